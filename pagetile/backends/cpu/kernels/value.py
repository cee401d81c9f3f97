"""Weighted values of some keys, added to a task's rows. One kernel an element dtype.

A key that a row does not see is never multiplied, not even by 0: it may be NaN. Rows whose ranges differ are therefore
added up apart where they differ. Products of pairs do multiply by 0, but only what is finite: where a value is not,
each token is taken apart, with what it does not see replaced by zeros.

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
    FP8_E4M3,
    FP8_E5M2,
    INT8,
    get_i64,
    slot_value,
)
from pagetile.backends.cpu.kernels.pairs import (
    BLOCK_KEYS,
    WEIGHT_BYTES,
    add_packed,
    ask_for_units,
    close_products,
    open_products,
)
from pagetile.backends.cpu.kernels.products import MAX_ROWS, accumulate_rows
from pagetile.backends.cpu.kernels.score import SCORE_BYTES, ask_for
from pagetile.backends.cpu.kernels.softmax import clear_row, copy_row
from pagetile.backends.cpu.kernels.stage import stage_pair, stage_values
from pagetile.backends.cpu.kernels.vector import DOT, ROW_BYTES
from pagetile.backends.cpu.tuning import CHUNK, DIRECT_KEYS, STAGED_KEYS


@inlined
def _value_block(block, scratch, task, head, start, first, last, addresses, offset, sums, tag):
    """Add the values of the keys ``start + [first, last)`` to one KV head's rows, each row only those it sees.

    Up to four rows share the keys that all of them see; before and after those, each row goes alone. A row's keys are
    taken in ascending order either way.
    """
    group, tokens = slot_value(block, P.A_GROUP), slot_value(task, P.T_TOKENS)
    rows, vectors = tokens * group, slot_value(block, P.A_SUM_VECTORS)
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

    From some rows a head on, values are first copied to contiguous float32, which all those rows then read. The keys of
    the next chunk, of which there are ``ahead``, are asked for meanwhile.
    """
    values = chunk_addresses(block, scratch, P.A_S_VADDR, start)
    staged_values, stage = scratch + slot_value(block, P.A_S_SADDR), scratch + slot_value(block, P.A_S_STAGE)
    next_keys, heads = chunk_addresses(block, scratch, P.A_S_KADDR, start + CHUNK), slot_value(task, P.T_HEADS)
    place_k = slot_value(task, P.T_HEAD) * slot_value(block, P.A_K_HEAD)
    bytes_k = (heads - 1) * slot_value(block, P.A_K_HEAD) + slot_value(block, P.A_K_BYTES)
    rows, size = slot_value(task, P.T_TOKENS) * slot_value(block, P.A_GROUP), slot_value(block, P.A_SIZE_V)
    staged = rows >= slot_value(block, P.A_STAGE_ROWS) or slot_value(block, P.A_DIRECT_V) == 0
    step = STAGED_KEYS if staged else DIRECT_KEYS
    key = first
    while key < last:
        end = min(last, key + step)
        for head in range(heads):
            lone = slot_value(task, P.T_HEAD) + head
            offset = lone * slot_value(block, P.A_V_HEAD)
            ask_for(next_keys, min(key, ahead), min(end, ahead), head, heads, place_k, bytes_k)
            if staged:
                stage_values(values, offset, key, end, size, stage, slot_value(block, P.A_STAGE_STRIDE), tag)
                _value_block(block, scratch, task, head, start, key, end, staged_values, 0, sums, FLOAT32)
            else:
                _value_block(block, scratch, task, head, start, key, end, values, offset, sums, tag)
        key = end


