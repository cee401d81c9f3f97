"""The two products of attention as register blocks: scores of R rows x T keys, and R rows of an accumulator.

Rows are float32, or pairs of bfloat16 where the machine has a dot product of them. Keys come transposed (see
:mod:`~pagetile.backends.cpu.kernels.stage`), a vector of keys for each element; values come through an array of row
addresses. So block size, strides and layout do not appear here.

Neither product's bits depend on the block it was computed in: a score is fused multiply-adds over ascending elements,
an element of the accumulator fused multiply-adds over ascending keys. Nor, but for pairs, on the width of a vector.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from pagetile.backends.cpu.jit import inlined
from pagetile.backends.cpu.kernels.elements import element_bytes, to_float
from pagetile.backends.cpu.kernels.vector import (
    ELEMENT_BYTES,
    ROW_BYTES,
    W,
    advance,
    constant,
    counted,
    emits,
    f32,
    i32,
    i64,
    load,
    multiply_add,
    splat,
    store,
    vec,
)

A = types.int64

TILE_KEYS = 2 * W
"""Keys that are staged, and scored, at a time."""

SCORE_ROWS = 8 if W == 16 else 4
"""Rows of the largest score block: with two vectors of keys, half of the registers are accumulators."""

MAX_ROWS = 4
"""Rows of the largest accumulator block."""

PV_VECTORS = 4 if W == 16 else 2
"""Vectors of an accumulator row that stay in registers at a time."""


def _score_block(rows: int):
    @emits(types.void, A, A, A, A, A, A, tagged=True)
    def score(b, dtype, queries, query_stride, keys, count, scores, score_stride):
        """``scores[r][t] = queries[r] . keys[:, t]`` for R rows and a tile of keys."""
        q = [b.add(queries, b.mul(query_stride, ir.Constant(i64, r))) for r in range(rows)]
        of = i32 if dtype == "pairs" else f32

        def body(i, sums):
            here = advance(b, keys, i, 2 * ROW_BYTES)
            k = [load(b, here, vec(of), n * ROW_BYTES) for n in range(2)]
            out = []
            for r in range(rows):
                x = splat(b, load(b, advance(b, q[r], i, 4), of))
                out += [multiply_add(b, dtype, x, k[n], sums[2 * r + n]) for n in range(2)]
            return out

        sums = counted(b, count, [constant(0.0, vec(f32))] * (2 * rows), body)
        for index, value in enumerate(sums):
            row = b.add(scores, b.mul(score_stride, ir.Constant(i64, index // 2)))
            store(b, value, row, index % 2 * ROW_BYTES)

    return score


def _accumulate_block(rows: int, width: int):
    @emits(types.void, A, A, A, A, A, A, A, tagged=True)
    def accumulate(b, dtype, sums, sum_stride, weights, weight_stride, addresses, offset, count):
        """``sums[r] += weights[r][j] * values[j]`` over ascending j, for R rows of ``width`` vectors."""
        a = [b.add(sums, b.mul(sum_stride, ir.Constant(i64, r))) for r in range(rows)]
        p = [b.add(weights, b.mul(weight_stride, ir.Constant(i64, r))) for r in range(rows)]
        size, of = W * ELEMENT_BYTES[dtype], i32 if dtype == "pairs" else f32

        def body(j, now):
            v = b.add(load(b, advance(b, addresses, j, 8), i64), offset)
            if dtype == "pairs":
                values = [load(b, v, vec(i32), n * size) for n in range(width)]
            else:
                values = [to_float(b, dtype, v, n * size) for n in range(width)]
            out = []
            for r in range(rows):
                weight = splat(b, load(b, advance(b, p[r], j, 4), of))
                out += [multiply_add(b, dtype, weight, values[n], now[r * width + n]) for n in range(width)]
            return out

        start = [load(b, a[r], vec(f32), n * ROW_BYTES) for r in range(rows) for n in range(width)]
        for index, value in enumerate(counted(b, count, start, body)):
            store(b, value, a[index // width], index % width * ROW_BYTES)

    return accumulate


_score1, _score2, _score3, _score4 = (_score_block(rows) for rows in (1, 2, 3, 4))
_score5, _score6, _score7, _score8 = (_score_block(min(rows, SCORE_ROWS)) for rows in (5, 6, 7, 8))
_wide1, _wide2, _wide3, _wide4 = (_accumulate_block(rows, PV_VECTORS) for rows in (1, 2, 3, 4))
_thin1, _thin2, _thin3, _thin4 = (_accumulate_block(rows, 1) for rows in (1, 2, 3, 4))


@inlined
def _score_up_to_4(rows, queries, query_stride, keys, count, scores, score_stride, tag):
    if rows == 4:
        _score4(queries, query_stride, keys, count, scores, score_stride, tag)
    elif rows == 3:
        _score3(queries, query_stride, keys, count, scores, score_stride, tag)
    elif rows == 2:
        _score2(queries, query_stride, keys, count, scores, score_stride, tag)
    else:
        _score1(queries, query_stride, keys, count, scores, score_stride, tag)


@inlined
def _score_up_to_8(rows, queries, query_stride, keys, count, scores, score_stride, tag):
    if rows == 8:
        _score8(queries, query_stride, keys, count, scores, score_stride, tag)
    elif rows == 7:
        _score7(queries, query_stride, keys, count, scores, score_stride, tag)
    elif rows == 6:
        _score6(queries, query_stride, keys, count, scores, score_stride, tag)
    elif rows == 5:
        _score5(queries, query_stride, keys, count, scores, score_stride, tag)
    else:
        _score_up_to_4(rows, queries, query_stride, keys, count, scores, score_stride, tag)


score_rows = _score_up_to_8 if SCORE_ROWS == 8 else _score_up_to_4
"""Scores of up to ``SCORE_ROWS`` rows against a staged tile of keys: ``TILE_KEYS`` scores a row, whatever is wanted.

``count`` is of elements (or of pairs). The rows have room for a whole tile.
"""


@inlined
def accumulate_rows(rows, sums, sum_stride, weights, weight_stride, addresses, offset, vectors, first, last, tag):
    """Add the values of the keys (or pairs of keys) ``[first, last)`` of a chunk, all for all of up to four rows."""
    count = last - first
    weights += first * 4
    addresses += first * 8
    done = 0
    while done < vectors:
        wide = vectors - done >= PV_VECTORS
        a, v = sums + done * ROW_BYTES, offset + done * W * element_bytes(tag)
        if rows == 4:
            if wide:
                _wide4(a, sum_stride, weights, weight_stride, addresses, v, count, tag)
            else:
                _thin4(a, sum_stride, weights, weight_stride, addresses, v, count, tag)
        elif rows == 3:
            if wide:
                _wide3(a, sum_stride, weights, weight_stride, addresses, v, count, tag)
            else:
                _thin3(a, sum_stride, weights, weight_stride, addresses, v, count, tag)
        elif rows == 2:
            if wide:
                _wide2(a, sum_stride, weights, weight_stride, addresses, v, count, tag)
            else:
                _thin2(a, sum_stride, weights, weight_stride, addresses, v, count, tag)
        else:
            if wide:
                _wide1(a, sum_stride, weights, weight_stride, addresses, v, count, tag)
            else:
                _thin1(a, sum_stride, weights, weight_stride, addresses, v, count, tag)
        done += PV_VECTORS if wide else 1
