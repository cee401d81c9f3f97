"""Merge: add two states over disjoint sets of keys.

Source: the online-softmax identity of :mod:`pagetile.contracts.state`; the operation is vLLM's ``merge_attn_states``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.contracts.state import State
from pagetile.reference.attend import compute_dtype


def merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> State:
    """The state over the union of the keys.

    Args:
        a, b: ``[T, H, D]``, one floating dtype.
        a_lse, b_lse: ``[H, T]``, natural logarithm. ``-inf`` is the empty state, and so is ``+inf``; what an empty
            state's output holds is not looked at.

    Returns:
        ``out`` in the inputs' dtype. Where one side is empty it is the other side bit for bit; where both are,
        0 and ``-inf``.
    """
    dtype = compute_dtype(a)
    # [2, H, T]: +inf is how FlashAttention 2 marks an empty row.
    both = torch.stack([x.to(dtype).masked_fill(x.isposinf(), -torch.inf) for x in (a_lse, b_lse)])
    a_share, b_share = both.softmax(dim=0).mT.unsqueeze(-1)  # [T, H, 1] each
    a_empty, b_empty = both.isneginf().mT.unsqueeze(-1)

    out = (a.to(dtype) * a_share + b.to(dtype) * b_share).to(a.dtype)
    out = torch.where(a_empty, b, torch.where(b_empty, a, out)).masked_fill(a_empty & b_empty, 0)
    lse = torch.where(both[0].isneginf(), both[1], torch.where(both[1].isneginf(), both[0], both.logsumexp(dim=0)))
    return State(out, lse)
