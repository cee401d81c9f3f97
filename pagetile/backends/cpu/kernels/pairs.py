"""The two products of attention in pairs of bfloat16: by tiles where the machine has them, else by ``vdpbf16ps``.

Rows of queries and of weights are packed bfloat16. Both products come in one shape for any number of rows, so that a
row's bits are the same in every task.
"""

from __future__ import annotations

import numpy as np

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import inlined
from pagetile.backends.cpu.kernels import tiles
from pagetile.backends.cpu.kernels.elements import get_i64, prefetch_rows, put_i64, slot_value
from pagetile.backends.cpu.kernels.products import MAX_ROWS, SCORE_ROWS, accumulate_rows, score_rows
from pagetile.backends.cpu.kernels.softmax import clear_row
from pagetile.backends.cpu.kernels.stage import stage_keys, turn_scores
from pagetile.backends.cpu.kernels.vector import DOT, ROW_BYTES, W
from pagetile.backends.cpu.tuning import CHUNK

PAIRS = np.uint32(0)
"""The tag of pairs, see :data:`pagetile.backends.cpu.kernels.vector.TAGS`."""

BLOCK_KEYS = 32
"""Keys of a product of tiles. Blocks of zero weights change nothing, and are left out."""

WEIGHT_BYTES = CHUNK * 2
"""Of a row of packed weights."""


@inlined
def packed_bytes(size):
    """Of a packed row of ``size`` elements: whole blocks of 32."""
    return (size + 31) // 32 * 64


@inlined
def sum_vectors(size):
    """Vectors of a row of sums: two for each block of 32 elements."""
    return (size + 31) // 32 * (32 // W)


@inlined
def _open_with_tiles(scratch, block, rows):
    short = rows % tiles.TILE_ROWS
    tiles.open_tiles(scratch + slot_value(block, P.A_S_TILES), short if short > 0 else tiles.TILE_ROWS)


@inlined
def _close_with_tiles():
    tiles.close_tiles()


@inlined
def _score_with_tiles(rows, queries, keys, size, scores, score_stride):
    stride, blocks, row = packed_bytes(size), (size + 31) // 32, 0
    while row + tiles.TILE_ROWS <= rows:
        tiles.score_full(queries + row * stride, stride, keys, blocks, scores + row * score_stride, score_stride)
        row += tiles.TILE_ROWS
    if row < rows:
        tiles.score_short(queries + row * stride, stride, keys, blocks, scores + row * score_stride, score_stride)


@inlined
def turn_queries(block, scratch, rows, head):
    """Transpose the packed queries of a head (at most 16), for :func:`score_in_place`."""
    size = slot_value(block, P.A_SIZE)
    stride, addresses = packed_bytes(size), scratch + slot_value(block, P.A_S_TURN)
    packed = scratch + slot_value(block, P.A_S_PACKED) + head * rows * stride
    for row in range(32):
        put_i64(addresses + row * 8, packed + min(row, rows - 1) * stride)
    turned = scratch + slot_value(block, P.A_S_TURNED) + head * stride * 32
    stage_keys(addresses, 0, size, turned, PAIRS)


@inlined
def ask_for_units(addresses, first, count, heads, last, offset, apart, size):
    """Prefetch units ``first`` to ``first + count`` of some rows: a unit is a head of a token, and all heads of a token
    come before the next token. A few units between a few products: more requests than a core can have under way would
    hold up what comes after them."""
    row = first // heads
    head = first - row * heads
    for _ in range(count):
        if row < last:
            prefetch_rows(addresses, row, row + 1, offset + head * apart, size)
        head += 1
        if head == heads:
            head = 0
            row += 1


@inlined
def _may_with_tiles(block, rows):
    return rows <= tiles.TILE_ROWS and slot_value(block, P.A_SIZE) % 32 == 0


