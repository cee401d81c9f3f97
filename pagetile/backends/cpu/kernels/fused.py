"""Fused write, the kernel: norm and rotation of each query and key head, then its row or its slot.

A head is read to float32, normalised, rotated and rounded once to its dtype; what is stored is made of those rounded
elements, so a quantised cache holds the bytes of a write. Without a norm the results are the bits of the reference.

Reads queries, keys, values and the rotary rows of their positions; writes the rotated queries, the slots that are 0 or
more, and the rotated keys where somebody wants them.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types

from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.elements import (
    get_f32,
    get_f64,
    index_at,
    read_strided,
    slot_value,
    take_ticket,
    vectors_of,
    write_strided,
)
from pagetile.backends.cpu.kernels.quantise import quantise_span
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
    i64,
    load,
    splat,
    store,
    vec,
)
from pagetile.backends.cpu.kernels.write import copy_span

A = types.int64

(   # slots of the parameter block
    TICKET, WORKER, CHUNK, COUNT,                  # next chunk and worker; rows a chunk; rows of the queries
    NUM_SLOTS, SLOTS_AT, SLOTS_STEP, SLOTS_WIDE, BLOCK_SIZE,
    POSITIONS, POSITIONS_STEP, POSITIONS_WIDE,
    COS, COS_ROW, SIN, SIN_ROW, TABLE, TABLE_BYTES, HALF, INTERLEAVED,  # TABLE: code of the tables' dtype
    NORM, WEIGHT, WEIGHT_BYTES, EPS_F,             # whether there is a norm; code of the weights' dtype
    DTYPE, BYTES, KIND,                            # code and size of an element; code of a quantised kind, or -1
    SCRATCH, SCRATCH_BYTES,                        # a worker's share
    S_ROW, S_COS, S_SIN, S_Q_WEIGHT, S_K_WEIGHT, S_ROUNDED,  # offsets in it
    Q_HEADS, KV_HEADS, SIZE, SIZE_V,
    Q, Q_ROW, Q_HEAD, Q_OUT, Q_OUT_ROW, Q_OUT_HEAD, Q_WEIGHT,
    K, K_ROW, K_HEAD, K_OUT, K_OUT_ROW, K_OUT_HEAD, K_WEIGHT,  # K_OUT 0: nobody wants them
    V, V_ROW, V_HEAD,
    K_CACHE, K_CACHE_BLOCK, K_CACHE_TOKEN, K_CACHE_HEAD, K_SCALE, K_SCALE_HEAD,
    V_CACHE, V_CACHE_BLOCK, V_CACHE_TOKEN, V_CACHE_HEAD, V_SCALE, V_SCALE_HEAD,
    SLOTS,
) = range(69)  # fmt: skip

_ONE = np.float32(1)


@emits(types.float32, A, A)
def sum_of_squares(b, row, vectors):
    def body(i, carried):
        x = load(b, advance(b, row, i, ROW_BYTES), vec(f32))
        return [fma(b, x, x, carried[0])]

    (total,) = counted(b, vectors, [constant(0.0, vec(f32))], body)
    return fold_lanes(b, total, lambda x, y: b.fadd(x, y))


@emits(types.void, A, A, A, types.float32)
def scale_row(b, row, weight, vectors, factor):
    """``row * factor * weight`` in place."""

    def body(i, _):
        at = advance(b, row, i, ROW_BYTES)
        x = b.fmul(load(b, at, vec(f32)), splat(b, factor))
        store(b, b.fmul(x, load(b, advance(b, weight, i, ROW_BYTES), vec(f32))), at)
        return []

    counted(b, vectors, [], body)


def _turn(b, first, second, cos, sin, count):
    """Turn ``count`` pairs: at ``first`` the one channel of each, at ``second`` the other."""
    x, y = (load(b, at, vec(f32, count)) for at in (first, second))
    c, s = (load(b, at, vec(f32, count)) for at in (cos, sin))
    store(b, b.fsub(b.fmul(x, c), b.fmul(y, s)), first)
    store(b, b.fadd(b.fmul(y, c), b.fmul(x, s)), second)


@emits(types.void, A, A, A, A)
def rotate_halves(b, row, cos, sin, half):
    """Channel i with ``i + half``, in place."""
    other = advance(b, row, half, 4)
    whole = b.and_(half, ir.Constant(i64, -W))

    def piece(count, start):
        def body(i, _):
            at = b.add(start, b.mul(i, ir.Constant(i64, count)))
            _turn(b, *(advance(b, base, at, 4) for base in (row, other, cos, sin)), count)
            return []

        return body

    counted(b, b.sdiv(half, ir.Constant(i64, W)), [], piece(W, ir.Constant(i64, 0)))
    counted(b, b.sub(half, whole), [], piece(1, whole))


@emits(types.void, A, A, A, A)
def rotate_neighbours(b, row, cos, sin, half):
    """Channel 2 i with ``2 i + 1``, in place."""

    def body(i, _):
        first = advance(b, row, i, 8)
        _turn(b, first, b.add(first, ir.Constant(i64, 4)), advance(b, cos, i, 4), advance(b, sin, i, 4), 1)
        return []

    counted(b, half, [], body)


@inlined
def _turn_head(block, scratch, source, weight):
    """A head, normalised and rotated, as float32 in scratch; its address."""
    row, size = scratch + slot_value(block, S_ROW), slot_value(block, SIZE)
    read_strided(source, slot_value(block, BYTES), row, size, slot_value(block, DTYPE))
    if slot_value(block, NORM):
        mean = sum_of_squares(row, vectors_of(size)) / np.float32(size)
        factor = _ONE / np.float32(math.sqrt(mean + get_f64(block + EPS_F * 8)))
        scale_row(row, scratch + weight, vectors_of(size), factor)
    cos, sin, half = scratch + slot_value(block, S_COS), scratch + slot_value(block, S_SIN), slot_value(block, HALF)
    if slot_value(block, INTERLEAVED):
        rotate_neighbours(row, cos, sin, half)
    else:
        rotate_halves(row, cos, sin, half)
    return row


@inlined
def _keep(block, source, target, size, scale):
    """Rounded elements to where they are stored: as bytes, or quantised."""
    kind = slot_value(block, KIND)
    if kind < 0:
        copy_span(source, target, size * slot_value(block, BYTES))
    else:
        quantise_span(source, target, size, slot_value(block, DTYPE), kind, get_f32(scale))


@inlined
def _read_tables(block, scratch, token):
    positions, wide = slot_value(block, POSITIONS), slot_value(block, POSITIONS_WIDE)
    position = index_at(positions + token * slot_value(block, POSITIONS_STEP), 0, wide)
    half, code, size = slot_value(block, HALF), slot_value(block, TABLE), slot_value(block, TABLE_BYTES)
    cos = slot_value(block, COS) + position * slot_value(block, COS_ROW)
    sin = slot_value(block, SIN) + position * slot_value(block, SIN_ROW)
    read_strided(cos, size, scratch + slot_value(block, S_COS), half, code)
    read_strided(sin, size, scratch + slot_value(block, S_SIN), half, code)


@inlined
def _write_queries(block, scratch, token):
    source = slot_value(block, Q) + token * slot_value(block, Q_ROW)
    target = slot_value(block, Q_OUT) + token * slot_value(block, Q_OUT_ROW)
    weight, size, dtype = slot_value(block, S_Q_WEIGHT), slot_value(block, SIZE), slot_value(block, DTYPE)
    for head in range(slot_value(block, Q_HEADS)):
        row = _turn_head(block, scratch, source + head * slot_value(block, Q_HEAD), weight)
        write_strided(row, target + head * slot_value(block, Q_OUT_HEAD), slot_value(block, BYTES), size, dtype)


@inlined
def _slot(block, token):
    if token >= slot_value(block, NUM_SLOTS):
        return -1
    at = slot_value(block, SLOTS_AT) + token * slot_value(block, SLOTS_STEP)
    return index_at(at, 0, slot_value(block, SLOTS_WIDE))


@inlined
def _write_keys(block, scratch, token, slot):
    size, dtype, rounded = slot_value(block, SIZE), slot_value(block, DTYPE), scratch + slot_value(block, S_ROUNDED)
    home = slot // slot_value(block, BLOCK_SIZE)
    offset = slot - home * slot_value(block, BLOCK_SIZE)
    source = slot_value(block, K) + token * slot_value(block, K_ROW)
    target = slot_value(block, K_CACHE) + home * slot_value(block, K_CACHE_BLOCK)
    target += offset * slot_value(block, K_CACHE_TOKEN)
    for head in range(slot_value(block, KV_HEADS)):
        row = _turn_head(block, scratch, source + head * slot_value(block, K_HEAD), slot_value(block, S_K_WEIGHT))
        write_strided(row, rounded, slot_value(block, BYTES), size, dtype)
        if slot_value(block, K_OUT):
            out = slot_value(block, K_OUT) + token * slot_value(block, K_OUT_ROW)
            copy_span(rounded, out + head * slot_value(block, K_OUT_HEAD), size * slot_value(block, BYTES))
        if slot >= 0:
            scale = slot_value(block, K_SCALE) + head * slot_value(block, K_SCALE_HEAD)
            _keep(block, rounded, target + head * slot_value(block, K_CACHE_HEAD), size, scale)


@inlined
def _write_values(block, token, slot):
    home = slot // slot_value(block, BLOCK_SIZE)
    offset = slot - home * slot_value(block, BLOCK_SIZE)
    source = slot_value(block, V) + token * slot_value(block, V_ROW)
    target = slot_value(block, V_CACHE) + home * slot_value(block, V_CACHE_BLOCK)
    target += offset * slot_value(block, V_CACHE_TOKEN)
    for head in range(slot_value(block, KV_HEADS)):
        scale = slot_value(block, V_SCALE) + head * slot_value(block, V_SCALE_HEAD)
        start, end = source + head * slot_value(block, V_HEAD), target + head * slot_value(block, V_CACHE_HEAD)
        _keep(block, start, end, slot_value(block, SIZE_V), scale)


def fused_chunks(block):
    """Take chunks of tokens until there is none."""
    worker = take_ticket(block + WORKER * 8)
    scratch = slot_value(block, SCRATCH) + worker * slot_value(block, SCRATCH_BYTES)
    if slot_value(block, NORM):
        size, code, each = slot_value(block, SIZE), slot_value(block, WEIGHT), slot_value(block, WEIGHT_BYTES)
        read_strided(slot_value(block, Q_WEIGHT), each, scratch + slot_value(block, S_Q_WEIGHT), size, code)
        read_strided(slot_value(block, K_WEIGHT), each, scratch + slot_value(block, S_K_WEIGHT), size, code)
    chunk, count = slot_value(block, CHUNK), slot_value(block, COUNT)
    while True:
        first = take_ticket(block + TICKET * 8) * chunk
        if first >= count:
            break
        for token in range(first, min(count, first + chunk)):
            _read_tables(block, scratch, token)
            _write_queries(block, scratch, token)
            slot = _slot(block, token)
            if slot >= 0 or slot_value(block, K_OUT):
                _write_keys(block, scratch, token, slot)
            if slot >= 0:
                _write_values(block, token, slot)


FUSED = Kernel(fused_chunks)
