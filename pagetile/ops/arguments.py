"""The arguments of an attention that are no tensors of a cache: each held to what it allows, and made one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagetile.contracts.dtypes import dtype_name
from pagetile.contracts.errors import ArgumentError, DTypeError, UnsupportedError
from pagetile.contracts.shapes import require_tensor
from pagetile.contracts.visibility import normalize_window
from pagetile.ops.checks import host_float


def refuse_training(*, q_v: Any, dropout_p: float, return_attn_probs: bool, q_descale: Any) -> None:
    """Refuse, by name, the arguments that FlashAttention has and that are not implemented here."""
    if q_v is not None:
        raise UnsupportedError("q_v is given, but absorbed MLA queries are not implemented; pass q_v=None")
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p is {dropout_p}, but this is inference and nothing is dropped; pass 0.0")
    if return_attn_probs:
        raise UnsupportedError("return_attn_probs is True, but probabilities are never stored; pass False")
    if q_descale is not None:
        raise UnsupportedError(
            "q_descale is given, but it belongs to an fp8 q, which is not implemented (q is float32, float16 or "
            "bfloat16); pass q_descale=None"
        )


def fold_window(window_size: Sequence[int | None] | None, causal: bool) -> tuple[int, int]:
    """:func:`~pagetile.contracts.visibility.normalize_window`, with a short way for the usual case of no window."""
    if window_size is None or (type(window_size) is tuple and window_size == (-1, -1)):
        return (-1, 0) if causal else (-1, -1)
    return normalize_window(window_size, causal)


def default_scale(q: Tensor, softmax_scale: float | None) -> float:
    """``softmax_scale``, or ``D ** -0.5`` of the true head size."""
    if softmax_scale is None:
        return q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    return host_float("softmax_scale", softmax_scale)


def check_softcap(softcap: float | None) -> float:
    """A finite softcap, 0 or more; None is 0."""
    if softcap is None or (type(softcap) is float and softcap == 0.0):
        return 0.0
    value = host_float("softcap", softcap)
    if value < 0:
        raise ArgumentError(f"softcap is {value}; it must be above 0, or 0 for none")
    return value


def float_sinks(sinks: Tensor) -> Tensor:
    """Sinks as float32, from any floating dtype (H values: exact, and without a synchronisation)."""
    require_tensor("s_aux", sinks)
    if not sinks.dtype.is_floating_point:
        raise DTypeError(f"s_aux is {dtype_name(sinks.dtype)}; sinks are logits, pass a floating dtype")
    return sinks.to(torch.float32).contiguous()


def check_keys(k: Any, cu_seqlens_k: Any, seqused_k: Any, block_table: Any) -> None:
    """Paged keys have lengths, ragged keys have offsets, and never both."""
    require_tensor("k", k)
    if block_table is not None:
        if seqused_k is None:
            raise ArgumentError(
                "block_table is given without seqused_k; pass seqused_k, int32 [B], the number of keys of each sequence"
            )
        if cu_seqlens_k is not None:
            raise ArgumentError(
                "block_table and cu_seqlens_k are both given; paged keys have seqused_k, ragged keys cu_seqlens_k"
            )
        return
    if seqused_k is not None:
        raise ArgumentError("seqused_k is given without block_table; ragged keys have cu_seqlens_k, paged ones a table")
    if cu_seqlens_k is None:
        raise ArgumentError(
            "neither cu_seqlens_k nor block_table is given; pass cu_seqlens_k, int32 [B + 1], with ragged k and v, "
            "or block_table and seqused_k with a paged cache"
        )
