"""Fused write, from the host. The kernel is :mod:`pagetile.backends.cpu.kernels.fused`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.block import Block
from pagetile.backends.cpu.faults import wide_index
from pagetile.backends.cpu.kernels import fused as K
from pagetile.backends.cpu.kernels.vector import W
from pagetile.backends.cpu.launch import available_threads, launch
from pagetile.backends.cpu.scratch import MEMORY
from pagetile.backends.protocol import Scale
from pagetile.backends.verbs import FusedWriteCall
from pagetile.contracts.dtypes import QUANTISED, dtype_name
from pagetile.reference.checks import check_slots
from pagetile.reference.rope import check_positions

CHUNK_BYTES = 1 << 14
"""Bytes of heads a ticket: rotating costs more than moving, so less than a write takes."""


def fused_write(call: FusedWriteCall) -> None:
    """Normalise, rotate and store.

    Raises:
        ArgumentError: a position outside the tables. SlotError: a slot past the cache. Nothing has been written.
    """
    write, problem = call.write, call.problem
    key, value, key_cache, value_cache = write.key, write.value, write.key_cache, write.value_cache
    check_slots(write.slot_mapping, key.shape[0], *key_cache.shape[:2])
    check_positions(call.positions, call.cos.shape[0])
    count, size, size_v = key.shape[0], key.shape[2], value.shape[2]
    if not count:
        return
    each, stored = key.element_size(), key_cache.element_size()
    heads = problem.num_q_heads + 2 * problem.write.num_kv_heads
    chunk = max(1, CHUNK_BYTES // max(1, heads * max(size, size_v) * each))
    threads = min(available_threads(), -(-count // chunk))
    block = Block(K.SLOTS)
    block.put(K.CHUNK, chunk, count, *_indices(write.slot_mapping, "slot_mapping"), problem.write.block_size)
    block.put(K.POSITIONS, *_indices(call.positions, "positions")[1:])
    block.put(K.COS, *_rows(call.cos), *_rows(call.sin), P.DTYPE_CODES[dtype_name(call.cos.dtype)])
    block.put(K.TABLE_BYTES, call.cos.element_size(), call.cos.shape[1], int(problem.interleaved))
    if call.q_weight is not None and call.k_weight is not None:
        block.put(K.NORM, 1, P.DTYPE_CODES[dtype_name(call.q_weight.dtype)], call.q_weight.element_size())
        block[K.Q_WEIGHT], block[K.K_WEIGHT] = call.q_weight.data_ptr(), call.k_weight.data_ptr()
        block.put_float(K.EPS_F, call.eps)
    kind = P.KIND_CODES[problem.kind] if problem.kind in QUANTISED else -1
    block.put(K.DTYPE, P.DTYPE_CODES[problem.dtype], each, kind)
    scratch = _put_scratch(block, size, call.cos.shape[1], threads)
    block.put(K.Q_HEADS, problem.num_q_heads, problem.write.num_kv_heads, size, size_v)
    block.put(K.Q, *_heads(call.query, each), *_heads(call.query_out, each))
    block.put(K.K, *_heads(key, each))
    if call.key_out is not None:
        block.put(K.K_OUT, *_heads(call.key_out, each))
    block.put(K.V, *_heads(value, each))
    k_scale, v_scale = _scale(write.k_scale), _scale(write.v_scale)
    block.put(K.K_CACHE, *_heads(key_cache, stored), *_scale_slots(k_scale))
    block.put(K.V_CACHE, *_heads(value_cache, stored), *_scale_slots(v_scale))
    launch(K.FUSED, block.address, threads)
    del scratch, k_scale, v_scale  # kept alive until here: the block holds only their addresses


def _indices(tensor: Tensor, name: str) -> tuple[int, int, int, int]:
    """Number, address, step in bytes, and whether they are int64."""
    return tensor.shape[0], tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), wide_index(name, tensor)


def _rows(table: Tensor) -> tuple[int, int]:
    return table.data_ptr(), table.stride(0) * table.element_size()


def _heads(tensor: Tensor, size: int) -> tuple[int, ...]:
    """Address and steps in bytes, but for the last axis."""
    return tensor.data_ptr(), *(step * size for step in tensor.stride()[:-1])


def _scale(scale: Scale) -> Tensor:
    if isinstance(scale, Tensor):
        return scale
    return torch.full((), 1.0 if scale is None else scale, dtype=torch.float32)


def _scale_slots(scale: Tensor) -> tuple[int, int]:
    return scale.data_ptr(), 4 * scale.stride(0) if scale.numel() > 1 else 0


def _put_scratch(block: Block, size: int, half: int, threads: int) -> Tensor:
    """A head, its weights and its rotary rows as float32, and the rounded head, for each worker."""
    whole, tables = (-(-n // W) * W * 4 for n in (size, half))
    worker = 0
    for slot, part in (
        (K.S_ROW, whole),
        (K.S_COS, tables),
        (K.S_SIN, tables),
        (K.S_Q_WEIGHT, whole),
        (K.S_K_WEIGHT, whole),
        (K.S_ROUNDED, whole),
    ):
        block[slot] = worker
        worker += -(-part // 64) * 64
    scratch = MEMORY.scratch(threads * worker + 64)
    block.put(K.SCRATCH, -(-scratch.data_ptr() // 64) * 64, worker)
    return scratch
