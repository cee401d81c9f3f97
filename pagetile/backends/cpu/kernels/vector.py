"""Explicit vectors for numba: loads, stores and arithmetic on ``W`` floats, emitted as LLVM instructions.

Numba has no vector type, and the loops it leaves to LLVM's vectoriser may not reassociate a sum. So the inner loops of
this backend are *emitted*: a Python function receives an ``IRBuilder`` and the values of its arguments and appends
instructions; :func:`emits` turns it into something that numba code can call. Loops inside are :func:`counted`.

Addresses are 64-bit integers throughout. Loads and stores assume no alignment beyond a byte: on today's CPUs an
unaligned access inside one cache line costs nothing, and views may start anywhere.

Order of arithmetic is a contract, not an accident: a dot product has one accumulator per lane, and its lanes are
added in one fixed tree (:func:`sum_lanes`), whatever register block it was computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagetile.backends.cpu.isa import host_isa

W = host_isa().width
"""Floats in a vector."""

DOT = host_isa().dot
"""What multiplies bfloat16, see :mod:`pagetile.backends.cpu.isa`."""

ROW_BYTES = 4 * W
"""Bytes of a vector of floats."""

i1, i8, i16, i32, i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
f16, f32, f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for; only intrinsics are given it."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


bf16 = _Bfloat()

TAGS = {
    types.float32: "float32",
    types.int16: "bfloat16",
    types.uint16: "float16",
    types.uint32: "pairs",
    types.uint8: "fp8_e4m3",
    types.int32: "fp8_e5m2",
    types.int8: "int8",
}
"""A kernel's element dtype is chosen by the *type* of a dummy argument: numba specialises on it. ``pairs`` are two
neighbouring bfloat16 in one word, which a ``dot`` of :mod:`pagetile.backends.cpu.isa` multiplies and adds at once."""

ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "pairs": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}


def emits(result, *arguments, tagged: bool = False) -> Callable:
    """Decorator: ``emit(builder, *values)`` becomes callable from numba code with the signature given.

    With ``tagged``, the call takes one more argument at the end, a dummy whose type names an element dtype, and
    ``emit(builder, dtype, *values)`` gets that name.
    """

    def decorate(emit: Callable):
        def define(_typing_context, *given):
            if len(given) != len(arguments) + tagged:
                raise TypeError(f"{emit.__name__} takes {len(arguments) + tagged} arguments, got {len(given)}")
            dtype = (TAGS[given[-1]],) if tagged else ()
            signature = result(*arguments, *given[len(arguments) :])

            def codegen(context, builder, _signature, values):
                out = emit(builder, *dtype, *values[: len(arguments)])
                return context.get_dummy_value() if out is None else out

            return signature, codegen

        # Numba binds calls by the signature it sees: positional names instead of *given.
        names = ["typing_context", *(f"a{i}" for i in range(len(arguments) + tagged))]
        define.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        define.__name__ = define.__qualname__ = emit.__name__
        define.__doc__ = emit.__doc__
        return intrinsic(define)

    return decorate


def calls(arguments: int) -> Callable:
    """A function that numba code calls as ``f(address, a, b, ...)``: a kernel of that many int64s, by its address."""

    def call_address(b, address, *values):
        b.call(b.inttoptr(address, ir.FunctionType(ir.VoidType(), [i64] * arguments).as_pointer()), values)

    return emits(types.void, *[types.int64] * (arguments + 1))(call_address)


def vec(element: ir.Type, count: int = 0) -> ir.Type:
    """A vector type of ``count`` elements, ``W`` by default; one element is a scalar."""
    count = count or W
    return element if count == 1 else ir.VectorType(element, count)


def constant(value: float | int, of: ir.Type) -> ir.Constant:
    """The constant in every lane."""
    return ir.Constant(of, [value] * of.count if isinstance(of, ir.VectorType) else value)


def splat(b: ir.IRBuilder, scalar: ir.Value, count: int = 0) -> ir.Value:
    """The scalar in every lane."""
    of = vec(scalar.type, count)
    undefined = ir.Constant(of, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(i32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(i32, of.count), [0] * of.count))


def at(b: ir.IRBuilder, address: ir.Value, of: ir.Type, offset: int = 0) -> ir.Value:
    """Pointer to an ``of`` that lies ``offset`` bytes after the address."""
    if offset:
        address = b.add(address, ir.Constant(i64, offset))
    return b.inttoptr(address, of.as_pointer())


def load(b: ir.IRBuilder, address: ir.Value, of: ir.Type, offset: int = 0) -> ir.Value:
    return b.load(at(b, address, of, offset), align=1)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
    b.store(value, at(b, address, value.type, offset), align=1)


def load_some(b: ir.IRBuilder, address: ir.Value, of: ir.VectorType, count: ir.Value) -> ir.Value:
    """The first ``count`` elements of a vector, zeros after them; nothing past those is read."""
    lanes = ir.Constant(ir.VectorType(i32, of.count), list(range(of.count)))
    mask = b.icmp_signed("<", lanes, splat(b, b.trunc(count, i32), of.count))
    name = f"llvm.masked.load.v{of.count}{of.element.intrinsic_name}.p0"
    return call(b, name, at(b, address, of), ir.Constant(i32, 1), mask, constant(0, of), result=of)


def advance(b: ir.IRBuilder, address: ir.Value, index: ir.Value, size: int) -> ir.Value:
    """``address + index * size``."""
    return b.add(address, b.mul(index, ir.Constant(i64, size)))


def call(b: ir.IRBuilder, name: str, *values: ir.Value, result: ir.Type | None = None) -> ir.Value:
    """Call an LLVM intrinsic, declared on first use in the module."""
    of = result or values[0].type
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(of, [v.type for v in values]), name)
    return b.call(function, values)


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """``x * y + z`` rounded once."""
    suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
    return call(b, f"llvm.fma.{suffix}", x, y, z)


def multiply_add(b: ir.IRBuilder, dtype: str, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """``x * y + z`` of floats; of ``pairs``, both products of each lane are added to it."""
    if dtype != "pairs":
        return fma(b, x, y, z)
    of = vec(bf16, 2 * W)
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", z, b.bitcast(x, of), b.bitcast(y, of))


def rounded_pairs(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """A vector of floats rounded to bfloat16, to the nearest even; subnormal ones become 0."""
    narrow = call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", x, result=vec(bf16))
    return b.bitcast(narrow, vec(i16))


def shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(i32, len(lanes)), list(lanes)))


def counted(b: ir.IRBuilder, count: ir.Value, carried: Sequence[ir.Value], body: Callable) -> list[ir.Value]:
    """``for i in range(count): carried = body(i, carried)``; returns what is carried at the end. ``count`` may be 0."""
    entry, head = b.block, b.append_basic_block("head")
    inside, done = b.append_basic_block("body"), b.append_basic_block("done")
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(i64)
    i.add_incoming(ir.Constant(i64, 0), entry)
    phis = [b.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, entry)
    b.cbranch(b.icmp_signed("<", i, count), inside, done)
    b.position_at_end(inside)
    new = body(i, phis)
    i.add_incoming(b.add(i, ir.Constant(i64, 1)), b.block)
    for phi, value in zip(phis, new, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(done)
    return phis


def _pair_lanes(step: int) -> tuple[list[int], list[int]]:
    """Lanes of two vectors x, y that bring ``step``-wide neighbours of each opposite one another."""
    low, high = [], []
    for start in range(0, W, 2 * step):
        for base in (start, W + start):
            low += [base + j for j in range(step)]
            high += [base + step + j for j in range(step)]
    return low, high


def sum_lanes(b: ir.IRBuilder, sums: Sequence[ir.Value]) -> ir.Value:
    """The lane sums of up to ``W`` vectors: lane i of the result is the sum of the lanes of ``sums[i]``.

    Every vector is summed in the same tree, neighbours first: ``((l0 + l1) + (l2 + l3)) + ...``, so a sum does not
    depend on how many others are taken along.
    """
    vectors, step = list(sums), 1
    while step < W:
        low, high = _pair_lanes(step)
        if len(vectors) % 2:
            vectors.append(vectors[-1])
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [b.fadd(shuffle(b, x, y, low), shuffle(b, x, y, high)) for x, y in pairs]
        step *= 2
    return vectors[0]


def transposed(b: ir.IRBuilder, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """``W`` vectors of ``W`` lanes, rows and lanes exchanged."""
    now, step = list(rows), 1
    while step < W:
        low, high = _pair_lanes(step)
        for i in range(W):
            if not i & step:
                x, y = now[i], now[i + step]
                now[i], now[i + step] = shuffle(b, x, y, low), shuffle(b, x, y, high)
        step *= 2
    return now


def fold_lanes(b: ir.IRBuilder, x: ir.Value, combine: Callable) -> ir.Value:
    """``combine`` over all lanes, neighbours first; a scalar."""
    step = 1
    while step < W:
        x = combine(x, shuffle(b, x, x, [lane ^ step for lane in range(W)]))
        step *= 2
    return b.extract_element(x, ir.Constant(i32, 0))
