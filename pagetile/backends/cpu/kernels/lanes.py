"""Elements of every storage kind as float32 lanes, and the branches that choose a kind while a kernel runs.

Eight-bit kinds become float32 by integers and one exact multiplication; what they are scaled by is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.kernels.elements import from_float, to_float
from pagetile.backends.cpu.kernels.vector import (
    ELEMENT_BYTES,
    W,
    advance,
    constant,
    counted,
    emits,
    f32,
    i8,
    i32,
    i64,
    load,
    splat,
    vec,
)

A = types.int64

KINDS = {**P.DTYPE_CODES, **{kind: 8 + code for kind, code in P.KIND_CODES.items()}}
"""Codes of what a cache holds: those of the dtypes, and from 8 on those of the quantised kinds."""

_FP8 = {"fp8_e4m3": (20, 2.0**120, 0x7F), "fp8_e5m2": (21, 2.0**112, 0x7C)}
"""Place of the last mantissa bit in float32, what moves the exponent, and the first magnitude that is not finite."""


def bytes_of_kind(kind: str) -> int:
    """Bytes of an element."""
    return ELEMENT_BYTES.get(kind, 1)


def lanes(b: ir.IRBuilder, kind: str, address: ir.Value, count: int) -> ir.Value:
    """``count`` neighbours of a kind, exactly, as float32."""
    if kind in ELEMENT_BYTES:
        return to_float(b, kind, address, count=count)
    wide, real = vec(i32, count), vec(f32, count)
    stored = load(b, address, vec(i8, count))
    if kind == "int8":
        return b.sitofp(b.sext(stored, wide), real)
    shift, power, special = _FP8[kind]
    bits = b.zext(stored, wide)
    sign = b.shl(b.and_(bits, constant(0x80, wide)), constant(24, wide))
    rest = b.and_(bits, constant(0x7F, wide))
    moved = b.shl(rest, constant(shift, wide))
    finite = b.bitcast(b.fmul(b.bitcast(moved, real), constant(power, real)), wide)
    # e4m3 has no infinity: its one special magnitude is NaN, as are those of e5m2 above its infinity.
    beyond = b.or_(moved, constant(0x7FC00000 if kind == "fp8_e4m3" else 0x7F800000, wide))
    value = b.select(b.icmp_unsigned(">=", rest, constant(special, wide)), beyond, finite)
    return b.bitcast(b.or_(value, sign), real)


def choose(b: ir.IRBuilder, code: ir.Value, codes: dict[str, int], body: Callable[[str], None]) -> None:
    """Run ``body(name)`` for the name whose code this is."""
    done = b.append_basic_block("chosen")
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
def dequantise_span(b, source, target, size, kind_code, dtype_code, scale):
    """``size`` neighbours of a quantised kind, times ``scale``, rounded to a dtype. Writes nothing else."""
    whole = b.and_(size, ir.Constant(i64, -W))

    def convert(kind: str, dtype: str) -> None:
        def piece(count: int, first: ir.Value):
            def body(i, _):
                at = b.add(first, b.mul(i, ir.Constant(i64, count)))
                value = lanes(b, kind, b.add(source, at), count)
                value = b.fmul(value, splat(b, scale, count) if count > 1 else scale)
                from_float(b, dtype, value, advance(b, target, at, ELEMENT_BYTES[dtype]))
                return []

            return body

        counted(b, b.sdiv(size, ir.Constant(i64, W)), [], piece(W, ir.Constant(i64, 0)))
        counted(b, b.sub(size, whole), [], piece(1, whole))

    kinds = {kind: KINDS[kind] for kind in P.KIND_CODES}
    choose(b, kind_code, kinds, lambda kind: choose(b, dtype_code, P.DTYPE_CODES, lambda d: convert(kind, d)))


TAGS = {
    types.float32: "float32",
    types.int16: "bfloat16",
    types.uint16: "float16",
    types.uint8: "fp8_e4m3",
    types.uint32: "fp8_e5m2",
    types.int8: "int8",
}
"""A kernel's storage kind is chosen by the *type* of a dummy argument: numba specialises on it."""

TAG_OF = {
    "float32": np.float32(0),
    "bfloat16": np.int16(0),
    "float16": np.uint16(0),
    "fp8_e4m3": np.uint8(0),
    "fp8_e5m2": np.uint32(0),
    "int8": np.int8(0),
}
"""The dummies."""


def emits_of_kind(result, *arguments) -> Callable:
    """Like :func:`~pagetile.backends.cpu.kernels.vector.emits`, for ``emit(builder, kind, *values)``.

    What numba code calls takes one more argument at the end, a dummy of :data:`TAG_OF`.
    """

    def decorate(emit: Callable):
        def define(_typing_context, *given):
            kind = TAGS[given[-1]]

            def codegen(context, builder, _signature, values):
                out = emit(builder, kind, *values[: len(arguments)])
                return context.get_dummy_value() if out is None else out

            return result(*arguments, given[-1]), codegen

        # Numba binds calls by the signature it sees: positional names instead of *given.
        names = ["typing_context", *(f"a{i}" for i in range(len(arguments) + 1))]
        define.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        define.__name__ = define.__qualname__ = emit.__name__
        define.__doc__ = emit.__doc__
        return intrinsic(define)

    return decorate
