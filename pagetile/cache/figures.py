"""Numbers about a cache, as values that can be printed."""

from __future__ import annotations

from dataclasses import dataclass

from pagetile.cache.pool import BlockPool


@dataclass(slots=True)
class TableStats:
    """Counters of a sequence table since it was made.

    Attributes:
        queried_tokens: tokens of the sequences that asked the prefix cache.
        hit_tokens: of those, tokens that need not be computed.
        preemptions: sequences that gave their blocks back unfinished.
        copies: blocks copied on a first write.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    copies: int = 0


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """Blocks of one group; ``live + cached + free == total``. ``queries``, ``hits`` and ``evictions`` are in blocks."""

    total: int
    live: int
    cached: int
    free: int
    queries: int
    hits: int
    evictions: int

    @classmethod
    def of(cls, pool: BlockPool) -> GroupUsage:
        """The present figures of a pool."""
        s = pool.stats
        return cls(pool.num_blocks, pool.num_live, pool.num_cached, pool.num_free, s.queries, s.hits, s.evictions)

    @property
    def utilization(self) -> float:
        """Share of the blocks that are live, in [0, 1]; cached blocks can be had and do not count."""
        return self.live / self.total


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes (K and V, all layers) at the step that held the most live blocks.

    Attributes:
        paged_bytes: live blocks, each counted once however many sequences share it.
        contiguous_max_bytes: a buffer of the maximum length for each sequence of that step.
        contiguous_final_bytes: a buffer of each of these sequences' present (in the end: final) length.
        num_sequences: sequences that held blocks at that step.
    """

    paged_bytes: int
    contiguous_max_bytes: int
    contiguous_final_bytes: int
    num_sequences: int

    @property
    def saved_against_max(self) -> float:
        """1 - paged / contiguous at the maximum length; 0 when nothing was held, negative when paged holds more."""
        return _saved(self.paged_bytes, self.contiguous_max_bytes)

    @property
    def saved_against_final(self) -> float:
        """1 - paged / contiguous at the final lengths; partly filled blocks can make it negative."""
        return _saved(self.paged_bytes, self.contiguous_final_bytes)


def _saved(paged: int, contiguous: int) -> float:
    return 1.0 - paged / contiguous if contiguous else 0.0
