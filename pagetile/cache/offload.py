"""Preemption by swap: the blocks of a sequence that must go wait in host memory, and come back as they were.

Recomputing a preempted sequence costs a prefill; copying its keys and values out and in costs their bytes over the
bus, and gives back the same bits. The life of a parked sequence::

    out = host.park(seq)          # gives its device blocks back, all or nothing
    host.send(out)                # before anything else is written in this step
    host.settle([seq])            # the step worked: its copy counts
    ...
    back = host.unpark(seq)       # device blocks again, some of them prefix hits
    host.fetch(back)              # before the model runs
    host.settle([seq])            # after the step's commit: the host blocks are free again

A step that fails calls :meth:`HostBlocks.cancel` instead: a sequence on its way out is computed again, one on its way
back stays parked.

Source: swapping in PagedAttention (Kwon et al. 2023, section 4.5).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pagetile.cache.groups import per_group
from pagetile.cache.kv import PagedKVCache
from pagetile.cache.pool import BlockPool
from pagetile.cache.prefix import Prefix
from pagetile.cache.sequence import Sequence
from pagetile.cache.sequences import SequenceTable
from pagetile.contracts.errors import ArgumentError, OutOfBlocksError
from pagetile.contracts.geometry import blocks_for
from pagetile.ops.blocks import swap_blocks


class Transfer(NamedTuple):
    """One block to be copied between the device and the host; which way, the method says that takes it."""

    group: str
    device: int
    host: int


class Phase(Enum):
    """Where a parked sequence is between two steps that succeed."""

    LEAVING = "leaving"
    PARKED = "parked"
    RETURNING = "returning"


@dataclass(slots=True)
class Parked:
    """What a sequence was when it left: its counts, and for each group the host blocks of what it still saw."""

    phase: Phase
    num_computed: int
    num_stored: int
    num_hit: int
    prefixes: list[Prefix]
    released: dict[str, int]
    blocks: dict[str, list[int]]


class HostBlocks:
    """Blocks in host memory for sequences that lost theirs.

    Args:
        table: the sequences.
        cache: their keys and values, on the device.
        num_blocks: host blocks of every group, or a mapping by group name.

    Attributes:
        cache: keys and values in host memory (page-locked when the device is a GPU).
        parked: who waits here, by the id of the sequence.
        num_swaps: sequences that left and were settled, since this was made.
    """

    def __init__(self, table: SequenceTable, cache: PagedKVCache, num_blocks: int | Mapping[str, int]) -> None:
        counts = per_group("num_blocks of the host", num_blocks, cache.groups)
        self.table = table
        self.device = cache
        self.cache = cache.on_host(counts)
        self.pools = {name: BlockPool(n, cache.block_size, prefix_cache=False) for name, n in counts.items()}
        self.parked: dict[int, Parked] = {}
        self.num_swaps = 0

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self.parked

    # Out ------------------------------------------------------------------------------------------------------------

    def park(self, seq: Sequence) -> list[Transfer]:
        """Preempt a sequence, and say which of its blocks to :meth:`send` before anything is written.

        Raises:
            OutOfBlocksError: the host has too few blocks. Nothing has changed then.
            ArgumentError: it is parked already, or waits for copies of a reservation.
        """
        if seq in self:
            raise ArgumentError(f"sequence {seq.id} is parked already")
        if seq.holds:
            raise ArgumentError(f"sequence {seq.id} waits for copies of its reservation; park it after commit")
        stored = blocks_for(seq.num_stored, self.table.block_size)
        rows = {name: list(seq.blocks[name][seq.released[name] : stored]) for name in self.pools}
        for name, row in rows.items():
            if not self.pools[name].can_allocate(len(row)):
                raise OutOfBlocksError(
                    f"sequence {seq.id} has {len(row)} blocks of group {name!r} to park, and the host has "
                    f"{self.pools[name].num_available} of {self.pools[name].num_blocks} free"
                )
        entry = Parked(
            Phase.LEAVING, seq.num_computed, seq.num_stored, seq.num_hit, seq.prefixes, dict(seq.released), {}
        )
        transfers = []
        for name, row in rows.items():
            entry.blocks[name] = self.pools[name].allocate(len(row))
            transfers += [Transfer(name, *pair) for pair in zip(row, entry.blocks[name], strict=True)]
        self.parked[seq.id] = entry
        self.table.preempt(seq)
        return transfers

    # Back -----------------------------------------------------------------------------------------------------------

    def unpark(self, seq: Sequence) -> list[Transfer]:
        """Give a parked sequence device blocks again, and say which to :meth:`fetch` before the model runs.

        Blocks that the prefix cache still has are shared, not copied. The sequence keeps its host blocks until
        :meth:`settle`, so that :meth:`cancel` can send it back.

        Raises:
            OutOfBlocksError: the device has too few blocks. Nothing has changed then.
            ArgumentError: it is not parked, or was truncated or given blocks meanwhile.
        """
        entry = self.parked.get(seq.id)
        if entry is None or entry.phase is not Phase.PARKED:
            raise ArgumentError(f"sequence {seq.id} is {'not parked' if entry is None else entry.phase.value}")
        if any(seq.blocks.values()) or len(seq) < entry.num_stored:
            raise ArgumentError(
                f"sequence {seq.id} was parked with {entry.num_stored} tokens and has changed since: it has {len(seq)} "
                f"tokens and blocks {dict(seq.blocks)}; forget() it, and it is computed again"
            )
        rows: dict[str, list[int]] = {}
        transfers: list[Transfer] = []
        try:
            for name, pool in self.table.pools.items():
                rows[name], copied = self._take(name, pool, entry)
                transfers += copied
        except OutOfBlocksError:
            for name, row in rows.items():
                self.table.pools[name].free(row)
            raise
        for name, row in rows.items():
            seq.released[name] = entry.released[name]
            seq.blocks[name] = array("i", [0] * entry.released[name] + row)
        seq.num_computed, seq.num_stored, seq.num_hit = entry.num_computed, entry.num_stored, entry.num_hit
        seq.num_reserved = entry.num_stored
        seq.prefixes = list(entry.prefixes)
        entry.phase = Phase.RETURNING
        return transfers

    def _take(self, name: str, pool: BlockPool, entry: Parked) -> tuple[list[int], list[Transfer]]:
        """Device blocks of one group for a parked sequence, and which of them are to be fetched."""
        prefixes = entry.prefixes[entry.released[name] :]
        known = [pool.lookup(prefix) for prefix in prefixes] + [None] * (len(entry.blocks[name]) - len(prefixes))
        hits = [block for block in known if block is not None]
        pool.share(hits)
        try:
            fresh = iter(pool.allocate(len(known) - len(hits)))
        except OutOfBlocksError:
            pool.free(hits)
            raise
        row, transfers = [], []
        for block, host in zip(known, entry.blocks[name], strict=True):
            row.append(next(fresh) if block is None else block)
            if block is None:
                transfers.append(Transfer(name, row[-1], host))
        return row, transfers

    # Between steps --------------------------------------------------------------------------------------------------

    def settle(self, sequences: Iterable[Sequence]) -> None:
        """The step worked: who was leaving is parked; who was returning has left the host for good."""
        for seq in sequences:
            entry = self.parked.get(seq.id)
            if entry is None:
                continue
            if entry.phase is Phase.RETURNING:
                self._register(seq, entry)
                self.forget(seq)
            elif entry.phase is Phase.LEAVING:
                entry.phase = Phase.PARKED
                self.num_swaps += 1

    def cancel(self, seq: Sequence) -> None:
        """Undo a move that has not been settled.

        A leaving sequence is forgotten here and is computed again; a returning one gives its device blocks back and is
        parked as before.
        """
        entry = self.parked.get(seq.id)
        if entry is None or entry.phase is Phase.PARKED:
            return
        if entry.phase is Phase.LEAVING:
            self.forget(seq)
        else:
            self.table.preempt(seq)
            entry.phase = Phase.PARKED

    def forget(self, seq: Sequence) -> None:
        """Give the host blocks of a sequence back, wherever it is; it may never have been here."""
        entry = self.parked.pop(seq.id, None)
        if entry is not None:
            for name, row in entry.blocks.items():
                self.pools[name].free(row)

    def _register(self, seq: Sequence, entry: Parked) -> None:
        """What came back is known to the prefix cache again, now that its copies have surely run."""
        for index, prefix in enumerate(entry.prefixes):
            for name, pool in self.table.pools.items():
                if index >= seq.released[name]:
                    pool.register(seq.blocks[name][index], prefix)

    # Copies ---------------------------------------------------------------------------------------------------------

    def send(self, transfers: Iterable[Transfer]) -> None:
        """Copy device blocks to their host blocks."""
        for group, pairs in _by_group(transfers).items():
            _copy(self.device, self.cache, group, [(device, host) for device, host in pairs])

    def fetch(self, transfers: Iterable[Transfer]) -> None:
        """Copy host blocks to their device blocks."""
        for group, pairs in _by_group(transfers).items():
            _copy(self.cache, self.device, group, [(host, device) for device, host in pairs])

    def check(self) -> None:
        """Prove that every host block belongs to a sequence of the table that is parked here.

        Raises:
            AssertionError: names the first invariant that does not hold.
        """
        alive = {seq.id for seq in self.table.sequences}
        strangers = sorted(set(self.parked) - alive)
        if strangers:
            raise AssertionError(f"sequences {strangers} hold host blocks and are not in the table")
        for name, pool in self.pools.items():
            pool.check()
            held = sorted(block for entry in self.parked.values() for block in entry.blocks[name])
            live = sorted(set(range(pool.num_blocks)) - pool.free_blocks())
            if held != live:
                raise AssertionError(f"group {name!r}: host blocks {live} are live, parked sequences hold {held}")


def _by_group(transfers: Iterable[Transfer]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for group, device, host in transfers:
        found.setdefault(group, []).append((device, host))
    return found


def _copy(src: PagedKVCache, dst: PagedKVCache, group: str, pairs: list[tuple[int, int]]) -> None:
    into = dst.block_tensors(group)
    content = src.block_tensors(group)
    swap_blocks(list(content.values()), [into[name] for name in content], pairs)
