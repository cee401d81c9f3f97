"""Scores of a task's rows against some keys: raw products, before scale and mask. One kernel an element dtype.

A tile of keys at a time is transposed into scratch, and every row of the task is scored against it. The values of the
same keys are asked for meanwhile: blocks lie anywhere, so no hardware prefetcher guesses them.

Reads the task's queries (float32 or packed bfloat16, in scratch) and K; writes raw scores to scratch.
"""

from __future__ import annotations

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.address import chunk_addresses
from pagetile.backends.cpu.kernels.elements import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FP8_E4M3,
    FP8_E5M2,
    INT8,
    get_i64,
    prefetch_rows,
    slot_value,
    vectors_of,
)
from pagetile.backends.cpu.kernels.pairs import (
    PAIRS,
    close_products,
    may_score_in_place,
    open_products,
    packed_bytes,
    score_in_place,
    score_packed,
)
from pagetile.backends.cpu.kernels.products import SCORE_ROWS, TILE_KEYS, score_rows
from pagetile.backends.cpu.kernels.stage import stage_keys
from pagetile.backends.cpu.kernels.vector import DOT, ROW_BYTES
from pagetile.backends.cpu.tuning import CHUNK, SCORE_PAD

SCORE_BYTES = (CHUNK + SCORE_PAD) * 4
"""From one row of scores to the next."""


