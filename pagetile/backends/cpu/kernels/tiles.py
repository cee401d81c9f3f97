"""Products of bfloat16 pairs by tiles (AMX): sixteen rows by sixteen columns of sums at once.

Eight tile registers of 16 rows x 64 bytes, laid out by :func:`open_tiles`: a full left operand and its two sums, the
same with as many rows as the last, shorter block of a task has, and two right operands.

A sum adds the products of 32 elements at a time, even ones and odd ones apart, in the order that the instruction
fixes; which row of a tile it stands in changes nothing. Subnormal numbers count as 0.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from pagetile.backends.cpu.kernels.vector import advance, at, call, counted, emits, i8, i64, store

A = types.int64

TILE_ROWS = 16
_BYTES = 64  # of a row of a tile, and of a configuration
_LEFT, _SUMS = (2, 5), ((0, 1), (3, 4))  # by whether the block is a short one
_RIGHT = (6, 7)


def _tile(b, name: str, *arguments) -> None:
    values = [ir.Constant(i8, a) if isinstance(a, int) else a for a in arguments]
    call(b, f"llvm.x86.{name}", *values, result=ir.VoidType())


def _load(b, tile: int, address: ir.Value, stride: ir.Value) -> None:
    _tile(b, "tileloadd64", tile, at(b, address, i8), stride)


def _multiply(b, short: int) -> None:
    for n in range(2):
        _tile(b, "tdpbf16ps", _SUMS[short][n], _LEFT[short], _RIGHT[n])


@emits(types.void, A, A)
def open_tiles(b, memory, short):
    """Configure this thread's tiles; ``short`` is the number of rows (1 to 16) of a short block."""
    rows = b.or_(b.shl(b.mul(short, ir.Constant(i64, 0x010101)), ir.Constant(i64, 24)), ir.Constant(i64, 0x101010))
    rows = b.or_(rows, ir.Constant(i64, 0x1010 << 48))
    width = ir.Constant(i64, _BYTES * 0x0001000100010001)
    zero = ir.Constant(i64, 0)
    for index, word in enumerate((ir.Constant(i64, 1), zero, width, width, zero, zero, rows, zero)):
        store(b, word, memory, 8 * index)
    _tile(b, "ldtilecfg", at(b, memory, i8))


@emits(types.void)
def close_tiles(b):
    _tile(b, "tilerelease")


def _score(short: int):
    @emits(types.void, *[A] * 6)
    def score(b, queries, query_stride, keys, blocks, scores, score_stride):
        """Scores of up to 16 rows against a staged tile of 32 keys, 32 elements a block."""
        stride = ir.Constant(i64, 2 * _BYTES)
        for n in range(2):
            _tile(b, "tilezero", _SUMS[short][n])

        def body(i, _):
            _load(b, _LEFT[short], advance(b, queries, i, _BYTES), query_stride)
            right = advance(b, keys, i, TILE_ROWS * 2 * _BYTES)
            for n in range(2):
                _load(b, _RIGHT[n], b.add(right, ir.Constant(i64, n * _BYTES)), stride)
            _multiply(b, short)
            return []

        counted(b, blocks, [], body)
        for n in range(2):
            place = at(b, scores, i8, n * _BYTES)
            _tile(b, "tilestored64", _SUMS[short][n], place, score_stride)

    return score


@emits(types.void)
def begin_keys(b):
    """Scores of 16 keys, read where they are, as rows, against up to 16 transposed queries, as columns: the sums.

    The same products and sums as of a tile of queries and transposed keys, so the same bits.
    """
    _tile(b, "tilezero", 0)


@emits(types.void, A, A, A)
def score_keys(b, keys, key_stride, queries):
    """32 elements more."""
    _load(b, _LEFT[0], keys, key_stride)
    _load(b, _RIGHT[0], queries, ir.Constant(i64, 2 * _BYTES))
    _tile(b, "tdpbf16ps", 0, _LEFT[0], _RIGHT[0])


@emits(types.void, A)
def end_keys(b, target):
    """The sums, a row a key."""
    _tile(b, "tilestored64", 0, at(b, target, i8), ir.Constant(i64, _BYTES))


def _add(short: int):
    @emits(types.void, *[A] * 7)
    def add(b, weights, weight_stride, values, value_stride, blocks, sums, sum_stride):
        """The sums of up to 16 rows of weights over blocks of 32 keys: 32 elements of each."""
        for n in range(2):
            _tile(b, "tilezero", _SUMS[short][n])

        def body(i, _):
            _load(b, _LEFT[short], advance(b, weights, i, _BYTES), weight_stride)
            right = b.add(values, b.mul(b.mul(i, value_stride), ir.Constant(i64, TILE_ROWS)))
            for n in range(2):
                _load(b, _RIGHT[n], b.add(right, ir.Constant(i64, n * _BYTES)), value_stride)
            _multiply(b, short)
            return []

        counted(b, blocks, [], body)
        for n in range(2):
            _tile(b, "tilestored64", _SUMS[short][n], at(b, sums, i8, n * _BYTES), sum_stride)

    return add


score_full, score_short = _score(0), _score(1)
add_full, add_short = _add(0), _add(1)
