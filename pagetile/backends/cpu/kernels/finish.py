"""The end of an attention: a state becomes a row of out and an entry of lse."""

from __future__ import annotations

import math

import numpy as np

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import inlined
from pagetile.backends.cpu.kernels.address import query_span
from pagetile.backends.cpu.kernels.elements import (
    bytes_of,
    get_double,
    get_f32,
    get_i64,
    put_f32,
    put_slot,
    read_strided,
    slot_value,
    vectors_of,
    write_strided,
)
from pagetile.backends.cpu.kernels.softmax import LOG2E, all_finite, divide_row, exp2_of
from pagetile.backends.cpu.kernels.stage import reorder_row
from pagetile.backends.cpu.kernels.vector import ROW_BYTES
from pagetile.backends.cpu.tuning import SEGMENT

_NONE = np.float32(-math.inf)
_ONE = np.float32(1)


@inlined
def seen_in(ranges, token, segment):
    """Whether a token sees any key of a segment; a fact about the row alone, never about its task."""
    low, high = get_i64(ranges + token * 16), get_i64(ranges + token * 16 + 8)
    return max(low, segment * SEGMENT) < min(high, (segment + 1) * SEGMENT)


@inlined
def _write_lse(block, query_head, row, value):
    lse = slot_value(block, P.A_LSE)
    if lse:
        place = query_head * slot_value(block, P.A_LSE_HEAD) + row * slot_value(block, P.A_LSE_ROW)
        put_f32(lse + place, value)


@inlined
def _finish_row(block, seq, query_head, sums, largest, total, vectors):
    """Divide a row that saw keys by its denominator, in place, the sink included; its log-sum-exp."""
    sinks = slot_value(block, P.A_SINKS)
    top = np.float64(largest) * get_double(block + P.A_NATURAL_F * 8)  # natural units from here on
    factor = _ONE
    if sinks:
        sink = np.float64(get_f32(sinks + query_head * slot_value(block, P.A_SINKS_HEAD)))
        if sink != -math.inf:
            before, top = top, sink if sink > top else top
            factor = exp2_of(np.float32((before - top) * LOG2E))
            bias = get_double(block + P.A_BIAS_F * 8)
            total = total * factor + exp2_of(np.float32((sink - top) * LOG2E - bias))
    if slot_value(block, P.A_VS) and slot_value(block, P.A_VS_OWN) == 0:
        scale = seq * slot_value(block, P.A_VS_SEQ) + query_head // slot_value(block, P.A_GROUP) * slot_value(
            block, P.A_VS_HEAD
        )
        factor *= get_f32(slot_value(block, P.A_VS) + scale)
    divide_row(sums, sums, vectors, factor, total)
    if slot_value(block, P.A_DOT):
        reorder_row(sums, vectors)
    return np.float32(top + math.log(np.float64(total)))


@inlined
def _is_finite(block, scratch, row, dtype, size):
    """Whether a row of out is."""
    alone = scratch + slot_value(block, P.A_S_ALONE)
    read_strided(row, bytes_of(dtype), alone, size, dtype)
    return all_finite(alone, vectors_of(size))


@inlined
def finish_rows(block, scratch, task, ranges, state):
    """Write the rows of a task from their states.

    Sums of many large values may overflow where their mean does not. A row that is not finite is noted; the host then
    has everything done again with weights that are smaller by a power of two, and only those rows are written anew.
    """
    heads, tokens = slot_value(task, P.T_HEADS), slot_value(task, P.T_TOKENS)
    group, size = slot_value(block, P.A_GROUP), slot_value(block, P.A_SIZE_V)
    rows, vectors = heads * tokens * group, slot_value(block, P.A_SUM_VECTORS)
    maxima, dtype = state + rows * vectors * ROW_BYTES, slot_value(block, P.A_DTYPE)
    start, _ = query_span(block, slot_value(task, P.T_SEQ))
    again = get_double(block + P.A_BIAS_F * 8) != 0.0
    row = 0
    for head in range(slot_value(task, P.T_HEAD), slot_value(task, P.T_HEAD) + heads):
        for token in range(tokens):
            query_row = start + slot_value(task, P.T_TOKEN) + token
            seen = get_i64(ranges + token * 16) < get_i64(ranges + token * 16 + 8)
            for query_head in range(head * group, head * group + group):
                sums = state + row * vectors * ROW_BYTES
                target = slot_value(block, P.A_OUT) + query_row * slot_value(block, P.A_OUT_ROW)
                target += query_head * slot_value(block, P.A_OUT_HEAD)
                if again:
                    if seen and not _is_finite(block, scratch, target, dtype, size):
                        largest, total = get_f32(maxima + row * 4), get_f32(maxima + (rows + row) * 4)
                        _finish_row(block, slot_value(task, P.T_SEQ), query_head, sums, largest, total, vectors)
                        write_strided(sums, target, bytes_of(dtype), size, dtype)
                    row += 1
                    continue
                if seen:
                    largest, total = get_f32(maxima + row * 4), get_f32(maxima + (rows + row) * 4)
                    lse = _finish_row(block, slot_value(task, P.T_SEQ), query_head, sums, largest, total, vectors)
                    if not all_finite(sums, vectors):
                        put_slot(block, P.A_BAD, 1)
                else:  # the state is still the zeros it was cleared to
                    sinks = slot_value(block, P.A_SINKS)
                    lse = get_f32(sinks + query_head * slot_value(block, P.A_SINKS_HEAD)) if sinks else _NONE
                _write_lse(block, query_head, query_row, lse)
                write_strided(sums, target, bytes_of(dtype), size, dtype)
                row += 1
