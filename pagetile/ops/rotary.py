"""Rotary position embedding of new queries and keys, in torch.

A pair of channels ``(x1, x2)`` at position p turns by the angle of ``cos[p], sin[p]``::

    x1' = x1 * cos - x2 * sin
    x2' = x2 * cos + x1 * sin

Interleaved (GPT-J): the pairs are channels ``(0, 1), (2, 3), ...``; otherwise (GPT-NeoX, Llama) channel i pairs with
``i + rotary_dim / 2``. Channels from ``rotary_dim`` on are left as they are.

Source: Su et al. 2021, RoFormer; the arguments are those of FlashAttention's ``flash_attn_with_kvcache``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x`` turned to its positions; float32 arithmetic, a new tensor of x's dtype.

    Args:
        x: ``[B, S, H, D]``.
        positions: int64 ``[B, S]``. A position outside the tables turns its row to NaN, rather than read another row.
        cos, sin: ``[rows, rotary_dim / 2]``.
        interleaved: which channels are a pair.
    """
    half = cos.shape[1]
    known = (positions >= 0) & (positions < cos.shape[0])  # [B, S]
    row = positions.clamp(0, max(cos.shape[0] - 1, 0))
    c, s = (  # [B, S, 1, rotary_dim / 2]
        torch.where(known.unsqueeze(-1), table.float()[row], torch.nan).unsqueeze(2) for table in (cos, sin)
    )
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        x1, x2 = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1).flatten(-2)
    else:
        x1, x2 = turned[..., :half], turned[..., half:]
        turned = torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def query_positions(start: Tensor, num_queries: int, every_position: bool) -> Tensor:
    """Positions ``[B, Sq]`` of the queries: counted on from ``start`` where the mask depends on positions (causal or a
    window), and all at ``start`` where it does not."""
    steps = torch.arange(num_queries, device=start.device) if every_position else start.new_zeros(num_queries)
    return start.long().unsqueeze(1) + steps
