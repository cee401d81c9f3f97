"""Compaction: the blocks in use move to the low ids of their pool, and every table follows.

Long-running pools scatter what they hold over all ids. After :func:`defragment` the blocks in use of each group are
``[0, live + cached)``, in the fewest moves: a block whose id is low enough stays where it is. Every destination is a
free block, so nothing is overwritten and an error on the way leaves the tables as they were.
"""

from __future__ import annotations

from array import array

from pagetile.cache.kv import PagedKVCache
from pagetile.cache.sequences import SequenceTable
from pagetile.contracts.errors import ArgumentError

Moves = dict[str, dict[int, int]]
"""For each group, old block id -> new block id; blocks that stayed are not named."""


def compaction(table: SequenceTable) -> Moves:
    """The moves that :func:`defragment` would make.

    >>> from pagetile.cache import LayerGroup
    >>> table = SequenceTable([LayerGroup("full", (0,))], num_blocks=8, block_size=4, prefix_cache=False)
    >>> first, second = table.add([1] * 8), table.add([2] * 4)
    >>> for seq in (first, second):
    ...     table.reserve(seq, len(seq))
    []
    []
    >>> table.free(first)                       # leaves a hole of two blocks in front of the second's
    >>> compaction(table)
    {'full': {2: 0}}
    """
    moves: Moves = {}
    for name, pool in table.pools.items():
        used = pool.num_live + pool.num_cached
        free = pool.free_blocks()
        holes = sorted(block for block in free if block < used)
        strays = sorted(set(range(used, pool.num_blocks)) - free)
        moves[name] = dict(zip(strays, holes, strict=True))
    return moves


def defragment(table: SequenceTable, cache: PagedKVCache) -> Moves:
    """Move the blocks in use to the lowest ids; contents, references, prefixes and sequences' rows follow.

    To be called between steps: a batch that was packed before names the old ids.

    Args:
        table: the sequences over the cache.
        cache: its keys and values.

    Returns:
        For each group, old block id -> new block id.

    Raises:
        ArgumentError: copies of a reservation have yet to run (commit them first), or the cache has other blocks than
            the table. Nothing has moved then.
    """
    own = {name: pool.num_blocks for name, pool in table.pools.items()}
    if own != cache.num_blocks:
        raise ArgumentError(f"the table has blocks {own} and the cache {cache.num_blocks}; give the table's own cache")
    waiting = next((seq for seq in table.sequences if seq.holds), None)
    if waiting is not None:
        raise ArgumentError(
            f"sequence {waiting.id} waits for copies of its reservation; defragment between steps, after commit"
        )
    moves = compaction(table)
    for name, moved in moves.items():
        cache.copy_blocks(name, list(moved.items()))
    for name, moved in moves.items():
        table.pools[name].renumber(moved)
        for seq in table.sequences:
            released = seq.released[name]
            row = seq.blocks[name].tolist()
            seq.blocks[name] = array("i", row[:released] + [moved.get(block, block) for block in row[released:]])
    return moves
