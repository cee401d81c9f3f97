"""Attend over an x-packed cache, the kernels: states of partitions of the keys, and their sum.

A *task* is one query token, one KV head and one partition of its keys, at an absolute multiple of ``PARTITION_KEYS``:
look up the keys, score them for all heads of the group, edit the scores, turn them into weights, weigh the values. It
leaves a maximum, a sum and an output. A second kernel adds a row's partitions in ascending order. So a row's bits
depend on its own keys alone.

Reads q, the block table, and the K and V of keys that the token sees; writes states, then out and lse.
"""

from __future__ import annotations

import math

import numpy as np

from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.elements import (
    get_f32,
    get_f64,
    get_i64,
    index_at,
    put_f32,
    put_i64,
    read_strided,
    slot_value,
    take_ticket,
    vectors_of,
    write_strided,
)
from pagetile.backends.cpu.kernels.lanes import TAG_OF
from pagetile.backends.cpu.kernels.packed_products import (
    LANES,
    MANY,
    TOKENS,
    add_scaled,
    edit_scores,
    largest_score,
    scale_by,
    score_many,
    score_one,
    turn_to_weights,
    values_last,
    values_many,
    values_one,
)
from pagetile.backends.cpu.kernels.softmax import clear_row
from pagetile.backends.cpu.kernels.vector import ROW_BYTES, W, calls
from pagetile.backends.verbs import PARTITION_KEYS

(   # slots of the parameter block
    TICKET, WORKER, FIRST, ROWS, PARTS,             # next task and worker; rows of this pass, and partitions a row
    LOW, HIGH, POSITION, SEQ,                       # int64 of each row: visible keys [low, high), position, sequence
    Q, Q_ROW, Q_HEAD, DTYPE, BYTES,                 # code and size of an element of q and out
    K, K_BLOCK, K_HEAD, K_PACK, K_TOKEN,            # addresses and byte steps
    V, V_BLOCK, V_HEAD, V_CHANNEL, V_TOKEN,
    TABLE, TABLE_ROW, TABLE_WIDE, BLOCK_SIZE,
    HEADS, GROUP, SIZE, SIZE_V, PACKS,
    SCALE_F, CAP_F,                                 # softcap, 0 is off
    SLOPES, SLOPES_SEQ, SLOPES_HEAD,                # address 0: none
    K_SCALE, K_SCALE_SEQ, K_SCALE_HEAD, V_SCALE, V_SCALE_SEQ, V_SCALE_HEAD,
    SUMS, MAXIMA, STATE_HEAD, STATE_ROW,            # float32 states and their byte steps
    PARTIAL, PARTIAL_PART, PARTIAL_HEAD, PARTIAL_ROW, PARTIAL_DTYPE, PARTIAL_BYTES,
    OUT, OUT_ROW, OUT_HEAD,
    LSE, LSE_ROW, LSE_HEAD,                         # address 0: none
    SINKS, SINKS_HEAD,                              # address 0: none
    SCORE_AT, WEIGH_AT,                             # addresses of the kernels of this kind of keys
    SCRATCH, SCRATCH_BYTES,                         # a worker's share
    S_QUERY, S_SCORES, S_KEYS, S_PIECES, S_TAILS, S_SUMS,  # offsets in it
    SLOTS,
) = range(73)  # fmt: skip

SCORE_BYTES = (PARTITION_KEYS + W + TOKENS) * 4
"""From one row of scores to the next."""

TAG_FLOAT32, TAG_BFLOAT16, TAG_FLOAT16 = TAG_OF["float32"], TAG_OF["bfloat16"], TAG_OF["float16"]
TAG_FP8_E4M3, TAG_FP8_E5M2, TAG_INT8 = TAG_OF["fp8_e4m3"], TAG_OF["fp8_e5m2"], TAG_OF["int8"]
call_score, call_weigh = calls(3), calls(4)

_NONE, _ZERO, _ONE = np.float32(-math.inf), np.float32(0), np.float32(1)


