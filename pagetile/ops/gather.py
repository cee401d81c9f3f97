"""``gather_cache`` and ``scatter_cache``: tokens of sequences out of their pages, in order, and back.

Both first turn the block table into a slot for each row; a gather then reads those slots and a scatter writes them, as
``reshape_and_cache_flash`` does.

Source: vLLM ``gather_and_maybe_dequant_cache`` and ``cp_gather_cache``, for any head size, block size and KV heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.backends.protocol import Backend, Scale
from pagetile.backends.verbs import GatherCall, verb_of
from pagetile.contracts.dtypes import dtype_name, storage_kind
from pagetile.contracts.errors import ArgumentError, DTypeError, UnsupportedError
from pagetile.contracts.problem import GatherProblem, Granularity
from pagetile.contracts.shapes import (
    Sizes,
    require_contiguous_last,
    require_device,
    require_dtype,
    require_no_overlap,
    require_same_dtype,
    require_tensor,
)
from pagetile.ops.checks import (
    INDEX_DTYPES,
    QUANTISED,
    QUERY_DTYPES,
    bump_version,
    check_named,
    check_no_grad,
    check_validate,
    finest,
    is_plain,
    scale_granularity,
)
from pagetile.ops.dispatch import select
from pagetile.ops.overlap import shares_memory
from pagetile.ops.row_slots import check_on_device, row_scale, row_slots
from pagetile.ops.write import reshape_and_cache_flash


def gather_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    out: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    kv_cache_dtype: str = "auto",
    backend: str | Backend = "auto",
    validate: bool | str = False,
) -> tuple[Tensor, Tensor]:
    """Keys and values of whole stretches of sequences, lying together and dequantised.

    Row ``cu_seq_lens[b] + i`` is the token at position ``seq_starts[b] + i`` of sequence b.

    Args:
        key_cache: ``[NB, BS, Hkv, D]``, any strides with a contiguous last axis, any BS and D.
        value_cache: ``[NB, BS, Hkv, Dv]``, likewise, strides of its own.
        block_table: int32 or int64 ``[B, width]``, last axis contiguous. Only entries of blocks that hold a wanted
            token are read; the others may be anything.
        cu_seq_lens: int32 ``[B + 1]``: from 0 on, the running sum of the numbers of tokens to gather; 0 is one.
        seq_starts: int32 or int64 ``[B]``, the first position of each sequence, also inside a block; None for 0.
        k_scale, v_scale: of a quantised cache, value = stored * scale: None (1), a float, float32 0-d, ``[1]``,
            ``[Hkv]``, ``[B, Hkv]`` or ``[NB, BS, Hkv]``.
        out: ``(key, value)`` to fill, ``[T, Hkv, D]`` and ``[T, Hkv, Dv]``, any strides with a contiguous last axis.
            Rows from ``cu_seq_lens[-1]`` on stay as they are. None allocates ``T = cu_seq_lens[-1]`` rows, for which
            a GPU is waited for.
        dtype: of the rows that are allocated; None is that of a cache that is not quantised, and float32 of one that
            is. A cache that is not quantised is copied bit by bit, so no other dtype is possible there.
        kv_cache_dtype: what a quantised cache holds, see :func:`pagetile.reshape_and_cache_flash`.
        backend: ``auto``, the name of one backend, or a backend object.
        validate: block ids are always checked on the CPU. On a GPU a bad one gives rows of 0 and is kept for
            :func:`pagetile.raise_deferred`, or raises before anything is written (``True``: one synchronisation).

    Returns:
        ``(key, value)``.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree; the message names both.
        BlockTableError: a block id outside the cache, or a table row too short (CPU). Nothing has been written.
        UnsupportedError: an input requires grad, or ``out`` is needed: while a CUDA graph is captured or traced.
        BackendError: the backend cannot take the problem; ``.reasons`` says why.
    """
    tensors = _named(key_cache, value_cache, block_table, cu_seq_lens, seq_starts, out)
    plain = _admit(tensors, validate, backend)
    if out is None:
        out = _allocate(key_cache, value_cache, cu_seq_lens, dtype, kv_cache_dtype, plain)
    elif dtype is not None and out[0].dtype != dtype:
        raise DTypeError(f"dtype is {dtype_name(dtype)}, but out is {dtype_name(out[0].dtype)}; pass one of the two")
    key, value = out
    problem = bind_gather(
        key_cache, value_cache, block_table, cu_seq_lens, seq_starts, key, value, k_scale, v_scale, kv_cache_dtype
    )
    slots = _slots(block_table, cu_seq_lens, seq_starts, key, key_cache, validate, plain)
    k_rows, v_rows = (
        row_scale(scale, problem.kind, slots, cu_seq_lens, key_cache) if problem.kind in QUANTISED else None
        for scale in (k_scale, v_scale)
    )
    if plain:
        run_gather(problem, key, value, key_cache, value_cache, slots, k_rows, v_rows, backend)
    else:
        assert isinstance(backend, str)
        torch.ops.pagetile.gather_rows(
            key, value, key_cache, value_cache, slots, k_rows, v_rows, kv_cache_dtype, backend
        )
    return key, value


def scatter_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    kv_cache_dtype: str = "auto",
    backend: str | Backend = "auto",
    validate: bool | str = False,
) -> None:
    """Store rows that lie together at the positions of sequences, in place: the inverse of :func:`gather_cache`.

    Args:
        key, value: ``[T, Hkv, D]`` and ``[T, Hkv, Dv]``; row ``cu_seq_lens[b] + i`` goes to position
            ``seq_starts[b] + i`` of sequence b, rows from ``cu_seq_lens[-1]`` on go nowhere.
        key_cache, value_cache, kv_cache_dtype, k_scale, v_scale: see :func:`pagetile.reshape_and_cache_flash`.
        block_table, cu_seq_lens, seq_starts, backend, validate: see :func:`gather_cache`. Sequences that share a block
            share its tokens: which of two rows stays is undefined.

    Raises:
        As :func:`gather_cache`. Nothing has been written.
    """
    tensors = _named(key_cache, value_cache, block_table, cu_seq_lens, seq_starts, (key, value))
    plain = _admit(tensors, validate, backend)
    sizes = _bind_places(key_cache, block_table, cu_seq_lens, seq_starts)
    sizes.bind("key", require_tensor("key", key), "T Hkv D")
    slots = _slots(block_table, cu_seq_lens, seq_starts, key, key_cache, validate, plain)
    reshape_and_cache_flash(
        key,
        value,
        key_cache,
        value_cache,
        slots,
        kv_cache_dtype,
        k_scale,
        v_scale,
        backend=backend,
        validate="deferred" if validate == "deferred" else False,
    )


def run_gather(
    problem: GatherProblem,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    backend: str | Backend,
) -> None:
    """Dispatch and run a gather of slots on plain tensors."""
    for name, rows in (("key", key), ("value", value)):
        for other, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            if shares_memory(rows, cache):
                raise ArgumentError(f"out ({name}) and {other} share memory; pass rows of their own")
    chosen = select(problem, backend)
    call = GatherCall(problem, key_cache, value_cache, slots, key, value, k_scale, v_scale)
    verb_of(chosen, "gather", problem)(call)
    if torch.is_grad_enabled():
        bump_version(key)
        bump_version(value)


def bind_gather(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None,
    key: Tensor,
    value: Tensor,
    k_scale: Scale,
    v_scale: Scale,
    kv_cache_dtype: str,
) -> GatherProblem:
    """Hold the tensors of a gather to each other, and say what is asked. Reads no values."""
    sizes = _bind_places(key_cache, block_table, cu_seq_lens, seq_starts)
    kind = bind_rows(sizes, key_cache, value_cache, key, value, kv_cache_dtype)
    covers: list[Granularity] = [
        scale_granularity(
            name,
            scale,
            kind=kind,
            num_kv_heads=sizes["Hkv"],
            device_of="key_cache",
            device=key_cache.device,
            num_seqs=sizes["B"],
            cache_shape=(sizes["NB"], sizes["BS"]),
        )
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    scale = finest(covers[0], covers[1])
    return gather_problem(sizes, kind, key, "token_head" if scale == "sequence_head" else scale)


def bind_rows(
    sizes: Sizes, key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, kv_cache_dtype: str
) -> str:
    """Hold rows to the caches that they come from; the kind of the caches."""
    sizes.bind("key_cache", key_cache, "NB BS Hkv D")
    sizes.bind("value_cache", value_cache, "NB BS Hkv Dv")
    sizes.bind("key", require_tensor("key", key), "T Hkv D")
    sizes.bind("value", require_tensor("value", value), "T Hkv Dv")
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache), ("key", key), ("value", value)):
        require_device(name, tensor, "key_cache", key_cache.device)
        require_contiguous_last(name, tensor)
    require_same_dtype("value_cache", value_cache, "key_cache", key_cache.dtype)
    require_dtype("key", key, QUERY_DTYPES)
    require_same_dtype("value", value, "key", key.dtype)
    require_no_overlap("key", key)
    require_no_overlap("value", value)
    kind = storage_kind(dtype_name(key_cache.dtype), kv_cache_dtype)
    if kind not in QUANTISED and key.dtype != key_cache.dtype:
        raise DTypeError(
            f"key_cache is {kind}, but the rows are {dtype_name(key.dtype)}; a cache that is not quantised is copied "
            f"bit by bit, so pass rows of {kind} and convert them"
        )
    return kind


def gather_problem(sizes: Sizes, kind: str, key: Tensor, scale: Granularity) -> GatherProblem:
    """The problem of sizes that are bound."""
    return GatherProblem(
        device=key.device.type,
        dtype=dtype_name(key.dtype),
        kind=kind,
        num_tokens=sizes["T"],
        num_kv_heads=sizes["Hkv"],
        head_size=sizes["D"],
        head_size_v=sizes["Dv"],
        block_size=sizes["BS"],
        scale=scale,
    )


def _bind_places(key_cache: Tensor, block_table: Tensor, cu_seq_lens: Tensor, seq_starts: Tensor | None) -> Sizes:
    sizes = Sizes()
    sizes.bind("key_cache", require_tensor("key_cache", key_cache), "NB BS Hkv D")
    if sizes["BS"] < 1:
        raise ArgumentError("key_cache: axis 1 (BS) is 0, but a block holds at least one slot")
    sizes.bind("block_table", require_tensor("block_table", block_table), "B width")
    sizes.fix("B+1", sizes["B"] + 1, "block_table")
    sizes.bind("cu_seq_lens", require_tensor("cu_seq_lens", cu_seq_lens), "B+1")
    require_dtype("block_table", block_table, INDEX_DTYPES)
    require_contiguous_last("block_table", block_table)
    require_dtype("cu_seq_lens", cu_seq_lens, (torch.int32,))
    if seq_starts is not None:
        sizes.bind("seq_starts", require_tensor("seq_starts", seq_starts), "B")
        require_dtype("seq_starts", seq_starts, INDEX_DTYPES)
    for name, tensor in (("block_table", block_table), ("cu_seq_lens", cu_seq_lens), ("seq_starts", seq_starts)):
        if tensor is not None:
            require_device(name, tensor, "key_cache", key_cache.device)
    return sizes


def _named(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None,
    rows: tuple[Tensor, Tensor] | None,
) -> list[tuple[str, Tensor]]:
    key, value = rows or (None, None)
    named = (
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_table", block_table),
        ("cu_seq_lens", cu_seq_lens),
        ("seq_starts", seq_starts),
        ("key", key),
        ("value", value),
    )
    return [(name, tensor) for name, tensor in named if tensor is not None]


def _admit(tensors: list[tuple[str, Tensor]], validate: bool | str, backend: str | Backend) -> bool:
    """Whether the call may skip the dispatcher, after looking at the arguments that no tensor depends on."""
    for name, tensor in tensors:
        require_tensor(name, tensor)
    if torch.is_grad_enabled():
        check_no_grad(tensors)
    check_validate(validate)
    plain = is_plain(*(tensor for _, tensor in tensors))
    if not plain:
        check_named(backend)
    return plain


def _allocate(
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seq_lens: Tensor,
    dtype: torch.dtype | None,
    kv_cache_dtype: str,
    plain: bool,
) -> tuple[Tensor, Tensor]:
    if not plain or (cu_seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise UnsupportedError(
            "out is None, so its number of rows is a value of cu_seq_lens, which a captured or traced graph cannot "
            "read; pass out=(key, value) with room for the longest case"
        )
    if dtype is None:
        kind = storage_kind(dtype_name(key_cache.dtype), kv_cache_dtype)
        dtype = torch.float32 if kind in QUANTISED else key_cache.dtype
    sizes = Sizes()
    sizes.bind("key_cache", key_cache, "NB BS Hkv D")
    sizes.bind("value_cache", value_cache, "NB BS Hkv Dv")
    sizes.bind("cu_seq_lens", cu_seq_lens, "B+1")
    rows = max(0, int(cu_seq_lens[-1])) if cu_seq_lens.numel() else 0
    shapes = ((rows, *key_cache.shape[2:]), (rows, *value_cache.shape[2:]))
    key, value = (torch.empty(shape, dtype=dtype, device=key_cache.device) for shape in shapes)
    return key, value


def _slots(
    block_table: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None,
    key: Tensor,
    key_cache: Tensor,
    validate: bool | str,
    plain: bool,
) -> Tensor:
    num_blocks, block_size = key_cache.shape[:2]
    how = (key.shape[0], num_blocks, block_size)
    if not plain:
        return torch.ops.pagetile.row_slots(block_table, cu_seq_lens, seq_starts, *how)
    slots = row_slots(block_table, cu_seq_lens, seq_starts, *how)
    if validate is True and not slots.is_cpu:
        check_on_device(slots, *how[1:])
    return slots
