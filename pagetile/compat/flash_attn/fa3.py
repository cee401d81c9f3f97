"""FlashAttention 3: the functions of ``flash_attn_interface`` (and of ``sgl_kernel.flash_attn``, which are those).

``page_table`` is FlashAttention 3's word for the block table. ``pack_gqa`` and ``scheduler_metadata`` steer its own
kernels and bear on no result; they are accepted and not used. What would change a result, or leave processors free, and
is not implemented raises: ``qv``, ``q_descale``, ``attention_chunk``, ``seqused_q``, ``rotary_seqlens``, ``sm_margin``.

Source: ``hopper/flash_attn_interface.py`` of flash_attn 2.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import pagetile.ops as ops
from pagetile.backends.protocol import Backend, Scale
from pagetile.compat.flash_attn.shapes import (
    attend_dense,
    blocks_of_one,
    packed_over_cache,
    refuse,
    rows,
    speaking,
)
from pagetile.contracts.errors import ArgumentError, UnsupportedError
from pagetile.contracts.shapes import require_tensor
from pagetile.ops.arguments import check_softcap, default_scale, float_sinks, fold_window
from pagetile.ops.attention import attend
from pagetile.ops.checks import host_bound

Window = Sequence[int]
Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Result:
    """Attention of a dense batch.

    Args:
        q: ``[B, Sq, Hq, D]``; k ``[B, Sk, Hkv, D]``, v ``[B, Sk, Hkv, Dv]``, any strides. Quantised k and v take
            ``k_descale`` and ``v_descale`` (value = stored * scale, float32 ``[B, Hkv]`` or as everywhere here).
        The others: see :func:`pagetile.flash_attn_varlen_func`.

    Returns:
        ``out`` ``[B, Sq, Hq, Dv]``; with ``return_attn_probs`` also the log-sum-exp float32 ``[B, Hq, Sq]``.

    Raises:
        UnsupportedError: an argument that is not implemented, or an input that requires grad.
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree.
    """
    del pack_gqa, deterministic
    _refuse(qv, q_descale, attention_chunk, sm_margin)
    out, lse = attend_dense(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        num_splits=num_splits,
        k_descale=k_descale,
        v_descale=v_descale,
        s_aux=s_aux,
        backend=backend,
        with_lse=return_attn_probs,
    )
    return out if lse is None else (out, lse)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Result:
    """:func:`flash_attn_func` of qkv ``[B, S, 3, H, D]``, or ``[B, S, Hq + 2 * Hkv, D]`` with ``num_heads_q`` given.

    Raises:
        ArgumentError: ``num_heads_q`` is missing, or leaves heads that are no two equal halves.
    """
    qkv = rows("qkv", qkv)
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(dim=2)
    else:
        heads = qkv.shape[2] if qkv.dim() == 4 else -1
        if num_heads_q is None or not 0 <= num_heads_q <= heads or (heads - num_heads_q) % 2:
            raise ArgumentError(
                f"qkv is {list(qkv.shape)} and num_heads_q is {num_heads_q}; pass [B, S, 3, H, D], or "
                "[B, S, Hq + 2 * Hkv, D] with num_heads_q = Hq"
            )
        half = (heads - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, half, half], dim=2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
        s_aux=s_aux,
        backend=backend,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Result:
    """Attention of packed queries over ragged keys.

    Args:
        q: ``[total_q, Hq, D]``; k ``[total_k, Hkv, D]``, v ``[total_k, Hkv, Dv]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``.
        seqused_k: int32 ``[B]``: only the first so many keys of each sequence count, at most ``max_seqlen_k``.
        seqused_q: not implemented.
        block_table: with it (and ``seqused_k``) k and v are caches ``[NB, BS, Hkv, D]``, as in vLLM's fork.
        The others: see :func:`flash_attn_func`.

    Returns:
        ``out`` ``[total_q, Hq, Dv]``; with ``return_attn_probs`` also the log-sum-exp float32 ``[Hq, total_q]``.

    Raises:
        As :func:`flash_attn_func`.
    """
    del pack_gqa, deterministic
    _refuse(qv, q_descale, attention_chunk, sm_margin)
    refuse(seqused_q=(seqused_q, None, "queries with room between them are not implemented, pack them"))
    q = rows("q", q)
    offsets: Tensor | None = cu_seqlens_k
    words: dict[str, str] = {}
    if block_table is not None:
        offsets, block_table = None, rows("block_table", block_table)
        if seqused_k is None:
            seqused_k, words = torch.diff(_given("cu_seqlens_k", cu_seqlens_k)), {"seqused_k": "diff(cu_seqlens_k)"}
    elif seqused_k is not None:
        bound = host_bound("max_seqlen_k", max_seqlen_k)
        k, v = rows("k", k), rows("v", v)
        k, v, block_table = blocks_of_one(k, v, _given("cu_seqlens_k", cu_seqlens_k), bound)
        offsets = None
    else:
        k, v = rows("k", k), rows("v", v)
    with speaking(**words):
        return ops.flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=max_seqlen_q,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_k=max_seqlen_k,
            cu_seqlens_k=offsets,
            seqused_k=seqused_k,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            block_table=block_table,
            return_softmax_lse=return_attn_probs,
            k_descale=k_descale,
            v_descale=v_descale,
            num_splits=num_splits,
            s_aux=s_aux,
            backend=backend,
        )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    ver: int = 3,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Append ``k`` and ``v`` in place, then attend; packed queries with ``cu_seqlens_q``.

    Args:
        q: ``[B, Sq, Hq, D]``, or ``[total_q, Hq, D]`` with ``cu_seqlens_q`` int32 ``[B + 1]`` and ``max_seqlen_q``
            (default: all of ``total_q``).
        k_cache, v_cache: with ``page_table`` ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``, any block size; without,
            a row a sequence.
        k, v: ``[B, Snew, Hkv, D]``, dense queries only; packed queries with new keys are not implemented (append them
            with ``reshape_and_cache_flash``). ``cu_seqlens_k_new`` means nothing without ``k``, and is not looked at.
        cache_seqlens: keys of each sequence before ``k``.
        ver: FlashAttention's version, as ``sgl_kernel`` takes it; not used.
        The others: see :func:`pagetile.flash_attn_with_kvcache`.

    Returns:
        ``out`` in the shape of ``q``; with ``return_softmax_lse`` four values, as in FlashAttention 3: ``out``, the
        log-sum-exp float32 (``[B, Hq, Sq]``, packed ``[Hq, total_q]``), and two empty tensors where it has what its
        splits accumulated.

    Raises:
        As :func:`pagetile.flash_attn_with_kvcache`.
    """
    del scheduler_metadata, pack_gqa, ver
    _refuse(qv, q_descale, attention_chunk, sm_margin)
    refuse(rotary_seqlens=(rotary_seqlens, None, "rotary positions count on from cache_seqlens"))
    table = None if page_table is None else rows("page_table", page_table)
    common: dict[str, Any] = {"k_descale": k_descale, "v_descale": v_descale, "s_aux": s_aux, "backend": backend}
    with speaking(block_table="page_table"):
        if cu_seqlens_q is not None:
            refuse(k=(k, None, "appending under packed queries is not implemented; append before this call"))
            refuse(v=(v, None, "appending under packed queries is not implemented; append before this call"))
            refuse(rotary_cos=(rotary_cos, None, "only new keys are rotated, and there are none"))
            refuse(rotary_sin=(rotary_sin, None, "only new keys are rotated, and there are none"))
            args = packed_over_cache(
                rows("q", q), k_cache, v_cache, cache_seqlens, cache_batch_idx, table, cu_seqlens_q, max_seqlen_q
            )
            args.scale = default_scale(args.q, softmax_scale)
            args.window, args.softcap = fold_window(window_size, causal), check_softcap(softcap)
            args.key_starts, args.num_splits = cache_leftpad, host_bound("num_splits", num_splits)
            args.sinks = None if s_aux is None else float_sinks(s_aux)
            args.k_scale, args.v_scale, args.backend, args.with_lse = k_descale, v_descale, backend, return_softmax_lse
            out, lse = attend(args)
        else:
            if k is not None and cu_seqlens_k_new is not None:
                raise UnsupportedError(
                    "cu_seqlens_k_new is given with k: ragged new keys are not implemented; append them with "
                    "reshape_and_cache_flash, then call without k and v"
                )
            result = ops.flash_attn_with_kvcache(
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
                block_table=table,
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                softcap=softcap,
                rotary_interleaved=rotary_interleaved,
                num_splits=num_splits,
                return_softmax_lse=return_softmax_lse,
                **common,
            )
            out, lse = result if isinstance(result, tuple) else (result, None)
    return out if lse is None else (out, lse, lse.new_empty(0), lse.new_empty(0))


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """There is no plan step, so there is nothing to compute; the functions above accept the None."""
    del args, kwargs


def _given(name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise ArgumentError(f"{name} is None, but it says where the keys of each sequence start; pass int32 [B + 1]")
    return require_tensor(name, value)


def _refuse(qv: Any, q_descale: Any, attention_chunk: int, sm_margin: int) -> None:
    refuse(
        qv=(qv, None, "absorbed MLA queries are not implemented"),
        q_descale=(q_descale, None, "it belongs to an fp8 q, which is not implemented"),
        attention_chunk=(attention_chunk, 0, "attention in chunks is not implemented (a window is, see window_size)"),
        sm_margin=(sm_margin, 0, "no launch leaves processors free"),
    )
