"""Rows of the cache, brought into the form that the products want, a few keys at a time.

Keys are transposed: *elements* down, *keys* across, so that a score is a lane and nothing is summed across lanes.
Values stay rows; for products of pairs, two neighbouring keys are interleaved into one row of words.

Reads exactly the rows it is given addresses of, and nothing past their ends.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from pagetile.backends.cpu.jit import inlined
from pagetile.backends.cpu.kernels.elements import get_i64, read_row, stored_type, to_float, widen
from pagetile.backends.cpu.kernels.vector import (
    ELEMENT_BYTES,
    ROW_BYTES,
    W,
    advance,
    constant,
    counted,
    emits,
    f32,
    i16,
    i32,
    i64,
    load,
    load_some,
    shuffle,
    store,
    transposed,
    vec,
)

A = types.int64

_PAIR = 2 * W
"""Elements of a row that one vector of pairs takes; ``W`` of anything else."""


def _whole(b, dtype, address):
    """A vector of a row: floats, or words of two elements."""
    if dtype == "pairs":
        return load(b, address, vec(i32))
    return to_float(b, dtype, address)


def _part(b, dtype, address, count):
    """The first ``count`` elements of such a vector, zeros after them."""
    if dtype == "pairs":
        return b.bitcast(load_some(b, address, vec(i16, 2 * W), count), vec(i32))
    if dtype == "float32":
        return load_some(b, address, vec(f32), count)
    return widen(b, dtype, load_some(b, address, vec(stored_type(dtype)), count))


def _loaded_transposed(b, rows, quarters: int = W // 4):
    """``W`` words (or the first quarters) of each of ``W`` rows, transposed. Quarters of four words are loaded into
    place, which leaves only shuffles within quarters: half of what whole vectors would take."""
    out = [None] * 4 * quarters
    for quarter in range(quarters):
        joined = []
        for first in range(4):
            parts = [load(b, rows[first + 4 * lane], vec(i32, 4), 16 * quarter) for lane in range(W // 4)]
            while len(parts) > 1:
                width = 2 * parts[0].type.count
                parts = [shuffle(b, x, y, range(width)) for x, y in zip(parts[::2], parts[1::2], strict=True)]
            joined.append(parts[0])
        # Lane group g of joined[r] holds four words of row r + 4 g: transpose each group.
        spread = [(lane // 4 * 4) for lane in range(W)]
        low = [g + (0, W, 1, W + 1)[lane % 4] for lane, g in enumerate(spread)]
        high = [g + (2, W + 2, 3, W + 3)[lane % 4] for lane, g in enumerate(spread)]
        x02, x13 = (
            (shuffle(b, joined[0], joined[2], low), shuffle(b, joined[0], joined[2], high)),
            (shuffle(b, joined[1], joined[3], low), shuffle(b, joined[1], joined[3], high)),
        )
        for half in range(2):
            out[4 * quarter + 2 * half] = shuffle(b, x02[half], x13[half], low)
            out[4 * quarter + 2 * half + 1] = shuffle(b, x02[half], x13[half], high)
    return out


@emits(types.void, A, A, A, A, tagged=True)
def stage_keys(b, dtype, addresses, offset, size, target):
    """A tile of ``2 W`` keys, transposed: for each element (or pair) a row of ``2 W`` words at ``target``."""
    step, element = _PAIR if dtype == "pairs" else W, 2 if dtype == "pairs" else ELEMENT_BYTES[dtype]
    whole = b.sdiv(size, ir.Constant(i64, step))
    rest = b.sub(size, b.mul(whole, ir.Constant(i64, step)))

    def group(half, _):
        here = advance(b, addresses, half, 8 * W)
        rows = [b.add(load(b, here, i64, 8 * t), offset) for t in range(W)]
        place = advance(b, target, half, ROW_BYTES)

        def put(index, vectors):
            out = advance(b, place, index, W * 2 * ROW_BYTES)
            for i, value in enumerate(transposed(b, vectors)):
                store(b, value, out, i * 2 * ROW_BYTES)

        def full(i, _):
            if dtype in ("float32", "pairs") and W > 4:
                out = advance(b, place, i, W * 2 * ROW_BYTES)
                for n, value in enumerate(_loaded_transposed(b, [advance(b, row, i, ROW_BYTES) for row in rows])):
                    store(b, value, out, n * 2 * ROW_BYTES)
            else:
                put(i, [_whole(b, dtype, advance(b, row, i, step * element)) for row in rows])
            return []

        def tail(_i, _):
            put(whole, [_part(b, dtype, advance(b, row, whole, step * element), rest) for row in rows])
            return []

        counted(b, whole, [], full)
        counted(b, b.zext(b.icmp_signed(">", rest, ir.Constant(i64, 0)), i64), [], tail)
        return []

    counted(b, ir.Constant(i64, 2), [], group)


_UNPACKED = [[8 * lane + 4 * half + i for lane in range(W // 4) for i in range(4)] for half in range(2)]
"""The elements of a row that the two vectors of a staged pair hold: what one unpacking instruction makes of them."""


@emits(A, A, A, A, A)
def stage_pair(b, first, second, size, target):
    """Rows of two bfloat16 keys, interleaved into ``size`` words (zeros up to a multiple of ``2 W``), in the order of
    ``_UNPACKED``, which :func:`reorder_row` undoes in the end.

    Returns 0 if all of them are finite.
    """
    step = 2 * W
    whole = b.sdiv(size, ir.Constant(i64, step))
    rest = b.sub(size, b.mul(whole, ir.Constant(i64, step)))
    of = vec(i16, step)
    largest = constant(0, of)

    def put(index, x, y, now):
        out = advance(b, target, index, 2 * ROW_BYTES)
        for half in range(2):
            lanes = [lane for i in _UNPACKED[half] for lane in (i, step + i)]
            store(b, shuffle(b, x, y, lanes), out, half * ROW_BYTES)
        for value in (x, y):
            magnitude = b.and_(value, constant(0x7FFF, of))
            now = b.select(b.icmp_unsigned(">", magnitude, now), magnitude, now)
        return [now]

    def full(i, now):
        x, y = (load(b, advance(b, row, i, 2 * step), of) for row in (first, second))
        return put(i, x, y, now[0])

    def tail(_i, now):
        x, y = (load_some(b, advance(b, row, whole, 2 * step), of, rest) for row in (first, second))
        return put(whole, x, y, now[0])

    now = counted(b, whole, [largest], full)
    (largest,) = counted(b, b.zext(b.icmp_signed(">", rest, ir.Constant(i64, 0)), i64), now, tail)
    bad = b.icmp_unsigned(">=", largest, constant(0x7F80, of))
    return b.zext(b.bitcast(bad, ir.IntType(step)), i64) if step < 64 else b.bitcast(bad, i64)


@emits(types.void, A, A)
def reorder_row(b, row, vectors):
    """Sums over staged pairs, put into the order of the values' elements; an even number of vectors."""
    order = _UNPACKED[0] + _UNPACKED[1]
    place = [order.index(element) for element in range(2 * W)]

    def body(i, _):
        here = advance(b, row, i, 2 * ROW_BYTES)
        x, y = (load(b, here, vec(f32), half * ROW_BYTES) for half in range(2))
        for half in range(2):
            store(b, shuffle(b, x, y, place[half * W : half * W + W]), here, half * ROW_BYTES)
        return []

    counted(b, b.sdiv(vectors, ir.Constant(i64, 2)), [], body)


@emits(types.void, A, A, A, A)
def turn_scores(b, tile, scores, score_stride, rows):
    """Columns of a tile of ``W`` keys x ``W`` queries to rows of scores, four at a time: up to three too many."""

    def body(i, _):
        columns = [b.add(advance(b, tile, i, 16), ir.Constant(i64, key * ROW_BYTES)) for key in range(W)]
        for n, value in enumerate(_loaded_transposed(b, columns, quarters=1)):
            row = b.add(b.mul(i, ir.Constant(i64, 4)), ir.Constant(i64, n))
            store(b, value, b.add(scores, b.mul(row, score_stride)))
        return []

    counted(b, b.sdiv(b.add(rows, ir.Constant(i64, 3)), ir.Constant(i64, 4)), [], body)


@inlined
def stage_values(addresses, offset, first, last, size, target, stride, tag):
    """Rows ``[first, last)`` as contiguous float32, zero-padded to whole vectors."""
    for key in range(first, last):
        read_row(get_i64(addresses + key * 8) + offset, target + key * stride, size, tag)
