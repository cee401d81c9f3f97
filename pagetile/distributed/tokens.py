"""Which rank holds the keys of a position: chunks of tokens dealt out in turn.

With ``size`` ranks and chunks of ``interleave`` tokens, position p belongs to rank ``(p // interleave) % size``. A rank
sees its tokens as a sequence without gaps, in order, and stores that in blocks like any other sequence.

>>> one = TokenSplit(size=2, rank=1, interleave=4)
>>> [one.owner(p) for p in (0, 3, 4, 7, 8)]
[0, 0, 1, 1, 0]
>>> TokenSplit(2, 0, 4).local_len(10), one.local_len(10)     # 0-3 and 8-9; 4-7
(6, 4)
>>> one.local_index(6), one.position(2)
(2, 6)

The number of a rank's tokens below a position, :meth:`TokenSplit.local_len`, is the whole arithmetic: the keys that a
query at position p sees are the first ``local_len(p + 1)`` local ones, from ``local_len(p - left)`` on under a window.

Source: vLLM's decode context parallelism (``get_dcp_local_seq_lens``, ``cp_kv_cache_interleave_size``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError
from pagetile.contracts.geometry import PAD_SLOT
from pagetile.contracts.visibility import FARTHEST


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """How one rank sees a split of tokens over ``size`` ranks.

    Attributes:
        size: ranks that share the tokens of a sequence.
        rank: this one, from 0.
        interleave: tokens in a chunk. Any; a multiple of the block size keeps a block's tokens side by side.
    """

    size: int
    rank: int
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ArgumentError(f"rank is {self.rank} of size {self.size}; 0 <= rank < size must hold")
        if self.interleave < 1 or self.size * self.interleave > FARTHEST:
            raise ArgumentError(
                f"interleave is {self.interleave}; a chunk holds at least 1 token, and size of them less than 2**31"
            )

    def owner(self, position: int) -> int:
        """The rank that holds a position."""
        return position // self.interleave % self.size

    def local_len(self, length: int) -> int:
        """How many of the first ``length`` positions are this rank's."""
        rounds, rest = divmod(length, self.size * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def local_index(self, position: int) -> int:
        """Where a position of this rank stands among its tokens.

        Raises:
            ArgumentError: the position is another rank's.
        """
        if position < 0 or self.owner(position) != self.rank:
            raise ArgumentError(
                f"position {position} is rank {self.owner(position)}'s, not rank {self.rank}'s ({self.size} ranks, "
                f"chunks of {self.interleave})"
            )
        return self.local_len(position)

    def position(self, local_index: int) -> int:
        """The position of a local token: the inverse of :meth:`local_index`."""
        chunk, within = divmod(local_index, self.interleave)
        return (chunk * self.size + self.rank) * self.interleave + within

    def local_lens(self, lengths: Tensor) -> Tensor:
        """:meth:`local_len` of each element, in its dtype (int32 or int64), where the tensor lives.

        No synchronisation; a negative length counts as 0.
        """
        period = self.size * self.interleave
        lengths = lengths.clamp(min=0)
        rounds = torch.div(lengths, period, rounding_mode="floor")
        rest = lengths - rounds * period - self.rank * self.interleave
        return rounds * self.interleave + rest.clamp(0, self.interleave)

    def owns(self, positions: Tensor) -> Tensor:
        """bool: which positions are this rank's; no negative one is."""
        chunk = torch.div(positions, self.interleave, rounding_mode="floor")
        return (positions >= 0) & (torch.remainder(chunk, self.size) == self.rank)

    def local_slots(self, positions: Tensor, owners: Tensor, block_table: Tensor, block_size: int) -> Tensor:
        """Where this rank stores the tokens at some positions.

        Args:
            positions: int32 or int64 ``[T]``, of the whole sequence; negative is nowhere.
            owners: int64 ``[T]``, the row of the block table of each token's sequence.
            block_table: int32 or int64 ``[B, width]``, of this rank's tokens.
            block_size: slots in a block.

        Returns:
            int64 ``[T]``; -1 where the token is another rank's, where its row has no block for it, and where the block
            id is negative. No synchronisation.
        """
        num_seqs, width = block_table.shape
        if width == 0 or num_seqs == 0:
            return torch.full(positions.shape, PAD_SLOT, dtype=torch.int64, device=positions.device)
        local = self.local_lens(positions.to(torch.int64))
        logical = torch.div(local, block_size, rounding_mode="floor")
        blocks = block_table[owners, logical.clamp(max=width - 1)].to(torch.int64)
        slots = blocks * block_size + (local - logical * block_size)
        return torch.where(self.owns(positions) & (logical < width) & (blocks >= 0), slots, PAD_SLOT)
