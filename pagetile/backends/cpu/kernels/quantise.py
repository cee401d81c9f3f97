"""Write into a quantised cache, the kernel: divide, round to nearest even, saturate, store a byte an element.

The bytes are those of :func:`pagetile.reference.quantise`, by integers, so they do not depend on which conversions a
CPU has. A token is one span where its heads are contiguous and one scale serves them all, a span a head otherwise;
where the scales are outputs, a span is a head, is read twice, and its scale is stored beside it.

Reads the slots (all of them before a byte is written) and the rows with a slot of 0 or more; writes those slots, and
their scales.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.elements import get_f32, put_f32, slot_value, take_ticket, to_float
from pagetile.backends.cpu.kernels.vector import (
    ELEMENT_BYTES,
    W,
    advance,
    constant,
    counted,
    emits,
    f32,
    fold_lanes,
    i8,
    i32,
    i64,
    splat,
    store,
    vec,
)
from pagetile.backends.cpu.kernels.write import check_slots, slot_of

A = types.int64

_FP8 = {"fp8_e4m3": (20, 120, 0x43E00000, 0x3C800000, 2.0**14), "fp8_e5m2": (21, 112, 0x47600000, 0x38800000, 2.0**7)}
"""Mantissa bits of float32 that are dropped; difference of the exponents' biases; bits of the largest value and of the
smallest normal one; the power of two whose last float32 bit is the kind's smallest step."""

_INFINITY = 0x7F800000
_LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}


def _smaller(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_unsigned("<", x, y), x, y)


def _larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_unsigned(">", x, y), x, y)


def _in_steps(b: ir.IRBuilder, magnitude: ir.Value, real: ir.Type, power: float) -> ir.Value:
    """``magnitude / step`` to the nearest even integer, where ``step`` is the last bit of ``power``: one addition."""
    step = constant(power, real)
    return b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, real), step), magnitude.type), b.bitcast(step, magnitude.type))


def _to_byte(b: ir.IRBuilder, kind: str, value: ir.Value, count: int) -> ir.Value:
    """float32 lanes as the kind stores them."""
    wide, real = vec(i32, count), value.type
    bits = b.bitcast(value, wide)
    magnitude = b.and_(bits, constant(0x7FFFFFFF, wide))
    nan = b.icmp_unsigned(">", magnitude, constant(_INFINITY, wide))
    if kind == "int8":
        largest = b.bitcast(constant(127.0, real), wide)
        steps = _in_steps(b, _smaller(b, magnitude, largest), real, 2.0**23)
        signed = b.select(b.icmp_signed("<", bits, constant(0, wide)), b.neg(steps), steps)
        return b.trunc(b.select(nan, constant(0, wide), signed), vec(i8, count))
    dropped, bias, largest, normal_from, power = _FP8[kind]
    magnitude = _smaller(b, magnitude, constant(largest, wide))
    odd = b.and_(b.lshr(magnitude, constant(dropped, wide)), constant(1, wide))
    rounded = b.add(magnitude, b.add(odd, constant((1 << (dropped - 1)) - 1, wide)))
    normal = b.sub(b.lshr(rounded, constant(dropped, wide)), constant(bias << (23 - dropped), wide))
    tiny = _in_steps(b, magnitude, real, power)
    stored = b.select(b.icmp_unsigned("<", magnitude, constant(normal_from, wide)), tiny, normal)
    sign = b.and_(b.lshr(bits, constant(24, wide)), constant(0x80, wide))
    return b.trunc(b.select(nan, constant(0x7F, wide), b.or_(stored, sign)), vec(i8, count))


def _each(b: ir.IRBuilder, code: ir.Value, codes: dict[str, int], body) -> None:
    """Run ``body(name)`` for the name of a run-time code."""
    done = b.append_basic_block("any")
    for name, value in codes.items():
        mine, other = b.append_basic_block(name), b.append_basic_block("or")
        b.cbranch(b.icmp_signed("==", code, ir.Constant(i64, value)), mine, other)
        b.position_at_end(mine)
        body(name)
        b.branch(done)
        b.position_at_end(other)
    b.branch(done)
    b.position_at_end(done)


@emits(types.void, A, A, A, A, A, types.float32)
def quantise_span(b, source, target, size, dtype_code, kind_code, scale):
    """``size`` neighbours of a dtype code, divided by ``scale``, as bytes of a kind code. Writes nothing else."""
    whole = b.and_(size, ir.Constant(i64, -W))

    def convert(dtype: str, kind: str) -> None:
        def piece(count: int, first: ir.Value):
            def body(i, _):
                at = b.add(first, b.mul(i, ir.Constant(i64, count)))
                value = to_float(b, dtype, advance(b, source, at, ELEMENT_BYTES[dtype]), count=count)
                divisor = splat(b, scale, count) if count > 1 else scale
                store(b, _to_byte(b, kind, b.fdiv(value, divisor), count), b.add(target, at))
                return []

            return body

        counted(b, b.sdiv(size, ir.Constant(i64, W)), [], piece(W, ir.Constant(i64, 0)))
        counted(b, b.sub(size, whole), [], piece(1, whole))

    _each(b, dtype_code, P.DTYPE_CODES, lambda dtype: _each(b, kind_code, P.KIND_CODES, lambda k: convert(dtype, k)))


