"""Copy blocks: the pairs of one level, in every cache, in one launch.

Contract: :class:`pagetile.backends.verbs.CopyCall`. Grid: ``(pairs x runs x chunks of a run, caches)``. A block is one
run of bytes where it is dense, several where it is not. Reads each source byte once and writes each stored byte once,
16 bytes wide where addresses and steps allow it.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagetile.backends.triton.launch import Launch
from pagetile.backends.verbs import CopyCall
from pagetile.contracts.metadata import to_device
from pagetile.contracts.moves import runs_of

WIDTH_BYTES = 16384
"""Bytes that one program moves."""

_SIZES = ("source_step", "target_step", "spare_step", "first_spare", "num_runs", "run_units", "chunks")


@triton.jit
def block_address(places, block, step, first_spare, spare_step, WHICH: tl.constexpr):
    """Address of a block: in the source (0) or target (1) of this cache, or in its spare room."""
    spare = block - first_spare
    home = tl.load(places + WHICH) + block * step
    return tl.where(spare >= 0, tl.load(places + 2) + spare * spare_step, home)


@triton.jit(do_not_specialize=_SIZES)
def copy_blocks_kernel(
    pairs,
    places,
    runs,
    source_step,
    target_step,
    spare_step,
    first_spare,
    num_runs,
    run_units,
    chunks,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``places`` int64 ``[caches, 3]``, addresses; ``runs`` int64 ``[runs, 2]``, byte offsets in source and target."""
    index = tl.program_id(0).to(tl.int64)
    place = places + tl.program_id(1) * 3
    chunk = index % chunks
    run = index // chunks % num_runs
    pair = pairs + index // chunks // num_runs * 2
    source = block_address(place, tl.load(pair), source_step, first_spare, spare_step, 0) + tl.load(runs + run * 2)
    target = block_address(place, tl.load(pair + 1), target_step, first_spare, spare_step, 1)
    target += tl.load(runs + run * 2 + 1)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    unit = chunk * WIDTH + tl.arange(0, WIDTH)
    real = unit < run_units
    moved = tl.load(source.to(tl.pointer_type(UNIT)) + unit, mask=real)
    tl.store(target.to(tl.pointer_type(UNIT)) + unit, moved, mask=real)


def copy_blocks(call: CopyCall, on: Callable[..., None]) -> None:
    """Launch each level in turn."""
    source, target = call.sources[0], call.caches[0]
    size, device = target.element_size(), target.device
    run, first, second = runs_of(target.shape[1:], source.stride()[1:], target.stride()[1:])
    offsets = torch.tensor([first, second], dtype=torch.int64).mul_(size).t().contiguous()  # [runs, 2]
    places = [[a.data_ptr(), b.data_ptr(), 0] for a, b in zip(call.sources, call.caches, strict=True)]
    for place, spare in zip(places, call.spares, strict=bool(call.spares)):
        place[2] = spare.data_ptr()
    steps = [size * cache.stride(0) for cache in (source, target, (call.spares or call.caches)[0])]
    together = size * run
    for number in (*steps, *offsets.flatten().tolist(), *(each for place in places for each in place)):
        together |= number
    unit = next(width for width in (4, 2, 1) if not together & (width - 1))
    aligned = not together & 15
    units = size * run // unit
    width = min(triton.next_power_of_2(units), WIDTH_BYTES // unit)
    chunks = -(-units // width)
    first_spare = target.shape[0] if call.spares else 1 << 62
    scalars = (*steps, first_spare, len(first), units, chunks)
    constants = {"UNIT": {4: tl.int32, 2: tl.int16, 1: tl.int8}[unit], "ALIGNED": aligned, "WIDTH": width}
    tables = [_there(table, device) for table in (torch.tensor(places), offsets)]
    for level in call.levels:
        grid = (len(level) * len(first) * chunks, len(call.caches), 1)
        launch = Launch(copy_blocks_kernel, grid, scalars, constants, num_warps=4)
        on(device, launch, _there(level.contiguous(), device), *tables)


def _there(table: Tensor, device: torch.device) -> Tensor:
    """A table of the host on the device, without waiting for it."""
    return to_device(table.numpy(), device)
