"""Metadata that follows from the block table on the device, and the checks of values that live there.

``slots_kernel`` is the device half of the metadata builder: where the tokens of this step go. ``check_slots_kernel``
and ``check_blocks_kernel`` find the first offender for ``validate=True``; they write one number and touch no cache.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.device import NO_COLUMN, SIZES, first_bad_column, locate


@triton.jit(do_not_specialize=SIZES)
def slots_kernel(
    slots,
    positions,
    q_loc,
    seq_lens,
    table,
    table_row,
    num_seqs,
    num_rows,
    num_cols,
    num_blocks,
    block_size,
    ROWS: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Grid ``(row tiles,)``. Row i of sequence s stands at ``i + seq_len - q_len``; rows of no sequence get slot -1."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    lower = tl.zeros([ROWS], tl.int32)
    upper = tl.zeros([ROWS], tl.int32) + num_seqs
    span: tl.int32 = num_seqs
    while span > 1:  # the last sequence that starts at or before the row, as a vector of binary searches
        middle = (lower + upper) // 2
        below = tl.load(q_loc + middle) <= row
        lower = tl.where(below & (upper - lower > 1), middle, lower)
        upper = tl.where(below | (upper - lower <= 1), upper, middle)
        span = (span + 1) // 2
    q_start = tl.load(q_loc + lower)
    q_end = tl.load(q_loc + lower + 1)
    position = row - q_end + tl.load(seq_lens + lower)
    real_token = real & (row >= q_start) & (row < q_end) & (position >= 0)
    place = (table + lower.to(tl.int64) * table_row, num_cols, num_blocks, block_size, 0)
    block, offset, usable = locate(tl.maximum(position, 0), real_token, place, True, LOG2_BLOCK, False)
    slot = tl.where(usable, block * block_size + offset, -1)
    tl.store(slots + row, slot.to(slots.dtype.element_ty), mask=real)
    if POSITIONS:
        position = tl.where(real_token, position, 0)
        tl.store(positions + row, position.to(positions.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=SIZES)
def check_slots_kernel(first, slots, num_rows, num_slots, ROWS: tl.constexpr):
    """Grid ``(row tiles,)``: ``first`` (int64, starts at its maximum) becomes the first row whose slot is too large."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int64)
    bad = tl.min(tl.where(slot >= num_slots, row, 2147483647), 0)
    if bad != 2147483647:
        tl.atomic_min(first, bad.to(tl.int64))


@triton.jit(do_not_specialize=SIZES)
def check_blocks_kernel(
    first, seq_lens, table, table_row, num_cols, num_blocks, block_size, LOG2_BLOCK: tl.constexpr, SCAN: tl.constexpr
):
    """Grid ``(sequences,)``: ``first`` becomes ``seq * 2^32 + column`` of the first bad entry that a sequence needs."""
    seq = tl.program_id(0).to(tl.int64)
    place = (table + seq * table_row, num_cols, num_blocks, block_size, 0)
    column = first_bad_column(0, tl.load(seq_lens + seq), place, LOG2_BLOCK, SCAN)
    if column != NO_COLUMN:
        tl.atomic_min(first, seq * 4294967296 + column)
