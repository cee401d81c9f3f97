"""The two products of attention as register blocks: scores of R rows x T keys, and R rows of an accumulator.

Rows are float32 (queries, probabilities, accumulators); keys and values are read through an array of row addresses in
any dtype, so block size, strides and layout do not appear here. Both blocks fill about ``W`` registers.

Neither product's bits depend on the block it was computed in: a score is one accumulator per lane over ascending
elements and one fixed tree; an element of the accumulator is fused multiply-adds over ascending keys.
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
    fma,
    i64,
    load,
    shuffle,
    splat,
    store,
    sum_lanes,
    vec,
)

A = types.int64

MAX_ROWS = min(4, W)
"""Rows of the largest register block."""

PV_VECTORS = 4 if W == 16 else 2
"""Vectors of an accumulator row that stay in registers at a time."""


def keys_in_block(rows: int) -> int:
    """Keys of a score block: the power of two that fills ``W`` accumulators, at most 16."""
    return 1 << ((W // rows).bit_length() - 1)


def _dot_block(rows: int):
    keys = keys_in_block(rows)

    @emits(types.void, A, A, A, A, A, A, A, tagged=True)
    def dot(b, dtype, queries, query_stride, addresses, offset, vectors, scores, score_stride):
        """``scores[r][t] = queries[r] . keys[t]`` for R rows and T keys."""
        q = [b.add(queries, b.mul(query_stride, ir.Constant(i64, r))) for r in range(rows)]
        k = [b.add(load(b, addresses, i64, 8 * t), offset) for t in range(keys)]

        def body(i, sums):
            ks = [to_float(b, dtype, advance(b, k[t], i, W * ELEMENT_BYTES[dtype])) for t in range(keys)]
            out = []
            for r in range(rows):
                x = load(b, advance(b, q[r], i, ROW_BYTES), vec(f32))
                out += [fma(b, x, ks[t], sums[r * keys + t]) for t in range(keys)]
            return out

        sums = counted(b, vectors, [constant(0.0, vec(f32))] * (rows * keys), body)
        total = sum_lanes(b, sums)
        for r in range(rows):
            lanes = [r * keys + t for t in range(keys)]
            part = shuffle(b, total, total, lanes) if keys > 1 else b.extract_element(total, ir.Constant(i64, r))
            store(b, part, b.add(scores, b.mul(score_stride, ir.Constant(i64, r))))

    return dot


def _accumulate_block(rows: int, width: int):
    @emits(types.void, A, A, A, A, A, A, A, tagged=True)
    def accumulate(b, dtype, sums, sum_stride, weights, weight_stride, addresses, offset, count):
        """``sums[r] += weights[r][j] * values[j]`` over ascending j, for R rows of ``width`` vectors."""
        a = [b.add(sums, b.mul(sum_stride, ir.Constant(i64, r))) for r in range(rows)]
        p = [b.add(weights, b.mul(weight_stride, ir.Constant(i64, r))) for r in range(rows)]
        size = W * ELEMENT_BYTES[dtype]

        def body(j, now):
            v = b.add(load(b, advance(b, addresses, j, 8), i64), offset)
            values = [to_float(b, dtype, v, n * size) for n in range(width)]
            out = []
            for r in range(rows):
                weight = splat(b, load(b, advance(b, p[r], j, 4), f32))
                out += [fma(b, weight, values[n], now[r * width + n]) for n in range(width)]
            return out

        start = [load(b, a[r], vec(f32), n * ROW_BYTES) for r in range(rows) for n in range(width)]
        for index, value in enumerate(counted(b, count, start, body)):
            store(b, value, a[index // width], index % width * ROW_BYTES)

    return accumulate


_dot1, _dot2, _dot3, _dot4 = (_dot_block(rows) for rows in (1, 2, 3, 4))
_KEYS1, _KEYS2, _KEYS3, _KEYS4 = (keys_in_block(rows) for rows in (1, 2, 3, 4))
_wide1, _wide2, _wide3, _wide4 = (_accumulate_block(rows, PV_VECTORS) for rows in (1, 2, 3, 4))
_thin1, _thin2, _thin3, _thin4 = (_accumulate_block(rows, 1) for rows in (1, 2, 3, 4))


@inlined
def score_rows(rows, queries, query_stride, addresses, offset, vectors, scores, score_stride, first, last, tag):
    """Scores of up to four rows against the keys ``[first, last)`` of a chunk.

    May write up to a block's keys beyond ``last``: the row has room for it, and the addresses are valid there.
    """
    key = first
    if rows == 4:
        while key < last:
            _dot4(queries, query_stride, addresses + key * 8, offset, vectors, scores + key * 4, score_stride, tag)
            key += _KEYS4
    elif rows == 3:
        while key < last:
            _dot3(queries, query_stride, addresses + key * 8, offset, vectors, scores + key * 4, score_stride, tag)
            key += _KEYS3
    elif rows == 2:
        while key < last:
            _dot2(queries, query_stride, addresses + key * 8, offset, vectors, scores + key * 4, score_stride, tag)
            key += _KEYS2
    else:
        while key < last:
            _dot1(queries, query_stride, addresses + key * 8, offset, vectors, scores + key * 4, score_stride, tag)
            key += _KEYS1


@inlined
def accumulate_rows(rows, sums, sum_stride, weights, weight_stride, addresses, offset, vectors, first, last, tag):
    """Add the values of the keys ``[first, last)`` of a chunk, all visible to all of up to four rows."""
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
