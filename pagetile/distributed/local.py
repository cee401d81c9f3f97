"""What one rank must know about a batch whose tokens are split over ranks; built once a step, for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError, ShapeError
from pagetile.contracts.metadata import build_metadata, to_device
from pagetile.contracts.visibility import FARTHEST
from pagetile.distributed.tokens import TokenSplit


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """A packed batch of B sequences and T query tokens, as one rank sees it. Every rank has all T queries.

    The worked example: two ranks, chunks of 4 tokens, blocks of 4. A sequence of 10 tokens, the last three of them new
    (positions 7, 8, 9); rank 0 holds positions 0-3, 8, 9 in its blocks 5 and 2.

    >>> split = TokenSplit(size=2, rank=0, interleave=4)
    >>> b = build_local_batch([[5, 2]], seq_lens=[10], query_lens=[3], block_size=4, split=split)
    >>> b.slot_mapping.tolist()              # position 7 is the other rank's; 8 and 9 are the first two of block 2
    [-1, 8, 9]
    >>> b.context_lens.tolist()              # of positions 0 to 6, four are here
    [4]
    >>> b.row_lens.tolist()                  # what the queries at 7, 8 and 9 see here: 0-3; then 8; then 9
    [4, 5, 6]

    Attributes:
        split: how tokens are split, and which rank this is.
        slot_mapping: int64 ``[T]``, where this rank stores each token; -1 is not stored here.
        query_start_loc: int32 ``[B + 1]``.
        seq_lens: int32 ``[B]``, of the whole sequences, the new tokens included.
        context_lens: int32 ``[B]``, tokens of this rank before the new ones.
        block_table: int32 ``[B, width]``, of this rank's tokens.
        positions: int32 ``[T]``, of each query in its sequence; -1 for rows that belong to none.
        row_lens: int32 ``[T]``, tokens of this rank that a causal query without a window sees.
        row_ends: int32 ``[T]``, the length of each query's whole sequence.
        owners: int64 ``[T]``, the sequence of each query (any, for rows that belong to none).
        row_table: int32 ``[T, width]``, the table row of each query's sequence; None where a sequence has several
            queries, since it would be large. :meth:`table_of_rows` makes it then.
        row_loc: int32 ``[T + 1]``, 0, 1, 2, ...: every query a sequence of its own.
        max_query_len, max_local_len: host integers.
        block_size: slots in a block.
    """

    split: TokenSplit
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    context_lens: Tensor
    block_table: Tensor
    positions: Tensor
    row_lens: Tensor
    row_ends: Tensor
    owners: Tensor
    row_table: Tensor | None
    row_loc: Tensor
    max_query_len: int
    max_local_len: int
    block_size: int

    def table_of_rows(self) -> Tensor:
        """int32 ``[T, width]``: a table in which every query is a sequence of its own."""
        return self.block_table[self.owners] if self.row_table is None else self.row_table

    def row_bounds(self, window: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """The local tokens that each query sees, ``[starts, lens)`` int32 ``[T]`` each, lens first; starts may be None.

        ``window`` is normalised: causality folded in, -1 unbounded.
        """
        left, right = window
        lens = self.row_lens
        if right != 0:
            last = self.row_ends if right < 0 else torch.minimum(self.row_ends, _add(self.positions, 1 + right))
            lens = self.split.local_lens(torch.where(self.positions < 0, 0, last))
        if left < 0:
            return lens, None
        return lens, self.split.local_lens(self.positions - left)


def build_local_batch(
    block_lists: Sequence[Sequence[int] | Any],
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    block_size: int,
    split: TokenSplit,
    *,
    device: torch.device | str = "cpu",
    pad_tokens: int | None = None,
    pad_seqs: int | None = None,
    table_width: int | None = None,
) -> LocalBatch:
    """A :class:`LocalBatch`, from per-sequence lists on the host.

    Args:
        block_lists: for each sequence the blocks of this rank, head first: at least enough for
            ``split.local_len(seq_len)`` tokens. The ranks may all use one list, made for rank 0, which has the most.
        seq_lens: tokens of each whole sequence, the new ones included.
        query_lens: new tokens of each sequence; they stand at its last positions.
        device, pad_tokens, pad_seqs, table_width: see :func:`pagetile.build_metadata`.

    Raises:
        As :func:`pagetile.build_metadata`.
    """
    if len(seq_lens) != len(query_lens):
        raise ShapeError(f"seq_lens has {len(seq_lens)} sequences, query_lens has {len(query_lens)}; they must agree")
    for b, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        if not 0 <= new <= length <= FARTHEST:
            raise ArgumentError(
                f"query_lens[{b}] is {new} and seq_lens[{b}] is {length}; 0 <= query_len <= seq_len < 2**31 must hold "
                "(seq_len counts the new tokens too)"
            )
    local = [split.local_len(n) for n in seq_lens]
    # Blocks as for the local tokens, none of them new; the queries are packed as they are.
    tables = build_metadata(
        block_lists, local, [0] * len(local), block_size, device=device, pad_seqs=pad_seqs, table_width=table_width
    )
    num_seqs, num_tokens = tables.num_seqs, int(sum(query_lens))
    if pad_tokens is not None and pad_tokens < num_tokens:
        raise ShapeError(f"pad_tokens is {pad_tokens}, but the batch has {num_tokens} tokens; pad to that or more")
    lens, starts = np.zeros(num_seqs, dtype=np.int32), np.full(num_seqs + 1, num_tokens, dtype=np.int32)
    lens[: len(local)] = seq_lens
    starts[: len(local) + 1] = np.cumsum([0, *query_lens])
    return local_batch(
        split,
        tables.block_table,
        to_device(lens, device),
        to_device(starts, device),
        block_size,
        num_tokens=num_tokens if pad_tokens is None else pad_tokens,
        max_query_len=max(query_lens, default=0),
        max_local_len=max(local, default=0),
    )


def local_batch(
    split: TokenSplit,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    *,
    num_tokens: int,
    max_query_len: int,
    max_local_len: int,
) -> LocalBatch:
    """A :class:`LocalBatch` from tensors, where they live; nothing is read back, so it can be captured in a CUDA graph.

    Args:
        block_table: int32 ``[B, width]``, of this rank's tokens.
        seq_lens: int32 ``[B]``, of the whole sequences, the new tokens included.
        query_start_loc: int32 ``[B + 1]``.
        num_tokens: T; rows from ``query_start_loc[-1]`` on belong to no sequence.
        max_query_len, max_local_len: host upper bounds.
    """
    device = seq_lens.device
    num_seqs = seq_lens.shape[0]
    rows = torch.arange(num_tokens, dtype=torch.int32, device=device)
    row_loc = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
    ends = query_start_loc[1:].contiguous()
    query_lens = ends - query_start_loc[:-1]
    context_lens = split.local_lens(seq_lens - query_lens)
    lookup = block_table
    if num_seqs == 0:  # rows of nobody
        lookup = block_table.new_zeros((1, block_table.shape[1]))
        owners, positions, row_ends = rows.long() * 0, torch.full_like(rows, -1), torch.zeros_like(rows)
    else:
        owners = torch.searchsorted(ends, rows, right=True)  # the first sequence that ends after the row
        real = owners < num_seqs
        owners = owners.clamp(max=num_seqs - 1)
        positions = torch.where(real, rows - ends[owners] + seq_lens[owners], -1).to(torch.int32)
        row_ends = torch.where(real, seq_lens[owners], 0).to(torch.int32)
    return LocalBatch(
        split=split,
        slot_mapping=split.local_slots(positions, owners, block_table, block_size),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        context_lens=context_lens,
        block_table=block_table,
        positions=positions,
        row_lens=split.local_lens(positions + 1),
        row_ends=row_ends,
        owners=owners,
        row_table=lookup[owners] if max_query_len <= 1 else None,
        row_loc=row_loc,
        max_query_len=max_query_len,
        max_local_len=max_local_len,
        block_size=block_size,
    )


def _add(positions: Tensor, distance: int) -> Tensor:
    """``positions + distance`` in int32 without wrapping around; distances reach ``FARTHEST``."""
    return torch.clamp(positions.to(torch.int64) + distance, max=FARTHEST).to(torch.int32)
