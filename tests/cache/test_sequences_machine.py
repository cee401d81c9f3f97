"""The sequence table over a simulated cache, under random histories.

After every step each sequence must read, through its block table, exactly its own tokens: no foreign data, copies on
first write, windows, hits, rollbacks. And each hit must be the longest one that the pools could serve.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulated import SimulatedCache, SimulatedHost, prefix_tokens, snapshot

from pagetile.cache.defragment import defragment
from pagetile.cache.groups import LayerGroup
from pagetile.cache.offload import Phase
from pagetile.cache.prefix import blake2b
from pagetile.cache.sequence import Sequence
from pagetile.cache.sequences import SequenceTable
from pagetile.contracts.errors import ArgumentError, OutOfBlocksError

GROUPS = {
    "full": (None,),
    "window": (3,),
    "full and window": (None, 4),
    "full and two windows": (5, None, 1),
    "two windows": (2, 6),
}
SALTS = (None, "s")


class SequencesMachine(RuleBasedStateMachine):
    hasher = staticmethod(blake2b)

    @initialize(
        windows=st.sampled_from(sorted(GROUPS)),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(3, 14),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(self, windows: str, block_size: int, num_blocks: int, prefix_cache: bool) -> None:
        groups = [LayerGroup(f"g{i}", (i,), window) for i, window in enumerate(GROUPS[windows])]
        self.table = SequenceTable(groups, num_blocks, block_size, prefix_cache=prefix_cache, hasher=self.hasher)
        self.cache = SimulatedCache(self.table)
        self.host = SimulatedHost(self.table, self.cache, max(1, num_blocks // 2))  # type: ignore[arg-type]

    def teardown(self) -> None:
        if hasattr(self, "table"):
            for seq in self.table.sequences:
                self.host.forget(seq)
                self.table.free(seq)
            self.table.check()
            self.host.check()
            for pool in self.table.pools.values():
                assert pool.num_live == 0, "a block leaked"

    def one(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.table.sequences))

    def one_here(self, data: st.DataObject) -> Sequence | None:
        """A sequence that is not parked."""
        here = [seq for seq in self.table.sequences if seq not in self.host]
        return data.draw(st.sampled_from(here)) if here else None

    # The longest hit, by the definition: every group holds what the next query sees, up to the boundary

    def longest(self, tokens: list[int], salt: object) -> int:
        size, known = self.table.block_size, {}
        for name, pool in self.table.pools.items():
            known[name] = {
                (self.root_salt(p), prefix_tokens(p))
                for b in range(pool.num_blocks)
                if (p := pool.prefix(b)) is not None
            }
        for count in range(len(tokens) // size, 0, -1):
            query = min(count * size, len(tokens) - 1)
            if all(
                (salt, tuple(tokens[: (index + 1) * size])) in known[g.name]
                for g in self.table.groups
                for index in range(g.first_visible(query) // size, count)
            ):
                return query
        return 0

    def root_salt(self, prefix) -> object:
        while prefix.parent is not None:
            prefix = prefix.parent
        return "s" if prefix.content.endswith(b"str:s") else None

    # Rules

    @rule(tokens=st.lists(st.integers(0, 1), max_size=12), salt=st.sampled_from(SALTS), take=st.booleans())
    def add(self, tokens: list[int], salt: str | None, take: bool) -> None:
        if len(self.table.sequences) < 5:
            expected = self.longest(tokens, salt) if take else 0
            seq = self.table.add(tokens, salt=salt, take_hits=take)
            assert seq.num_computed == expected
            assert not tokens or seq.num_uncomputed >= 1
            self.cache.check()

    @precondition(lambda self: self.table.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if len(self.table.sequences) < 5:
            seq = self.one(data)
            before = [pool.num_live for pool in self.table.pools.values()]
            child = self.table.fork(seq)
            assert list(child.token_ids) == list(seq.token_ids)
            assert [pool.num_live for pool in self.table.pools.values()] == before, "a fork takes no block"
            self.cache.check()

    @precondition(lambda self: self.table.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        seq = self.one(data)
        for token in tokens:
            self.table.append(seq, token)

    def draw_work(self, data: st.DataObject) -> list[tuple[Sequence, int]]:
        chosen = data.draw(st.lists(st.sampled_from(self.table.sequences), unique_by=id, max_size=4))
        chosen = [seq for seq in chosen if seq not in self.host]
        return [(seq, data.draw(st.integers(0, seq.num_uncomputed))) for seq in chosen]

    @precondition(lambda self: self.table.sequences)
    @rule(data=st.data(), meddle=st.booleans())
    def step(self, data: st.DataObject, meddle: bool) -> None:
        """A step; with ``meddle`` others are freed and reserved for between the reservation and its copies."""
        work = self.draw_work(data)
        before = snapshot(self.table)
        try:
            copies = self.table.reserve(work)
        except OutOfBlocksError:
            assert snapshot(self.table) == before, "a refused reservation changes nothing"
            return
        if meddle:
            others = [s for s in self.table.sequences if all(s is not seq for seq, _ in work)]
            if others:
                gone = data.draw(st.sampled_from(others))
                self.host.forget(gone)
                self.table.free(gone)
            idle = [s for s in self.table.sequences if all(s is not x for x, _ in work) and s not in self.host]
            for seq in idle[:1]:
                try:
                    copies += self.table.reserve(seq, seq.num_uncomputed)
                    work.append((seq, seq.num_uncomputed))
                except OutOfBlocksError:
                    pass
        self.table.check()
        self.cache.copy(copies)
        self.cache.forward(work)
        for seq, n in work:
            self.table.commit(seq, data.draw(st.integers(0, n)) if data.draw(st.booleans()) else n)
        self.cache.check()

    @precondition(lambda self: self.table.sequences)
    @rule(data=st.data())
    def step_that_fails(self, data: st.DataObject) -> None:
        """The forward never came: reserved and copied, nothing committed."""
        try:
            copies = self.table.reserve(self.draw_work(data))
        except OutOfBlocksError:
            return
        self.cache.copy(copies)
        self.cache.check()

    @precondition(lambda self: self.table.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = self.one(data)
        self.host.forget(seq)
        self.table.free(seq)
        with pytest.raises(ArgumentError, match="not in this table"):
            self.table.reserve(seq, 1)
        self.cache.check()

    @precondition(lambda self: self.table.sequences)
    @rule(data=st.data(), again=st.booleans())
    def preempt(self, data: st.DataObject, again: bool) -> None:
        seq = self.one_here(data)
        if seq is None:
            return
        self.table.preempt(seq)
        assert seq.num_computed == 0
        if again and self.table.prefix_cache:
            expected = self.longest(list(seq.token_ids), seq.salt)
            assert self.table.take_hits(seq) == expected
        self.cache.check()

    @precondition(lambda self: self.table.sequences)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = self.one_here(data)
        if seq is None:
            return
        n = data.draw(st.integers(0, len(seq)))
        kept, computed = list(seq.token_ids)[:n], min(n, seq.num_computed)
        assert self.table.truncate(seq, n) in (0, computed)
        if all(g.window is None for g in self.table.groups):
            assert seq.num_computed == computed
        assert list(seq.token_ids) == kept
        self.cache.check()

    @rule()
    def defragment(self) -> None:
        """Whatever is in use lies at the low ids afterwards, and reads what it read before."""
        if any(seq.holds for seq in self.table.sequences):
            before = snapshot(self.table)
            with pytest.raises(ArgumentError, match="waits for copies"):
                defragment(self.table, self.cache)  # type: ignore[arg-type]
            assert snapshot(self.table) == before
            return
        defragment(self.table, self.cache)  # type: ignore[arg-type]
        for pool in self.table.pools.values():
            assert pool.free_blocks() == set(range(pool.num_live + pool.num_cached, pool.num_blocks))
        self.cache.check()

    @precondition(lambda self: self.table.sequences)
    @rule(data=st.data(), works=st.booleans())
    def park(self, data: st.DataObject, works: bool) -> None:
        """Out to the host; when the step fails it is computed again, as after an ordinary preemption."""
        seq = self.one_here(data)
        if seq is None or seq.holds:
            return
        before = snapshot(self.table)
        try:
            out = self.host.park(seq)
        except OutOfBlocksError:
            assert snapshot(self.table) == before
        else:
            assert seq.num_computed == 0
            assert not any(seq.blocks.values())
            self.host.send(out)
            if works:
                self.host.settle([seq])
            else:
                self.host.cancel(seq)
            assert (seq in self.host) == works
        self.host.check()
        self.cache.check()

    @precondition(lambda self: any(seq in self.host for seq in self.table.sequences))
    @rule(data=st.data(), works=st.booleans(), grow=st.booleans())
    def unpark(self, data: st.DataObject, works: bool, grow: bool) -> None:
        """Back where it was, its data too; a step that fails leaves it parked."""
        seq = data.draw(st.sampled_from([s for s in self.table.sequences if s in self.host]))
        entry, before = self.host.parked[seq.id], snapshot(self.table)
        try:
            back = self.host.unpark(seq)
        except OutOfBlocksError:
            assert snapshot(self.table) == before
            assert entry.phase is Phase.PARKED
            return
        assert (seq.num_computed, seq.num_stored) == (entry.num_computed, entry.num_stored)
        if not works:
            self.host.cancel(seq)
            assert seq in self.host
        else:
            self.host.fetch(back)
            if grow:
                with contextlib.suppress(OutOfBlocksError):
                    self.cache.step([(seq, seq.num_uncomputed)])
            self.host.settle([seq])
            assert seq not in self.host
        self.host.check()
        self.cache.check()


class CollidingSequencesMachine(SequencesMachine):
    hasher = staticmethod(lambda _parent, _content: b"x")


TestSequences = SequencesMachine.TestCase
TestSequences.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestCollidingSequences = CollidingSequencesMachine.TestCase
TestCollidingSequences.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
