"""Attend, the kernel: one program for decodes, prefills and everything between.

A *task* is a tile of query tokens of one sequence, over one KV head (or all of them) and a range of whole segments of
its keys. Its rows are (KV head, token, head of the group), so a key is read once for the whole group. Keys are taken
``CHUNK`` at a time, at absolute multiples: look up their addresses, score them, turn scores into weights, add the
values. Every ``SEGMENT`` keys, again absolute, the state is set aside and restarted.

Reads q, the K and V rows that some row of the task sees, the tables; writes out and lse, or a state a segment when the
task is one of several over the same rows (:mod:`~pagetile.backends.cpu.kernels.combine` adds those).

A key that a row does not see never touches it: its score is replaced by -inf, and its value is never multiplied, not
even by 0. Rows whose ranges differ are therefore added up apart where they differ.
"""

from __future__ import annotations

import math

import numpy as np

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.address import fill_addresses, key_span, query_span, visible
from pagetile.backends.cpu.kernels.elements import (
    get_f32,
    get_f64,
    get_i64,
    put_f32,
    put_i64,
    read_row,
    slot_value,
    take_ticket,
    vectors_of,
)
from pagetile.backends.cpu.kernels.finish import finish_rows, seen_in
from pagetile.backends.cpu.kernels.products import MAX_ROWS, accumulate_rows, score_rows
from pagetile.backends.cpu.kernels.softmax import (
    LOG2E,
    add_alibi,
    add_state,
    clear_row,
    exp2_of,
    exp_and_sum,
    finite_shift,
    mask_and_max,
    scale_row,
    soft_cap,
)
from pagetile.backends.cpu.kernels.vector import ROW_BYTES, W
from pagetile.backends.cpu.tuning import CHUNK, SCORE_PAD, SEGMENT

SCORE_BYTES = (CHUNK + SCORE_PAD) * 4
"""From one row of scores to the next."""

FLOAT32, BFLOAT16, FLOAT16 = np.float32(0), np.int16(0), np.uint16(0)
"""Tags: values whose types choose an element dtype, see :data:`pagetile.backends.cpu.kernels.vector.TAGS`."""

_NONE = np.float32(-math.inf)
_ZERO = np.float32(0)
_LOG2E = np.float32(LOG2E)


@inlined
def _read_queries(block, scratch, task, tag):
    heads, tokens, group = slot_value(task, P.T_HEADS), slot_value(task, P.T_TOKENS), slot_value(block, P.A_GROUP)
    size = slot_value(block, P.A_SIZE)
    start, _ = query_span(block, slot_value(task, P.T_SEQ))
    source = slot_value(block, P.A_Q) + (start + slot_value(task, P.T_TOKEN)) * slot_value(block, P.A_Q_ROW)
    target = scratch + slot_value(block, P.A_S_QUERY)
    for head in range(heads):
        for token in range(tokens):
            for member in range(group):
                query_head = (slot_value(task, P.T_HEAD) + head) * group + member
                place = source + token * slot_value(block, P.A_Q_ROW) + query_head * slot_value(block, P.A_Q_HEAD)
                read_row(place, target, size, tag)
                target += vectors_of(size) * ROW_BYTES


@inlined
def fill_ranges(block, ranges, task):
    """The visible range of each token of a task, two int64 each."""
    seq, tokens = slot_value(task, P.T_SEQ), slot_value(task, P.T_TOKENS)
    _, q_len = query_span(block, seq)
    _, seq_len = key_span(block, seq)
    for token in range(tokens):
        low, high = visible(block, seq, slot_value(task, P.T_TOKEN) + token, q_len, seq_len)
        put_i64(ranges + token * 16, low)
        put_i64(ranges + token * 16 + 8, high)


@inlined
def _clear_state(state, rows, vectors):
    largest = state + rows * vectors * ROW_BYTES
    for row in range(rows):
        clear_row(state + row * vectors * ROW_BYTES, vectors)
        put_f32(largest + row * 4, _NONE)
        put_f32(largest + (rows + row) * 4, _ZERO)


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
def _stage(block, scratch, addresses, offset, first, last, size, tag):
    """Copy rows to contiguous float32, zero-padded to whole vectors."""
    stage, stride = scratch + slot_value(block, P.A_S_STAGE), slot_value(block, P.A_STAGE_STRIDE)
    for key in range(first, last):
        read_row(get_i64(addresses + key * 8) + offset, stage + key * stride, size, tag)