@inlined
def _fill_keys(block, scratch, seq, head, low, high):
    """Where the keys are, and where runs of neighbouring values are; ``(pieces, tails)``: runs, and keys left over.

    A record is an address and the place of its weight in a row of them.
    """
    keys, pieces = scratch + slot_value(block, S_KEYS), scratch + slot_value(block, S_PIECES)
    tails = scratch + slot_value(block, S_TAILS)
    row = slot_value(block, TABLE) + seq * slot_value(block, TABLE_ROW)
    block_size, wide = slot_value(block, BLOCK_SIZE), slot_value(block, TABLE_WIDE)
    logical = low // block_size
    offset = low - logical * block_size
    x, num_pieces, num_tails = low, 0, 0
    while x < high:
        physical = index_at(row, logical, wide)
        k = slot_value(block, K) + physical * slot_value(block, K_BLOCK) + head * slot_value(block, K_HEAD)
        v = slot_value(block, V) + physical * slot_value(block, V_BLOCK) + head * slot_value(block, V_HEAD)
        end = min(high, x + block_size - offset)
        for token in range(end - x):
            put_i64(keys + (x - low + token) * 8, k + (offset + token) * slot_value(block, K_TOKEN))
        while x + LANES <= end:
            put_i64(pieces + num_pieces * 16, v + offset * slot_value(block, V_TOKEN))
            put_i64(pieces + num_pieces * 16 + 8, (x - low) * 4)
            num_pieces += 1
            offset += LANES
            x += LANES
        while x < end:
            put_i64(tails + num_tails * 16, v + offset * slot_value(block, V_TOKEN))
            put_i64(tails + num_tails * 16 + 8, (x - low) * 4)
            num_tails += 1
            offset += 1
            x += 1
        logical += 1
        offset = 0
    for pad in range(TOKENS - 1):  # so that scores may be taken four at a time: what is read is a key
        put_i64(keys + (high - low + pad) * 8, get_i64(keys + (high - low - 1) * 8))
    return num_pieces, num_tails


@inlined
def _score(block, scratch, count, tag):
    """Raw scores of ``count`` keys for all rows of the group; -inf up to a whole vector."""
    group, packs, step = slot_value(block, GROUP), slot_value(block, PACKS), slot_value(block, K_PACK)
    stride = slot_value(block, SIZE) * 4
    row = 0
    while row < group:
        rows = MANY if group - row >= MANY else 1
        query = scratch + slot_value(block, S_QUERY) + row * stride
        scores = scratch + slot_value(block, S_SCORES) + row * SCORE_BYTES
        for key in range(0, count, TOKENS):
            keys, at = scratch + slot_value(block, S_KEYS) + key * 8, scores + key * 4
            if rows == MANY:
                score_many(query, stride, keys, packs, step, at, SCORE_BYTES, tag)
            else:
                score_one(query, stride, keys, packs, step, at, SCORE_BYTES, tag)
        for member in range(rows):
            for key in range(count, vectors_of(count) * W):
                put_f32(scores + member * SCORE_BYTES + key * 4, _NONE)
        row += rows


@inlined
def _edit(block, scores, count, slope, distance, k_scale):
    """Scale, softcap, ALiBi: raw scores to logits."""
    factor, cap = np.float32(get_f64(block + SCALE_F * 8) * k_scale), get_f64(block + CAP_F * 8)
    if cap == _ZERO:
        edit_scores(scores, vectors_of(count), factor, slope, distance)
        return
    edit_scores(scores, vectors_of(count), factor, _ZERO, distance)
    for key in range(count):
        at = scores + key * 4
        put_f32(at, np.float32(cap * np.float32(math.tanh(get_f32(at) / cap))))
    if slope != _ZERO:
        edit_scores(scores, vectors_of(count), _ONE, slope, distance)


@inlined
def _weigh(block, scratch, pieces, tails, tag):
    """Weighted values of all rows of the group, in scratch."""
    group, size = slot_value(block, GROUP), slot_value(block, SIZE_V)
    runs, rest = scratch + slot_value(block, S_PIECES), scratch + slot_value(block, S_TAILS)
    step, apart = slot_value(block, V_CHANNEL), vectors_of(size) * ROW_BYTES
    row = 0
    while row < group:
        weights = scratch + slot_value(block, S_SCORES) + row * SCORE_BYTES
        sums = scratch + slot_value(block, S_SUMS) + row * apart
        rows = MANY if group - row >= MANY else 1
        if rows == MANY:
            values_many(pieces, runs, tails, rest, step, weights, SCORE_BYTES, sums, apart, size, tag)
        else:
            values_one(pieces, runs, tails, rest, step, weights, SCORE_BYTES, sums, apart, size, tag)
        if size & 1:
            for member in range(rows):
                here, own = sums + member * apart, weights + member * SCORE_BYTES
                values_last(pieces, runs, tails, rest, step, own, here, size, tag)
        row += rows


@inlined
def _read_queries(block, scratch, row, head):
    group, size, dtype = slot_value(block, GROUP), slot_value(block, SIZE), slot_value(block, DTYPE)
    source = slot_value(block, Q) + row * slot_value(block, Q_ROW) + head * group * slot_value(block, Q_HEAD)
    for member in range(group):
        target = scratch + slot_value(block, S_QUERY) + member * size * 4
        read_strided(source + member * slot_value(block, Q_HEAD), slot_value(block, BYTES), target, size, dtype)


