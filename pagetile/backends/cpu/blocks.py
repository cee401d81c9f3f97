"""Copy blocks, from the host. The kernel is :mod:`pagetile.backends.cpu.kernels.blocks`."""

from __future__ import annotations

from array import array

from torch import Tensor

from pagetile.backends.cpu.block import Block
from pagetile.backends.cpu.kernels import blocks as K
from pagetile.backends.cpu.launch import available_threads, launch
from pagetile.backends.verbs import CopyCall
from pagetile.contracts.moves import runs_of

SERIAL_BYTES = 1 << 18
"""Copies below this are done before a second thread has come."""

CHUNK_BYTES = 1 << 17
"""Bytes a ticket, where blocks are smaller than that."""


def copy_blocks(call: CopyCall) -> None:
    """Copy the blocks of each level, all caches of it at once."""
    source, target = call.sources[0], call.caches[0]
    size = target.element_size()
    run, first, second = runs_of(target.shape[1:], source.stride()[1:], target.stride()[1:])
    offsets = [array("q", [size * at for at in runs]) for runs in (first, second)]
    places = array("q")
    for i, (a, b) in enumerate(zip(call.sources, call.caches, strict=True)):
        places.extend((a.data_ptr(), b.data_ptr(), call.spares[i].data_ptr() if call.spares else 0))
    block = Block(K.SLOTS)
    block.put(K.CACHES, places.buffer_info()[0], len(call.caches))
    block.put(K.SOURCE_STEP, *(size * _step(cache) for cache in (source, target, (call.spares or call.caches)[0])))
    block[K.NUM_BLOCKS] = target.shape[0] if call.spares else 1 << 62
    block.put(K.FROM, *(runs.buffer_info()[0] for runs in offsets), len(first), run * size)
    block_bytes = call.problem.block_bytes
    for level in call.levels:
        pairs = level.contiguous()
        total = block_bytes * len(pairs) * len(call.caches)
        block.put(K.TICKET, 0, max(1, CHUNK_BYTES // block_bytes), pairs.data_ptr(), len(pairs))
        launch(K.COPY, block.address, available_threads() if total > SERIAL_BYTES else 1)


def _step(cache: Tensor) -> int:
    return cache.stride(0)
