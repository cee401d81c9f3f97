"""Merge, the kernel: add two states, row by row, in float32.

A row is read whole before it is written, so ``out`` may be either input. Where one side is empty (log-sum-exp of -inf,
or +inf) the other is copied element by element, unread as numbers, and comes out bit for bit.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.elements import (
    bytes_of,
    get_f32,
    put_f32,
    read_strided,
    slot_value,
    take_ticket,
    vectors_of,
    write_strided,
)
from pagetile.backends.cpu.kernels.softmax import clear_row
from pagetile.backends.cpu.kernels.vector import (
    ROW_BYTES,
    advance,
    counted,
    emits,
    f32,
    fma,
    i16,
    i32,
    load,
    splat,
    store,
    vec,
)

_EMPTY = np.float32(-math.inf)
_FULL = np.float32(math.inf)


def _copier(bits):
    @emits(types.void, *[types.int64] * 5)
    def copy(b, source, source_step, target, target_step, count):
        def body(i, _):
            store(b, load(b, b.add(source, b.mul(i, source_step)), bits), b.add(target, b.mul(i, target_step)))
            return []

        counted(b, count, [], body)

    return copy


_copy_words, _copy_halves = _copier(i32), _copier(i16)


@inlined
def _copy_elements(source, source_step, target, target_step, count, dtype):
    if bytes_of(dtype) == 4:
        _copy_words(source, source_step, target, target_step, count)
    else:
        _copy_halves(source, source_step, target, target_step, count)


@emits(types.void, types.int64, types.int64, types.int64, types.float32, types.float32)
def _blend(b, a, other, vectors, share, other_share):
    """``a = a * share + other * other_share``."""
    shares, other_shares = splat(b, share), splat(b, other_share)

    def body(i, _):
        address = advance(b, a, i, ROW_BYTES)
        theirs = b.fmul(load(b, advance(b, other, i, ROW_BYTES), vec(f32)), other_shares)
        store(b, fma(b, load(b, address, vec(f32)), shares, theirs), address)
        return []

    counted(b, vectors, [], body)


@inlined
def _merge_row(a, a_step, a_lse, other, b_step, b_lse, out, out_step, size, scratch, dtype):
    """One row and head; returns the log-sum-exp."""
    a_empty, b_empty = abs(a_lse) == _FULL, abs(b_lse) == _FULL
    vectors = vectors_of(size)
    second = scratch + vectors * ROW_BYTES
    if a_empty != b_empty:
        source, step = (other, b_step) if a_empty else (a, a_step)
        if source != out:
            _copy_elements(source, step, out, out_step, size, dtype)
        return b_lse if a_empty else a_lse
    lse = _EMPTY
    if a_empty:
        clear_row(scratch, vectors)
    else:
        largest = a_lse if a_lse > b_lse else b_lse
        a_weight, b_weight = math.exp(a_lse - largest), math.exp(b_lse - largest)
        total = a_weight + b_weight
        read_strided(a, a_step, scratch, size, dtype)
        read_strided(other, b_step, second, size, dtype)
        _blend(scratch, second, vectors, a_weight / total, b_weight / total)
        lse = np.float32(largest + math.log(total))
    write_strided(scratch, out, out_step, size, dtype)
    return lse


@inlined
def _merge_rows(block, first, last, scratch):
    heads, size = slot_value(block, P.M_HEADS), slot_value(block, P.M_SIZE)
    out_lse = slot_value(block, P.M_OUT_LSE)
    for index in range(first, last):
        row = index // heads
        head = index - row * heads
        a_lse = slot_value(block, P.M_A_LSE) + head * slot_value(block, P.M_A_LSE_HEAD)
        b_lse = slot_value(block, P.M_B_LSE) + head * slot_value(block, P.M_B_LSE_HEAD)
        lse = _merge_row(
            slot_value(block, P.M_A) + row * slot_value(block, P.M_A_ROW) + head * slot_value(block, P.M_A_HEAD),
            slot_value(block, P.M_A_STEP),
            get_f32(a_lse + row * slot_value(block, P.M_A_LSE_ROW)),
            slot_value(block, P.M_B) + row * slot_value(block, P.M_B_ROW) + head * slot_value(block, P.M_B_HEAD),
            slot_value(block, P.M_B_STEP),
            get_f32(b_lse + row * slot_value(block, P.M_B_LSE_ROW)),
            slot_value(block, P.M_OUT) + row * slot_value(block, P.M_OUT_ROW) + head * slot_value(block, P.M_OUT_HEAD),
            slot_value(block, P.M_OUT_STEP),
            size,
            scratch,
            slot_value(block, P.M_DTYPE),
        )
        if out_lse:
            place = head * slot_value(block, P.M_OUT_LSE_HEAD) + row * slot_value(block, P.M_OUT_LSE_ROW)
            put_f32(out_lse + place, lse)


@inlined
def _merge_chunks(block):
    worker = take_ticket(block + P.M_WORKER * 8)
    scratch = slot_value(block, P.M_SCRATCH) + worker * slot_value(block, P.M_SCRATCH_BYTES)
    count, chunk = slot_value(block, P.M_ROWS) * slot_value(block, P.M_HEADS), slot_value(block, P.M_CHUNK)
    while True:
        first = take_ticket(block + P.M_TICKET * 8) * chunk
        if first >= count:
            break
        _merge_rows(block, first, min(count, first + chunk), scratch)


def merge_states(block):
    """All rows and heads, in chunks."""
    _merge_chunks(block)


MERGE = Kernel(merge_states)
