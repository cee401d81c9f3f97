"""``flash_attn_with_kvcache``: append new keys and values, then attend, one row of queries a sequence.

Source: the function of that name in FlashAttention 2, whose arguments these are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from pagetile.backends.protocol import Backend, Scale
from pagetile.contracts.errors import ArgumentError, ShapeError, UnsupportedError
from pagetile.contracts.shapes import (
    Sizes,
    require_contiguous_last,
    require_device,
    require_dtype,
    require_no_overlap,
    require_same_dtype,
    require_tensor,
)
from pagetile.contracts.visibility import FARTHEST
from pagetile.ops.append import append_slots
from pagetile.ops.arguments import check_softcap, default_scale, float_sinks, fold_window
from pagetile.ops.attention import (
    attend,
    attend_call,
    check_call,
    execute,
    op_arguments,
    plan_attend,
    run_attend_call,
)
from pagetile.ops.bind_attention import KVCACHE, KVCACHE_ROWS, AttendArgs
from pagetile.ops.checks import (
    INDEX_DTYPES,
    check_named,
    check_no_grad,
    check_values,
    host_bound,
    host_int,
    is_plain,
    refuse_odd,
    scale_granularity,
)
from pagetile.ops.plans import PLANS, tensor_key
from pagetile.ops.rotary import query_positions, rotate
from pagetile.ops.write import WriteNames, bind_kind, plan_write, reshape_and_cache_flash, run_write_call, write_call

_TENSORS = (
    "q",
    "k_cache",
    "v_cache",
    "k",
    "v",
    "rotary_cos",
    "rotary_sin",
    "cache_batch_idx",
    "cache_leftpad",
    "block_table",
)
_WRITE = WriteNames("k", "v", "k_cache", "v_cache", "the slots of k", "k_descale", "v_descale")


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
    window_size: Sequence[int | None] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    k_descale: Scale = None,
    v_descale: Scale = None,
    s_aux: Tensor | None = None,
    *,
    backend: str | Backend = "auto",
    validate: bool | str = False,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
    workspace: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ``Sq`` queries a sequence over its cache, after appending new keys and values in place.

    Args:
        q: ``[B, Sq, Hq, D]``; where its first two axes are not one span of rows (``[B, H, S, D]`` transposed), it is
            copied.
        k_cache, v_cache: with ``block_table`` ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``; without, one row a
            sequence, ``[Bc, S, Hkv, D]`` and ``[Bc, S, Hkv, Dv]``.
        k, v: ``[B, Snew, Hkv, D]`` and ``[B, Snew, Hkv, Dv]``, stored at positions ``cache_seqlens[b]`` on before
            attending. ``cache_seqlens`` itself stays as it is.
        rotary_cos, rotary_sin: ``[rows, rotary_dim / 2]``, dtype of ``q``; ``rotary_dim <= D``, the channels from there
            on are left alone. They need ``k``, which is rotated to positions ``cache_seqlens - cache_leftpad`` on; so
            is ``q`` when causal or windowed, and otherwise all of it to position ``cache_seqlens - cache_leftpad``.
        cache_seqlens: int, or int32 ``[B]``: keys before the new ones. None: the cache is full (without ``k``).
        cache_batch_idx: int32 or int64 ``[B]``: the cache's row of each sequence (no ``block_table``); None: 0, 1, ...
        cache_leftpad: int32 ``[B]``: keys below it are padding and hidden.
        block_table: int32 or int64 ``[B, width]``, last axis contiguous.
        rotary_interleaved: pairs of channels ``(0, 1), (2, 3), ...``; else channel i with ``i + rotary_dim / 2``.
        softmax_scale, causal, window_size, softcap, alibi_slopes, num_splits, k_descale, v_descale, s_aux: see
            :func:`pagetile.flash_attn_varlen_func`; the scales serve the append too, so then they are None, a float,
            one element or ``[Hkv]``.
        backend, validate, batch_invariant, kv_cache_dtype, workspace: as there.

    Returns:
        ``out`` ``[B, Sq, Hq, Dv]``, or ``(out, lse)`` with lse float32 ``[B, Hq, Sq]``.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree; the message names both.
        BlockTableError: a block id outside the cache, in a range that is used (CPU). Nothing has been written.
        UnsupportedError: an argument that is not implemented, or an input that requires grad.
        BackendError: the backend cannot take the problem; ``.reasons`` says why. Nothing has been written.
    """
    plain = is_plain(q, k_cache, v_cache, k, v, block_table, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin)
    tensors = (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table)
    seen = _seen(tensors, k_descale, v_descale, kv_cache_dtype) if plain else None
    if seen is None or PLANS.get(seen) is None:
        _bind(*tensors, kv_cache_dtype, (k_descale, v_descale))
    if torch.is_grad_enabled():
        check_no_grad((*zip(_TENSORS, tensors, strict=True), ("k_descale", k_descale), ("v_descale", v_descale)))
    batch, num_queries = q.shape[:2]
    num_blocks, block_size = k_cache.shape[:2]
    table = _table(q, block_table, cache_batch_idx)
    window = fold_window(window_size, causal)
    room = min(table.shape[1] * block_size, FARTHEST) if plain else table.shape[1] * block_size
    lens = _lengths(q, cache_seqlens, room, appending=k is not None)
    names = KVCACHE if block_table is not None else KVCACHE_ROWS
    slots = None
    if k is not None:
        assert v is not None
        num_new = k.shape[1]
        rows = -1 if rotary_cos is None else rotary_cos.shape[0]
        every_position = window != (-1, -1)
        span = max(num_new, num_queries if every_position else 1)
        placing = append_slots if plain else torch.ops.pagetile.append_slots
        slots = placing(lens, table, num_new, num_blocks, block_size, cache_leftpad, rows, span, names.block_table)
        if rotary_cos is not None:
            assert rotary_sin is not None
            start = lens if cache_leftpad is None else lens - cache_leftpad
            positions = query_positions(start, num_queries, every_position)
            q = rotate(q, positions, rotary_cos, rotary_sin, rotary_interleaved)
            k = rotate(k, query_positions(start, num_new, True), rotary_cos, rotary_sin, rotary_interleaved)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        lens = lens + num_new

    args = AttendArgs(
        out=None,
        lse=None,
        q=q.flatten(0, 1),
        k=k_cache,
        v=v_cache,
        query_start_loc=_starts(batch, num_queries, q.device),
        seq_lens=lens,
        key_start_loc=None,
        block_table=table,
        max_q_len=num_queries,
        max_k_len=room,
        scale=default_scale(q, softmax_scale),
        window=window,
        softcap=check_softcap(softcap),
        key_starts=cache_leftpad,
        alibi_slopes=alibi_slopes,
        sinks=None if s_aux is None else float_sinks(s_aux),
        k_scale=k_descale,
        v_scale=v_descale,
        kv_cache_dtype=kv_cache_dtype,
        num_splits=host_bound("num_splits", num_splits),
        batch_invariant=batch_invariant,
        workspace=workspace,
        backend=backend,
        validate=validate,
        with_lse=return_softmax_lse,
        caller=names.caller,
    )
    out, lse = _append_and_attend(args, k, v, slots, seen)
    out = out.view(batch, num_queries, *out.shape[1:])
    if lse is None:
        return out
    return out, lse.view(lse.shape[0], batch, num_queries).transpose(0, 1).contiguous()


