"""Products with x-packed keys and values: packs of a key are vectors as they lie, and so are neighbours in a block of
one value channel. Nothing is transposed.

A score adds up the lanes of a pack, then the packs' lanes in one tree; a weighted value adds up :data:`LANES` keys at a
time and the rest one by one. Neither order depends on how many rows are taken along.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from pagetile.backends.cpu.kernels.lanes import bytes_of_kind, emits_of_kind, lanes
from pagetile.backends.cpu.kernels.vector import (
    ROW_BYTES,
    W,
    advance,
    call,
    constant,
    counted,
    emits,
    f32,
    fma,
    fold_lanes,
    i32,
    i64,
    load,
    shuffle,
    splat,
    store,
    vec,
)

A = types.int64
TOKENS = 4
"""Keys that are scored together."""

LANES = 8
"""Neighbouring keys of a block whose values are added together; the smallest block of the original ops."""

MANY = 4 if W >= 16 else 2
"""Query rows that share the loads of keys and values, by the registers there are; what is left of a group goes alone.
Each further number of rows would be one more copy of every loop to compile."""

_PACK_BYTES = 16
_MAGIC = 12582912.0
_EXP2 = (
    1.0,
    0.6931471805599453,
    0.24022650695910072,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.00015403530393381608,
)
"""Taylor coefficients of ``2 ** x``: below 2e-7 of it for ``abs(x) <= 0.5``."""


def _halved(b, x):
    """A vector with its upper half added to its lower one, down to four lanes."""
    while x.type.count > 4:
        half = x.type.count // 2
        x = b.fadd(shuffle(b, x, x, range(half)), shuffle(b, x, x, range(half, 2 * half)))
    return x


def _sums(b, four):
    """The lane sums of four vectors, as one vector."""
    w, x, y, z = (_halved(b, v) for v in four)
    even, odd = (0, 2, 4, 6), (1, 3, 5, 7)
    first, second = (b.fadd(shuffle(b, p, q, even), shuffle(b, p, q, odd)) for p, q in ((w, x), (y, z)))
    return b.fadd(shuffle(b, first, second, even), shuffle(b, first, second, odd))


def _score(b, kind, rows, query, stride, addresses, packs, step, scores, apart):
    size = _PACK_BYTES // bytes_of_kind(kind)
    starts = [load(b, addresses, i64, 8 * token) for token in range(TOKENS)]

    def body(i, sums):
        keys = [lanes(b, kind, b.add(start, b.mul(i, step)), size) for start in starts]
        out = []
        for row in range(rows):
            at = b.add(query, b.mul(stride, ir.Constant(i64, row)))
            q = load(b, advance(b, at, i, 4 * size), vec(f32, size))
            out += [fma(b, q, key, sums[row * TOKENS + token]) for token, key in enumerate(keys)]
        return out

    sums = counted(b, packs, [constant(0.0, vec(f32, size))] * (rows * TOKENS), body)
    for row in range(rows):
        store(b, _sums(b, sums[row * TOKENS : (row + 1) * TOKENS]), b.add(scores, b.mul(apart, ir.Constant(i64, row))))


def _make_score(rows):
    @emits_of_kind(types.void, *[A] * 7)
    def score_keys(b, kind, *values):
        _score(b, kind, rows, *values)

    return score_keys


score_one, score_many = _make_score(1), _make_score(MANY)


def _add_values(b, kind, rows, channels, pieces, values, tails, tail_values, step, weights, apart, sums, sum_apart, d):
    """Channels ``d`` on of the weighted sum, for ``rows`` rows: pieces of :data:`LANES` keys, then single keys."""
    numbers = [(row, channel) for row in range(rows) for channel in range(channels)]

    def row_at(base, stride, row):
        return b.add(base, b.mul(stride, ir.Constant(i64, row)))

    def piece(count):
        def body(i, carried):
            record = advance(b, values if count > 1 else tail_values, i, 16)
            start, place = b.add(load(b, record, i64), b.mul(d, step)), load(b, record, i64, 8)
            v = [lanes(b, kind, b.add(start, b.mul(step, ir.Constant(i64, c))), count) for c in range(channels)]
            p = [load(b, b.add(row_at(weights, apart, row), place), vec(f32, count)) for row in range(rows)]
            return [fma(b, p[row], v[channel], sum_) for (row, channel), sum_ in zip(numbers, carried, strict=True)]

        return body

    found = counted(b, pieces, [constant(0.0, vec(f32, LANES))] * len(numbers), piece(LANES))
    found = [_sum_of(b, x) for x in found]
    found = counted(b, tails, found, piece(1))
    for (row, channel), total in zip(numbers, found, strict=True):
        at = advance(b, row_at(sums, sum_apart, row), b.add(d, ir.Constant(i64, channel)), 4)
        store(b, total, at)


def _sum_of(b, x):
    x = _halved(b, x)
    x = b.fadd(shuffle(b, x, x, (0, 2)), shuffle(b, x, x, (1, 3)))
    return b.fadd(b.extract_element(x, ir.Constant(i32, 0)), b.extract_element(x, ir.Constant(i32, 1)))


def _make_values(rows):
    @emits_of_kind(types.void, *[A] * 10)
    def weigh_values(b, kind, pieces, values, tails, tail_values, step, weights, apart, sums, sum_apart, size):
        shared = (pieces, values, tails, tail_values, step, weights, apart, sums, sum_apart)

        def two(i, _):
            _add_values(b, kind, rows, 2, *shared, b.mul(i, ir.Constant(i64, 2)))
            return []

        counted(b, b.sdiv(size, ir.Constant(i64, 2)), [], two)

    return weigh_values


values_one, values_many = _make_values(1), _make_values(MANY)
"""All channels but the last one of an odd number."""


@emits_of_kind(types.void, *[A] * 8)
def values_last(b, kind, pieces, values, tails, tail_values, step, weights, sums, size):
    """The last channel, of one row."""
    none, last = ir.Constant(i64, 0), b.sub(size, ir.Constant(i64, 1))
    _add_values(b, kind, 1, 1, pieces, values, tails, tail_values, step, weights, none, sums, none, last)


@emits(types.void, A, A, types.float32, types.float32, types.float32)
def edit_scores(b, scores, vectors, factor, slope, distance):
    """``score * factor - slope * abs(distance + i)`` in place, ``i`` counting the scores."""
    iota = ir.Constant(vec(f32), [float(i) for i in range(W)])

    def body(i, _):
        at = advance(b, scores, i, ROW_BYTES)
        start = b.fadd(distance, b.sitofp(b.mul(i, ir.Constant(i64, W)), f32))
        far = call(b, f"llvm.fabs.v{W}f32", b.fadd(iota, splat(b, start)))
        scaled = b.fmul(load(b, at, vec(f32)), splat(b, factor))
        store(b, b.fsub(scaled, b.fmul(splat(b, slope), far)), at)
        return []

    counted(b, vectors, [], body)


@emits(types.float32, A, A)
def largest_score(b, scores, vectors):
    """The maximum; what is not a number is passed over."""

    def body(i, carried):
        x = load(b, advance(b, scores, i, ROW_BYTES), vec(f32))
        return [b.select(b.fcmp_ordered(">", x, carried[0]), x, carried[0])]

    (most,) = counted(b, vectors, [constant(float("-inf"), vec(f32))], body)
    return fold_lanes(b, most, lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@emits(types.float32, A, A, types.float32)
def turn_to_weights(b, scores, vectors, most):
    """``exp(score - most)`` in place; their sum. -inf becomes 0, NaN stays."""

    def body(i, carried):
        at = advance(b, scores, i, ROW_BYTES)
        x = b.fmul(b.fsub(load(b, at, vec(f32)), splat(b, most)), constant(1.4426950408889634, vec(f32)))
        gone = b.fcmp_ordered("<", x, constant(-126.0, vec(f32)))
        x = b.select(gone, constant(-126.0, vec(f32)), x)
        shifted = b.fadd(x, constant(_MAGIC, vec(f32)))  # the nearest integer, in the last bits
        rest = b.fsub(x, b.fsub(shifted, constant(_MAGIC, vec(f32))))
        power = constant(_EXP2[-1], vec(f32))
        for coefficient in reversed(_EXP2[:-1]):
            power = fma(b, power, rest, constant(coefficient, vec(f32)))
        wide = vec(i32)
        exponent = b.add(b.bitcast(shifted, wide), constant(127 - 0x4B400000, wide))
        weight = b.fmul(power, b.bitcast(b.shl(exponent, constant(23, wide)), vec(f32)))
        weight = b.select(gone, constant(0.0, vec(f32)), weight)
        store(b, weight, at)
        return [b.fadd(carried[0], weight)]

    (total,) = counted(b, vectors, [constant(0.0, vec(f32))], body)
    return fold_lanes(b, total, lambda x, y: b.fadd(x, y))


@emits(types.void, A, A, A, types.float32)
def add_scaled(b, sums, row, vectors, weight):
    """``sums + weight * row`` in place."""

    def body(i, _):
        at = advance(b, sums, i, ROW_BYTES)
        store(b, fma(b, splat(b, weight), load(b, advance(b, row, i, ROW_BYTES), vec(f32)), load(b, at, vec(f32))), at)
        return []

    counted(b, vectors, [], body)


@emits(types.void, A, A, types.float32)
def scale_by(b, row, vectors, factor):
    """``row * factor`` in place."""

    def body(i, _):
        at = advance(b, row, i, ROW_BYTES)
        store(b, b.fmul(load(b, at, vec(f32)), splat(b, factor)), at)
        return []

    counted(b, vectors, [], body)
