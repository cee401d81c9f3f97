"""The result of attention over some of the keys, and how two results add.

A :class:`State` is ``(out, lse)``: the attention output over a set of keys and the natural logarithm of the softmax
denominator over the same set. Two states over disjoint sets of keys add to the state over their union::

    lse = log(exp(lse_a) + exp(lse_b))
    out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

The empty state, ``out = 0`` and ``lse = -inf``, is the identity, bit for bit. Split-KV, a shared prefix and context
parallelism are that one sentence. An incoming ``lse`` of ``+inf`` counts as empty, since FlashAttention 2 marks
empty rows so.

Source: Milakov and Gimelshein 2018, online normalizer; Dao et al., FlashAttention; vLLM ``merge_attn_states``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class State:
    """Attention over a set of keys.

    Attributes:
        out: ``[T, Hq, Dv]``, any floating dtype. 0 where nothing is visible.
        lse: ``[Hq, T]`` float32, natural logarithm. ``-inf`` where nothing is visible.
    """

    out: Tensor
    lse: Tensor
