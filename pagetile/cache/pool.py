"""The blocks of one group: which are free, which are in use by how many, which are kept for a prefix that may return.

Every block is in exactly one of three places::

    free     nobody holds it and it remembers nothing
    live     at least one reference
    cached   nobody holds it, but it holds a full block of a known prefix; the least recently freed goes first

``free + live + cached == total`` at all times. All operations are O(1) a block. A pool knows no tensors: it hands out
numbers. It is not safe to use from several threads at once.

Source: vLLM's block pool (reference counts, free queue in eviction order, tails before heads), Linux page cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagetile.cache.prefix import Hasher, Prefix, Salt, blake2b, chain, token_array
from pagetile.contracts import figure
from pagetile.contracts.errors import ArgumentError, BlockTableError, OutOfBlocksError


@dataclass(slots=True)
class PoolStats:
    """Counters since the pool was made, all in blocks.

    Attributes:
        queries: full blocks of the prompts that were looked up in the prefix cache.
        hits: of those, found and taken.
        evictions: cached blocks that gave way to an allocation.
    """

    queries: int = 0
    hits: int = 0
    evictions: int = 0


class BlockPool:
    """A fixed number of blocks, counted references and a prefix cache over full blocks.

    >>> pool = BlockPool(num_blocks=4, block_size=2)
    >>> blocks = pool.allocate(2)
    >>> pool.register_tokens(blocks, [5, 6, 7, 8])      # after their keys and values were written
    >>> pool.free(blocks)
    >>> pool.num_live, pool.num_cached, pool.num_free
    (0, 2, 2)
    >>> pool.match([5, 6, 9, 9]) == blocks[:1]          # the first block again, now with one reference
    True

    Args:
        num_blocks: total; ids are ``[0, num_blocks)``.
        block_size: tokens in a block.
        prefix_cache: False remembers nothing; freed blocks are free at once.
        hasher: chains the digests, see :data:`~pagetile.cache.prefix.Hasher`. A bad one costs time, never data.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True, hasher: Hasher = blake2b) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ArgumentError(f"num_blocks is {num_blocks} and block_size is {block_size}; both must be at least 1")
        self.num_blocks = int(num_blocks)
        self.block_size = int(block_size)
        self.prefix_cache = bool(prefix_cache)
        self.hasher = hasher
        self.stats = PoolStats()
        self._refs = [0] * self.num_blocks
        self._prefix: list[Prefix | None] = [None] * self.num_blocks
        self._by_digest: dict[bytes, list[int]] = {}
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: the block freed last is warm, and goes first
        self._cached: OrderedDict[int, None] = OrderedDict()  # in order of eviction
        self._num_live = 0

    # Counts ---------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that remember nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds that still serve prefix hits."""
        return len(self._cached)

    @property
    def num_live(self) -> int:
        """Blocks with at least one reference."""
        return self._num_live

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` can hand out: free and cached."""
        return len(self._free) + len(self._cached)

    def free_blocks(self) -> set[int]:
        """Ids of the blocks that remember nothing."""
        return set(self._free)

    def registered_blocks(self) -> list[int]:
        """Blocks that a prompt could hit: cached ones in the order of their eviction, then live ones, tails first."""
        live = [(-prefix.num_blocks, b) for b, prefix in enumerate(self._prefix) if prefix and self._refs[b]]
        return [*self._cached, *(b for _, b in sorted(live))]

    def ref(self, block: int) -> int:
        """References to a block."""
        return self._refs[self._known(block)]

    def prefix(self, block: int) -> Prefix | None:
        """The prefix a block is registered under; None when it would never be hit."""
        return self._prefix[self._known(block)]

    def digest(self, block: int) -> bytes | None:
        """The hash a block is registered under; None when it would never be hit."""
        prefix = self.prefix(block)
        return None if prefix is None else prefix.digest

    # References -----------------------------------------------------------------------------------------------------

    def can_allocate(self, count: int) -> bool:
        """Whether ``allocate(count)`` succeeds now."""
        return 0 <= count <= self.num_available

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, one reference each: free ones first, then the least recently freed cached ones.

        Raises:
            OutOfBlocksError: fewer are available. Nothing was taken.
        """
        if count < 0:
            raise ArgumentError(f"count is {count}; it is a number of blocks")
        if count > self.num_available:
            raise OutOfBlocksError(
                f"{count} blocks asked for, {self.num_available} available ({self.num_free} free, {self.num_cached} "
                f"cached, {self.num_live} live of {self.num_blocks}); free or preempt a sequence, or give more blocks"
            )
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self.forget(block)
                self.stats.evictions += 1
            self._refs[block] = 1
            taken.append(block)
        self._num_live += count
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, which must be live or cached.

        Raises:
            ArgumentError: a block is free. Nothing has changed then.
        """
        blocks = [self._known(b) for b in blocks]
        for block in blocks:
            if self._refs[block] == 0 and block not in self._cached:
                raise ArgumentError(f"block {block} is free; only a live or cached block can be shared")
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
                self._num_live += 1
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a sequence, given head first.

        A block without references is kept for its prefix, or becomes free if it has none (or if another block holds
        the same prefix). Tails are queued for eviction before heads: a head serves more prompts than its tail.

        Raises:
            ArgumentError: a block is named more often than it has references. Nothing has changed then.
        """
        blocks = [self._known(b) for b in blocks]
        for block, times in Counter(blocks).items():
            if times > self._refs[block]:
                raise ArgumentError(
                    f"block {block} is freed {times} times but has {self._refs[block]} references; "
                    "a reference is dropped once by who took it"
                )
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._num_live -= 1
                self._retire(block)

    def _retire(self, block: int) -> None:
        """Put a block nobody holds where it belongs."""
        prefix = self._prefix[block]
        if prefix is None:
            self._free.append(block)
            return
        twins = self._holders(prefix)
        if twins == [block]:
            self._cached[block] = None
            return
        self.forget(block)
        self._free.append(block)
        for twin in twins:
            if twin in self._cached:
                self._cached.move_to_end(twin)  # its content was in use until now

    # Prefix cache ---------------------------------------------------------------------------------------------------

    def register(self, block: int, prefix: Prefix) -> Prefix:
        """Say that a live block now holds the last block of ``prefix``: it may be hit from now on.

        To be called after its keys and values were written. Another block may hold the same prefix already; both stay.

        Returns:
            An equal prefix that the cache holds already, if any, else ``prefix``: to be extended in its place, so that
            chains share their parents.

        Raises:
            ArgumentError: the block is not live, or is registered under another prefix.
        """
        block = self._known(block)
        if not self.prefix_cache:
            return prefix
        self._check_registrable(block, prefix)
        own = self._prefix[block]
        if own is not None:
            return own
        twin = self.lookup(prefix)
        if twin is not None:
            prefix = self._prefix[twin] or prefix
        self._prefix[block] = prefix
        self._by_digest.setdefault(prefix.digest, []).append(block)
        return prefix

    def _check_registrable(self, block: int, prefix: Prefix) -> None:
        if not self.prefix_cache:
            return
        if self._refs[block] == 0:
            raise ArgumentError(f"block {block} is not live; only a block somebody holds can be registered")
        own = self._prefix[block]
        if own is not None and own is not prefix and not own.same(prefix):
            raise ArgumentError(f"block {block} holds {own}, it cannot become {prefix}; forget() it before rewriting")

    def forget(self, block: int) -> None:
        """Take a block out of the lookup, because its content is about to change. Its references stay."""
        prefix = self._prefix[self._known(block)]
        if prefix is None:
            return
        self._prefix[block] = None
        bucket = self._by_digest[prefix.digest]
        bucket.remove(block)
        if not bucket:
            del self._by_digest[prefix.digest]
        if self._refs[block] == 0 and block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def lookup(self, prefix: Prefix) -> int | None:
        """A block that holds the last block of ``prefix``, or None. Compares tokens and salt, not only the digest."""
        return next(iter(self._holders(prefix)), None)

    def take_hits(self, blocks: Sequence[int], queries: int) -> None:
        """:meth:`share` blocks that lookups found, and count them: ``len(blocks)`` hits of ``queries``."""
        self.share(blocks)
        self.stats.hits += len(blocks)
        self.stats.queries += queries

    def match(self, tokens: Any, salt: Salt = None) -> list[int]:
        """The blocks of the longest known prefix of ``tokens``, head first, with a reference added to each."""
        ids = token_array(tokens)
        found: list[int] = []
        for prefix in chain(ids, self.block_size, salt, self.hasher):
            block = self.lookup(prefix)
            if block is None:
                break
            found.append(block)
        self.take_hits(found, queries=len(ids) // self.block_size)
        return found

    def register_tokens(self, blocks: Sequence[int], tokens: Any, salt: Salt = None) -> None:
        """:meth:`register` the full blocks of ``tokens``, which lie in ``blocks``, head first.

        Raises:
            ArgumentError: there are fewer blocks than full blocks of tokens, one is named twice, is not live, or is
                registered under another prefix. Nothing has been registered then.
        """
        ids = token_array(tokens)
        full = len(ids) // self.block_size
        if len(blocks) < full:
            raise ArgumentError(
                f"{len(ids)} tokens fill {full} blocks of {self.block_size}, but {len(blocks)} blocks are given; "
                "pass the blocks that hold the tokens, head first"
            )
        used = [self._known(block) for block in blocks[:full]]
        if len(set(used)) < full:
            twice = next(block for block, times in Counter(used).items() if times > 1)
            raise ArgumentError(f"block {twice} is given twice; a block holds the tokens of one place")
        prefixes = list(chain(ids, self.block_size, salt, self.hasher))
        for block, prefix in zip(used, prefixes, strict=True):
            self._check_registrable(block, prefix)
        for block, prefix in zip(used, prefixes, strict=True):
            self.register(block, prefix)

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, live blocks' too, for instance because the weights changed."""
        for block in range(self.num_blocks):
            self.forget(block)

    def renumber(self, moves: Mapping[int, int]) -> None:
        """Take the place of each block ``old`` to ``new = moves[old]``, a free block: references, prefix and all.

        Raises:
            ArgumentError: a block that is free, or a new place that is not (or is named twice). Nothing has changed.
        """
        taken = [self._known(new) for new in moves.values()]
        free = self.free_blocks()
        for old, new in moves.items():
            if self._known(old) in free or new not in free:
                what = "is free" if old in free else f"cannot move to {new}, which is in use"
                raise ArgumentError(f"block {old} {what}; a block in use moves to a free one")
        if len(set(taken)) != len(taken):
            raise ArgumentError(f"two blocks move to the same place among {sorted(taken)}")
        for old, new in moves.items():
            self._refs[new], self._refs[old] = self._refs[old], 0
            prefix, self._prefix[old] = self._prefix[old], None
            self._prefix[new] = prefix
            if prefix is not None:
                bucket = self._by_digest[prefix.digest]
                bucket[bucket.index(old)] = new
        self._cached = OrderedDict.fromkeys(moves.get(block, block) for block in self._cached)
        self._free = sorted((free - set(taken)) | set(moves), reverse=True)  # the lowest goes first

    # Proof ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove every invariant of the pool.

        Raises:
            AssertionError: names the first one that does not hold.
        """
        live = {b for b, refs in enumerate(self._refs) if refs > 0}
        free, cached = set(self._free), set(self._cached)
        _hold(all(refs >= 0 for refs in self._refs), "no reference count is negative")
        _hold(len(free) == len(self._free), "no block is free twice")
        _hold(self._num_live == len(live), f"the live counter {self._num_live} equals the {len(live)} live blocks")
        _hold(
            not (free & cached or free & live or cached & live) and len(free | cached | live) == self.num_blocks,
            "every block is in exactly one of free, live, cached",
        )
        _hold(
            self.num_free + self.num_live + self.num_cached == self.num_blocks, "free + live + cached equals the total"
        )
        _hold(all(self._prefix[b] is None for b in free), "a free block remembers no prefix")
        _hold(all(self._prefix[b] is not None for b in cached), "a cached block has a prefix")
        for block, prefix in enumerate(self._prefix):
            if prefix is not None:
                times = self._by_digest.get(prefix.digest, []).count(block)
                _hold(times == 1, f"registered block {block} is in the lookup once, not {times} times")
                _hold(len(prefix.content) == 8 * self.block_size, f"block {block} is registered for a full block")
        entries = sum(map(len, self._by_digest.values()))
        named = sum(p is not None for p in self._prefix)
        _hold(entries == named, f"the lookup has {entries} entries for {named} registered blocks")
        _hold(all(self._by_digest.values()), "no empty bucket stays in the lookup")
        for block in cached:
            prefix = self._prefix[block]
            twins = [] if prefix is None else [b for b in self._holders(prefix) if b in cached]
            _hold(twins == [block], f"cached blocks {twins} do not hold the same prefix")

    def _holders(self, prefix: Prefix) -> list[int]:
        """The blocks registered under a prefix: one as a rule, more after requests computed the same at once."""
        candidates = self._by_digest.get(prefix.digest, ())
        return [b for b in candidates if (held := self._prefix[b]) is not None and held.same(prefix)]

    def _known(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise BlockTableError(f"block {block} is not in the pool, which has blocks 0 to {self.num_blocks - 1}")
        return int(block)

    def _repr_html_(self) -> str:
        """A square a block, for notebooks."""
        kinds = []
        for block, refs in enumerate(self._refs):
            kind = "shared" if refs > 1 else "live" if refs else "cached" if block in self._cached else "free"
            kinds.append((kind, f"block {block}: {kind}, {refs} references"))
        return figure.cells(repr(self), kinds)

    def __repr__(self) -> str:
        return (
            f"BlockPool({self.num_blocks} blocks of {self.block_size}: {self.num_live} live, {self.num_cached} cached, "
            f"{self.num_free} free)"
        )


def _hold(condition: bool, invariant: str) -> None:
    if not condition:
        raise AssertionError(f"block pool invariant broken: {invariant}")
