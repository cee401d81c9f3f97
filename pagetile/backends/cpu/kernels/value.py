"""Weighted values of some keys, added to a task's rows. One kernel an element dtype.

A key that a row does not see is never multiplied, not even by 0: it may be NaN. Rows whose ranges differ are therefore
added up apart where they differ.

Reads weights (in scratch) and V; adds to the rows' sums over a chunk (in scratch).
"""

from __future__ import annotations

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.address import chunk_addresses
from pagetile.backends.cpu.kernels.elements import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    get_i64,
    prefetch_rows,
    slot_value,
    vectors_of,
)
from pagetile.backends.cpu.kernels.products import MAX_ROWS, accumulate_rows
from pagetile.backends.cpu.kernels.score import SCORE_BYTES, stage
from pagetile.backends.cpu.kernels.vector import ROW_BYTES
from pagetile.backends.cpu.tuning import CHUNK, DIRECT_KEYS, STAGED_KEYS


@inlined
def _value_block(block, scratch, task, head, start, first, last, addresses, offset, sums, tag):
    """Add the values of the keys ``start + [first, last)`` to one KV head's rows, each row only those it sees.

    Up to four rows share the keys that all of them see; before and after those, each row goes alone. A row's keys are
    taken in ascending order either way.
    """
    group, tokens = slot_value(block, P.A_GROUP), slot_value(task, P.T_TOKENS)
    rows, vectors = tokens * group, vectors_of(slot_value(block, P.A_SIZE_V))
    ranges = scratch + slot_value(block, P.A_S_RANGE)
    sums += head * rows * vectors * ROW_BYTES
    scores = scratch + slot_value(block, P.A_S_SCORE) + head * rows * SCORE_BYTES
    stride = vectors * ROW_BYTES
    row = 0
    while row < rows:
        count = min(MAX_ROWS, rows - row)
        final = (row + count - 1) // group
        low = max(first, get_i64(ranges + final * 16) - start)
        high = min(last, get_i64(ranges + row // group * 16 + 8) - start)
        if low >= high:  # nothing in common
            low = high = last
        for phase in range(3):
            if phase == 1:
                if low < high:
                    here, weights = sums + row * stride, scores + row * SCORE_BYTES
                    accumulate_rows(
                        count, here, stride, weights, SCORE_BYTES, addresses, offset, vectors, low, high, tag
                    )
                continue
            begin, end = (first, low) if phase == 0 else (high, last)
            if begin >= end:
                continue
            for member in range(row, row + count):
                lone = max(begin, get_i64(ranges + member // group * 16) - start)
                stop = min(end, get_i64(ranges + member // group * 16 + 8) - start)
                if lone < stop:
                    here, weights = sums + member * stride, scores + member * SCORE_BYTES
                    accumulate_rows(1, here, stride, weights, SCORE_BYTES, addresses, offset, vectors, lone, stop, tag)
        row += count


@inlined
def _value_chunk(block, scratch, task, start, first, last, ahead, sums, tag):
    """Add the weighted values of a chunk: a few keys at a time, every head in turn.

    The keys of the next chunk, of which there are ``ahead``, are asked for meanwhile.
    """
    values, staged_values = (
        chunk_addresses(block, scratch, P.A_S_VADDR, start),
        scratch + slot_value(block, P.A_S_SADDR),
    )
    next_keys, key_bytes = chunk_addresses(block, scratch, P.A_S_KADDR, start + CHUNK), slot_value(block, P.A_K_BYTES)
    rows, size = slot_value(task, P.T_TOKENS) * slot_value(block, P.A_GROUP), slot_value(block, P.A_SIZE_V)
    staged = rows >= slot_value(block, P.A_STAGE_ROWS) or slot_value(block, P.A_DIRECT_V) == 0
    step = STAGED_KEYS if staged else DIRECT_KEYS
    key = first
    while key < last:
        end = min(last, key + step)
        for head in range(slot_value(task, P.T_HEADS)):
            offset = (slot_value(task, P.T_HEAD) + head) * slot_value(block, P.A_V_HEAD)
            if staged:
                stage(block, scratch, values, offset, key, end, size, tag)
                _value_block(block, scratch, task, head, start, key, end, staged_values, 0, sums, FLOAT32)
            else:
                next_offset = (slot_value(task, P.T_HEAD) + head) * slot_value(block, P.A_K_HEAD)
                prefetch_rows(next_keys, min(key, ahead), min(end, ahead), next_offset, key_bytes)
                _value_block(block, scratch, task, head, start, key, end, values, offset, sums, tag)
        key = end


def add_float32(block, scratch, task, start, first, last, ahead, sums):
    """Add the weighted float32 values ``start + [first, last)``; ``ahead`` keys of the next chunk will be read."""
    _value_chunk(block, scratch, task, start, first, last, ahead, sums, FLOAT32)


def add_bfloat16(block, scratch, task, start, first, last, ahead, sums):
    """Add the weighted bfloat16 values."""
    _value_chunk(block, scratch, task, start, first, last, ahead, sums, BFLOAT16)


def add_float16(block, scratch, task, start, first, last, ahead, sums):
    """Add the weighted float16 values."""
    _value_chunk(block, scratch, task, start, first, last, ahead, sums, FLOAT16)


ADD = {
    "float32": Kernel(add_float32),
    "bfloat16": Kernel(add_bfloat16),
    "float16": Kernel(add_float16),
}
