"""Scores of a task's rows against some keys: raw products, before scale and mask. One kernel an element dtype.

Keys are read straight from the cache, or first copied to contiguous float32 (*staged*): when a register block would
read past the end of a row whose size is no multiple of a vector, and when enough rows share the copy. The products are
the same bits either way. Where keys are read in place, the values of the same keys are asked for meanwhile: blocks lie
anywhere, so no hardware prefetcher guesses them.

Reads the task's queries (float32, in scratch) and K; writes raw scores to scratch.
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
    read_row,
    slot_value,
    vectors_of,
)
from pagetile.backends.cpu.kernels.products import MAX_ROWS, score_rows
from pagetile.backends.cpu.kernels.vector import ROW_BYTES
from pagetile.backends.cpu.tuning import CHUNK, DIRECT_KEYS, SCORE_PAD, STAGED_KEYS

SCORE_BYTES = (CHUNK + SCORE_PAD) * 4
"""From one row of scores to the next."""


@inlined
def stage(block, scratch, addresses, offset, first, last, size, tag):
    """Copy rows to contiguous float32, zero-padded to whole vectors."""
    stage, stride = scratch + slot_value(block, P.A_S_STAGE), slot_value(block, P.A_STAGE_STRIDE)
    for key in range(first, last):
        read_row(get_i64(addresses + key * 8) + offset, stage + key * stride, size, tag)


@inlined
def _score_block(block, scratch, task, head, start, first, last, addresses, offset, tag):
    """Scores of one KV head's rows against the keys ``start + [first, last)``, in register blocks of rows."""
    group, tokens = slot_value(block, P.A_GROUP), slot_value(task, P.T_TOKENS)
    rows, vectors = tokens * group, vectors_of(slot_value(block, P.A_SIZE))
    ranges = scratch + slot_value(block, P.A_S_RANGE)
    queries = scratch + slot_value(block, P.A_S_QUERY) + head * rows * vectors * ROW_BYTES
    scores = scratch + slot_value(block, P.A_S_SCORE) + head * rows * SCORE_BYTES
    row = 0
    while row < rows:
        count = min(MAX_ROWS, rows - row)
        low = max(first, get_i64(ranges + row // group * 16) - start)
        high = min(last, get_i64(ranges + (row + count - 1) // group * 16 + 8) - start)
        if low < high:
            score_rows(
                count,
                queries + row * vectors * ROW_BYTES,
                vectors * ROW_BYTES,
                addresses,
                offset,
                vectors,
                scores + row * SCORE_BYTES,
                SCORE_BYTES,
                low,
                high,
                tag,
            )
        row += count


@inlined
def _score_chunk(block, scratch, task, start, first, last, tag):
    """Scores of all rows against the keys ``start + [first, last)``: a few keys at a time, every head in turn."""
    keys, staged_keys = chunk_addresses(block, scratch, P.A_S_KADDR, start), scratch + slot_value(block, P.A_S_SADDR)
    values, value_bytes = chunk_addresses(block, scratch, P.A_S_VADDR, start), slot_value(block, P.A_V_BYTES)
    rows, size = slot_value(task, P.T_TOKENS) * slot_value(block, P.A_GROUP), slot_value(block, P.A_SIZE)
    staged = rows >= slot_value(block, P.A_STAGE_ROWS) or slot_value(block, P.A_DIRECT_K) == 0
    step = STAGED_KEYS if staged else DIRECT_KEYS
    key = first
    while key < last:
        end = min(last, key + step)
        for head in range(slot_value(task, P.T_HEADS)):
            offset = (slot_value(task, P.T_HEAD) + head) * slot_value(block, P.A_K_HEAD)
            if staged:
                stage(block, scratch, keys, offset, key, end, size, tag)
                _score_block(block, scratch, task, head, start, key, end, staged_keys, 0, FLOAT32)
            else:
                ahead = (slot_value(task, P.T_HEAD) + head) * slot_value(block, P.A_V_HEAD)
                prefetch_rows(values, key, end, ahead, value_bytes)
                _score_block(block, scratch, task, head, start, key, end, keys, offset, tag)
        key = end


def score_float32(block, scratch, task, start, first, last):
    """Scores against float32 keys ``start + [first, last)``."""
    _score_chunk(block, scratch, task, start, first, last, FLOAT32)


def score_bfloat16(block, scratch, task, start, first, last):
    """Scores against bfloat16 keys."""
    _score_chunk(block, scratch, task, start, first, last, BFLOAT16)


def score_float16(block, scratch, task, start, first, last):
    """Scores against float16 keys."""
    _score_chunk(block, scratch, task, start, first, last, FLOAT16)


SCORE = {
    "float32": Kernel(score_float32),
    "bfloat16": Kernel(score_bfloat16),
    "float16": Kernel(score_float16),
}
