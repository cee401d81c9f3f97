"""Passes over one row of scores, and over one row of an accumulator.

A row of scores holds the keys of one chunk, lane ``x`` the key ``chunk start + x``. Passes work on the vectors
that hold some lane of the row's visible range ``[low, high)``; the other lanes of those are left out by a *select*, so
that whatever was computed there, NaN included, is gone. Scores are in units of their own: ``unit`` of them make a
factor of 2. Without softcap and ALiBi they are the bare products, and the scale is part of the unit.

NaN in a visible score must reach the result: the maximum drops it, ``exp2`` keeps it, and so the sum and the output
of that row become NaN.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types

from pagetile.backends.cpu.jit import inlined
from pagetile.backends.cpu.kernels.elements import get_f32, put_f32
from pagetile.backends.cpu.kernels.vector import (
    ROW_BYTES,
    W,
    advance,
    constant,
    counted,
    emits,
    f32,
    fma,
    fold_lanes,
    i16,
    i32,
    i64,
    load,
    rounded_pairs,
    splat,
    store,
    sum_lanes,
    vec,
)

A, F = types.int64, types.float32

LOG2E = math.log2(math.e)

# Minimax fits over the stated ranges, constant terms held exact; errors below 2**-28 and 2**-27 of the value.
_EXP2 = (  # exp2(f) on [-1/2, 1/2], after the leading 1
    0.6931472028553454,
    0.2402264791360374,
    0.055503324704677635,
    0.009618437358712522,
    0.0013398874688987444,
    0.00015353362219072236,
)
_TANH = (  # (tanh(a)/a - 1)/a**2 in powers of a**2, on [0, 0.65]
    -0.33333259842515617,
    0.13330830195932064,
    -0.053688010882387234,
    0.020469381106744736,
    -0.0055151219952667314,
)
_TANH_SMALL = 0.625
_ROUNDER = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, which then stands in the low bits


def _integer(x: ir.Value) -> ir.Type:
    return vec(i32, x.type.count) if isinstance(x.type, ir.VectorType) else i32


def exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """``2**x`` for ``x`` up to 126. Exactly 1 at 0, exactly 0 below -126 and at -inf; NaN gives NaN.

    The exponent is taken from the bits of a rounded float: a conversion of NaN to an integer would be undefined.
    """
    real, whole = x.type, _integer(x)
    rounder = constant(_ROUNDER, real)
    n = b.fadd(x, rounder)
    f = b.fsub(x, b.fsub(n, rounder))
    y = constant(_EXP2[-1], real)
    for coefficient in (*_EXP2[-2::-1], 1.0):
        y = fma(b, y, f, constant(coefficient, real))
    exponent = b.add(b.shl(b.bitcast(n, whole), constant(23, whole)), constant(127 << 23, whole))
    y = b.fmul(y, b.bitcast(exponent, real))
    return b.select(b.fcmp_ordered("<", x, constant(-126.0, real)), constant(0.0, real), y)


def tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Safe at any size, accurate near 0; NaN gives NaN."""
    real, whole = x.type, _integer(x)
    bits = b.bitcast(x, whole)
    sign = b.and_(bits, constant(-(1 << 31), whole))
    a = b.bitcast(b.and_(bits, constant(0x7FFFFFFF, whole)), real)
    z = b.fmul(a, a)
    small = constant(_TANH[-1], real)
    for coefficient in _TANH[-2::-1]:
        small = fma(b, small, z, constant(coefficient, real))
    small = fma(b, b.fmul(a, z), small, a)
    e = exp2(b, b.fmul(a, constant(-2.0 * LOG2E, real)))
    one = constant(1.0, real)
    large = b.fsub(one, b.fdiv(b.fadd(e, e), b.fadd(one, e)))
    y = b.select(b.fcmp_ordered("<", a, constant(_TANH_SMALL, real)), small, large)
    return b.bitcast(b.or_(b.bitcast(y, whole), sign), real)


