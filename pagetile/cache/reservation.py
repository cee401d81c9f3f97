"""Blocks for the next step, planned for all of its sequences before the first is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import NamedTuple

from pagetile.cache.pool import BlockPool
from pagetile.cache.sequence import Sequence
from pagetile.contracts.errors import OutOfBlocksError
from pagetile.contracts.geometry import blocks_for


class BlockCopy(NamedTuple):
    """Copy block ``src`` to block ``dst`` in all layers of ``group``, before the next write."""

    group: str
    src: int
    dst: int


class Reservation:
    """What a step needs: new blocks at the ends, and own copies of shared blocks that it writes.

    A block in the range to be written is *shared* when another sequence holds it; references held for copies that
    still read from it do not count. Of several sequences in the step that share a block, the last writes in place.

    Raises:
        OutOfBlocksError: on construction, when a group has too few blocks. Nothing has changed then.
    """

    def __init__(
        self,
        pools: Mapping[str, BlockPool],
        holds: Mapping[str, Counter[int]],
        block_size: int,
        work: List[tuple[Sequence, int]],
    ) -> None:
        self.pools = pools
        self.holds = holds
        self.block_size = block_size
        self.work = work
        self.rewrites: dict[str, list[tuple[Sequence, int]]] = {}
        self.forgets: dict[str, list[int]] = {}
        for name in pools:
            self._plan(name)

    def _plan(self, name: str) -> None:
        pool, holds, size = self.pools[name], self.holds[name], self.block_size
        rewrites: list[tuple[Sequence, int]] = []
        forgets: list[int] = []
        left: Counter[int] = Counter()  # references that this plan gives up
        needed = 0
        for seq, n in self.work:
            row, end = seq.blocks[name], blocks_for(seq.num_computed + n, size)
            needed += max(0, end - len(row))
            if seq.num_computed + n <= seq.num_stored:
                continue
            for index in range(seq.num_stored // size, min(end, len(row))):
                block = row[index]
                if pool.ref(block) - holds[block] - left[block] > 1:
                    left[block] += 1
                    rewrites.append((seq, index))
                elif pool.prefix(block) is not None:
                    forgets.append(block)
        needed += len(rewrites)
        if not pool.can_allocate(needed):
            raise OutOfBlocksError(
                f"group {name!r}: {needed} blocks asked for {len(self.work)} sequences ({len(rewrites)} of them to "
                f"copy shared blocks), {pool.num_available} available of {pool.num_blocks}; free or "
                "preempt a sequence, or reserve for fewer"
            )
        self.rewrites[name], self.forgets[name] = rewrites, forgets

    def carry_out(self) -> list[BlockCopy]:
        """Take the blocks; returns the copies to run."""
        copies = [copy for name in self.pools for copy in self._carry_out(name)]
        for seq, n in self.work:
            seq.num_reserved = max(seq.num_reserved, seq.num_computed + n)
        return copies

    def _carry_out(self, name: str) -> list[BlockCopy]:
        pool, holds, size = self.pools[name], self.holds[name], self.block_size
        copies = []
        for seq, index in self.rewrites[name]:
            old = seq.blocks[name][index]
            (new,) = pool.allocate(1)
            seq.blocks[name][index] = new
            # The sequence's reference to the old block lives on as a hold, until the copy has surely run.
            seq.holds.append((name, old))
            holds[old] += 1
            copies.append(BlockCopy(name, old, new))
        for block in self.forgets[name]:
            pool.forget(block)
        for seq, n in self.work:
            row = seq.blocks[name]
            row.extend(pool.allocate(max(0, blocks_for(seq.num_computed + n, size) - len(row))))
        return copies
