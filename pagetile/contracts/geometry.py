"""Where a token lives: the address arithmetic of a paged cache, in one place.

A request sees positions 0, 1, 2, ...; the cache is a pool of ``num_blocks`` blocks of ``block_size`` slots::

    position --(block table)--> (block, offset) --> slot = block * block_size + offset --> address

The worked example used everywhere in this project: ``block_table = [7, 2, 9]``, block size 16, position 20.

>>> split_position(20, 16)          # logical block 1, offset 4
(1, 4)
>>> slot_of([7, 2, 9], 20, 16)      # physical block 2, so slot 2 * 16 + 4
36
>>> split_slot(36, 16)              # the way back
(2, 4)

Everything here is plain integers, exact at any size. Kernels repeat this arithmetic in 64 bits, from the block id
on; tests hold each kernel to the functions of this file.

Source: the slot mapping and block table of vLLM (``reshape_and_cache_flash``), Kwon et al. 2023, PagedAttention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagetile.contracts.errors import BlockTableError

PAD_SLOT = -1
"""What the metadata builder writes into ``slot_mapping`` for a row that must not be stored."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens: the ceiling of ``num_tokens / block_size``."""
    return -(-num_tokens // block_size)


def split_position(position: int, block_size: int) -> tuple[int, int]:
    """``(logical block, offset)`` of a position of a request."""
    return divmod(position, block_size)


def join_slot(block: int, offset: int, block_size: int) -> int:
    """The slot of an offset inside a physical block."""
    return block * block_size + offset


def split_slot(slot: int, block_size: int) -> tuple[int, int]:
    """``(physical block, offset)`` of a slot; the inverse of :func:`join_slot`."""
    return divmod(slot, block_size)


def slots_held(num_blocks: int, block_size: int) -> str:
    """What a message says of the slots of a cache.

    >>> slots_held(3, 16)
    'the cache has 3 blocks of 16, so slots 0 to 47'
    """
    if num_blocks < 1:
        return "the cache has no blocks"
    return f"the cache has {num_blocks} blocks of {block_size}, so slots 0 to {num_blocks * block_size - 1}"


def blocks_held(num_blocks: int) -> str:
    """What a message says of the blocks of a cache.

    >>> blocks_held(3)
    'the cache has 3 blocks, so ids 0 to 2'
    """
    return (
        f"the cache has {num_blocks} blocks, so ids 0 to {num_blocks - 1}" if num_blocks else "the cache has no blocks"
    )


def slot_of(block_row: Sequence[int], position: int, block_size: int) -> int:
    """The slot of a position, through one row of a block table.

    Raises:
        BlockTableError: the row has no entry for the position.
    """
    logical, offset = split_position(position, block_size)
    if not 0 <= logical < len(block_row):
        raise BlockTableError(
            f"position {position} is in logical block {logical} (block size {block_size}), "
            f"but the block table row has {len(block_row)} entries; append blocks before writing there"
        )
    return join_slot(block_row[logical], offset, block_size)


@dataclass(frozen=True, slots=True)
class CacheStrides:
    """Distances inside one cache tensor of logical shape ``[num_blocks, block_size, num_kv_heads, head_size]``.

    ``block``, ``token`` and ``head`` are in elements; the last dimension is contiguous. K and V each have their
    own. NHD and HND are the same shape with other strides:

    >>> CacheStrides.nhd(block_size=16, num_kv_heads=8, head_size=128)
    CacheStrides(block=16384, token=1024, head=128)
    >>> CacheStrides.hnd(block_size=16, num_kv_heads=8, head_size=128)
    CacheStrides(block=16384, token=128, head=2048)
    >>> CacheStrides.nhd(block_size=16, num_kv_heads=8, head_size=128).element(36, 3, 16)   # block 2, offset 4, head 3
    37248
    """

    block: int
    token: int
    head: int

    @classmethod
    def nhd(cls, block_size: int, num_kv_heads: int, head_size: int) -> CacheStrides:
        """Strides of a contiguous block stored ``[token, head, element]``."""
        return cls(block_size * num_kv_heads * head_size, num_kv_heads * head_size, head_size)

    @classmethod
    def hnd(cls, block_size: int, num_kv_heads: int, head_size: int) -> CacheStrides:
        """Strides of a contiguous block stored ``[head, token, element]``."""
        return cls(block_size * num_kv_heads * head_size, head_size, block_size * head_size)

    def element(self, slot: int, head: int, block_size: int) -> int:
        """Offset, in elements from the cache's base, of the first element of a head at a slot."""
        block, offset = split_slot(slot, block_size)
        return block * self.block + offset * self.token + head * self.head