def _lanes(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Chunk-relative key of each lane of a vector, int32."""
    base = b.mul(b.trunc(vector, i32), ir.Constant(i32, W))
    steps = ir.Constant(ir.VectorType(i32, W), list(range(W)))
    return b.add(splat(b, base), steps)


def _over(b, scores, low, high, carried, body):
    """``new scores, carried = body(vector, scores, seen, carried)`` for each vector with a lane of ``[low, high)``.

    ``seen`` is None where the whole vector is in the range, else the lanes that are. Ascending; new scores of None
    leave them as they are.
    """
    width, lows, highs = ir.Constant(i64, W), splat(b, b.trunc(low, i32)), splat(b, b.trunc(high, i32))

    def step(vector, seen, now):
        address = advance(b, scores, vector, ROW_BYTES)
        value, now = body(vector, load(b, address, vec(f32)), seen, now)
        if value is not None:
            store(b, value, address)
        return now

    def edge(vector, present, now):
        """The vector, if ``present`` (0 or 1)."""

        def once(_i, now):
            lane = _lanes(b, vector)
            return step(vector, b.and_(b.icmp_signed(">=", lane, lows), b.icmp_signed("<", lane, highs)), now)

        return counted(b, present, now, once)

    first, end = b.sdiv(low, width), b.sdiv(high, width)
    ragged_low = b.icmp_signed("!=", b.mul(first, width), low)
    full = b.add(first, b.zext(ragged_low, i64))  # the first vector that is in the range from its first lane on
    carried = edge(first, b.zext(ragged_low, i64), carried)
    carried = counted(b, b.sub(end, full), carried, lambda i, now: step(b.add(full, i), None, now))
    ragged_high = b.and_(b.icmp_signed("!=", b.mul(end, width), high), b.icmp_signed(">=", end, full))
    return edge(end, b.zext(ragged_high, i64), carried)


@emits(F, A, A, A)
def row_max(b, scores, low, high):
    """The maximum over lanes ``[low, high)``, NaN left out; -inf if that is all there is."""

    def body(_vector, s, seen, now):
        better = b.fcmp_ordered(">", s, now[0])
        return None, [b.select(better if seen is None else b.and_(better, seen), s, now[0])]

    (largest,) = _over(b, scores, low, high, [constant(-math.inf, vec(f32))], body)
    return fold_lanes(b, largest, lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@emits(F, A, A, A, F, F, F)
def exp_and_sum(b, scores, low, high, shift, unit, bias):
    """Replace scores by ``2**((score - shift) * unit - bias)``, by 0 outside ``[low, high)``; their sum.

    The difference is taken first: it is exact where it matters, so that a large score costs no accuracy.
    """
    return _exp_and_sum(b, scores, None, low, high, shift, unit, bias)


@emits(F, A, A, A, A, F, F, F)
def exp_to_pairs(b, scores, weights, low, high, shift, unit, bias):
    """:func:`exp_and_sum` that leaves the scores, and puts the weights, rounded to bfloat16, into a row of zeros.

    The sum is of the weights before they are rounded.
    """
    return _exp_and_sum(b, scores, weights, low, high, shift, unit, bias)


def _exp_and_sum(b, scores, weights, low, high, shift, unit, bias):
    shifts, units, biases = splat(b, shift), splat(b, unit), splat(b, b.fneg(bias))
    zero = constant(0.0, vec(f32))

    def body(vector, s, seen, now):
        p = exp2(b, fma(b, b.fsub(s, shifts), units, biases))
        p = p if seen is None else b.select(seen, p, zero)
        if weights is not None:
            store(b, rounded_pairs(b, p), advance(b, weights, vector, ROW_BYTES // 2))
        return p if weights is None else None, [b.fadd(now[0], p)]

    (total,) = _over(b, scores, low, high, [zero], body)
    return b.extract_element(sum_lanes(b, [total]), ir.Constant(i32, 0))


@emits(types.void, A, A, A, F, F)
def soft_cap(b, scores, low, high, inner, cap):
    """``cap * tanh(score * inner)``, with ``inner = scale / cap``."""
    inners, caps = splat(b, inner), splat(b, cap)
    _over(b, scores, low, high, [], lambda _v, s, _seen, now: (b.fmul(caps, tanh(b, b.fmul(s, inners))), now))


@emits(types.void, A, A, A, F, F, A)
def add_alibi(b, scores, low, high, factor, slope, position):
    """``score * factor - slope * |position - key|``; the position counts from the chunk's start."""
    factors, slopes = splat(b, factor), splat(b, slope)

    def body(vector, s, _seen, now):
        keys = b.sext(_lanes(b, vector), vec(i64))
        distance = b.sub(splat(b, position), keys)
        distance = b.select(b.icmp_signed("<", distance, constant(0, vec(i64))), b.neg(distance), distance)
        penalty = b.fmul(slopes, b.sitofp(distance, vec(f32)))
        return b.fsub(b.fmul(s, factors), penalty), now

    _over(b, scores, low, high, [], body)


@emits(F, F)
def exp2_of(b, x):
    """:func:`exp2` of a scalar."""
    return exp2(b, x)


@emits(types.void, A, A, A)
def negate(b, scores, low, high):
    """Turn the sign of scores (a negative scale)."""
    _over(b, scores, low, high, [], lambda _v, s, _seen, now: (b.fneg(s), now))


@emits(types.void, A, A, A, A)
def multiply_scores(b, scores, factors, low, high):
    """Each score (or weight) times the factor of its key."""

    def body(vector, s, _seen, now):
        return b.fmul(s, load(b, advance(b, factors, vector, ROW_BYTES), vec(f32))), now

    _over(b, scores, low, high, [], body)


@emits(types.void, A, A, F)
def multiply_row(b, row, vectors, factor):
    factors = splat(b, factor)

    def body(i, _):
        here = advance(b, row, i, ROW_BYTES)
        store(b, b.fmul(load(b, here, vec(f32)), factors), here)
        return []

    counted(b, vectors, [], body)


@emits(types.void, A, A)
def clear_row(b, row, vectors):
    def body(i, _):
        store(b, constant(0.0, vec(f32)), advance(b, row, i, ROW_BYTES))
        return []

    counted(b, vectors, [], body)


@emits(types.void, A, A, A)
def copy_row(b, source, target, vectors):
    def body(i, _):
        store(b, load(b, advance(b, source, i, ROW_BYTES), vec(f32)), advance(b, target, i, ROW_BYTES))
        return []

    counted(b, vectors, [], body)


@emits(types.void, A, A, A)
def pack_row(b, source, target, vectors):
    """Floats that are bfloat16 already, as such (the upper halves of their words); zeros up to an even number of
    vectors."""

    def body(i, _):
        bits = load(b, advance(b, source, i, ROW_BYTES), vec(i32))
        store(b, b.trunc(b.lshr(bits, constant(16, vec(i32))), vec(i16)), advance(b, target, i, ROW_BYTES // 2))
        return []

    def pad(_i, _):
        store(b, constant(0, vec(i16)), advance(b, target, vectors, ROW_BYTES // 2))
        return []

    counted(b, vectors, [], body)
    counted(b, b.and_(vectors, ir.Constant(i64, 1)), [], pad)


@emits(types.int64, A, A)
def all_finite(b, row, vectors):
    """1 if no float of a row is NaN or infinite."""
    nothing = constant(0.0, vec(f32))

    def body(i, now):  # 0 * x is 0 for what is finite, and NaN for anything else
        return [fma(b, load(b, advance(b, row, i, ROW_BYTES), vec(f32)), nothing, now[0])]

    (total,) = counted(b, vectors, [nothing], body)
    lone = fold_lanes(b, total, lambda x, y: b.fadd(x, y))
    return b.zext(b.fcmp_ordered("==", lone, ir.Constant(f32, 0.0)), i64)


@emits(types.void, A, A, A, F, F)
def mix_rows(b, into, other, vectors, keep, take):
    """``into = other * take + into * keep``."""
    keeps, takes = splat(b, keep), splat(b, take)

    def body(i, _):
        address = advance(b, into, i, ROW_BYTES)
        kept = b.fmul(load(b, address, vec(f32)), keeps)
        store(b, fma(b, load(b, advance(b, other, i, ROW_BYTES), vec(f32)), takes, kept), address)
        return []

    counted(b, vectors, [], body)


@emits(types.void, A, A, A, F, F)
def divide_row(b, source, target, vectors, factor, divisor):
    """``target = source * factor / divisor``."""
    factors, divisors = splat(b, factor), splat(b, divisor)

    def body(i, _):
        value = b.fmul(load(b, advance(b, source, i, ROW_BYTES), vec(f32)), factors)
        store(b, b.fdiv(value, divisors), advance(b, target, i, ROW_BYTES))
        return []

    counted(b, vectors, [], body)


@inlined
def finite_shift(largest):
    """What to subtract before ``exp2``: the maximum, or 0 while nothing (or only -inf) was seen."""
    return largest if largest != -math.inf else types.float32(0.0)


@inlined
def decay(before, shift, unit):
    """The factor that moves what was weighed against the maximum ``before`` to another shift."""
    return types.float32(0.0) if before == -math.inf else exp2_of((before - shift) * unit)


@inlined
def add_state(into, into_max, into_sum, other, other_max, other_sum, vectors, unit):
    """Add one softmax state to another: rows of ``vectors``, maxima and sums at their addresses.

    The only place where two states meet: within a task and between split tasks alike, so both give the same bits.
    """
    m, n = get_f32(into_max), get_f32(other_max)
    largest = m if m > n else n
    shift = finite_shift(largest)
    keep, take = decay(m, shift, unit), decay(n, shift, unit)
    mix_rows(into, other, vectors, keep, take)
    put_f32(into_max, largest)
    put_f32(into_sum, get_f32(into_sum) * keep + get_f32(other_sum) * take)
