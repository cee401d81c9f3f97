"""Which heads are a rank's, and how ranks are laid out that split heads and tokens at once.

KV heads are dealt out in contiguous ranges, each with the query heads it serves; with fewer KV heads than ranks several
ranks hold the same KV head and divide its query heads.

>>> [(h.kv_heads, h.q_heads) for h in (HeadSplit(6, 3, 2, r) for r in range(2))]           # uneven
[(range(0, 1), range(0, 2)), (range(1, 3), range(2, 6))]
>>> [(h.kv_heads, h.q_heads) for h in (HeadSplit(8, 2, 4, r) for r in range(4))]           # fewer KV heads than ranks
[(range(0, 1), range(0, 2)), (range(0, 1), range(2, 4)), (range(1, 2), range(4, 6)), (range(1, 2), range(6, 8))]

Holding a KV head twice is memory and bandwidth spent for nothing; where tokens can be split as well, a
:class:`RankGrid` does that with the ranks that are left over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from pagetile.contracts.errors import ArgumentError
from pagetile.distributed.tokens import TokenSplit

DEFAULT_TIMEOUT = 60.0
"""Seconds after which an exchange that has not completed is an error, in the groups that are made here."""


def shares(count: int, size: int) -> list[range]:
    """``count`` things in ``size`` contiguous ranges that differ by one at most.

    >>> shares(5, 3)
    [range(0, 1), range(1, 3), range(3, 5)]
    """
    return [range(count * i // size, count * (i + 1) // size) for i in range(size)]


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The heads of one rank out of ``size`` that split them.

    Attributes:
        num_q_heads, num_kv_heads: of the model; the second divides the first.
        size, rank: ranks that share the heads, and this one.
    """

    num_q_heads: int
    num_kv_heads: int
    size: int
    rank: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise ArgumentError(
                f"num_q_heads is {self.num_q_heads} and num_kv_heads is {self.num_kv_heads}; each KV head serves the "
                "same number of query heads"
            )
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ArgumentError(f"rank is {self.rank} of size {self.size}; 0 <= rank < size must hold")

    @property
    def kv_heads(self) -> range:
        """The KV heads that this rank stores; never empty."""
        if self.size <= self.num_kv_heads:
            return shares(self.num_kv_heads, self.size)[self.rank]
        head = self.rank * self.num_kv_heads // self.size
        return range(head, head + 1)

    @property
    def q_heads(self) -> range:
        """The query heads that this rank computes; empty where more ranks share a KV head than it has query heads."""
        group, kv = self.num_q_heads // self.num_kv_heads, self.kv_heads
        if self.size <= self.num_kv_heads:
            return range(kv.start * group, kv.stop * group)
        holders = [r for r in range(self.size) if r * self.num_kv_heads // self.size == kv.start]
        mine = shares(group, len(holders))[holders.index(self.rank)]
        return range(kv.start * group + mine.start, kv.start * group + mine.stop)


@dataclass(frozen=True, slots=True)
class RankGrid:
    """``tp`` ways by KV head times ``cp`` ways by token; rank r is column ``r % cp`` of row ``r // cp``.

    The ranks of a row hold the same KV heads and different tokens: they exchange states, so they should be close to
    each other. Rows never exchange anything for attention.

    >>> RankGrid.of(8, num_kv_heads=2)
    RankGrid(tp=2, cp=4)
    >>> RankGrid.of(8, num_kv_heads=8), RankGrid.of(2, num_kv_heads=1)
    (RankGrid(tp=8, cp=1), RankGrid(tp=1, cp=2))
    """

    tp: int
    cp: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.cp < 1:
            raise ArgumentError(f"tp is {self.tp} and cp is {self.cp}; both are at least 1")

    @classmethod
    def of(cls, world: int, num_kv_heads: int) -> RankGrid:
        """The most ways by head that leave no KV head on two ranks, tokens with the rest."""
        tp = math.gcd(world, num_kv_heads)
        return cls(tp, world // tp)

    def heads(self, rank: int, num_q_heads: int, num_kv_heads: int) -> HeadSplit:
        """The heads of a rank's row."""
        return HeadSplit(num_q_heads, num_kv_heads, self.tp, rank // self.cp)

    def tokens(self, rank: int, interleave: int = 1) -> TokenSplit:
        """The tokens of a rank's column."""
        return TokenSplit(self.cp, rank % self.cp, interleave)

    def make_groups(self, timeout: float = DEFAULT_TIMEOUT, backend: str | None = None) -> dist.ProcessGroup:
        """The group of this rank's row, over which states are exchanged. Every rank of the world calls this.

        Args:
            timeout: seconds after which an exchange that has not completed is an error.
            backend: of ``torch.distributed``; default: the world's.

        Raises:
            ArgumentError: the world is not ``tp * cp`` ranks.
        """
        world = dist.get_world_size()
        if world != self.tp * self.cp:
            raise ArgumentError(f"the world has {world} ranks, but tp is {self.tp} and cp is {self.cp}")
        mine: dist.ProcessGroup | None = None
        for row in range(self.tp):
            ranks = list(range(row * self.cp, (row + 1) * self.cp))
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend=backend)
            if isinstance(group, dist.ProcessGroup):  # a number stands for a group that this rank is not in
                mine = group
        assert mine is not None
        return mine
