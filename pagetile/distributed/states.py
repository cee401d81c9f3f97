"""States of several ranks into one: packed into bytes, exchanged, and added by the merge that everything here uses.

Three ways, with the same result within one rounding step:

``all_to_all``
    every rank gets its heads' states from every other, and adds them; its heads come out. One collective.
``reduce_scatter``
    every rank learns all log-sum-exps, scales its output by its share, and the sum is left to the reduce-scatter, in
    float32; its heads come out. Two collectives, twice the bytes of 16-bit states, no merge.
``all_gather``
    every rank gets all states, and adds them; all heads come out everywhere. One collective, ``size`` times the bytes.

Adding is done in float32 whatever the dtype, pairwise as a tree over the ranks, and rounded once at the end. The order
is fixed, so the result is the same bits on every run. Empty states (no token of a sequence on a rank) are the identity.

Source: vLLM's ``cp_lse_ag_out_rs`` and ``dcp_a2a_lse_reduce``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagetile.backends.protocol import Backend
from pagetile.contracts.errors import ArgumentError
from pagetile.contracts.shapes import Sizes, require_dtype, require_tensor
from pagetile.distributed.exchange import Exchange
from pagetile.distributed.heads import shares
from pagetile.ops import merge_attn_states

MODES = ("all_to_all", "reduce_scatter", "all_gather")

State = tuple[Tensor, Tensor]
ALIGN = 16
"""Bytes at whose multiples the parts of a message start."""


def start_combine(
    exchange: Exchange,
    out: Tensor,
    lse: Tensor,
    mode: str,
    backend: str | Backend = "auto",
    *,
    dtype: torch.dtype | None = None,
) -> Callable[[], State]:
    """Start adding the states of all ranks; calling the result waits and returns this rank's part.

    Args:
        out: ``[T, H, Dv]`` float32, float16 or bfloat16; lse float32 ``[H, T]``; any strides. Every rank passes the
            same shapes. ``reduce_scatter`` reads ``out`` again at the end; the other two have sent it by then.
        mode: one of :data:`MODES`.
        dtype: of the result; default: that of ``out``.

    Returns:
        A function without arguments, for ``out`` ``[T, h, Dv]`` in ``dtype`` and lse float32 ``[h, T]``:
        this rank's share of the heads (:func:`~pagetile.distributed.heads.shares`), or with ``all_gather`` all H.

    Raises:
        PeerError: here or when called, a rank that is gone.
        ArgumentError, ShapeError, DTypeError: states that are none.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
    sizes = Sizes()
    sizes.bind("out", require_tensor("out", out), "T H Dv")
    sizes.bind("lse", require_tensor("lse", lse), "H T")
    require_dtype("out", out, (torch.float32, torch.float16, torch.bfloat16))
    require_dtype("lse", lse, (torch.float32,))
    dtype = dtype or out.dtype
    if exchange.size == 1 or sizes["T"] == 0:  # nothing to exchange, which every rank knows
        whole = exchange.size == 1 or mode == "all_gather"
        part = slice(None) if whole else as_slice(shares(sizes["H"], exchange.size)[exchange.rank])
        return lambda: (out[:, part].to(dtype), lse[part])
    if mode == "reduce_scatter":
        return _reduce_scatter(exchange, out, lse, dtype)
    start = _all_to_all if mode == "all_to_all" else _all_gather
    return start(exchange, out, lse, dtype, backend)


def as_slice(part: range) -> slice:
    """The slice that takes the heads of a share."""
    return slice(part.start, part.stop)


def message_bytes(num_tokens: int, heads: int, head_size_v: int, itemsize: int) -> int:
    """Bytes of one state in a message: its log-sum-exps, then its output, each padded to :data:`ALIGN`."""
    return _lse_bytes(num_tokens, heads) + _aligned(num_tokens * heads * head_size_v * itemsize)


def add_states(outs: Tensor, lses: Tensor, dtype: torch.dtype, backend: str | Backend = "auto") -> State:
    """Add N states, pairwise: the first half to the last, until one is left. Overwrites its arguments.

    Args:
        outs: float32 ``[N, T, H, Dv]``, contiguous; lses float32 ``[H, N, T]``, contiguous. N is at least 1.
        dtype: of the result.
    """
    left = outs.shape[0]
    while left > 1:
        half = left // 2
        into, last = (outs[at : at + half].flatten(0, 1) for at in (0, left - half))
        into_lse, last_lse = (lses[:, at : at + half].flatten(1, 2) for at in (0, left - half))
        merge_attn_states(into, into, into_lse, last, last_lse, into_lse, backend=backend)
        left -= half
    return outs[0].to(dtype), lses[:, 0].contiguous()


