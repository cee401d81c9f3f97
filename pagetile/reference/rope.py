"""RMS norm and rotary embedding of one head at a time, then the write: what a fused write has to equal.

A pair of channels ``(x1, x2)`` at position p turns by the angle of ``cos[p], sin[p]``::

    x1' = x1 * cos - x2 * sin
    x2' = x2 * cos + x1 * sin

All arithmetic is float32, and a head is rounded once, to its own dtype, before it is stored: a quantised cache holds
what :func:`pagetile.reference.write` would make of those rounded keys.

Source: Su et al. 2021, RoFormer; Zhang and Sennrich 2019, RMSNorm; norm before rotation as in Qwen3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError
from pagetile.reference.attend import compute_dtype


def normalise_and_rotate(
    x: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Heads after the norm (where there is a weight) and the rotation, a new tensor of the dtype of ``x``.

    Args:
        x: ``[T, H, D]``.
        positions: integers ``[T]``, each a row of ``cos`` and ``sin``.
        cos, sin: ``[rows, rotary_size / 2]``; channels from ``rotary_size`` on are not rotated.
        interleaved: pairs are channels ``(0, 1), (2, 3), ...``; else channel i and ``i + rotary_size / 2``.
        weight: ``[D]`` of the norm ``x / sqrt(mean(x ** 2) + eps) * weight``, or None for no norm.

    Raises:
        ArgumentError: a position outside the tables.
    """
    check_positions(positions, cos.shape[0])
    y = x.to(compute_dtype(x))
    if weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(y.dtype)
    half = cos.shape[1]
    c, s = (table.to(y.dtype)[positions.to(torch.int64)].unsqueeze(1) for table in (cos, sin))  # [T, 1, half]
    first, second = pairs_of(half, interleaved)
    turned = y.clone()
    turned[..., first] = y[..., first] * c - y[..., second] * s
    turned[..., second] = y[..., second] * c + y[..., first] * s
    return turned.to(x.dtype)


def pairs_of(half: int, interleaved: bool) -> tuple[slice, slice]:
    """The first and the second channels of the ``half`` pairs."""
    if interleaved:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(0, half), slice(half, 2 * half)


def check_positions(positions: Tensor, num_rows: int) -> None:
    """Every position is a row of the rotary tables."""
    bad = ((positions < 0) | (positions >= num_rows)).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ArgumentError(
            f"positions[{row}] is {int(positions[row])}, but rotary_cos has {num_rows} rows; pass tables with a row "
            "for each position. Nothing was written"
        )
