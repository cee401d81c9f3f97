"""FlashAttention 2: its functions, positional orders and return conventions.

``return_attn_probs=True`` returns three values, as there: the output, the log-sum-exp, and where the probabilities of a
dropout test would be an empty tensor (FlashAttention 2 itself stores them only under dropout). Every function takes
two keywords more: ``s_aux`` (sinks ``[Hq]``, see :func:`pagetile.flash_attn_varlen_func`) and ``backend``.

Source: ``flash_attn/flash_attn_interface.py`` of flash_attn 2.8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import pagetile.ops as ops
from pagetile.backends.protocol import Backend
from pagetile.compat.flash_attn.shapes import attend_dense, refuse, rows, speaking

Result = Tensor | tuple[Tensor, Tensor, Tensor]
Window = Sequence[int]

_NO_DROPOUT = "this is inference and nothing is dropped"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Result:
    """Attention of a dense batch.

    Args:
        q: ``[B, Sq, Hq, D]``; k ``[B, Sk, Hkv, D]``, v ``[B, Sk, Hkv, Dv]``; float32, float16 or bfloat16, any strides.
        dropout_p: 0; anything else raises.
        softmax_scale: default ``D ** -0.5``.
        causal, window_size: aligned to the bottom right; both ends of the window are inclusive, -1 is unbounded.
        alibi_slopes: float32 ``[Hq]`` or ``[B, Hq]``.
        deterministic: accepted; the result always is.

    Returns:
        ``out`` ``[B, Sq, Hq, Dv]``; with ``return_attn_probs`` also the log-sum-exp float32 ``[B, Hq, Sq]`` and an
        empty tensor.

    Raises:
        UnsupportedError: dropout, or an input that requires grad.
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree.
    """
    del deterministic
    refuse(dropout_p=(dropout_p, 0.0, _NO_DROPOUT))
    out, lse = attend_dense(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        backend=backend,
        with_lse=return_attn_probs,
    )
    return _result(out, lse)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Result:
    """:func:`flash_attn_func` with keys and values in one tensor, kv ``[B, Sk, 2, Hkv, D]``."""
    k, v = rows("kv", kv).unbind(dim=2)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *rest, s_aux=s_aux, backend=backend)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Result:
    """:func:`flash_attn_func` with all three in one tensor, qkv ``[B, S, 3, H, D]``."""
    q, k, v = rows("qkv", qkv).unbind(dim=2)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *rest, s_aux=s_aux, backend=backend)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Result:
    """Attention of packed queries; note the order of the lengths, which is not the one of the pagetile function.

    Args:
        q: ``[total_q, Hq, D]``.
        k, v: ragged ``[total_k, Hkv, D]``, or with ``block_table`` the caches ``[NB, BS, Hkv, D]``, any block size.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``. With ``block_table`` the differences of ``cu_seqlens_k`` are the
            lengths (one small kernel a call).
        max_seqlen_q, max_seqlen_k: host upper bounds.
        block_table: int32 ``[B, width]``; entries past a sequence's length may be anything.
        The others: see :func:`flash_attn_func`.

    Returns:
        ``out`` ``[total_q, Hq, Dv]``; with ``return_attn_probs`` also the log-sum-exp float32 ``[Hq, total_q]`` (the
        unpadded form) and an empty tensor.

    Raises:
        As :func:`flash_attn_func`; BlockTableError: a block id outside the cache (CPU).
    """
    del deterministic
    refuse(dropout_p=(dropout_p, 0.0, _NO_DROPOUT))
    lens = offsets = None
    if block_table is None:
        offsets = cu_seqlens_k
    else:
        lens, block_table = torch.diff(rows("cu_seqlens_k", cu_seqlens_k)), rows("block_table", block_table)
    with speaking(seqused_k="diff(cu_seqlens_k)"):
        result = ops.flash_attn_varlen_func(
            rows("q", q),
            rows("k", k) if block_table is None else k,
            rows("v", v) if block_table is None else v,
            max_seqlen_q=max_seqlen_q,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_k=max_seqlen_k,
            cu_seqlens_k=offsets,
            seqused_k=lens,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            block_table=block_table,
            return_softmax_lse=return_attn_probs,
            s_aux=s_aux,
            backend=backend,
        )
    return _result(*result) if isinstance(result, tuple) else result


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Result:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor, kv ``[total_k, 2, Hkv, D]``."""
    k, v = rows("kv", kv).unbind(dim=1)
    lens = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *lens, *rest, s_aux=s_aux, backend=backend)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Result:
    """:func:`flash_attn_varlen_func` with all three in one tensor, qkv ``[total, 3, H, D]``."""
    q, k, v = rows("qkv", qkv).unbind(dim=1)
    lens = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *lens, *rest, s_aux=s_aux, backend=backend)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Append ``k`` and ``v`` in place, then attend; shapes, results and errors as
    :func:`pagetile.flash_attn_with_kvcache`, whose arguments are these. Any block size; ``block_table`` may come with
    ``cache_leftpad``, which FlashAttention 2 refuses."""
    return ops.flash_attn_with_kvcache(
        rows("q", q),
        k_cache,
        v_cache,
        None if k is None else rows("k", k),
        None if v is None else rows("v", v),
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=None if block_table is None else rows("block_table", block_table),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        s_aux=s_aux,
        backend=backend,
    )


def _result(out: Tensor, lse: Tensor | None) -> Result:
    return out if lse is None else (out, lse, out.new_empty(0))
