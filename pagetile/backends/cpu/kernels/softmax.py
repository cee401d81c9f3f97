"""Passes over one row of scores, and over one row of an accumulator.

A row of scores holds the keys of one chunk, lane ``x`` the key ``chunk start + x``. Passes work on whole vectors
``[first, last)`` of it; lanes outside the row's visible range are turned into -inf by a *select*, so that whatever was
computed there, NaN included, is gone. Scores are kept in base 2 (natural units times log2(e)).

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
    splat,
    store,
    sum_lanes,
    vec,
)

A, F = types.int64, types.float32

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

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


def _real(x: ir.Value) -> ir.Type:
    return x.type


def _integer(x: ir.Value) -> ir.Type:
    return vec(i32, x.type.count) if isinstance(x.type, ir.VectorType) else i32


def exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """``2**x`` for ``x <= 0``. Exactly 1 at 0, exactly 0 below -126 and at -inf; NaN gives NaN.

    The exponent is taken from the bits of a rounded float: a conversion of NaN to an integer would be undefined.
    """
    real, whole = _real(x), _integer(x)
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
    real, whole = _real(x), _integer(x)
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


def _over(b: ir.IRBuilder, scores: ir.Value, first: ir.Value, last: ir.Value, carried, body):
    """For each vector of scores: ``new scores, carried = body(vector index, scores, carried)``."""

    def step(i, now):
        vector = b.add(first, i)
        address = advance(b, scores, vector, ROW_BYTES)
        value, now = body(vector, load(b, address, vec(f32)), now)
        store(b, value, address)
        return now

    return counted(b, b.sub(last, first), carried, step)


@emits(F, A, A, A, A, A, F)
def mask_and_max(b, scores, first, last, low, high, factor):
    """Multiply by ``factor``, hide lanes outside ``[low, high)``, return the maximum without regard to NaN."""
    factors = splat(b, factor)
    lows, highs = splat(b, b.trunc(low, i32)), splat(b, b.trunc(high, i32))
    hidden = constant(-math.inf, vec(f32))

    def body(vector, s, now):
        lane = _lanes(b, vector)
        seen = b.and_(b.icmp_signed(">=", lane, lows), b.icmp_signed("<", lane, highs))
        s = b.select(seen, b.fmul(s, factors), hidden)
        return s, [b.select(b.fcmp_ordered(">", s, now[0]), s, now[0])]

    (largest,) = _over(b, scores, first, last, [hidden], body)
    return fold_lanes(b, largest, lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@emits(F, A, A, A, F)
def exp_and_sum(b, scores, first, last, shift):
    """Replace scores by ``2**(score - shift)`` and return their sum."""
    shifts = splat(b, shift)

    def body(_vector, s, now):
        p = exp2(b, b.fsub(s, shifts))
        return p, [b.fadd(now[0], p)]

    (total,) = _over(b, scores, first, last, [constant(0.0, vec(f32))], body)
    return b.extract_element(sum_lanes(b, [total]), ir.Constant(i32, 0))


@emits(types.void, A, A, A, F, F)
def soft_cap(b, scores, first, last, inner, cap):
    """``cap * tanh(score * inner)``, with ``inner = scale / cap``."""
    inners, caps = splat(b, inner), splat(b, cap)
    _over(b, scores, first, last, [], lambda _v, s, now: (b.fmul(caps, tanh(b, b.fmul(s, inners))), now))


@emits(types.void, A, A, A, F, F, A)
def add_alibi(b, scores, first, last, factor, slope, position):
    """``score * factor - slope * |position - key|``; the position counts from the chunk's start."""
    factors, slopes = splat(b, factor), splat(b, slope)

    def body(vector, s, now):
        keys = b.sext(_lanes(b, vector), vec(i64))
        distance = b.sub(splat(b, position), keys)
        distance = b.select(b.icmp_signed("<", distance, constant(0, vec(i64))), b.neg(distance), distance)
        penalty = b.fmul(slopes, b.sitofp(distance, vec(f32)))
        return b.fsub(b.fmul(s, factors), penalty), now

    _over(b, scores, first, last, [], body)


@emits(F, F)
def exp2_of(b, x):
    """:func:`exp2` of a scalar."""
    return exp2(b, x)


@emits(F, F)
def log2_of(b, x):
    return call(b, "llvm.log2.f32", x)


@emits(types.void, A, A, F)
def scale_row(b, row, vectors, factor):
    factors = splat(b, factor)

    def body(i, _):
        address = advance(b, row, i, ROW_BYTES)
        store(b, b.fmul(load(b, address, vec(f32)), factors), address)
        return []

    counted(b, vectors, [], body)


@emits(types.void, A, A)
def clear_row(b, row, vectors):
    def body(i, _):
        store(b, constant(0.0, vec(f32)), advance(b, row, i, ROW_BYTES))
        return []

    counted(b, vectors, [], body)


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
def add_state(into, into_max, into_sum, other, other_max, other_sum, vectors):
    """Add one softmax state to another: rows of ``vectors``, maxima and sums at their addresses.

    The only place where two states meet: within a task and between split tasks alike, so both give the same bits.
    """
    m, n = get_f32(into_max), get_f32(other_max)
    largest = m if m > n else n
    shift = finite_shift(largest)
    keep, take = exp2_of(m - shift), exp2_of(n - shift)
    mix_rows(into, other, vectors, keep, take)
    put_f32(into_max, largest)
    put_f32(into_sum, get_f32(into_sum) * keep + get_f32(other_sum) * take)
