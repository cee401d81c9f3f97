"""Copies of whole blocks, a level at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def copy_levels(
    sources: Sequence[Tensor], caches: Sequence[Tensor], spares: Sequence[Tensor], levels: Sequence[Tensor]
) -> None:
    """Copy blocks of each source to the cache at the same place of its list, in place.

    Args:
        sources, caches: tensors whose first axis is the block; the same list for copies inside caches.
        spares: for each cache, room for the blocks with ids from its number of blocks on; empty for none.
        levels: integers ``[n, 2]`` each, (source, destination); within a level all sources are read before a
            destination is written.
    """
    for i, (source, cache) in enumerate(zip(sources, caches, strict=True)):
        spare = spares[i] if spares else cache[:0]
        for level in levels:
            pairs = level.tolist()
            contents = [block_of(source, spare, block).clone() for block, _ in pairs]
            for content, (_, block) in zip(contents, pairs, strict=True):
                block_of(cache, spare, block).copy_(content)


def block_of(cache: Tensor, spare: Tensor, block: int) -> Tensor:
    """Block ``block``, in the cache or in the spare room behind it."""
    return cache[block] if block < len(cache) else spare[block - len(cache)]
