"""Attend, the kernel: one program for decodes, prefills and everything between.

A *task* is a tile of query tokens of one sequence, over one KV head (or all of them) and a range of whole segments of
its keys. Its rows are (KV head, token, head of the group), so a key is read once for the whole group. Keys are taken
``CHUNK`` at a time, at absolute multiples: look up their addresses, score them, turn scores into weights, add the
values. Every ``SEGMENT`` keys, again absolute, the state is set aside and restarted.

A task that is one of several over the same rows leaves a state a segment; a second phase adds those, in the order and
by the function that a whole task uses, so that a split changes no bit.

Reads q and the tables, and by :mod:`~pagetile.backends.cpu.kernels.score` and
:mod:`~pagetile.backends.cpu.kernels.value` the K and V rows that some row of the task sees; writes out and lse.
"""

from __future__ import annotations

import math

import numpy as np

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.address import chunk_addresses, fill_addresses, key_span, query_span, visible
from pagetile.backends.cpu.kernels.elements import (
    bytes_of,
    get_f32,
    get_f64,
    get_i64,
    put_f32,
    put_i64,
    read_strided,
    slot_value,
    take_ticket,
    vectors_of,
)
from pagetile.backends.cpu.kernels.finish import finish_rows, seen_in
from pagetile.backends.cpu.kernels.pairs import may_score_in_place, packed_bytes, turn_queries
from pagetile.backends.cpu.kernels.softmax import add_state, clear_row, mix_rows, multiply_row, pack_row
from pagetile.backends.cpu.kernels.vector import ROW_BYTES, calls
from pagetile.backends.cpu.tuning import CHUNK, SCORE_PAD, SEGMENT

_NONE, _ZERO, _ONE = np.float32(-math.inf), np.float32(0), np.float32(1)

call_score, call_weigh, call_add = calls(6), calls(7), calls(8)


@inlined
def _read_queries(block, scratch, task):
    heads, tokens, group = slot_value(task, P.T_HEADS), slot_value(task, P.T_TOKENS), slot_value(block, P.A_GROUP)
    size, dtype = slot_value(block, P.A_SIZE), slot_value(block, P.A_DTYPE)
    start, _ = query_span(block, slot_value(task, P.T_SEQ))
    source = slot_value(block, P.A_Q) + (start + slot_value(task, P.T_TOKEN)) * slot_value(block, P.A_Q_ROW)
    target = scratch + slot_value(block, P.A_S_QUERY)
    packed = scratch + slot_value(block, P.A_S_PACKED) if slot_value(block, P.A_DOT) else 0
    scales = 0  # of K, where a head's keys share one: the query takes it, and with it every score
    if slot_value(block, P.A_KS) and slot_value(block, P.A_KS_OWN) == 0:
        scales = slot_value(block, P.A_KS) + slot_value(task, P.T_SEQ) * slot_value(block, P.A_KS_SEQ)
    turned = packed and may_score_in_place(block, tokens * group)
    for head in range(heads):
        for token in range(tokens):
            for member in range(group):
                query_head = (slot_value(task, P.T_HEAD) + head) * group + member
                place = source + token * slot_value(block, P.A_Q_ROW) + query_head * slot_value(block, P.A_Q_HEAD)
                read_strided(place, bytes_of(dtype), target, size, dtype)
                if scales:
                    scale = scales + (slot_value(task, P.T_HEAD) + head) * slot_value(block, P.A_KS_HEAD)
                    multiply_row(target, vectors_of(size), get_f32(scale))
                if packed:
                    pack_row(target, packed, vectors_of(size))
                    packed += packed_bytes(size)
                target += vectors_of(size) * ROW_BYTES
        if turned:
            turn_queries(block, scratch, tokens * group, head)


@inlined
def _fill_ranges(block, ranges, task):
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
def _fold_chunk(block, scratch, task, low, high, state):
    """Add a chunk's sums to the states of the rows that see a key of ``[low, high)``.

    Sums of a chunk apart, then of a segment, then of all: an error grows with the length of a chunk, not of the keys.
    """
    tokens, group = slot_value(task, P.T_TOKENS), slot_value(block, P.A_GROUP)
    vectors = slot_value(block, P.A_SUM_VECTORS)
    stride = vectors * ROW_BYTES
    sums, keeps = scratch + slot_value(block, P.A_S_CHUNK), scratch + slot_value(block, P.A_S_KEEP)
    ranges = scratch + slot_value(block, P.A_S_RANGE)
    row = 0
    for _ in range(slot_value(task, P.T_HEADS)):
        for token in range(tokens):
            if max(low, get_i64(ranges + token * 16)) < min(high, get_i64(ranges + token * 16 + 8)):
                for member in range(row, row + group):
                    keep = get_f32(keeps + member * 4)
                    mix_rows(state + member * stride, sums + member * stride, vectors, keep, _ONE)
            row += group


@inlined
def _look_up(block, scratch, task, start, low, high):
    """Addresses of the keys ``[low, high)`` that lie in the chunk that begins at ``start``; their number."""
    first, last = max(low - start, 0), min(high - start, CHUNK)
    if first >= last:
        return 0
    keys = chunk_addresses(block, scratch, P.A_S_KADDR, start)
    values = chunk_addresses(block, scratch, P.A_S_VADDR, start)
    fill_addresses(block, slot_value(task, P.T_SEQ), start, first, last, keys, values)
    return last