@emits(types.float32, A, A, A)
def largest_finite(b, source, size, dtype_code):
    """The largest magnitude of ``size`` neighbours; what is not finite counts as 0."""
    found = cgutils.alloca_once(b, f32)  # in the entry block: this code may stand in a loop
    whole = b.and_(size, ir.Constant(i64, -W))

    def search(dtype: str) -> None:
        def piece(count: int, first: ir.Value):
            wide = vec(i32, count)

            def body(i, carried):
                at = b.add(first, b.mul(i, ir.Constant(i64, count)))
                value = to_float(b, dtype, advance(b, source, at, ELEMENT_BYTES[dtype]), count=count)
                magnitude = b.and_(b.bitcast(value, wide), constant(0x7FFFFFFF, wide))
                finite = b.icmp_unsigned("<", magnitude, constant(_INFINITY, wide))
                return [_larger(b, carried[0], b.select(finite, magnitude, constant(0, wide)))]

            return body

        start = constant(0, vec(i32))
        (lanes,) = counted(b, b.sdiv(size, ir.Constant(i64, W)), [start], piece(W, ir.Constant(i64, 0)))
        first = fold_lanes(b, lanes, lambda x, y: _larger(b, x, y))
        (most,) = counted(b, b.sub(size, whole), [first], piece(1, whole))
        b.store(b.bitcast(most, f32), found)

    b.store(ir.Constant(f32, 0.0), found)
    _each(b, dtype_code, P.DTYPE_CODES, search)
    return b.load(found)


@emits(types.float32, types.float32, A)
def scale_for(b, most, kind_code):
    """``most`` over the largest value of the kind; 1 where that is 0."""
    found = cgutils.alloca_once(b, f32)
    b.store(ir.Constant(f32, 0.0), found)
    _each(b, kind_code, P.KIND_CODES, lambda kind: b.store(b.fdiv(most, ir.Constant(f32, _LARGEST[kind])), found))
    scale = b.load(found)
    return b.select(b.fcmp_ordered(">", scale, ir.Constant(f32, 0.0)), scale, ir.Constant(f32, 1.0))


@inlined
def _quantise_side(block, row, home, offset, first):
    """One row of K (``first`` is ``W_K_FROM`` and so on) or of V."""
    from_slot, scale_slot, size_slot = first
    source = slot_value(block, from_slot) + row * slot_value(block, from_slot + 1)
    target = slot_value(block, from_slot + 3) + home * slot_value(block, from_slot + 4)
    target += offset * slot_value(block, from_slot + 5)
    scales = slot_value(block, scale_slot) + home * slot_value(block, scale_slot + 1)
    scales += offset * slot_value(block, scale_slot + 2)
    size, own = slot_value(block, size_slot), slot_value(block, P.W_OWN_SCALES)
    dtype, kind = slot_value(block, P.W_DTYPE), slot_value(block, P.W_KIND)
    for span in range(slot_value(block, from_slot + 7)):
        start = source + span * slot_value(block, from_slot + 2)
        at = scales + span * slot_value(block, scale_slot + 3)
        if own:
            scale = scale_for(largest_finite(start, size, dtype), kind)
            put_f32(at, scale)
        else:
            scale = get_f32(at)
        quantise_span(start, target + span * slot_value(block, from_slot + 6), size, dtype, kind, scale)


@inlined
def _quantise_rows(block, first, last):
    block_size = slot_value(block, P.W_BLOCK_SIZE)
    for row in range(first, last):
        slot = slot_of(block, row)
        if slot < 0:
            continue
        home = slot // block_size
        offset = slot - home * block_size
        for side in range(2):
            slots = (P.W_V_FROM, P.W_V_SCALE, P.W_V_SIZE) if side else (P.W_K_FROM, P.W_K_SCALE, P.W_K_SIZE)
            _quantise_side(block, row, home, offset, slots)


def quantise_serial(block):
    """Check, then store every row on this thread."""
    if check_slots(block):
        _quantise_rows(block, 0, slot_value(block, P.W_COUNT))


def quantise_chunks(block):
    """Store chunks of rows, already checked, until there is none."""
    chunk, count = slot_value(block, P.W_CHUNK), slot_value(block, P.W_COUNT)
    while True:
        first = take_ticket(block + P.W_TICKET * 8) * chunk
        if first >= count:
            break
        _quantise_rows(block, first, min(count, first + chunk))


SERIAL, CHUNKS = Kernel(quantise_serial), Kernel(quantise_chunks)