@inlined
def _stage_pairs(block, scratch, task, values, head, first, last, low, high, next_keys, ahead):
    """The values ``[low, high)`` of a chunk as pairs, from the block of ``first`` to that of ``last``, zeros elsewhere;
    0 if all are finite. A share of the next chunk's keys is asked for meanwhile."""
    stage, stride = scratch + slot_value(block, P.A_S_STAGE), slot_value(block, P.A_STAGE_STRIDE)
    size, zeros, heads = (
        slot_value(block, P.A_SIZE_V),
        scratch + slot_value(block, P.A_S_ZEROS),
        slot_value(task, P.T_HEADS),
    )
    offset = (slot_value(task, P.T_HEAD) + head) * slot_value(block, P.A_V_HEAD)
    place, apart = slot_value(task, P.T_HEAD) * slot_value(block, P.A_K_HEAD), slot_value(block, P.A_K_HEAD)
    bad, vectors = 0, (size + 31) // 32 * 2
    for key in range(first // BLOCK_KEYS * BLOCK_KEYS, (last + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS, 2):
        target = stage + key // 2 * stride
        ask_for_units(next_keys, head * CHUNK + key, 2, heads, ahead, place, apart, slot_value(block, P.A_K_BYTES))
        if key + 1 < low or key >= high:
            clear_row(target, vectors)
        else:
            one = get_i64(values + key * 8) + offset if key >= low else zeros
            two = get_i64(values + key * 8 + 8) + offset if key + 1 < high else zeros
            bad |= stage_pair(one, two, size, target)
    return bad


@inlined
def _add_staged(block, scratch, head, rows, first, last, row, count, into):
    """Sums of the rows ``row + [0, count)`` of a head over the staged pairs."""
    stage, stride = scratch + slot_value(block, P.A_S_STAGE), slot_value(block, P.A_STAGE_STRIDE)
    begin, end = first // BLOCK_KEYS, (last + BLOCK_KEYS - 1) // BLOCK_KEYS
    weights = scratch + slot_value(block, P.A_S_WEIGHT) + (head * rows + row) * WEIGHT_BYTES + begin * BLOCK_KEYS * 2
    values, addresses = stage + begin * (BLOCK_KEYS // 2) * stride, scratch + slot_value(block, P.A_S_SADDR)
    addresses += begin * (BLOCK_KEYS // 2) * 8
    add_packed(count, weights, values, stride, addresses, end - begin, into, slot_value(block, P.A_SIZE_V))


@inlined
def _add_apart(block, scratch, task, head, values, start, first, last, sums):
    """Each token of a head apart, with zeros for the values that it does not see."""
    group, tokens = slot_value(block, P.A_GROUP), slot_value(task, P.T_TOKENS)
    rows, vectors = tokens * group, slot_value(block, P.A_SUM_VECTORS)
    ranges, alone = scratch + slot_value(block, P.A_S_RANGE), scratch + slot_value(block, P.A_S_ALONE)
    for token in range(tokens):
        low = max(first, get_i64(ranges + token * 16) - start)
        high = min(last, get_i64(ranges + token * 16 + 8) - start)
        if low < high:
            _stage_pairs(block, scratch, task, values, head, first, last, low, high, values, 0)
            for row in range(token * group, token * group + group):
                block_row = row // 16 * 16
                _add_staged(block, scratch, head, rows, first, last, block_row, min(16, rows - block_row), alone)
                copy_row(alone + (row - block_row) * vectors * ROW_BYTES, sums + row * vectors * ROW_BYTES, vectors)


@inlined
def _value_chunk_pairs(block, scratch, task, start, first, last, ahead, sums):
    """The weighted values of a chunk in pairs of bfloat16, every head in turn."""
    values = chunk_addresses(block, scratch, P.A_S_VADDR, start)
    next_keys = chunk_addresses(block, scratch, P.A_S_KADDR, start + CHUNK)
    rows, vectors = slot_value(task, P.T_TOKENS) * slot_value(block, P.A_GROUP), slot_value(block, P.A_SUM_VECTORS)
    open_products(scratch, block, rows)
    for head in range(slot_value(task, P.T_HEADS)):
        into = sums + head * rows * vectors * ROW_BYTES
        if _stage_pairs(block, scratch, task, values, head, first, last, first, last, next_keys, ahead):
            _add_apart(block, scratch, task, head, values, start, first, last, into)
        else:
            _add_staged(block, scratch, head, rows, first, last, 0, rows, into)
    close_products()


def add_float32(block, scratch, task, start, first, last, ahead, sums):
    """Add the weighted float32 values ``start + [first, last)``; ``ahead`` keys of the next chunk will be read."""
    _value_chunk(block, scratch, task, start, first, last, ahead, sums, FLOAT32)


def add_bfloat16(block, scratch, task, start, first, last, ahead, sums):
    """Add the weighted bfloat16 values, widened."""
    _value_chunk(block, scratch, task, start, first, last, ahead, sums, BFLOAT16)


def add_pairs(block, scratch, task, start, first, last, ahead, sums):
    """Add the bfloat16 values, by packed weights."""
    _value_chunk_pairs(block, scratch, task, start, first, last, ahead, sums)


def add_float16(block, scratch, task, start, first, last, ahead, sums):
    """Add the weighted float16 values."""
    _value_chunk(block, scratch, task, start, first, last, ahead, sums, FLOAT16)


def add_fp8_e4m3(block, scratch, task, start, first, last, ahead, sums):
    """Add the weighted fp8_e4m3 values."""
    _value_chunk(block, scratch, task, start, first, last, ahead, sums, FP8_E4M3)


def add_fp8_e5m2(block, scratch, task, start, first, last, ahead, sums):
    """Add the weighted fp8_e5m2 values."""
    _value_chunk(block, scratch, task, start, first, last, ahead, sums, FP8_E5M2)


def add_int8(block, scratch, task, start, first, last, ahead, sums):
    """Add the weighted int8 values."""
    _value_chunk(block, scratch, task, start, first, last, ahead, sums, INT8)


ADD = {
    "float32": Kernel(add_float32),
    "bfloat16": Kernel(add_pairs if DOT else add_bfloat16),
    "float16": Kernel(add_float16),
    "fp8_e4m3": Kernel(add_fp8_e4m3),
    "fp8_e5m2": Kernel(add_fp8_e5m2),
    "int8": Kernel(add_int8),
}
