"""Gather, from the host. The kernel is :mod:`pagetile.backends.cpu.kernels.gather`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.block import Block
from pagetile.backends.cpu.kernels import gather as K
from pagetile.backends.cpu.kernels.lanes import KINDS
from pagetile.backends.cpu.launch import available_threads, launch
from pagetile.backends.verbs import GatherCall
from pagetile.contracts.dtypes import QUANTISED
from pagetile.reference.checks import check_slots

CHUNK_BYTES = 1 << 16
"""Bytes of rows a ticket."""


def gather(call: GatherCall) -> None:
    """Fill the rows.

    Raises:
        SlotError: a slot past the end of the cache. Nothing has been written.
    """
    slots, problem = call.slots.contiguous(), call.problem
    check_slots(slots, call.key.shape[0], *call.key_cache.shape[:2])
    if not slots.shape[0]:
        return
    quantised = problem.kind in QUANTISED
    row_bytes = problem.num_kv_heads * (problem.head_size + problem.head_size_v) * call.key.element_size()
    chunk = max(1, CHUNK_BYTES // max(1, row_bytes))
    block = Block(K.SLOTS)
    kind = KINDS[problem.kind] if quantised else 0
    block.put(K.CHUNK, chunk, slots.shape[0], slots.data_ptr(), problem.block_size, kind, P.DTYPE_CODES[problem.dtype])
    one = torch.ones(1)
    scales = [one if scale is None else scale for scale in (call.k_scale, call.v_scale)]
    _put_side(block, K.K_SIDE, call.key_cache, call.key, scales[0], quantised)
    _put_side(block, K.V_SIDE, call.value_cache, call.value, scales[1], quantised)
    chunks = -(-slots.shape[0] // chunk)
    launch(K.GATHER, block.address, min(available_threads(), chunks))


def _put_side(block: Block, side: int, cache: Tensor, rows: Tensor, scale: Tensor, quantised: bool) -> None:
    heads, size = rows.shape[1:]
    joined = heads == 1 or cache.stride(2) == rows.stride(1) == size
    if quantised and scale.numel() > 1:
        joined = heads == 1
    spans, length = (1, heads * size) if joined else (heads, size)
    stored, moved = cache.element_size(), rows.element_size()
    block.put(side + K.CACHE, cache.data_ptr(), *(step * stored for step in cache.stride()[:3]))
    block.put(side + K.ROWS, rows.data_ptr(), *(step * moved for step in rows.stride()[:2]))
    block.put(side + K.SPANS, spans, length if quantised else length * moved)
    steps = (0, 0)
    if scale.numel() > 1:
        steps = scale.stride() if scale.dim() == 2 else (0, scale.stride(0))
    block.put(side + K.SCALE, scale.data_ptr(), *(4 * step for step in steps))