def _append_and_attend(
    args: AttendArgs, k: Tensor | None, v: Tensor | None, slots: Tensor | None, seen: Hashable
) -> tuple[Tensor, Tensor | None]:
    """Both calls are planned and checked before the first byte is written.

    ``seen``: the key to remember by that the tensors agree; None where the call goes through the operators.
    """
    append = None
    if k is not None and v is not None and slots is not None:
        append = (k, v, args.k, args.v, slots)
    if seen is None:
        if append is not None:
            scales = (args.kv_cache_dtype, args.k_scale, args.v_scale)
            reshape_and_cache_flash(*_admitted(args, append), *scales, backend=args.backend, validate=args.validate)
        return attend(args)

    plan = plan_attend(args)
    PLANS.put(seen, plan)
    if append is None:
        return execute(plan, args)
    call, out = attend_call(plan, args)
    scales = (args.k_scale, args.v_scale)
    write_plan = plan_write(*append, args.kv_cache_dtype, *scales, args.backend, args.validate, _WRITE)
    appending = write_call(write_plan, *append, *scales, _WRITE)
    check_call(plan, call, args)
    if args.validate is True:
        check_values(write_plan.backend, appending)
    run_write_call(write_plan, appending)
    return run_attend_call(plan, call, args, out)


_Append = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _admitted(args: AttendArgs, append: _Append) -> _Append:
    """The tensors of the write, whose slots come out of a check of the attention where that may yet fail: so that a
    graph, too, fails before it has written."""
    if args.workspace is None and args.sinks is None and args.alibi_slopes is None and args.backend == "auto":
        return append
    check_named(args.backend)
    slots = torch.ops.pagetile.admit(append[-1], args.workspace, args.with_lse, *op_arguments(args))
    return *append[:4], slots