@inlined
def _score_chunk(block, scratch, task, start, first, last, tag):
    """Scores of all rows against the keys ``start + [first, last)``: a few keys at a time, every head in turn."""
    keys, staged_keys = scratch + slot_value(block, P.A_S_KADDR), scratch + slot_value(block, P.A_S_SADDR)
    rows, size = slot_value(task, P.T_TOKENS) * slot_value(block, P.A_GROUP), slot_value(block, P.A_SIZE)
    staged = rows >= slot_value(block, P.A_STAGE_ROWS) or slot_value(block, P.A_DIRECT_K) == 0
    step = 32 if staged else 16
    key = first
    while key < last:
        end = min(last, key + step)
        for head in range(slot_value(task, P.T_HEADS)):
            offset = (slot_value(task, P.T_HEAD) + head) * slot_value(block, P.A_K_HEAD)
            if staged:
                _stage(block, scratch, keys, offset, key, end, size, tag)
                _score_block(block, scratch, task, head, start, key, end, staged_keys, 0, FLOAT32)
            else:
                _score_block(block, scratch, task, head, start, key, end, keys, offset, tag)
        key = end


@inlined
def _edit_scores(block, scores, low, high, seq, query_head, position):
    """Scale, softcap, ALiBi and mask one row of raw products, in that order, leaving base-2 scores; their maximum."""
    scale, cap = get_f64(block + P.A_SCALE_F * 8), get_f64(block + P.A_CAP_F * 8)
    slopes = slot_value(block, P.A_SLOPES)
    first, last = low // W, (high + W - 1) // W
    if cap == _ZERO and slopes == 0:
        return mask_and_max(scores, first, last, low, high, get_f64(block + P.A_SCALE2_F * 8))
    factor = scale
    if cap != _ZERO:
        if slopes == 0:  # base 2 at once: one rounding less
            soft_cap(scores, first, last, get_f64(block + P.A_INNER_F * 8), get_f64(block + P.A_CAP2_F * 8))
            return mask_and_max(scores, first, last, low, high, np.float32(1))
        soft_cap(scores, first, last, get_f64(block + P.A_INNER_F * 8), cap)
        factor = np.float32(1)
    if slopes:
        place = seq * slot_value(block, P.A_SLOPES_SEQ) + query_head * slot_value(block, P.A_SLOPES_HEAD)
        add_alibi(scores, first, last, factor, get_f32(slopes + place), position)
        factor = np.float32(1)
    return mask_and_max(scores, first, last, low, high, factor * _LOG2E)


