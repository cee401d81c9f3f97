"""A step's rows, packed: what the model reads besides its weights and the cache."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagetile.cache.sequence import Sequence
from pagetile.contracts.metadata import AttentionMetadata, build_metadata, to_device


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


def pack(
    work: List[tuple[Sequence, int]],
    groups: List[str],
    block_size: int,
    device: torch.device | str,
    pad_tokens: int | None,
    pad_seqs: int | None,
    table_width: int | None,
) -> Batch:
    """Pack the next ``n`` tokens of each sequence; tokens that are stored already get slot -1."""
    new = [n for _, n in work]
    lens = [seq.num_computed + n for seq, n in work]
    skip = [[(seq.num_computed, seq.num_stored)] if seq.num_stored > seq.num_computed else None for seq, _ in work]
    metadata = {
        name: build_metadata(
            [seq.blocks[name] for seq, _ in work],
            lens,
            new,
            block_size,
            device=device,
            pad_tokens=pad_tokens,
            pad_seqs=pad_seqs,
            table_width=table_width,
            skip=skip if any(skip) else None,
        )
        for name in groups
    }
    some = metadata[groups[0]]
    ids = np.zeros(some.num_tokens, dtype=np.int64)
    positions = np.zeros(some.num_tokens, dtype=np.int64)
    last = np.zeros(some.num_seqs, dtype=np.int64)
    row = 0
    for b, (seq, n) in enumerate(work):
        known = np.asarray(seq.token_ids[seq.num_computed : seq.num_computed + n])
        ids[row : row + len(known)] = known
        positions[row : row + n] = np.arange(seq.num_computed, seq.num_computed + n)
        row += n
        last[b] = row - 1 if n else 0
    return Batch(to_device(ids, device), to_device(positions, device), to_device(last, device), metadata)