@inlined
def _put_state(block, row, head, part, most, total, sums):
    """One row's state of one partition; ``row`` counts from the first of this pass."""
    at = row * slot_value(block, STATE_ROW) + head * slot_value(block, STATE_HEAD) + part * 4
    put_f32(slot_value(block, MAXIMA) + at, most)
    put_f32(slot_value(block, SUMS) + at, total)
    target = slot_value(block, PARTIAL) + row * slot_value(block, PARTIAL_ROW)
    target += head * slot_value(block, PARTIAL_HEAD) + part * slot_value(block, PARTIAL_PART)
    size, each, dtype = slot_value(block, SIZE_V), slot_value(block, PARTIAL_BYTES), slot_value(block, PARTIAL_DTYPE)
    write_strided(sums, target, each, size, dtype)


@inlined
def _run_task(block, scratch, index, head, part):
    row = slot_value(block, FIRST) + index
    group, vectors = slot_value(block, GROUP), vectors_of(slot_value(block, SIZE_V))
    low = max(get_i64(slot_value(block, LOW) + row * 8), part * PARTITION_KEYS)
    high = min(get_i64(slot_value(block, HIGH) + row * 8), (part + 1) * PARTITION_KEYS)
    sums = scratch + slot_value(block, S_SUMS)
    if low >= high:
        clear_row(sums, vectors)
        for member in range(group):
            _put_state(block, index, head * group + member, part, _NONE, _ZERO, sums)
        return
    seq, count = get_i64(slot_value(block, SEQ) + row * 8), high - low
    pieces, tails = _fill_keys(block, scratch, seq, head, low, high)
    _read_queries(block, scratch, row, head)
    call_score(slot_value(block, SCORE_AT), block, scratch, count)
    distance = np.float32(low - get_i64(slot_value(block, POSITION) + row * 8))
    k_scale = get_f32(
        slot_value(block, K_SCALE) + seq * slot_value(block, K_SCALE_SEQ) + head * slot_value(block, K_SCALE_HEAD)
    )
    v_scale = get_f32(
        slot_value(block, V_SCALE) + seq * slot_value(block, V_SCALE_SEQ) + head * slot_value(block, V_SCALE_HEAD)
    )
    states = scratch + slot_value(block, S_SUMS) + group * vectors * ROW_BYTES  # two floats a member
    for member in range(group):
        scores, slope = scratch + slot_value(block, S_SCORES) + member * SCORE_BYTES, _ZERO
        if slot_value(block, SLOPES):
            at = seq * slot_value(block, SLOPES_SEQ) + (head * group + member) * slot_value(block, SLOPES_HEAD)
            slope = get_f32(slot_value(block, SLOPES) + at)
        _edit(block, scores, count, slope, distance, k_scale)
        most = largest_score(scores, vectors_of(count))
        put_f32(states + member * 8, most)
        put_f32(states + member * 8 + 4, turn_to_weights(scores, vectors_of(count), most))
    call_weigh(slot_value(block, WEIGH_AT), block, scratch, pieces, tails)
    for member in range(group):
        most, total = get_f32(states + member * 8), get_f32(states + member * 8 + 4)
        here = sums + member * vectors * ROW_BYTES
        scale_by(here, vectors, v_scale / total)
        _put_state(block, index, head * group + member, part, most, total, here)


