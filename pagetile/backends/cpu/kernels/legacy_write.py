"""Write into an x-packed cache, the kernel: packs of a key as they are, and each value element to its own channel.

Neighbouring rows that go to neighbouring slots of a block are taken together, a head at a time, so that the cache lines
of a channel are filled while they are near. A quantised row is made in scratch first, then moved as bytes.

Reads the rows with a slot of 0 or more, which have been looked at before; writes those slots.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.elements import get_f32, index_at, slot_value, take_ticket
from pagetile.backends.cpu.kernels.lanes import choose
from pagetile.backends.cpu.kernels.quantise import quantise_span
from pagetile.backends.cpu.kernels.vector import advance, counted, emits, i8, load, store

A = types.int64

(   # slots of the parameter block
    TICKET, WORKER, CHUNK, COUNT, SLOTS_AT, SLOTS_STEP, SLOTS_WIDE, BLOCK_SIZE, HEADS,
    DTYPE, KIND,                                    # codes; KIND -1: bytes as they are
    SCRATCH, SCRATCH_BYTES, STORED,                 # a worker's share; bytes of a stored element
    K_FROM, K_FROM_ROW, K_FROM_HEAD, SIZE, K_TO, K_TO_BLOCK, K_TO_HEAD, K_TO_PACK, K_TO_TOKEN, K_SCALE, K_SCALE_HEAD,
    V_FROM, V_FROM_ROW, V_FROM_HEAD, SIZE_V, V_TO, V_TO_BLOCK, V_TO_HEAD, V_TO_CHANNEL, V_TO_TOKEN, V_SCALE,
    V_SCALE_HEAD,
    SLOTS,
) = range(37)  # fmt: skip

_PACK_BYTES = 16
_WIDTHS = {"bytes": 1, "halves": 2, "words": 4}


@emits(types.void, A, A, A, A)
def copy_packs(b, source, target, step, packs):
    """Packs of 16 bytes that lie together to packs ``step`` bytes apart."""
    pack = ir.VectorType(i8, _PACK_BYTES)

    def body(i, _):
        store(b, load(b, advance(b, source, i, _PACK_BYTES), pack), b.add(target, b.mul(i, step)))
        return []

    counted(b, packs, [], body)


@emits(types.void, A, A, A, A, A)
def spread_elements(b, source, target, step, count, width):
    """Elements of ``width`` bytes that lie together to places ``step`` bytes apart."""

    def of_width(name):
        element = ir.IntType(8 * _WIDTHS[name])

        def body(i, _):
            store(b, load(b, advance(b, source, i, _WIDTHS[name]), element), b.add(target, b.mul(i, step)))
            return []

        counted(b, count, [], body)

    choose(b, width, _WIDTHS, of_width)


@inlined
def _slot(block, row):
    at = slot_value(block, SLOTS_AT) + row * slot_value(block, SLOTS_STEP)
    return index_at(at, 0, slot_value(block, SLOTS_WIDE))


@inlined
def _stored(block, scratch, source, size, scale):
    """Where the bytes are that are stored for a head: the head itself, or what was made of it."""
    kind = slot_value(block, KIND)
    if kind < 0:
        return source
    quantise_span(source, scratch, size, slot_value(block, DTYPE), kind, get_f32(scale))
    return scratch


@inlined
def _write_run(block, scratch, first, count, slot):
    """Rows ``[first, first + count)`` to neighbouring slots of one block."""
    home = slot // slot_value(block, BLOCK_SIZE)
    offset = slot - home * slot_value(block, BLOCK_SIZE)
    size, size_v, width = slot_value(block, SIZE), slot_value(block, SIZE_V), slot_value(block, STORED)
    keys = slot_value(block, K_TO) + home * slot_value(block, K_TO_BLOCK)
    values = slot_value(block, V_TO) + home * slot_value(block, V_TO_BLOCK)
    for head in range(slot_value(block, HEADS)):
        source = slot_value(block, K_FROM) + head * slot_value(block, K_FROM_HEAD)
        target = keys + head * slot_value(block, K_TO_HEAD)
        scale = slot_value(block, K_SCALE) + head * slot_value(block, K_SCALE_HEAD)
        for row in range(count):
            made = _stored(block, scratch, source + (first + row) * slot_value(block, K_FROM_ROW), size, scale)
            at = target + (offset + row) * slot_value(block, K_TO_TOKEN)
            copy_packs(made, at, slot_value(block, K_TO_PACK), size * width // _PACK_BYTES)
        source = slot_value(block, V_FROM) + head * slot_value(block, V_FROM_HEAD)
        target = values + head * slot_value(block, V_TO_HEAD)
        scale = slot_value(block, V_SCALE) + head * slot_value(block, V_SCALE_HEAD)
        for row in range(count):
            made = _stored(block, scratch, source + (first + row) * slot_value(block, V_FROM_ROW), size_v, scale)
            at = target + (offset + row) * slot_value(block, V_TO_TOKEN)
            spread_elements(made, at, slot_value(block, V_TO_CHANNEL), size_v, width)


@inlined
def _write_rows(block, scratch, first, last):
    block_size = slot_value(block, BLOCK_SIZE)
    row = first
    while row < last:
        slot = _slot(block, row)
        count = 1
        if slot >= 0:
            room = block_size - slot % block_size
            while row + count < last and count < room and _slot(block, row + count) == slot + count:
                count += 1
            _write_run(block, scratch, row, count, slot)
        row += count


def xpacked_chunks(block):
    """Store chunks of rows until there is none."""
    worker = take_ticket(block + WORKER * 8)
    scratch = slot_value(block, SCRATCH) + worker * slot_value(block, SCRATCH_BYTES)
    chunk, count = slot_value(block, CHUNK), slot_value(block, COUNT)
    while True:
        first = take_ticket(block + TICKET * 8) * chunk
        if first >= count:
            break
        _write_rows(block, scratch, first, min(count, first + chunk))


XPACKED = Kernel(xpacked_chunks)
