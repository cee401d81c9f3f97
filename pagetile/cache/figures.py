"""Numbers about a cache, as values that can be printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pagetile.cache.groups import CacheGeometry
from pagetile.cache.pool import BlockPool
from pagetile.cache.sequence import Sequence
from pagetile.contracts.errors import ArgumentError


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


class PeakMeter:
    """Remembers the step at which live blocks took the most bytes, and whose they were."""

    def __init__(self, pools: Mapping[str, BlockPool], geometry: CacheGeometry | None) -> None:
        self._pools = pools
        self._geometry = geometry
        self._bytes = 0
        self._sequences: tuple[Sequence, ...] = ()

    def live_bytes(self) -> int:
        """Bytes of live blocks now; 0 without a geometry."""
        if self._geometry is None:
            return 0
        return sum(pool.num_live * self._geometry.group_bytes_per_block(name) for name, pool in self._pools.items())

    def note(self, sequences: Iterable[Sequence]) -> None:
        """Called after blocks were taken. The sequences themselves are kept, so that their final lengths are known."""
        held = self.live_bytes()
        if held > self._bytes:
            self._bytes = held
            self._sequences = tuple(s for s in sequences if any(s.blocks.values()))

    def figures(self, max_len: int) -> MemoryFigures:
        """The figures of that step, against contiguous buffers of ``max_len`` tokens a sequence.

        Raises:
            ArgumentError: without a geometry no bytes are known.
        """
        if self._geometry is None:
            raise ArgumentError(
                "this table has no geometry, so it knows no bytes; make it with SequenceTable.for_cache"
            )
        token = self._geometry.bytes_per_token
        return MemoryFigures(
            paged_bytes=self._bytes,
            contiguous_max_bytes=len(self._sequences) * max_len * token,
            contiguous_final_bytes=sum(len(seq) for seq in self._sequences) * token,
            num_sequences=len(self._sequences),
        )


def _saved(paged: int, contiguous: int) -> float:
    return 1.0 - paged / contiguous if contiguous else 0.0
