"""What the machine allows: reading whole blocks at random places, and copying.

The random reader is a kernel of the same kind as pagetile's own (explicit vectors, torch's threads): it loads every
byte of every block once, in the order of a block table, K and V in turn, and asks for the next block meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from pagetile.backends.cpu.jit import Kernel
from pagetile.backends.cpu.kernels.elements import get_i64, prefetch_rows, put_f32, slot_value, take_ticket
from pagetile.backends.cpu.kernels.vector import (
    ROW_BYTES,
    advance,
    constant,
    counted,
    emits,
    f32,
    fold_lanes,
    load,
    vec,
)
from pagetile.backends.cpu.launch import launch

_PIECE = 2048  # bytes read between two requests for the next block's


@emits(types.float32, types.int64, types.int64)
def read_bytes(b, address, size):
    """The sum of ``size`` bytes taken as floats: four vectors at a time."""

    def body(i, sums):
        here = advance(b, address, i, 4 * ROW_BYTES)
        return [b.fadd(old, load(b, here, vec(f32), n * ROW_BYTES)) for n, old in enumerate(sums)]

    count = b.sdiv(size, ir.Constant(ir.IntType(64), 4 * ROW_BYTES))
    sums = counted(b, count, [constant(0.0, vec(f32))] * 4, body)
    total = b.fadd(b.fadd(sums[0], sums[1]), b.fadd(sums[2], sums[3]))
    return fold_lanes(b, total, lambda x, y: b.fadd(x, y))


def read_pages(block):
    """Take pages until there is none; the block: ticket, count, addresses, bytes of a page, where a sum goes."""
    total = np.float32(0)
    count, addresses, size = slot_value(block, 1), slot_value(block, 2), slot_value(block, 3)
    while True:
        first = take_ticket(block) * 16
        if first >= count:
            break
        for page in range(first, min(count, first + 16)):
            here, ahead = get_i64(addresses + page * 8), addresses + min(page + 1, count - 1) * 8
            for done in range(0, size, _PIECE):
                prefetch_rows(ahead, 0, 1, done, min(_PIECE, size - done))
                total += read_bytes(here + done, min(_PIECE, size - done))
    put_f32(slot_value(block, 4), total)


_PAGES = Kernel(read_pages)


def page_reader(k: Tensor, v: Tensor, block_table: Tensor) -> Callable[[], None]:
    """Read each block of a table once, K and V in turn; blocks must be contiguous."""
    size = k.stride(0) * k.element_size()
    homes = [x.data_ptr() + block_table.reshape(-1).long() * size for x in (k, v)]
    addresses = torch.stack(homes, dim=1).reshape(-1).contiguous()
    block, sink = torch.zeros(8, dtype=torch.int64), torch.zeros(16)
    threads = torch.get_num_threads()
    block[1], block[2], block[3], block[4] = len(addresses), addresses.data_ptr(), size, sink.data_ptr()

    def run() -> None:
        block[0] = 0
        launch(_PAGES, block.data_ptr(), threads)

    run.keep = (k, v, addresses, block, sink)  # type: ignore[attr-defined]
    return run


def copier(size: int) -> Callable[[], None]:
    """Copy half of ``size`` bytes: as many are moved, read or written, as a read of all of them moves."""
    source, target = (torch.ones(size // 8, dtype=torch.float32) for _ in range(2))
    return lambda: target.copy_(source)
