"""A step's rows, packed: what the model reads besides its weights and the cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagetile.cache.sequence import Sequence
from pagetile.contracts.metadata import AttentionMetadata, build_metadata, to_device

Work = List[tuple[Sequence, int]]
"""Sequences of a step, each with the number of its new tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of several sequences, one after another. T rows and B sequences, both possibly padded.

    Attributes:
        token_ids: int64 ``[T]``; 0 in padded rows.
        positions: int64 ``[T]``, each token's position in its own sequence; 0 in padded rows.
        last_rows: int64 ``[B]``, the row of each sequence's last token, where the next one is predicted; 0 for
            sequences without rows.
        metadata: of each group, by name.
    """

    token_ids: Tensor
    positions: Tensor
    last_rows: Tensor
    metadata: dict[str, AttentionMetadata]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Where a batch goes and what it is padded to, see :func:`~pagetile.contracts.metadata.build_metadata`."""

    device: torch.device | str = "cpu"
    pad_tokens: int | None = None
    pad_seqs: int | None = None
    table_width: int | None = None


def group_metadata(work: Work, group: str, block_size: int, shape: BatchShape) -> AttentionMetadata:
    """Metadata of one group for the next ``n`` tokens of each sequence; tokens that are stored already get slot -1."""
    skip = [[(seq.num_computed, seq.num_stored)] if seq.num_stored > seq.num_computed else None for seq, _ in work]
    return build_metadata(
        [seq.blocks[group] for seq, _ in work],
        [seq.num_computed + n for seq, n in work],
        [n for _, n in work],
        block_size,
        device=shape.device,
        pad_tokens=shape.pad_tokens,
        pad_seqs=shape.pad_seqs,
        table_width=shape.table_width,
        skip=skip if any(skip) else None,
    )


def pack(work: Work, groups: List[str], block_size: int, shape: BatchShape) -> Batch:
    """The next ``n`` tokens of each sequence, all of which must be known."""
    metadata = {name: group_metadata(work, name, block_size, shape) for name in groups}
    some = metadata[groups[0]]
    known = array("q")
    for seq, n in work:
        known.extend(seq.token_ids[seq.num_computed : seq.num_computed + n])
    ids = np.zeros(some.num_tokens, dtype=np.int64)
    ids[: len(known)] = known

    first = np.array([seq.num_computed for seq, _ in work], dtype=np.int64)
    new = np.array([n for _, n in work], dtype=np.int64)
    ends = np.cumsum(new)
    positions = np.zeros(some.num_tokens, dtype=np.int64)
    positions[: len(known)] = np.arange(len(known)) + np.repeat(first - (ends - new), new)
    last = np.zeros(some.num_seqs, dtype=np.int64)
    last[: len(new)] = np.where(new > 0, ends - 1, 0)
    token_ids, at, last_rows = (to_device(x, shape.device) for x in (ids, positions, last))
    return Batch(token_ids, at, last_rows, metadata)
