"""The pool against a model made of dicts and lists, under random histories.

The model knows what is written in each block (the whole prefix, as tokens) and predicts every hit, every eviction and
every count; with a constant hash it must be exactly as right as with a strong one.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagetile.cache.pool import BlockPool
from pagetile.cache.prefix import blake2b
from pagetile.contracts.errors import OutOfBlocksError

BLOCK = 2
Content = tuple[str | None, tuple[int, ...]]


class PoolMachine(RuleBasedStateMachine):
    hasher = staticmethod(blake2b)

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK, hasher=self.hasher)
        self.refs = [0] * num_blocks
        self.known: dict[int, Content] = {}  # registered blocks
        self.cached: list[int] = []  # in order of eviction
        self.holders: list[tuple[Content, list[int]]] = []

    # The model's own steps

    def give(self, block: int) -> None:
        if block in self.cached:
            self.cached.remove(block)
        self.refs[block] += 1

    def take_new(self, count: int) -> list[int]:
        free = {b for b, r in enumerate(self.refs) if r == 0} - set(self.cached)
        evicted = self.cached[: max(0, count - len(free))]
        got = self.pool.allocate(count)
        assert len(set(got)) == count
        assert set(got) <= free | set(evicted)
        assert set(evicted) <= set(got)
        for block in evicted:
            self.cached.remove(block)
            del self.known[block]
        for block in got:
            self.refs[block] = 1
        return got

    def drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] or block not in self.known:
                continue
            twins = [b for b, c in self.known.items() if c == self.known[block] and b != block]
            if not twins:
                self.cached.append(block)
                continue
            del self.known[block]
            for twin in set(twins) & set(self.cached):
                self.cached.remove(twin)
                self.cached.append(twin)

    def available(self) -> int:
        return sum(r == 0 for r in self.refs)

    # Rules

    @rule(tokens=st.lists(st.integers(0, 1), max_size=8), salt=st.sampled_from([None, "s"]), write=st.booleans())
    def open(self, tokens: list[int], salt: str | None, write: bool) -> None:
        """Match, allocate the rest, perhaps write and register the full blocks."""
        prefixes = [(salt, tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        expected = 0
        while expected < len(prefixes) and prefixes[expected] in self.known.values():
            expected += 1
        hits = self.pool.match(tokens, salt)
        assert len(hits) == expected
        for block, content in zip(hits, prefixes, strict=False):
            assert self.known[block] == content, "foreign data"
            self.give(block)
        missing = -(-len(tokens) // BLOCK) - len(hits)
        assert self.pool.can_allocate(missing) == (missing <= self.available())
        if missing > self.available():
            try:
                self.pool.allocate(missing)
            except OutOfBlocksError:
                self.pool.free(hits)
                self.drop(hits)
                return
            raise AssertionError("allocated more than there is")
        blocks = hits + self.take_new(missing)
        if write:
            self.pool.register_tokens(blocks, tokens, salt)
            for block, content in zip(blocks, prefixes, strict=False):
                self.known[block] = content
        self.holders.append(((salt, tuple(tokens)), blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        _, blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(blocks)
        self.drop(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        content, blocks = data.draw(st.sampled_from(self.holders))
        self.pool.share(blocks)
        for block in blocks:
            self.give(block)
        self.holders.append((content, blocks))

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, len(self.refs) - 1))
        self.pool.forget(block)
        self.known.pop(block, None)
        if block in self.cached:
            self.cached.remove(block)

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.known.clear()
        self.cached.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert [self.pool.ref(b) for b in range(len(self.refs))] == self.refs
        assert list(self.pool._cached) == self.cached
        assert {b for b in range(len(self.refs)) if self.pool.digest(b) is not None} == set(self.known)
        assert self.pool.num_live == sum(r > 0 for r in self.refs)
        assert self.pool.num_available == self.available()


class CollidingPoolMachine(PoolMachine):
    hasher = staticmethod(lambda _parent, _content: b"x")


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCollidingPool = CollidingPoolMachine.TestCase
TestCollidingPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
