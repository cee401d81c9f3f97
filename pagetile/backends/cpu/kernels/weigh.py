"""Scores to weights: scale, softcap, ALiBi, mask, and the running softmax of each row."""

from __future__ import annotations

import numpy as np

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.address import key_span, query_span
from pagetile.backends.cpu.kernels.elements import get_f32, get_f64, get_i64, index_at, put_f32, slot_value
from pagetile.backends.cpu.kernels.pairs import WEIGHT_BYTES
from pagetile.backends.cpu.kernels.score import SCORE_BYTES
from pagetile.backends.cpu.kernels.softmax import (
    add_alibi,
    clear_row,
    decay,
    exp_and_sum,
    exp_to_pairs,
    finite_shift,
    multiply_scores,
    negate,
    row_max,
    soft_cap,
)
from pagetile.backends.cpu.kernels.vector import DOT, ROW_BYTES

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
def _to_floats(scores, _weights, low, high, shift, unit, bias):
    return exp_and_sum(scores, low, high, shift, unit, bias)


@inlined
def _to_pairs(scores, weights, low, high, shift, unit, bias):
    clear_row(weights, WEIGHT_BYTES // ROW_BYTES)
    return exp_to_pairs(scores, weights, low, high, shift, unit, bias)


@inlined
def _weigh_row(scores, weights, low, high, largest_at, total_at, keep_at, unit, bias, weigh):
    """One row's scores to weights, and its maximum and sum; the factor by which its state shrinks."""
    found, before = row_max(scores, low, high), get_f32(largest_at)
    largest = found if found > before else before
    shift = finite_shift(largest)
    keep = decay(before, shift, unit)
    put_f32(total_at, weigh(scores, weights, low, high, shift, unit, bias) + get_f32(total_at) * keep)
    put_f32(largest_at, largest)
    put_f32(keep_at, keep)


@inlined
def _gather_factors(block, seq, head, start, first, last, scales, factors):
    """The scales of the keys ``start + [first, last)`` of a KV head, to the same places of a row; ``scales`` is the
    first of their slots. A scale that belongs to no visible key is not looked at."""
    block_size = slot_value(block, P.A_BLOCK_SIZE)
    row = slot_value(block, P.A_TABLE) + seq * slot_value(block, P.A_TABLE_ROW)
    base = slot_value(block, scales) + head * slot_value(block, scales + P.A_KS_HEAD - P.A_KS)
    for key in range(first, last):
        logical = (start + key) // block_size
        offset = start + key - logical * block_size
        home = index_at(row, logical, slot_value(block, P.A_TABLE_WIDE)) * slot_value(
            block, scales + P.A_KS_BLOCK - P.A_KS
        )
        put_f32(factors + key * 4, get_f32(base + home + offset * slot_value(block, scales + P.A_KS_TOKEN - P.A_KS)))


@inlined
def _weigh_chunk(block, scratch, task, start, first, last, state, weigh):
    """Turn scores into weights, row by row; note by how much each row's state shrinks, and clear the chunk's sums."""
    seq, group, tokens = slot_value(task, P.T_SEQ), slot_value(block, P.A_GROUP), slot_value(task, P.T_TOKENS)
    heads, vectors = slot_value(task, P.T_HEADS), slot_value(block, P.A_SUM_VECTORS)
    ranges, scores = scratch + slot_value(block, P.A_S_RANGE), scratch + slot_value(block, P.A_S_SCORE)
    sums, keeps = scratch + slot_value(block, P.A_S_CHUNK), scratch + slot_value(block, P.A_S_KEEP)
    maxima = state + heads * tokens * group * vectors * ROW_BYTES
    totals, unit = maxima + heads * tokens * group * 4, get_f64(block + P.A_UNIT_F * 8)
    weights, bias = scratch + slot_value(block, P.A_S_WEIGHT), get_f64(block + P.A_BIAS_F * 8)
    edits = slot_value(block, P.A_EDITS)
    _, q_len = query_span(block, seq)
    _, seq_len = key_span(block, seq)
    k_factors = scratch + slot_value(block, P.A_S_FACTORS)
    v_factors, k_own, v_own = k_factors + SCORE_BYTES, slot_value(block, P.A_KS_OWN), slot_value(block, P.A_VS_OWN)
    row = 0
    for head in range(slot_value(task, P.T_HEAD), slot_value(task, P.T_HEAD) + heads):
        if k_own:
            _gather_factors(block, seq, head, start, first, last, P.A_KS, k_factors)
        if v_own:
            _gather_factors(block, seq, head, start, first, last, P.A_VS, v_factors)
        for token in range(tokens):
            low = max(first, get_i64(ranges + token * 16) - start)
            high = min(last, get_i64(ranges + token * 16 + 8) - start)
            if low < high:
                position = slot_value(task, P.T_TOKEN) + token + seq_len - q_len - start
                for member in range(group):
                    here, at = scores + (row + member) * SCORE_BYTES, (row + member) * 4
                    if k_own:
                        multiply_scores(here, k_factors, low, high)
                    if edits:
                        _edit_scores(block, here, low, high, seq, head * group + member, position)
                    there = weights + (row + member) * WEIGHT_BYTES
                    _weigh_row(here, there, low, high, maxima + at, totals + at, keeps + at, unit, bias, weigh)
                    if v_own:
                        multiply_scores(here, v_factors, low, high)
                clear_row(sums + row * vectors * ROW_BYTES, group * vectors)
            row += group


def weigh_floats(block, scratch, task, start, first, last, state):
    """Weights of the keys ``start + [first, last)`` for all rows of a task, in place of their scores."""
    _weigh_chunk(block, scratch, task, start, first, last, state, _to_floats)


def weigh_pairs(block, scratch, task, start, first, last, state):
    """The same as packed bfloat16."""
    _weigh_chunk(block, scratch, task, start, first, last, state, _to_pairs)


_FLOATS = Kernel(weigh_floats)

WEIGH = {"float32": _FLOATS, "bfloat16": Kernel(weigh_pairs) if DOT else _FLOATS, "float16": _FLOATS}
WEIGH |= dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "int8"), _FLOATS)
