"""A cache whose slots hold what was written instead of numbers: who, and up to which token.

A slot holds ``(salt, tokens[: position + 1])``, the whole identity of a key: it depends on every token before it. So a
read through the block table is right exactly when the slot holds the reader's own prefix, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagetile.cache.offload import HostBlocks, Transfer
from pagetile.cache.pool import BlockPool
from pagetile.cache.prefix import Prefix
from pagetile.cache.sequence import Sequence
from pagetile.cache.sequences import SequenceTable
from pagetile.contracts.geometry import slot_of

Identity = tuple[object, tuple[int, ...]]


def identity(seq: Sequence, position: int) -> Identity:
    return seq.salt, tuple(seq.token_ids[: position + 1])


class SimulatedCache:
    """Slots of every group, and a forward pass that writes and reads them as a model would."""

    def __init__(self, table: SequenceTable) -> None:
        self.table = table
        self.slots: dict[str, dict[int, Identity]] = {g.name: {} for g in table.groups}

    @property
    def groups(self):
        return self.table.groups

    @property
    def block_size(self) -> int:
        return self.table.block_size

    @property
    def num_blocks(self) -> dict[str, int]:
        return {name: pool.num_blocks for name, pool in self.table.pools.items()}

    def on_host(self, _num_blocks: object) -> SimulatedCache:
        return SimulatedCache(self.table)

    def copy_blocks(self, group: str, pairs: list[tuple[int, int]]) -> None:
        self.copy((group, src, dst) for src, dst in pairs)

    def copy(self, copies: Iterable[tuple[str, int, int]]) -> None:
        for group, src, dst in copies:
            move_slots(self.slots[group], src, self.slots[group], dst, self.table.block_size)

    def forward(self, work: list[tuple[Sequence, int]]) -> None:
        """Write the new tokens at their slots, then check every read of every query."""
        for g in self.table.groups:
            meta = self.table.metadata(work, g.name)
            slots, loc = meta.slot_mapping.tolist(), meta.query_start_loc.tolist()
            assert meta.seq_lens.tolist() == [seq.num_computed + n for seq, n in work]
            for b, (seq, n) in enumerate(work):
                assert loc[b + 1] - loc[b] == n
                for i in range(n):
                    position, slot = seq.num_computed + i, slots[loc[b] + i]
                    assert (slot == -1) == (position < seq.num_stored), (
                        "computed but not written, if and only if stored"
                    )
                    if slot >= 0:
                        self.slots[g.name][slot] = identity(seq, position)
            rows = meta.block_table.tolist()
            for (seq, n), row in zip(work, rows, strict=True):
                for query in range(seq.num_computed, seq.num_computed + n):
                    for position in range(g.first_visible(query), query + 1):
                        self.read(g.name, seq, row, position)

    def read(self, group: str, seq: Sequence, row: list[int], position: int) -> None:
        found = self.slots[group].get(slot_of(row, position, self.table.block_size))
        assert found == identity(seq, position), f"{group}: position {position} of {seq} reads {found}"

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Reserve, copy, forward, commit."""
        self.copy(self.table.reserve(work))
        self.forward(work)
        for seq, n in work:
            self.table.commit(seq, n)
        self.check()

    def run(self, *sequences: Sequence) -> None:
        """Compute all that is left of the sequences, in one step."""
        self.step([(seq, seq.num_uncomputed) for seq in sequences])

    def check(self) -> None:
        """Whatever the next query of any sequence sees is its own, and so is whatever the prefix cache promises."""
        self.table.check()
        for g in self.table.groups:
            for seq in self.table.sequences:
                row = list(seq.blocks[g.name])
                for position in range(g.first_visible(seq.num_computed), seq.num_stored):
                    self.read(g.name, seq, row, position)
            self.check_registered(g.name, self.table.pools[g.name])

    def check_registered(self, group: str, pool: BlockPool) -> None:
        size = self.table.block_size
        for block in range(pool.num_blocks):
            prefix = pool.prefix(block)
            if prefix is None:
                continue
            tokens = prefix_tokens(prefix)
            for offset in range(size):
                held = self.slots[group].get(block * size + offset)
                assert held is not None
                assert held[1] == tokens[: len(tokens) - size + offset + 1], f"{group}: block {block} is not {prefix}"


class SimulatedHost(HostBlocks):
    """Host blocks over simulated slots; what waits there is only what was sent."""

    def send(self, transfers: Iterable[Transfer]) -> None:
        for group, device, host in transfers:
            move_slots(self.device.slots[group], device, self.cache.slots[group], host, self.table.block_size)

    def fetch(self, transfers: Iterable[Transfer]) -> None:
        for group, device, host in transfers:
            move_slots(self.cache.slots[group], host, self.device.slots[group], device, self.table.block_size)


def move_slots(src: dict[int, Identity], old: int, dst: dict[int, Identity], new: int, size: int) -> None:
    """A copy of a block's slots from one store to another (or within one)."""
    for offset in range(size):
        dst.pop(new * size + offset, None)
        if old * size + offset in src:
            dst[new * size + offset] = src[old * size + offset]


def prefix_tokens(prefix: Prefix) -> tuple[int, ...]:
    """All token ids of a prefix, from position 0."""
    parts = []
    while prefix.parent is not None:
        parts.append(memoryview(prefix.content).cast("q").tolist())
        prefix = prefix.parent
    return tuple(token for part in reversed(parts) for token in part)


def snapshot(table: SequenceTable) -> object:
    """Everything that a failed call must leave as it was."""
    pools = [
        (
            [pool.ref(b) for b in range(pool.num_blocks)],
            [pool.digest(b) for b in range(pool.num_blocks)],
            list(pool._free),
            list(pool._cached),
        )
        for pool in table.pools.values()
    ]
    sequences = [
        (
            s.id,
            list(s.token_ids),
            s.num_computed,
            s.num_stored,
            s.num_reserved,
            {g: list(row) for g, row in s.blocks.items()},
            dict(s.released),
            list(s.holds),
            len(s.prefixes),
        )
        for s in table.sequences
    ]
    return pools, sequences, {g: dict(c) for g, c in table.holds.items()}