@inlined
def ask_for(addresses, first, last, head, heads, offset, size):
    """Prefetch a head's share of the rows ``[first, last)``: neighbouring tokens with all heads of the task, so that
    all shares together go through memory in the order of its addresses."""
    keys = last - first
    prefetch_rows(addresses, first + keys * head // heads, first + keys * (head + 1) // heads, offset, size)


@inlined
def _seen_rows(block, scratch, task, start, first, last):
    """Half-open range of the rows of a head that can see a key of ``start + [first, last)``: from the first token whose
    range has not ended before it, to the last one whose range has begun."""
    ranges, tokens = scratch + slot_value(block, P.A_S_RANGE), slot_value(task, P.T_TOKENS)
    group = slot_value(block, P.A_GROUP)
    low, high = 0, tokens
    while low < high and get_i64(ranges + low * 16 + 8) <= start + first:
        low += 1
    while low < high and get_i64(ranges + high * 16 - 16) >= start + last:
        high -= 1
    return low * group, high * group


@inlined
def _score_floats(block, scratch, head, keys, low, high, column, rows):
    """Scores of the rows ``[low, high)`` of one head of the task, at a column."""
    size = slot_value(block, P.A_SIZE)
    stride = vectors_of(size) * ROW_BYTES
    queries = scratch + slot_value(block, P.A_S_QUERY) + head * rows * stride
    scores = scratch + slot_value(block, P.A_S_SCORE) + head * rows * SCORE_BYTES + column * 4
    row = low
    while row < high:
        count = min(SCORE_ROWS, high - row)
        score_rows(count, queries + row * stride, stride, keys, size, scores + row * SCORE_BYTES, SCORE_BYTES, FLOAT32)
        row += count


@inlined
def _score_chunk(block, scratch, task, start, first, last, tag):
    """Scores of all rows against the keys ``start + [first, last)``: a tile of keys at a time, every head in turn."""
    keys, values = (
        chunk_addresses(block, scratch, P.A_S_KADDR, start),
        chunk_addresses(block, scratch, P.A_S_VADDR, start),
    )
    heads, rows = slot_value(task, P.T_HEADS), slot_value(task, P.T_TOKENS) * slot_value(block, P.A_GROUP)
    place_v = slot_value(task, P.T_HEAD) * slot_value(block, P.A_V_HEAD)
    bytes_v = (heads - 1) * slot_value(block, P.A_V_HEAD) + slot_value(block, P.A_V_BYTES)
    tile = scratch + slot_value(block, P.A_S_STAGE)
    key = first
    while key < last:
        end = min(last, key + TILE_KEYS)
        low, high = _seen_rows(block, scratch, task, start, key, end)
        for head in range(heads):
            lone = slot_value(task, P.T_HEAD) + head
            ask_for(values, key, end, head, heads, place_v, bytes_v)
            stage_keys(keys + key * 8, lone * slot_value(block, P.A_K_HEAD), slot_value(block, P.A_SIZE), tile, tag)
            _score_floats(block, scratch, head, tile, low, high, key, rows)
        key = end


@inlined
def _score_chunk_pairs(block, scratch, task, start, first, last):
    """The same in pairs of bfloat16."""
    keys, values = (
        chunk_addresses(block, scratch, P.A_S_KADDR, start),
        chunk_addresses(block, scratch, P.A_S_VADDR, start),
    )
    heads, rows = slot_value(task, P.T_HEADS), slot_value(task, P.T_TOKENS) * slot_value(block, P.A_GROUP)
    place_v = slot_value(task, P.T_HEAD) * slot_value(block, P.A_V_HEAD)
    bytes_v = (heads - 1) * slot_value(block, P.A_V_HEAD) + slot_value(block, P.A_V_BYTES)
    tile, size = scratch + slot_value(block, P.A_S_STAGE), slot_value(block, P.A_SIZE)
    queries, stride = scratch + slot_value(block, P.A_S_PACKED), packed_bytes(size)
    scores = scratch + slot_value(block, P.A_S_SCORE)
    open_products(scratch, block, rows)
    in_place = may_score_in_place(block, rows)
    key = first
    while key < last:
        end = min(last, key + TILE_KEYS)
        for head in range(heads):
            lone = slot_value(task, P.T_HEAD) + head
            offset, place = lone * slot_value(block, P.A_K_HEAD), scores + head * rows * SCORE_BYTES + key * 4
            done = False
            if in_place and end - key == TILE_KEYS:
                done = score_in_place(block, scratch, task, head, keys, values, key, last, rows, place, SCORE_BYTES)
            if not done:
                ask_for(values, key, end, head, heads, place_v, bytes_v)
                stage_keys(keys + key * 8, offset, size, tile, PAIRS)
                score_packed(rows, queries + head * rows * stride, tile, size, place, SCORE_BYTES)
        key = end
    close_products()


def score_float32(block, scratch, task, start, first, last):
    """Scores against float32 keys ``start + [first, last)``."""
    _score_chunk(block, scratch, task, start, first, last, FLOAT32)


def score_bfloat16(block, scratch, task, start, first, last):
    """Scores against bfloat16 keys, widened."""
    _score_chunk(block, scratch, task, start, first, last, BFLOAT16)


def score_pairs(block, scratch, task, start, first, last):
    """Scores of packed queries against bfloat16 keys."""
    _score_chunk_pairs(block, scratch, task, start, first, last)


def score_float16(block, scratch, task, start, first, last):
    """Scores against float16 keys."""
    _score_chunk(block, scratch, task, start, first, last, FLOAT16)


def score_fp8_e4m3(block, scratch, task, start, first, last):
    """Scores against fp8_e4m3 keys."""
    _score_chunk(block, scratch, task, start, first, last, FP8_E4M3)


def score_fp8_e5m2(block, scratch, task, start, first, last):
    """Scores against fp8_e5m2 keys."""
    _score_chunk(block, scratch, task, start, first, last, FP8_E5M2)


def score_int8(block, scratch, task, start, first, last):
    """Scores against int8 keys."""
    _score_chunk(block, scratch, task, start, first, last, INT8)


SCORE = {
    "float32": Kernel(score_float32),
    "bfloat16": Kernel(score_pairs if DOT else score_bfloat16),
    "float16": Kernel(score_float16),
    "fp8_e4m3": Kernel(score_fp8_e4m3),
    "fp8_e5m2": Kernel(score_fp8_e5m2),
    "int8": Kernel(score_int8),
}