@inlined
def _run_segment(block, scratch, task, low, high, task_high, state):
    """The state of all rows over the keys ``[low, high)``, which lie in one segment of a task that goes on further.

    The addresses of the first chunk stand already; those of each next chunk are looked up before they are needed.
    """
    sums = scratch + slot_value(block, P.A_S_CHUNK)
    start = low // CHUNK * CHUNK
    while start < high:
        first, last = max(low - start, 0), min(high - start, CHUNK)
        ahead = _look_up(block, scratch, task, start + CHUNK, low, task_high)
        call_score(slot_value(block, P.A_SCORE), block, scratch, task, start, first, last)
        call_weigh(slot_value(block, P.A_WEIGH), block, scratch, task, start, first, last, state)
        call_add(slot_value(block, P.A_ADD), block, scratch, task, start, first, last, ahead, sums)
        _fold_chunk(block, scratch, task, start + first, start + last, state)
        start += CHUNK


@inlined
def _add_segment(ranges, segment, into, other, heads, tokens, group, vectors, unit):
    """Add a segment's states to the rows that see a key of it."""
    rows, stride = heads * tokens * group, vectors * ROW_BYTES
    maxima, other_maxima = into + rows * stride, other + rows * stride
    first = 0
    for _ in range(heads):
        for token in range(tokens):
            if seen_in(ranges, token, segment):
                for row in range(first, first + group):
                    mine, theirs = maxima + row * 4, other_maxima + row * 4
                    add_state(
                        into + row * stride,
                        mine,
                        mine + rows * 4,
                        other + row * stride,
                        theirs,
                        theirs + rows * 4,
                        vectors,
                        unit,
                    )
            first += group


@inlined
def _run_task(block, scratch, task, second):
    """One task; or, in the second phase, the states that the parts of one split task left."""
    heads, tokens, group = slot_value(task, P.T_HEADS), slot_value(task, P.T_TOKENS), slot_value(block, P.A_GROUP)
    rows, vectors = heads * tokens * group, slot_value(block, P.A_SUM_VECTORS)
    ranges, total = scratch + slot_value(block, P.A_S_RANGE), scratch + slot_value(block, P.A_S_TOTAL)
    unit = get_f64(block + P.A_UNIT_F * 8)
    partial, first = slot_value(task, P.T_PARTIAL), slot_value(task, P.T_FIRST_SEGMENT)
    _fill_ranges(block, ranges, task)
    hull_low = max(get_i64(ranges), first * SEGMENT)
    hull_high = min(get_i64(ranges + tokens * 16 - 8), slot_value(task, P.T_LAST_SEGMENT) * SEGMENT)
    _clear_state(total, rows, vectors)
    if not second:
        _read_queries(block, scratch, task)
        _look_up(block, scratch, task, hull_low // CHUNK * CHUNK, hull_low, hull_high)
    for segment in range(first, slot_value(task, P.T_LAST_SEGMENT)):
        state = scratch + slot_value(block, P.A_S_STATE)
        if partial >= 0:
            before = partial + (segment - first) * rows
            state = slot_value(block, P.A_PARTIALS) + before * (vectors * ROW_BYTES + 8)
        if not second:
            _clear_state(state, rows, vectors)
            low, high = max(hull_low, segment * SEGMENT), min(hull_high, (segment + 1) * SEGMENT)
            _run_segment(block, scratch, task, low, high, hull_high, state)
        if second or partial < 0:
            _add_segment(ranges, segment, total, state, heads, tokens, group, vectors, unit)
    if second or partial < 0:
        finish_rows(block, scratch, task, ranges, total)


@inlined
def _run_all(block):
    worker = take_ticket(block + P.A_WORKER * 8)
    scratch = slot_value(block, P.A_SCRATCH) + worker * slot_value(block, P.A_SCRATCH_BYTES)
    stage, stride = scratch + slot_value(block, P.A_S_STAGE), slot_value(block, P.A_STAGE_STRIDE)
    for key in range(CHUNK + SCORE_PAD):
        put_i64(scratch + slot_value(block, P.A_S_SADDR) + key * 8, stage + key * stride)
    clear_row(scratch + slot_value(block, P.A_S_ZEROS), slot_value(block, P.A_SUM_VECTORS))
    second = slot_value(block, P.A_PHASE) == 1
    count = slot_value(block, P.A_NUM_GROUPS) if second else slot_value(block, P.A_NUM_TASKS)
    while True:
        index = take_ticket(block + P.A_TICKET * 8)
        if index >= count:
            break
        records = slot_value(block, P.A_GROUPS)
        if not second:
            index = get_i64(slot_value(block, P.A_TASK_ORDER) + index * 8)
            records = slot_value(block, P.A_TASKS)
        _run_task(block, scratch, records + index * P.TASK_BYTES, second)


def attend_tasks(block):
    """What each thread runs: take the next task, or the next split task to add up, until there is none."""
    _run_all(block)


ATTEND = Kernel(attend_tasks)
