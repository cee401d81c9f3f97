"""Copies of whole blocks, a level at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def copy_levels(caches: Sequence[Tensor], spares: Sequence[Tensor], levels: Sequence[Tensor]) -> None:
    """Copy blocks inside each cache, in place.

    Args:
        caches: tensors whose first axis is the block, ``NB`` of them.
        spares: for each cache, room for the blocks with ids from ``NB`` on.
        levels: integers ``[n, 2]`` each, (source, destination); within a level all sources are read before a
            destination is written.
    """
    for cache, spare in zip(caches, spares, strict=True):
        for level in levels:
            pairs = level.tolist()
            contents = [block_of(cache, spare, source).clone() for source, _ in pairs]
            for block, (_, destination) in zip(contents, pairs, strict=True):
                block_of(cache, spare, destination).copy_(block)


def block_of(cache: Tensor, spare: Tensor, block: int) -> Tensor:
    """Block ``block``, in the cache or in the spare room behind it."""
    return cache[block] if block < len(cache) else spare[block - len(cache)]