@inlined
def _in_place_with_tiles(block, scratch, task, head, keys, values, key, last, rows, scores, score_stride):
    stride, addresses = slot_value(block, P.A_K_TOKEN), keys + key * 8
    for group in (0, 128):
        if get_i64(addresses + group + 120) - get_i64(addresses + group) != 15 * stride:
            return False
    size, tile, heads = (
        slot_value(block, P.A_SIZE),
        scratch + slot_value(block, P.A_S_TURN),
        slot_value(task, P.T_HEADS),
    )
    turned = scratch + slot_value(block, P.A_S_TURNED) + head * packed_bytes(size) * 32
    offset, blocks = (slot_value(task, P.T_HEAD) + head) * slot_value(block, P.A_K_HEAD), size // 32
    place, apart = slot_value(task, P.T_HEAD) * slot_value(block, P.A_V_HEAD), slot_value(block, P.A_V_HEAD)
    for group in range(2):
        here, unit = get_i64(addresses + group * 128) + offset, (key + group * 16) * heads + head * 16
        tiles.begin_keys()
        for part in range(blocks):
            begin, end = part * 16 // blocks, (part + 1) * 16 // blocks
            ask_for_units(values, unit + begin, end - begin, heads, last, place, apart, slot_value(block, P.A_V_BYTES))
            tiles.score_keys(here + part * 64, stride, turned + part * 2048)
        tiles.end_keys(tile)
        turn_scores(tile, scores + group * 64, score_stride, rows)
    return True


@inlined
def _add_with_tiles(rows, weights, values, value_stride, _addresses, blocks, sums, size):
    vectors = sum_vectors(size)
    stride, row = vectors * ROW_BYTES, 0
    while row < rows:
        full, done = row + tiles.TILE_ROWS <= rows, 0
        here, into = weights + row * WEIGHT_BYTES, sums + row * stride
        while done < vectors:
            right, out = values + done * ROW_BYTES, into + done * ROW_BYTES
            if full:
                tiles.add_full(here, WEIGHT_BYTES, right, value_stride, blocks, out, stride)
            else:
                tiles.add_short(here, WEIGHT_BYTES, right, value_stride, blocks, out, stride)
            done += 2
        row += tiles.TILE_ROWS


@inlined
def _may_without_tiles(_block, _rows):
    return False


@inlined
def _in_place_without_tiles(_block, _scratch, _task, _head, _keys, _values, _key, _last, _rows, _scores, _stride):
    return False


@inlined
def _open_without_tiles(_scratch, _block, _rows):
    return


@inlined
def _close_without_tiles():
    return


@inlined
def _score_without_tiles(rows, queries, keys, size, scores, score_stride):
    stride, row = packed_bytes(size), 0
    while row < rows:
        count = min(SCORE_ROWS, rows - row)
        here = scores + row * score_stride
        score_rows(count, queries + row * stride, stride, keys, (size + 1) // 2, here, score_stride, PAIRS)
        row += count


@inlined
def _add_without_tiles(rows, weights, _values, _value_stride, addresses, blocks, sums, size):
    vectors, row = sum_vectors(size), 0
    stride, pairs = vectors * ROW_BYTES, blocks * (BLOCK_KEYS // 2)
    clear_row(sums, rows * vectors)
    while row < rows:
        count = min(MAX_ROWS, rows - row)
        here, into = weights + row * WEIGHT_BYTES, sums + row * stride
        accumulate_rows(count, into, stride, here, WEIGHT_BYTES, addresses, 0, vectors, 0, pairs, PAIRS)
        row += count


open_products = _open_with_tiles if DOT == "amx" else _open_without_tiles
"""Make this thread ready for blocks of up to so many rows; :func:`close_products` when done."""

close_products = _close_with_tiles if DOT == "amx" else _close_without_tiles

may_score_in_place = _may_with_tiles if DOT == "amx" else _may_without_tiles
"""Whether a head with so many rows may have its keys read in place; its queries are then to be turned."""

score_in_place = _in_place_with_tiles if DOT == "amx" else _in_place_without_tiles
"""Scores against 32 keys of a chunk from ``key`` on, if those are evenly apart; whether it was done.

Meanwhile a head's share of their values is asked for, ``last`` being the end of the chunk's keys.
"""

score_packed = _score_with_tiles if DOT == "amx" else _score_without_tiles
"""Scores of packed rows against a staged tile of 32 keys."""

add_packed = _add_with_tiles if DOT == "amx" else _add_without_tiles
"""``sums = weights . values`` of packed rows over blocks of 32 keys, staged as pairs at ``values``, ``value_stride``
apart, or at the addresses of an array."""