def _all_to_all(
    exchange: Exchange, out: Tensor, lse: Tensor, dtype: torch.dtype, backend: str | Backend
) -> Callable[[], State]:
    num_tokens, num_heads, size_v = out.shape
    parts = shares(num_heads, exchange.size)
    sizes = [message_bytes(num_tokens, len(part), size_v, out.element_size()) for part in parts]
    sent = torch.empty(sum(sizes), dtype=torch.uint8, device=out.device)
    if num_heads % exchange.size == 0:  # all pieces at once
        each = len(parts[0])
        lse_view, out_view = _views(sent.view(exchange.size, sizes[0]), num_tokens, each, size_v, out.dtype)
        lse_view.copy_(lse.unflatten(0, (exchange.size, each)))
        out_view.copy_(out.unflatten(1, (exchange.size, each)).transpose(0, 1))
    else:
        for part, piece in zip(parts, sent.split(sizes), strict=True):
            _pack(piece, out[:, part.start : part.stop], lse[part.start : part.stop])
    mine = parts[exchange.rank]
    received, pending = exchange.all_to_all(sent, sizes, sizes[exchange.rank])

    def finish() -> State:
        pending.wait()
        lses, outs = _views(received, num_tokens, len(mine), size_v, out.dtype)
        return _add_received(lses, outs, dtype, backend)

    return finish


def _all_gather(
    exchange: Exchange, out: Tensor, lse: Tensor, dtype: torch.dtype, backend: str | Backend
) -> Callable[[], State]:
    num_tokens, num_heads, size_v = out.shape
    sent = torch.empty(
        message_bytes(num_tokens, num_heads, size_v, out.element_size()), dtype=torch.uint8, device=out.device
    )
    _pack(sent, out, lse)
    received, pending = exchange.all_gather(sent)

    def finish() -> State:
        pending.wait()
        lses, outs = _views(received, num_tokens, num_heads, size_v, out.dtype)
        return _add_received(lses, outs, dtype, backend)

    return finish


def _reduce_scatter(exchange: Exchange, out: Tensor, lse: Tensor, dtype: torch.dtype) -> Callable[[], State]:
    num_tokens, num_heads, size_v = out.shape
    parts = shares(num_heads, exchange.size)
    widest = max(map(len, parts))
    own = lse.masked_fill(lse.isposinf(), -torch.inf).contiguous()  # others mark empty rows so
    lses, pending = exchange.all_gather(own)

    def finish() -> State:
        pending.wait()
        total = lses.logsumexp(dim=0)  # [H, T]; a row that is empty everywhere stays -inf
        share = (own - total).exp().masked_fill(own.isneginf(), 0.0).T.unsqueeze(-1)  # [T, H, 1]
        # What an empty state's output holds is not looked at: 0 times it could be NaN.
        scaled = (out.float() * share).masked_fill(own.isneginf().T.unsqueeze(-1), 0.0)
        pieces = out.new_zeros((exchange.size, num_tokens, widest, size_v), dtype=torch.float32)
        for part, piece in zip(parts, pieces, strict=True):
            piece[:, : len(part)] = scaled[:, part.start : part.stop]
        summed, summing = exchange.reduce_scatter(pieces)
        summing.wait()
        mine = parts[exchange.rank]
        return summed[:, : len(mine)].to(dtype), total[mine.start : mine.stop].contiguous()

    return finish


def _add_received(lses: Tensor, outs: Tensor, dtype: torch.dtype, backend: str | Backend) -> State:
    return add_states(outs.float().contiguous(), lses.transpose(0, 1).contiguous(), dtype, backend)


def _pack(message: Tensor, out: Tensor, lse: Tensor) -> None:
    lse_view, out_view = _views(message.unsqueeze(0), out.shape[0], out.shape[1], out.shape[2], out.dtype)
    lse_view[0].copy_(lse)
    out_view[0].copy_(out)


def _views(messages: Tensor, num_tokens: int, heads: int, size_v: int, dtype: torch.dtype) -> Any:
    """Views of uint8 ``[N, bytes]``: float32 ``[N, heads, T]`` and dtype ``[N, T, heads, Dv]``."""
    count = messages.shape[0]
    if num_tokens * heads == 0:  # no bytes to look at
        lses = messages.new_empty((count, heads, num_tokens), dtype=torch.float32)
        return lses, messages.new_empty((count, num_tokens, heads, size_v), dtype=dtype)
    lse_size, out_size = num_tokens * heads * 4, num_tokens * heads * size_v * dtype.itemsize
    start = _lse_bytes(num_tokens, heads)
    lses = messages[:, :lse_size].view(torch.float32).unflatten(1, (heads, num_tokens))
    outs = messages[:, start : start + out_size].view(dtype).unflatten(1, (num_tokens, heads, size_v))
    return lses, outs


def _lse_bytes(num_tokens: int, heads: int) -> int:
    return _aligned(num_tokens * heads * 4)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
