"""Copy blocks, the kernel: the pairs of one level, in every cache, as runs of bytes.

Reads the source blocks and writes the destinations; within a level no block is both.
"""

from __future__ import annotations

from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.elements import get_i64, slot_value, take_ticket
from pagetile.backends.cpu.kernels.write import copy_span

(   # slots of the parameter block
    TICKET, CHUNK, PAIRS, NUM_PAIRS,    # next chunk; (pair, cache) items a chunk; int64 (source, destination); number
    CACHES, NUM_CACHES,                 # int64 addresses (source, destination, spare) of each
    SOURCE_STEP, TARGET_STEP, SPARE_STEP,  # bytes from a block to the next
    NUM_BLOCKS,                         # ids from here on are spares
    FROM, TO, NUM_RUNS, RUN_BYTES,      # int64 byte offsets of the runs in a block
    SLOTS,
) = range(15)  # fmt: skip


@inlined
def _home(block, cache, at, step, identity):
    """Address of a block: in the cache (slot ``at`` of its record), or in the spare room."""
    record = slot_value(block, CACHES) + cache * 24
    spare = identity - slot_value(block, NUM_BLOCKS)
    if spare >= 0:
        return get_i64(record + 16) + spare * slot_value(block, SPARE_STEP)
    return get_i64(record + at * 8) + identity * slot_value(block, step)


@inlined
def _copy_item(block, item):
    pairs = slot_value(block, NUM_PAIRS)
    cache = item // pairs
    pair = slot_value(block, PAIRS) + (item - cache * pairs) * 16
    source = _home(block, cache, 0, SOURCE_STEP, get_i64(pair))
    target = _home(block, cache, 1, TARGET_STEP, get_i64(pair + 8))
    size, first, second = slot_value(block, RUN_BYTES), slot_value(block, FROM), slot_value(block, TO)
    for run in range(slot_value(block, NUM_RUNS)):
        copy_span(source + get_i64(first + run * 8), target + get_i64(second + run * 8), size)


def copy_block_items(block):
    """Copy chunks of (pair, cache) items until there is none."""
    chunk, items = slot_value(block, CHUNK), slot_value(block, NUM_PAIRS) * slot_value(block, NUM_CACHES)
    while True:
        first = take_ticket(block + TICKET * 8) * chunk
        if first >= items:
            break
        for item in range(first, min(items, first + chunk)):
            _copy_item(block, item)


COPY = Kernel(copy_block_items)