@inlined
def _weigh_chunk(block, scratch, task, start, first, last, state):
    """Turn scores into weights, row by row; bring the rows' states to their new maxima."""
    seq, group, tokens = slot_value(task, P.T_SEQ), slot_value(block, P.A_GROUP), slot_value(task, P.T_TOKENS)
    rows, vectors = slot_value(task, P.T_HEADS) * tokens * group, vectors_of(slot_value(block, P.A_SIZE_V))
    ranges, scores = scratch + slot_value(block, P.A_S_RANGE), scratch + slot_value(block, P.A_S_SCORE)
    maxima = state + rows * vectors * ROW_BYTES
    sums = maxima + rows * 4
    _, q_len = query_span(block, seq)
    _, seq_len = key_span(block, seq)
    for row in range(rows):
        token = row // group % tokens
        low = max(first, get_i64(ranges + token * 16) - start)
        high = min(last, get_i64(ranges + token * 16 + 8) - start)
        if low >= high:
            continue
        query_head = (slot_value(task, P.T_HEAD) + row // (group * tokens)) * group + row % group
        position = slot_value(task, P.T_TOKEN) + token + seq_len - q_len - start
        here = scores + row * SCORE_BYTES
        found = _edit_scores(block, here, low, high, seq, query_head, position)
        before = get_f32(maxima + row * 4)
        largest = found if found > before else before
        shift = finite_shift(largest)
        total = exp_and_sum(here, low // W, (high + W - 1) // W, shift)
        if largest > before:
            keep = exp2_of(before - shift)
            scale_row(state + row * vectors * ROW_BYTES, vectors, keep)
            total += get_f32(sums + row * 4) * keep
            put_f32(maxima + row * 4, largest)
        else:
            total += get_f32(sums + row * 4)
        put_f32(sums + row * 4, total)


@inlined
def _value_block(block, scratch, task, head, start, first, last, addresses, offset, state, tag):
    """Add the values of the keys ``start + [first, last)`` to one KV head's rows, each row only those it sees.

    Up to four rows share the keys that all of them see; before and after those, each row goes alone. A row's keys are
    taken in ascending order either way.
    """
    group, tokens = slot_value(block, P.A_GROUP), slot_value(task, P.T_TOKENS)
    rows, vectors = tokens * group, vectors_of(slot_value(block, P.A_SIZE_V))
    ranges = scratch + slot_value(block, P.A_S_RANGE)
    sums = state + head * rows * vectors * ROW_BYTES
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
def _value_chunk(block, scratch, task, start, first, last, state, tag):
    """Add the weighted values of a chunk: a few keys at a time, every head in turn."""
    values, staged_values = scratch + slot_value(block, P.A_S_VADDR), scratch + slot_value(block, P.A_S_SADDR)
    rows, size = slot_value(task, P.T_TOKENS) * slot_value(block, P.A_GROUP), slot_value(block, P.A_SIZE_V)
    staged = rows >= slot_value(block, P.A_STAGE_ROWS) or slot_value(block, P.A_DIRECT_V) == 0
    step = 32 if staged else 16
    key = first
    while key < last:
        end = min(last, key + step)
        for head in range(slot_value(task, P.T_HEADS)):
            offset = (slot_value(task, P.T_HEAD) + head) * slot_value(block, P.A_V_HEAD)
            if staged:
                _stage(block, scratch, values, offset, key, end, size, tag)
                _value_block(block, scratch, task, head, start, key, end, staged_values, 0, state, FLOAT32)
            else:
                _value_block(block, scratch, task, head, start, key, end, values, offset, state, tag)
        key = end


@inlined
def _run_segment(block, scratch, task, low, high, state, tag):
    """The state of all rows over the keys ``[low, high)``, which lie in one segment."""
    keys, values = scratch + slot_value(block, P.A_S_KADDR), scratch + slot_value(block, P.A_S_VADDR)
    start = low // CHUNK * CHUNK
    while start < high:
        first, last = max(low - start, 0), min(high - start, CHUNK)
        fill_addresses(block, slot_value(task, P.T_SEQ), start, first, last, keys, values)
        _score_chunk(block, scratch, task, start, first, last, tag)
        _weigh_chunk(block, scratch, task, start, first, last, state)
        _value_chunk(block, scratch, task, start, first, last, state, tag)
        start += CHUNK


@inlined
def add_segment(ranges, segment, into, other, heads, tokens, group, vectors):
    """Add a segment's states to the rows that see a key of it."""
    rows = heads * tokens * group
    maxima, other_maxima = into + rows * vectors * ROW_BYTES, other + rows * vectors * ROW_BYTES
    for row in range(rows):
        if seen_in(ranges, row // group % tokens, segment):
            add_state(
                into + row * vectors * ROW_BYTES,
                maxima + row * 4,
                maxima + (rows + row) * 4,
                other + row * vectors * ROW_BYTES,
                other_maxima + row * 4,
                other_maxima + (rows + row) * 4,
                vectors,
            )


@inlined
def _run_task(block, scratch, task, tag):
    heads, tokens, group = slot_value(task, P.T_HEADS), slot_value(task, P.T_TOKENS), slot_value(block, P.A_GROUP)
    rows, vectors = heads * tokens * group, vectors_of(slot_value(block, P.A_SIZE_V))
    ranges, total = scratch + slot_value(block, P.A_S_RANGE), scratch + slot_value(block, P.A_S_TOTAL)
    partial, first = slot_value(task, P.T_PARTIAL), slot_value(task, P.T_FIRST_SEGMENT)
    _read_queries(block, scratch, task, tag)
    fill_ranges(block, ranges, task)
    hull_low, hull_high = get_i64(ranges), get_i64(ranges + tokens * 16 - 8)
    _clear_state(total, rows, vectors)
    for segment in range(first, slot_value(task, P.T_LAST_SEGMENT)):
        state = scratch + slot_value(block, P.A_S_STATE)
        if partial >= 0:
            before = partial + (segment - first) * rows
            state = slot_value(block, P.A_PARTIALS) + before * (vectors * ROW_BYTES + 8)
        _clear_state(state, rows, vectors)
        low, high = max(hull_low, segment * SEGMENT), min(hull_high, (segment + 1) * SEGMENT)
        _run_segment(block, scratch, task, low, high, state, tag)
        if partial < 0:
            add_segment(ranges, segment, total, state, heads, tokens, group, vectors)
    if partial < 0:
        finish_rows(block, task, ranges, total, tag)


@inlined
def attend_tasks(block, tag):
    """What each thread runs: take the next task until there is none."""
    worker = take_ticket(block + P.A_WORKER * 8)
    scratch = slot_value(block, P.A_SCRATCH) + worker * slot_value(block, P.A_SCRATCH_BYTES)
    stage, stride = scratch + slot_value(block, P.A_S_STAGE), slot_value(block, P.A_STAGE_STRIDE)
    for key in range(CHUNK + SCORE_PAD):
        put_i64(scratch + slot_value(block, P.A_S_SADDR) + key * 8, stage + key * stride)
    while True:
        ticket = take_ticket(block + P.A_TICKET * 8)
        if ticket >= slot_value(block, P.A_NUM_TASKS):
            break
        index = get_i64(slot_value(block, P.A_TASK_ORDER) + ticket * 8)
        _run_task(block, scratch, slot_value(block, P.A_TASKS) + index * P.TASK_BYTES, tag)


def attend_float32(block):
    """All tasks over float32 q, K and V."""
    attend_tasks(block, FLOAT32)


def attend_bfloat16(block):
    """All tasks over bfloat16 q, K and V."""
    attend_tasks(block, BFLOAT16)


def attend_float16(block):
    """All tasks over float16 q, K and V."""
    attend_tasks(block, FLOAT16)


ATTEND = {
    "float32": Kernel(attend_float32),
    "bfloat16": Kernel(attend_bfloat16),
    "float16": Kernel(attend_float16),
}
