"""Scores to weights: scale, softcap, ALiBi, mask, and the running softmax of each row."""

from __future__ import annotations

import numpy as np

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.address import key_span, query_span
from pagetile.backends.cpu.kernels.elements import get_f32, get_f64, get_i64, put_f32, slot_value, vectors_of
from pagetile.backends.cpu.kernels.score import SCORE_BYTES
from pagetile.backends.cpu.kernels.softmax import (
    add_alibi,
    clear_row,
    decay,
    exp_and_sum,
    finite_shift,
    negate,
    row_max,
    soft_cap,
)
from pagetile.backends.cpu.kernels.vector import ROW_BYTES

_ZERO, _ONE = np.float32(0), np.float32(1)


@inlined
def _edit_scores(block, scores, low, high, seq, query_head, position):
    """Scale, softcap and ALiBi on one row of raw products, in that order; nothing where the scale is in the unit."""
    scale, cap = get_f64(block + P.A_SCALE_F * 8), get_f64(block + P.A_CAP_F * 8)
    slopes = slot_value(block, P.A_SLOPES)
    if cap != _ZERO:
        soft_cap(scores, low, high, get_f64(block + P.A_INNER_F * 8), cap)
    elif scale < _ZERO and slopes == 0:
        negate(scores, low, high)
    if slopes:
        place = seq * slot_value(block, P.A_SLOPES_SEQ) + query_head * slot_value(block, P.A_SLOPES_HEAD)
        factor = scale if cap == _ZERO else _ONE
        add_alibi(scores, low, high, factor, get_f32(slopes + place), position)


@inlined
def _weigh_chunk(block, scratch, task, start, first, last, state):
    """Turn scores into weights, row by row; note by how much each row's state shrinks, and clear the chunk's sums."""
    seq, group, tokens = slot_value(task, P.T_SEQ), slot_value(block, P.A_GROUP), slot_value(task, P.T_TOKENS)
    rows, vectors = slot_value(task, P.T_HEADS) * tokens * group, vectors_of(slot_value(block, P.A_SIZE_V))
    ranges, scores = scratch + slot_value(block, P.A_S_RANGE), scratch + slot_value(block, P.A_S_SCORE)
    maxima = state + rows * vectors * ROW_BYTES
    sums = maxima + rows * 4
    unit = get_f64(block + P.A_UNIT_F * 8)
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
        _edit_scores(block, here, low, high, seq, query_head, position)
        found = row_max(here, low, high)
        before = get_f32(maxima + row * 4)
        largest = found if found > before else before
        shift = finite_shift(largest)
        keep = decay(before, shift, unit)
        total = exp_and_sum(here, low, high, shift, unit) + get_f32(sums + row * 4) * keep
        put_f32(sums + row * 4, total)
        put_f32(maxima + row * 4, largest)
        put_f32(scratch + slot_value(block, P.A_S_KEEP) + row * 4, keep)
        clear_row(scratch + slot_value(block, P.A_S_CHUNK) + row * vectors * ROW_BYTES, vectors)


def weigh(block, scratch, task, start, first, last, state):
    """Weights of the keys ``start + [first, last)`` for all rows of a task."""
    _weigh_chunk(block, scratch, task, start, first, last, state)


WEIGH = Kernel(weigh)