def _seen(tensors: tuple[Any, ...], k_descale: Scale, v_descale: Scale, kv_cache_dtype: str) -> Hashable:
    """What the binding of a call depends on."""
    try:
        return ("kvcache", *map(tensor_key, tensors), tensor_key(k_descale), tensor_key(v_descale), kv_cache_dtype)
    except RuntimeError:  # sparse and nested tensors have no strides
        refuse_odd((*zip(_TENSORS, tensors, strict=True), ("k_descale", k_descale), ("v_descale", v_descale)))
        raise


def _starts(batch: int, num_queries: int, device: torch.device) -> Tensor:
    """Row of each sequence's first query, and the end: int32 ``[B + 1]``."""
    if num_queries == 0:
        return torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return torch.arange(0, (batch + 1) * num_queries, num_queries, dtype=torch.int32, device=device)


def _bind(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    kv_cache_dtype: str,
    scales: tuple[Scale, Scale],
) -> None:
    """Hold the tensors to each other under the names and with the axes that the caller knows."""
    if (k is None) != (v is None):
        raise ArgumentError("one of k and v is given without the other; pass both, or neither")
    if block_table is not None and cache_batch_idx is not None:
        raise ArgumentError("block_table and cache_batch_idx are both given; the table already says where each row is")
    tensors = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "block_table": block_table,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
    }
    for name, tensor in tensors.items():
        if tensor is not None or name in ("q", "k_cache", "v_cache"):
            require_device(name, require_tensor(name, tensor), "q", q.device)
    sizes = Sizes()
    sizes.bind("q", q, "B Sq Hq D")
    require_contiguous_last("q", q)
    sizes.bind("k_cache", k_cache, "NB BS Hkv D")
    sizes.bind("v_cache", v_cache, "NB BS Hkv Dv")
    if k is not None and v is not None:
        sizes.bind("k", k, "B Snew Hkv D")
        sizes.bind("v", v, "B Snew Hkv Dv")
        require_contiguous_last("k", k)
        require_contiguous_last("v", v)
        require_same_dtype("k", k, "q", q.dtype)
        require_same_dtype("v", v, "q", q.dtype)
    if block_table is not None:
        sizes.bind("block_table", block_table, "B width")
        require_dtype("block_table", block_table, INDEX_DTYPES)
    elif cache_batch_idx is not None:
        sizes.bind("cache_batch_idx", cache_batch_idx, "B")
        require_dtype("cache_batch_idx", cache_batch_idx, INDEX_DTYPES)
    elif k_cache.shape[0] < q.shape[0]:
        raise ShapeError(
            f"k_cache: axis 0 is {k_cache.shape[0]}, but q has B = {q.shape[0]}; without block_table and "
            "cache_batch_idx the cache has a row for each sequence"
        )
    if cache_leftpad is not None:
        sizes.bind("cache_leftpad", cache_leftpad, "B")
        require_dtype("cache_leftpad", cache_leftpad, (torch.int32,))
    _bind_rotary(q, k, rotary_cos, rotary_sin, sizes)
    if k is not None:
        require_no_overlap("k_cache", k_cache)
        require_no_overlap("v_cache", v_cache)
    require_contiguous_last("k_cache", k_cache)
    require_contiguous_last("v_cache", v_cache)
    kind = bind_kind("q", q, "q", q, "k_cache", k_cache, "v_cache", v_cache, kv_cache_dtype)
    _bind_append_scales(k, kind, sizes["Hkv"], q.device, scales)


