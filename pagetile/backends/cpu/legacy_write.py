"""Write into an x-packed cache, from the host. The kernel is :mod:`pagetile.backends.cpu.kernels.legacy_write`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.block import Block
from pagetile.backends.cpu.faults import wide_index
from pagetile.backends.cpu.kernels import legacy_write as K
from pagetile.backends.cpu.launch import available_threads, launch
from pagetile.backends.protocol import Scale, WriteCall
from pagetile.contracts.dtypes import QUANTISED
from pagetile.reference.checks import check_slots

CHUNK_BYTES = 1 << 16
"""Bytes of rows a ticket."""


@dataclass(frozen=True, slots=True)
class PackedWritePlan:
    """Cut of one write into an x-packed cache: ``chunk`` rows a ticket, ``threads`` that take part."""

    chunk: int
    threads: int

    def __str__(self) -> str:
        return (
            f"x-packed: {self.chunk} rows a ticket (about {CHUNK_BYTES >> 10} KiB, a block at least), {self.threads} "
            "threads; rows for neighbouring slots are taken together, a head at a time"
        )


def plan_for(call: WriteCall) -> PackedWritePlan:
    """The plan that :func:`write_xpacked` follows."""
    problem = call.problem
    row_bytes = problem.num_kv_heads * (problem.head_size + problem.head_size_v) * call.key.element_size()
    chunk = max(problem.block_size, CHUNK_BYTES // max(1, row_bytes))
    return PackedWritePlan(chunk, max(1, min(available_threads(), -(-call.slot_mapping.shape[0] // chunk))))


def write_xpacked(call: WriteCall) -> None:
    """Store keys and values at their slots.

    Raises:
        SlotError: a slot past the end of the cache. Nothing has been written.
    """
    slots, problem = call.slot_mapping, call.problem
    check_slots(slots, call.key.shape[0], call.key_cache.shape[0], problem.block_size)
    count, each, stored = slots.shape[0], call.key.element_size(), call.key_cache.element_size()
    if not count:
        return
    plan = plan_for(call)
    threads = plan.threads
    block = Block(K.SLOTS)
    block.put(K.CHUNK, plan.chunk, count, slots.data_ptr(), slots.stride(0) * slots.element_size())
    block.put(K.SLOTS_WIDE, wide_index("slot_mapping", slots), problem.block_size, problem.num_kv_heads)
    kind = P.KIND_CODES[problem.kind] if problem.kind in QUANTISED else -1
    block.put(K.DTYPE, P.DTYPE_CODES[problem.dtype], kind)
    scratch = torch.empty(threads * max(problem.head_size, problem.head_size_v), dtype=torch.uint8)
    block.put(K.SCRATCH, scratch.data_ptr(), max(problem.head_size, problem.head_size_v), stored)
    k_scale, v_scale = _scale(call.k_scale), _scale(call.v_scale)
    for first, rows, cache, scale in (
        (K.K_FROM, call.key, call.key_cache, k_scale),
        (K.V_FROM, call.value, call.value_cache, v_scale),
    ):
        block.put(first, rows.data_ptr(), rows.stride(0) * each, rows.stride(1) * each, rows.shape[2])
        # Key packs have one axis more than value channels, and its step is that of the elements of a pack.
        steps = [step * stored for step in cache.stride()[:4]]
        head_step = 4 * scale.stride(0) if scale.numel() > 1 else 0
        block.put(first + 4, cache.data_ptr(), *steps, scale.data_ptr(), head_step)
    launch(K.XPACKED, block.address, threads)
    del scratch, k_scale, v_scale  # kept alive until here: the block holds only their addresses


def _scale(scale: Scale) -> Tensor:
    if isinstance(scale, Tensor):
        return scale
    return torch.full((), 1.0 if scale is None else scale, dtype=torch.float32)
