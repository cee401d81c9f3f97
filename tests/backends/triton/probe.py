"""Kernels that store the offsets they compute, by the helpers that the real kernels use."""

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.device import locate
from pagetile.backends.triton.write import load_slots, split_slot


@triton.jit
def probe_reads(
    out,
    block_table,
    num_cols,
    num_blocks,
    block_size,
    num_keys,
    s_block,
    s_token,
    s_head,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    TRUSTED: tl.constexpr,
):
    """Grid ``(key tiles,)``. ``out`` int64 ``[keys, HEADS]``: element offset of each head at each position, else -1."""
    position = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    place = (block_table, num_cols, num_blocks, block_size, 0)
    block, offset, usable = locate(position, position < num_keys, place, True, LOG2_BLOCK, TRUSTED)
    for head in range(HEADS):
        at = block * s_block + offset * s_token + head * s_head
        tl.store(out + position * HEADS + head, tl.where(usable, at, -1), mask=position < num_keys)


@triton.jit
def probe_writes(
    out,
    slots,
    error,
    num_rows,
    num_slots,
    block_size,
    s_block,
    s_token,
    s_head,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Grid ``(row tiles,)``. ``out`` int64 ``[rows, HEADS]``: element offset that each row is stored at, else -1."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot, keep = load_slots(slots, row, num_rows, num_slots, error)
    block, offset = split_slot(slot, block_size, LOG2_BLOCK, NARROW)
    for head in range(HEADS):
        at = block * s_block + offset * s_token + head * s_head
        tl.store(out + row * HEADS + head, tl.where(keep, at, -1), mask=row < num_rows)
