"""Gather, the kernel: each row from its slot, as bytes, or multiplied by its scale and rounded.

A row is one span where its heads are contiguous on both sides and, in a quantised cache, one scale serves them all; a
span a head otherwise. Reads the tokens of the slots that are 0 or more, and writes those rows.
"""

from __future__ import annotations

from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.elements import get_f32, get_i64, slot_value, take_ticket
from pagetile.backends.cpu.kernels.lanes import dequantise_span
from pagetile.backends.cpu.kernels.write import copy_span

(   # slots of the parameter block
    TICKET, CHUNK, COUNT, SLOTS_AT, BLOCK_SIZE,  # next chunk, rows a chunk, rows, int64 slots
    KIND, DTYPE,                                 # codes; KIND 0: copy bytes
) = range(7)  # fmt: skip
K_SIDE, V_SIDE, SLOTS = 7, 19, 31

(   # of a side, from its first slot on
    CACHE, CACHE_BLOCK, CACHE_TOKEN, CACHE_SPAN,  # address and byte steps
    ROWS, ROWS_ROW, ROWS_SPAN,
    SPANS, SIZE,                                  # spans a row; bytes of one, or elements where it is dequantised
    SCALE, SCALE_ROW, SCALE_SPAN,                 # float32
) = range(12)  # fmt: skip


@inlined
def _gather_side(block, side, row, home, offset):
    source = slot_value(block, side + CACHE) + home * slot_value(block, side + CACHE_BLOCK)
    source += offset * slot_value(block, side + CACHE_TOKEN)
    target = slot_value(block, side + ROWS) + row * slot_value(block, side + ROWS_ROW)
    scales = slot_value(block, side + SCALE) + row * slot_value(block, side + SCALE_ROW)
    size, kind, dtype = slot_value(block, side + SIZE), slot_value(block, KIND), slot_value(block, DTYPE)
    for span in range(slot_value(block, side + SPANS)):
        start = source + span * slot_value(block, side + CACHE_SPAN)
        end = target + span * slot_value(block, side + ROWS_SPAN)
        if kind == 0:
            copy_span(start, end, size)
        else:
            scale = get_f32(scales + span * slot_value(block, side + SCALE_SPAN))
            dequantise_span(start, end, size, kind, dtype, scale)


def gather_chunks(block):
    """Fill chunks of rows until there is none."""
    chunk, count, block_size = slot_value(block, CHUNK), slot_value(block, COUNT), slot_value(block, BLOCK_SIZE)
    while True:
        first = take_ticket(block + TICKET * 8) * chunk
        if first >= count:
            break
        for row in range(first, min(count, first + chunk)):
            slot = get_i64(slot_value(block, SLOTS_AT) + row * 8)
            if slot < 0:
                continue
            home = slot // block_size
            _gather_side(block, K_SIDE, row, home, slot - home * block_size)
            _gather_side(block, V_SIDE, row, home, slot - home * block_size)


GATHER = Kernel(gather_chunks)