def _bind_rotary(q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None, sizes: Sizes) -> None:
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ArgumentError("one of rotary_cos and rotary_sin is given without the other; pass both, or neither")
    if k is None:
        raise ArgumentError("rotary_cos and rotary_sin are given without k; they rotate new keys, so pass k and v")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        require_device(name, require_tensor(name, table), "q", q.device)
        sizes.bind(name, table, "rows rotary/2")
        require_same_dtype(name, table, "q", q.dtype)
    if 2 * cos.shape[1] > q.shape[-1]:
        raise ShapeError(
            f"rotary_cos: axis 1 (rotary_dim / 2) is {cos.shape[1]}, but q has D = {q.shape[-1]} and rotary_dim may be "
            "at most that; pass narrower tables"
        )


def _bind_append_scales(
    k: Tensor | None, kind: str, num_kv_heads: int, device: torch.device, scales: tuple[Scale, Scale]
) -> None:
    if k is None:
        return
    for name, scale in zip(("k_descale", "v_descale"), scales, strict=True):
        if isinstance(scale, Tensor) and scale.dim() > 1:
            raise UnsupportedError(
                f"{name} is {list(scale.shape)}, but new keys are stored with one scale for the tensor or for each "
                "KV head; append with reshape_and_cache_flash first, then call without k and v"
            )
        scale_granularity(name, scale, kind=kind, num_kv_heads=num_kv_heads, device_of="q", device=device)


def _table(q: Tensor, block_table: Tensor | None, cache_batch_idx: Tensor | None) -> Tensor:
    """A cache with a row a sequence is a paged cache with one block a sequence."""
    if block_table is not None:
        return block_table
    if cache_batch_idx is not None:
        return cache_batch_idx.unsqueeze(1)
    return torch.arange(q.shape[0], dtype=torch.int32, device=q.device).unsqueeze(1)


def _lengths(q: Tensor, cache_seqlens: int | Tensor | None, capacity: int, appending: bool) -> Tensor:
    """Keys of each sequence before the new ones, int32 ``[B]``."""
    if isinstance(cache_seqlens, Tensor):
        require_device("cache_seqlens", require_tensor("cache_seqlens", cache_seqlens), "q", q.device)
        require_dtype("cache_seqlens", cache_seqlens, (torch.int32,))
        sizes = Sizes()
        sizes.fix("B", q.shape[0], "q")
        sizes.bind("cache_seqlens", cache_seqlens, "B")
        return cache_seqlens.contiguous()
    if cache_seqlens is None:
        if appending:
            raise ArgumentError("k is given without cache_seqlens; pass the length of each sequence before k")
        cache_seqlens = capacity
    length = host_int("cache_seqlens", cache_seqlens)
    if length > capacity:
        raise ArgumentError(f"cache_seqlens is {length}, but the cache has room for {capacity} keys a sequence")
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