def partition_tasks(block):
    """States of partitions, whatever kind of keys: what depends on that is called by address."""
    worker = take_ticket(block + WORKER * 8)
    scratch = slot_value(block, SCRATCH) + worker * slot_value(block, SCRATCH_BYTES)
    heads, parts = slot_value(block, HEADS), slot_value(block, PARTS)
    tasks = slot_value(block, ROWS) * heads * parts
    while True:
        task = take_ticket(block + TICKET * 8)
        if task >= tasks:
            break
        rest = task // parts
        _run_task(block, scratch, rest // heads, rest % heads, task % parts)


def score_float32(block, scratch, count):
    """Raw scores of ``count`` float32 keys."""
    _score(block, scratch, count, TAG_FLOAT32)


def weigh_float32(block, scratch, pieces, tails):
    """Weighted float32 values: ``pieces`` runs of neighbours, and ``tails`` single ones."""
    _weigh(block, scratch, pieces, tails, TAG_FLOAT32)


def score_bfloat16(block, scratch, count):
    """Raw scores of ``count`` bfloat16 keys."""
    _score(block, scratch, count, TAG_BFLOAT16)


def weigh_bfloat16(block, scratch, pieces, tails):
    """Weighted bfloat16 values: ``pieces`` runs of neighbours, and ``tails`` single ones."""
    _weigh(block, scratch, pieces, tails, TAG_BFLOAT16)


def score_float16(block, scratch, count):
    """Raw scores of ``count`` float16 keys."""
    _score(block, scratch, count, TAG_FLOAT16)


def weigh_float16(block, scratch, pieces, tails):
    """Weighted float16 values: ``pieces`` runs of neighbours, and ``tails`` single ones."""
    _weigh(block, scratch, pieces, tails, TAG_FLOAT16)


def score_fp8_e4m3(block, scratch, count):
    """Raw scores of ``count`` fp8_e4m3 keys."""
    _score(block, scratch, count, TAG_FP8_E4M3)


def weigh_fp8_e4m3(block, scratch, pieces, tails):
    """Weighted fp8_e4m3 values: ``pieces`` runs of neighbours, and ``tails`` single ones."""
    _weigh(block, scratch, pieces, tails, TAG_FP8_E4M3)


def score_fp8_e5m2(block, scratch, count):
    """Raw scores of ``count`` fp8_e5m2 keys."""
    _score(block, scratch, count, TAG_FP8_E5M2)


def weigh_fp8_e5m2(block, scratch, pieces, tails):
    """Weighted fp8_e5m2 values: ``pieces`` runs of neighbours, and ``tails`` single ones."""
    _weigh(block, scratch, pieces, tails, TAG_FP8_E5M2)


def score_int8(block, scratch, count):
    """Raw scores of ``count`` int8 keys."""
    _score(block, scratch, count, TAG_INT8)


def weigh_int8(block, scratch, pieces, tails):
    """Weighted int8 values: ``pieces`` runs of neighbours, and ``tails`` single ones."""
    _weigh(block, scratch, pieces, tails, TAG_INT8)


@inlined
def _add_row(block, scratch, index, head):
    """Add the partitions of one row in ascending order, then the sink; store out and lse."""
    parts, size = slot_value(block, PARTS), slot_value(block, SIZE_V)
    vectors, row = vectors_of(size), slot_value(block, FIRST) + index
    at = index * slot_value(block, STATE_ROW) + head * slot_value(block, STATE_HEAD)
    maxima, totals = slot_value(block, MAXIMA) + at, slot_value(block, SUMS) + at
    most, total, sink = _NONE, _ZERO, _NONE
    for part in range(parts):
        if get_f32(totals + part * 4) != _ZERO:
            most = max(most, get_f32(maxima + part * 4))
    if slot_value(block, SINKS):
        sink = get_f32(slot_value(block, SINKS) + head * slot_value(block, SINKS_HEAD))
        most = max(most, sink)
    sums = scratch + slot_value(block, S_SUMS)
    other = sums + vectors * ROW_BYTES
    clear_row(sums, vectors)
    source = slot_value(block, PARTIAL) + index * slot_value(block, PARTIAL_ROW)
    source += head * slot_value(block, PARTIAL_HEAD)
    for part in range(parts):
        own = get_f32(totals + part * 4)
        if own == _ZERO:
            continue
        weight = np.float32(own * np.float32(math.exp(get_f32(maxima + part * 4) - most)))
        start = source + part * slot_value(block, PARTIAL_PART)
        read_strided(start, slot_value(block, PARTIAL_BYTES), other, size, slot_value(block, PARTIAL_DTYPE))
        add_scaled(sums, other, vectors, weight)
        total += weight
    lse = sink
    if total != _ZERO:
        if sink != _NONE:
            total += np.float32(math.exp(sink - most))
        scale_by(sums, vectors, _ONE / total)
        lse = np.float32(most + np.float32(math.log(total)))
    out = slot_value(block, OUT) + row * slot_value(block, OUT_ROW) + head * slot_value(block, OUT_HEAD)
    write_strided(sums, out, slot_value(block, BYTES), size, slot_value(block, DTYPE))
    if slot_value(block, LSE):
        put_f32(slot_value(block, LSE) + row * slot_value(block, LSE_ROW) + head * slot_value(block, LSE_HEAD), lse)


def add_partitions(block):
    """Add the partitions of each row, until there is none."""
    worker = take_ticket(block + WORKER * 8)
    scratch = slot_value(block, SCRATCH) + worker * slot_value(block, SCRATCH_BYTES)
    heads = slot_value(block, HEADS) * slot_value(block, GROUP)
    while True:
        row = take_ticket(block + TICKET * 8)
        if row >= slot_value(block, ROWS):
            break
        for head in range(heads):
            _add_row(block, scratch, row, head)


PARTITIONS = Kernel(partition_tasks)
SCORE = {
    "float32": Kernel(score_float32),
    "bfloat16": Kernel(score_bfloat16),
    "float16": Kernel(score_float16),
    "fp8_e4m3": Kernel(score_fp8_e4m3),
    "fp8_e5m2": Kernel(score_fp8_e5m2),
    "int8": Kernel(score_int8),
}
WEIGH = {
    "float32": Kernel(weigh_float32),
    "bfloat16": Kernel(weigh_bfloat16),
    "float16": Kernel(weigh_float16),
    "fp8_e4m3": Kernel(weigh_fp8_e4m3),
    "fp8_e5m2": Kernel(weigh_fp8_e5m2),
    "int8": Kernel(weigh_int8),
}
ADD = Kernel(add_partitions)
