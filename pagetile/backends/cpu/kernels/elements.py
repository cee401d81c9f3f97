"""Elements of each dtype: how they are read into float32 and rounded back, and scalars at an address."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.isa import host_isa
from pagetile.backends.cpu.jit import inlined
from pagetile.backends.cpu.kernels.vector import (
    ELEMENT_BYTES,
    ROW_BYTES,
    W,
    advance,
    at,
    call,
    constant,
    counted,
    emits,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    load,
    store,
    vec,
)

_LINE = 64
"""Bytes of a cache line, near enough: asking for too many lines or too few only costs time."""

_NATIVE_HALF = host_isa().native_half

_FP8 = {"fp8_e4m3": (20, 2.0**120, 0x7F, 0x7FC00000), "fp8_e5m2": (21, 2.0**112, 0x7C, 0x7F800000)}
"""Place of the last mantissa bit in float32, what moves the exponent, the first magnitude that is not finite, and what
those become: e4m3 has no infinity, its one special magnitude is NaN."""

A = types.int64  # an address or a count
F = types.float32

FLOAT32, BFLOAT16, FLOAT16 = np.float32(0), np.int16(0), np.uint16(0)
FP8_E4M3, FP8_E5M2, INT8 = np.uint8(0), np.int32(0), np.int8(0)
"""Tags: values whose types choose an element dtype, see :data:`pagetile.backends.cpu.kernels.vector.TAGS`."""


@emits(types.int64, A)
def get_i64(b, address):
    return load(b, address, i64)


@emits(types.int64, A)
def get_i32(b, address):
    return b.sext(load(b, address, i32), i64)


@emits(types.float32, A)
def get_f32(b, address):
    return load(b, address, f32)


@emits(types.float64, A)
def get_double(b, address):
    return load(b, address, f64)


@emits(types.float32, A)
def get_f64(b, address):
    """A float64 of the parameter block, rounded to float32."""
    return b.fptrunc(load(b, address, f64), f32)


@emits(types.void, A, A)
def put_i64(b, address, value):
    store(b, value, address)


@emits(types.void, A, F)
def put_f32(b, address, value):
    store(b, value, address)


@emits(types.void, A, A, A, A, A)
def prefetch_rows(b, addresses, first, last, offset, size):
    """Ask for the cache lines of rows ``[first, last)`` of an array of addresses: ``size`` bytes at ``offset`` each."""
    lines = b.sdiv(b.add(size, ir.Constant(i64, _LINE - 1)), ir.Constant(i64, _LINE))
    flags = [ir.Constant(i32, flag) for flag in (0, 2, 1)]  # to read, into the L2 cache, data

    def row(i, _):
        start = b.add(load(b, advance(b, addresses, b.add(first, i), 8), i64), offset)

        def line(j, _):
            call(b, "llvm.prefetch.p0", at(b, advance(b, start, j, _LINE), i8), *flags, result=ir.VoidType())
            return []

        counted(b, lines, [], line)
        return []

    counted(b, b.sub(last, first), [], row)


@emits(types.int64, A)
def take_ticket(b, address):
    """Fetch and add one, atomically: each caller gets another number."""
    return b.atomic_rmw("add", at(b, address, i64), ir.Constant(i64, 1), "monotonic")


@emits(types.int64, A, A)
def slot_value(b, block, slot):
    """An integer slot of the parameter block, or field of a task."""
    return load(b, advance(b, block, slot, 8), i64)


@emits(types.void, A, A, A)
def put_slot(b, block, slot, value):
    store(b, value, advance(b, block, slot, 8))


@emits(types.int64, A)
def vectors_of(b, size):
    """Vectors that hold ``size`` floats."""
    return b.sdiv(b.add(size, ir.Constant(i64, W - 1)), ir.Constant(i64, W))


@inlined
def index_at(address, index, wide):
    """Element of an int32 or int64 array, as 64 bits."""
    return get_i64(address + index * 8) if wide else get_i32(address + index * 4)


def to_float(b: ir.IRBuilder, dtype: str, address: ir.Value, offset: int = 0, count: int = 0) -> ir.Value:
    """``count`` elements of a dtype, exactly, as float32."""
    if dtype == "float32":
        return load(b, address, vec(f32, count), offset)
    return widen(b, dtype, load(b, address, vec(stored_type(dtype), count), offset))


def stored_type(dtype: str) -> ir.IntType:
    """The integer that an element of a narrow dtype is loaded as."""
    return i16 if ELEMENT_BYTES[dtype] == 2 else i8


def widen(b: ir.IRBuilder, dtype: str, bits: ir.Value) -> ir.Value:
    """Elements of a 16-bit or 8-bit dtype, given as integers, exactly, as float32."""
    count = bits.type.count if isinstance(bits.type, ir.VectorType) else 1
    wide = vec(i32, count)
    if dtype == "int8":
        return b.sitofp(b.sext(bits, wide), vec(f32, count))
    if dtype in _FP8:
        return _fp8_to_float(b, dtype, b.zext(bits, wide))
    if dtype == "bfloat16":
        return b.bitcast(b.shl(b.zext(bits, wide), constant(16, wide)), vec(f32, count))
    if _NATIVE_HALF:
        return b.fpext(b.bitcast(bits, vec(f16, count)), vec(f32, count))
    return _half_to_float(b, b.zext(bits, wide))


def from_float(b: ir.IRBuilder, dtype: str, value: ir.Value, address: ir.Value) -> None:
    """Round to nearest even and store. NaN stays NaN."""
    if dtype == "float32":
        store(b, value, address)
        return
    count = value.type.count if isinstance(value.type, ir.VectorType) else 1
    if dtype == "bfloat16":
        wide = vec(i32, count)
        bits = b.bitcast(value, wide)
        odd = b.and_(b.lshr(bits, constant(16, wide)), constant(1, wide))
        rounded = b.add(bits, b.add(odd, constant(0x7FFF, wide)))
        quiet = b.or_(bits, constant(0x400000, wide))  # adding could carry a NaN into infinity
        bits = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
        store(b, b.trunc(b.lshr(bits, constant(16, wide)), vec(i16, count)), address)
    elif _NATIVE_HALF:
        store(b, b.fptrunc(value, vec(f16, count)), address)
    else:
        store(b, _float_to_half(b, value, count), address)


def _fp8_to_float(b: ir.IRBuilder, dtype: str, bits: ir.Value) -> ir.Value:
    """fp8 in int32 lanes to float32, by integers and one exact multiplication (which also normalises subnormals)."""
    wide = bits.type
    real = vec(f32, wide.count) if isinstance(wide, ir.VectorType) else f32
    shift, power, special, beyond = _FP8[dtype]
    sign = b.shl(b.and_(bits, constant(0x80, wide)), constant(24, wide))
    rest = b.and_(bits, constant(0x7F, wide))
    moved = b.shl(rest, constant(shift, wide))
    finite = b.bitcast(b.fmul(b.bitcast(moved, real), constant(power, real)), wide)
    odd = b.or_(moved, constant(beyond, wide))
    value = b.select(b.icmp_unsigned(">=", rest, constant(special, wide)), odd, finite)
    return b.bitcast(b.or_(value, sign), real)


def _half_to_float(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """float16 bits in int32 lanes to float32, by integers and one exact multiplication."""
    wide = bits.type
    real = vec(f32, wide.count) if isinstance(wide, ir.VectorType) else f32
    sign = b.shl(b.and_(bits, constant(0x8000, wide)), constant(16, wide))
    rest = b.and_(bits, constant(0x7FFF, wide))
    shifted = b.shl(rest, constant(13, wide))
    # Moving the exponent by 2**112 also normalises subnormals, since those are normal in float32.
    finite = b.bitcast(b.fmul(b.bitcast(shifted, real), constant(2.0**112, real)), wide)
    special = b.or_(shifted, constant(0x7F800000, wide))
    value = b.select(b.icmp_unsigned(">=", rest, constant(0x7C00, wide)), special, finite)
    return b.bitcast(b.or_(value, sign), real)


def _float_to_half(b: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    """float32 to float16 bits, round to nearest even, by integers and one addition."""
    wide, real = vec(i32, count), value.type
    bits = b.bitcast(value, wide)
    sign = b.and_(b.lshr(bits, constant(16, wide)), constant(0x8000, wide))
    magnitude = b.and_(bits, constant(0x7FFFFFFF, wide))
    odd = b.and_(b.lshr(magnitude, constant(13, wide)), constant(1, wide))
    rounded = b.add(magnitude, b.add(odd, constant(0xFFF - (112 << 23), wide)))
    normal = b.lshr(rounded, constant(13, wide))
    # Below 2**-14: adding 0.5 leaves exactly the subnormal's bits at the end of the mantissa, rounded to even.
    half = constant(0.5, real)
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, real), half), wide), b.bitcast(half, wide))
    out = b.select(b.icmp_unsigned("<", magnitude, constant(113 << 23, wide)), tiny, normal)
    out = b.select(b.icmp_unsigned(">=", magnitude, constant(0x477FF000, wide)), constant(0x7C00, wide), out)
    out = b.select(b.icmp_unsigned(">", magnitude, constant(0x7F800000, wide)), constant(0x7E00, wide), out)
    return b.trunc(b.or_(out, sign), vec(i16, count))


def _read_vectors(b, dtype, source, target, vectors):
    def body(i, _):
        value = to_float(b, dtype, advance(b, source, i, W * ELEMENT_BYTES[dtype]))
        store(b, value, advance(b, target, i, ROW_BYTES))
        return []

    counted(b, vectors, [], body)


def _read_scalars(b, dtype, source, stride, target, count):
    def body(i, _):
        store(b, to_float(b, dtype, b.add(source, b.mul(i, stride)), count=1), advance(b, target, i, 4))
        return []

    counted(b, count, [], body)


def _zero_tail(b, target, size):
    """Zeros from ``size`` floats up to a whole vector."""
    missing = b.and_(b.neg(size), ir.Constant(i64, W - 1))

    def body(i, _):
        store(b, ir.Constant(f32, 0.0), advance(b, target, b.add(size, i), 4))
        return []

    counted(b, missing, [], body)


def _read(b, dtype, source, target, size):
    """``size`` neighbours, as vectors and then one by one."""
    whole = b.and_(size, ir.Constant(i64, -W))
    _read_vectors(b, dtype, source, target, b.sdiv(whole, ir.Constant(i64, W)))
    width = ir.Constant(i64, ELEMENT_BYTES[dtype])
    rest, to = b.add(source, b.mul(whole, width)), advance(b, target, whole, 4)
    _read_scalars(b, dtype, rest, width, to, b.sub(size, whole))


@emits(types.void, A, A, A, tagged=True)
def read_row(b, dtype, source, target, size):
    """``size`` elements to float32 at ``target``, zero-filled up to a whole vector. Reads nothing past the end."""
    _read(b, dtype, source, target, size)
    _zero_tail(b, target, size)


@emits(types.int64, tagged=True)
def element_bytes(_b, dtype):
    return ir.Constant(i64, ELEMENT_BYTES[dtype])


def _each_dtype(b, code, body):
    """Run ``body(dtype)`` for the dtype of a run-time code."""
    done = b.append_basic_block("any")
    for dtype, value in P.DTYPE_CODES.items():
        mine, other = b.append_basic_block(dtype), b.append_basic_block("or")
        b.cbranch(b.icmp_signed("==", code, ir.Constant(i64, value)), mine, other)
        b.position_at_end(mine)
        body(dtype)
        b.branch(done)
        b.position_at_end(other)
    b.branch(done)
    b.position_at_end(done)


@emits(types.void, A, A, A, A, A)
def read_strided(b, source, stride, target, size, code):
    """``size`` elements of a dtype code, ``stride`` bytes apart, to float32, zero-filled up to a whole vector."""

    def body(dtype):
        near = b.icmp_signed("==", stride, ir.Constant(i64, ELEMENT_BYTES[dtype]))
        with b.if_else(near) as (neighbours, apart):
            with neighbours:
                _read(b, dtype, source, target, size)
            with apart:
                _read_scalars(b, dtype, source, stride, target, size)

    _each_dtype(b, code, body)
    _zero_tail(b, target, size)


def _write_scalars(b, dtype, source, target, stride, count):
    def body(i, _):
        from_float(b, dtype, load(b, advance(b, source, i, 4), f32), b.add(target, b.mul(i, stride)))
        return []

    counted(b, count, [], body)


def _write(b, dtype, source, target, size):
    def body(i, _):
        value = load(b, advance(b, source, i, ROW_BYTES), vec(f32))
        from_float(b, dtype, value, advance(b, target, i, W * ELEMENT_BYTES[dtype]))
        return []

    whole = b.and_(size, ir.Constant(i64, -W))
    counted(b, b.sdiv(whole, ir.Constant(i64, W)), [], body)
    width = ir.Constant(i64, ELEMENT_BYTES[dtype])
    rest, to = advance(b, source, whole, 4), b.add(target, b.mul(whole, width))
    _write_scalars(b, dtype, rest, to, width, b.sub(size, whole))


@emits(types.void, A, A, A, A, A)
def write_strided(b, source, target, stride, size, code):
    """``size`` floats rounded to a dtype code, ``stride`` bytes apart. Writes nothing else."""

    def body(dtype):
        near = b.icmp_signed("==", stride, ir.Constant(i64, ELEMENT_BYTES[dtype]))
        with b.if_else(near) as (neighbours, apart):
            with neighbours:
                _write(b, dtype, source, target, size)
            with apart:
                _write_scalars(b, dtype, source, target, stride, size)

    _each_dtype(b, code, body)


@inlined
def bytes_of(dtype):
    """Bytes of an element of a dtype code."""
    return 4 if dtype == P.FLOAT32 else 2
