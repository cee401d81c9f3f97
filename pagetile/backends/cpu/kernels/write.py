"""Write, the kernel: copy each new token's keys and values to its slot, as bytes.

The bytes do not depend on the dtype. A token is one span where its heads are contiguous in the source and in the cache,
a span a head otherwise; which one is the plan's, for K and V each. Spans are copied in vectors at any alignment, the
last one aligned to the span's end; spans shorter than a vector go element by element.

Reads the slots (all of them before a byte is written) and the rows with a slot of 0 or more; writes those slots.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.elements import index_at, put_slot, slot_value, take_ticket
from pagetile.backends.cpu.kernels.vector import ROW_BYTES, advance, at, counted, emits, i8, i32, i64, load, store

_PACK = ir.VectorType(i8, ROW_BYTES)


@emits(types.void, types.int64, types.int64, types.int64)
def copy_packs(b, source, target, packs):
    def body(i, _):
        store(b, load(b, advance(b, source, i, ROW_BYTES), _PACK), advance(b, target, i, ROW_BYTES))
        return []

    counted(b, packs, [], body)


@emits(types.void, types.int64, types.int64, types.int64)
def stream_packs(b, source, target, packs):
    """The same past the caches: the target, aligned to a pack, is not read first, and pushes nothing out."""
    mark = b.module.add_metadata([ir.Constant(i32, 1)])

    def body(i, _):
        place = at(b, advance(b, target, i, ROW_BYTES), _PACK)
        b.store(load(b, advance(b, source, i, ROW_BYTES), _PACK), place, align=ROW_BYTES).set_metadata(
            "nontemporal", mark
        )
        return []

    counted(b, packs, [], body)


@emits(types.void)
def finish_streams(b):
    """Nothing stored later is seen before what was streamed."""
    b.fence("seq_cst")


@emits(types.void, types.int64, types.int64, types.int64)
def copy_bytes(b, source, target, count):
    def body(i, _):
        store(b, load(b, b.add(source, i), i8), b.add(target, i))
        return []

    counted(b, count, [], body)


@emits(types.void, types.int64, types.int64)
def copy_word(b, source, target):
    store(b, load(b, source, i64), target)


@inlined
def copy_span(source, target, size):
    """Copy ``size`` bytes between spans that do not overlap."""
    if size >= ROW_BYTES:
        packs = size // ROW_BYTES
        copy_packs(source, target, packs)
        if size > packs * ROW_BYTES:  # the last pack once more, from the end
            copy_packs(source + size - ROW_BYTES, target + size - ROW_BYTES, 1)
    else:
        done = 0
        while done + 8 <= size:
            copy_word(source + done, target + done)
            done += 8
        copy_bytes(source + done, target + done, size - done)


@inlined
def slot_of(block, row):
    slots, step = slot_value(block, P.W_SLOTS), slot_value(block, P.W_SLOT_STEP)
    return index_at(slots + row * step, 0, slot_value(block, P.W_WIDE))


@inlined
def check_slots(block):
    limit = slot_value(block, P.W_LIMIT)
    for row in range(slot_value(block, P.W_COUNT)):
        slot = slot_of(block, row)
        if slot >= limit:
            put_slot(block, P.ERROR_ROW, row)
            put_slot(block, P.ERROR_VALUE, slot)
            put_slot(block, P.ERROR, P.BAD_SLOT)
            return False
    return True


@inlined
def stream_span(source, target, size):
    """:func:`copy_span` past the caches, where the target is whole aligned packs."""
    if size % ROW_BYTES == 0 and target % ROW_BYTES == 0:
        stream_packs(source, target, size // ROW_BYTES)
    else:
        copy_span(source, target, size)


@inlined
def _copy_rows(block, first, last, copy):
    block_size = slot_value(block, P.W_BLOCK_SIZE)
    k_spans, k_bytes = slot_value(block, P.W_K_SPANS), slot_value(block, P.W_K_BYTES)
    v_spans, v_bytes = slot_value(block, P.W_V_SPANS), slot_value(block, P.W_V_BYTES)
    for row in range(first, last):
        slot = slot_of(block, row)
        if slot < 0:
            continue
        home = slot // block_size
        offset = slot - home * block_size
        source = slot_value(block, P.W_K_FROM) + row * slot_value(block, P.W_K_FROM_ROW)
        target = slot_value(block, P.W_K_TO) + home * slot_value(block, P.W_K_TO_BLOCK)
        target += offset * slot_value(block, P.W_K_TO_TOKEN)
        for span in range(k_spans):
            copy(
                source + span * slot_value(block, P.W_K_FROM_SPAN),
                target + span * slot_value(block, P.W_K_TO_SPAN),
                k_bytes,
            )
        source = slot_value(block, P.W_V_FROM) + row * slot_value(block, P.W_V_FROM_ROW)
        target = slot_value(block, P.W_V_TO) + home * slot_value(block, P.W_V_TO_BLOCK)
        target += offset * slot_value(block, P.W_V_TO_TOKEN)
        for span in range(v_spans):
            copy(
                source + span * slot_value(block, P.W_V_FROM_SPAN),
                target + span * slot_value(block, P.W_V_TO_SPAN),
                v_bytes,
            )


@inlined
def _copy_chunks(block, copy):
    chunk, count = slot_value(block, P.W_CHUNK), slot_value(block, P.W_COUNT)
    while True:
        first = take_ticket(block + P.W_TICKET * 8) * chunk
        if first >= count:
            break
        _copy_rows(block, first, min(count, first + chunk), copy)


def write_check(block):
    """Look at every slot; the first bad one goes to the error slots."""
    check_slots(block)


def write_serial(block):
    """Check, then copy every row on this thread."""
    if check_slots(block):
        _copy_rows(block, 0, slot_value(block, P.W_COUNT), copy_span)


def write_chunks(block):
    """Copy chunks of rows, already checked, until there is none."""
    _copy_chunks(block, copy_span)


def write_streams(block):
    """The same, past the caches."""
    _copy_chunks(block, stream_span)
    finish_streams()


CHECK, SERIAL, CHUNKS = Kernel(write_check), Kernel(write_serial), Kernel(write_chunks)
STREAMS = Kernel(write_streams)
