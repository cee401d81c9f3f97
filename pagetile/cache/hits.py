"""Between a sequence and the prefix cache: what it can take, and what it adds."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List

from pagetile.cache.groups import LayerGroup
from pagetile.cache.pool import BlockPool
from pagetile.cache.prefix import Hasher, Prefix
from pagetile.cache.sequence import Sequence


def longest_hit(
    seq: Sequence, groups: List[LayerGroup], pools: Mapping[str, BlockPool], block_size: int, hasher: Hasher
) -> tuple[list[Prefix], dict[str, list[int]]]:
    """The longest prefix of a sequence that every group can serve.

    Full groups need every block of it. A sliding group of W tokens needs those that the next query sees:
    ``ceil((W - 1) / block_size)`` before the boundary, or ``ceil(W / block_size)`` when the whole sequence is known,
    because then its last token is computed again inside the last block.

    Returns:
        The prefixes, one for each block, and for each group the block found for each (0 where none was).
    """
    found: dict[str, list[int]] = {g.name: [] for g in groups}
    run = dict.fromkeys(found, 0)  # blocks known without a gap, up to here
    prefixes: list[Prefix] = []
    prefix = Prefix.root(seq.salt, block_size, hasher)
    best = 0
    for count in range(1, len(seq) // block_size + 1):
        prefix = prefix.extend_bytes(seq.token_bytes((count - 1) * block_size, count * block_size), hasher)
        for name, pool in pools.items():
            block = pool.lookup(prefix)
            found[name].append(0 if block is None else block)
            run[name] = 0 if block is None else run[name] + 1
            if block is not None:
                prefix = pool.prefix(block) or prefix  # the cache's own object, so that chains share parents
        prefixes.append(prefix)
        if any(g.window is None and run[g.name] < count for g in groups):
            break
        query = min(count * block_size, len(seq) - 1)
        if all(run[g.name] >= count - g.blocks_behind(query, block_size) for g in groups):
            best = count
    return prefixes[:best], found


def register_stored(seq: Sequence, pools: Mapping[str, BlockPool], block_size: int, hasher: Hasher) -> None:
    """Make the full blocks that are stored by now known to every pool, and extend the sequence's chain by them."""
    for index in range(len(seq.prefixes), seq.num_stored // block_size):
        parent = seq.prefixes[-1] if index else Prefix.root(seq.salt, block_size, hasher)
        prefix = parent.extend_bytes(seq.token_bytes(index * block_size, (index + 1) * block_size), hasher)
        for name, pool in pools.items():
            prefix = pool.register(seq.blocks[name][index], prefix)  # not released yet: it was written just now
        seq.prefixes.append(prefix)
