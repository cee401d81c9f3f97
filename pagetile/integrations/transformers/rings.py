"""Where the rows of a batch of continuous batching are: in blocks that grow, and in blocks that are a ring.

A full-attention layer keeps every token of a request, position p in block ``p // BS`` of its list. A sliding-window
layer of the host keeps the last W tokens, position p in slot ``p % W`` of the request's blocks, so that a new token
overwrites the one that has just left the window. For a single new token the ring then holds exactly the keys that it
sees, and since their positions are in the keys, their order does not matter: it is attended over in place, without a
mask. A longer piece of a prompt is attended over what it still needs of the ring, followed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagetile.contracts.geometry import PAD_SLOT
from pagetile.integrations.transformers.pages import Span


@dataclass(slots=True, eq=False)
class Batch:
    """Requests of one forward, in the order of their rows.

    Attributes:
        past: tokens of each request in the cache.
        new: rows of each.
        blocks: for each group of layers, the block ids of each request.
    """

    past: list[int]
    new: list[int]
    blocks: list[list[list[int]]]


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """Rows of a batch over rings.

    Attributes:
        slots: int64 ``[T]``, where each row is stored; -1 for rows that leave the window within the batch.
        singles: requests with one row; None when there is none.
        single_rows: int64, their rows; None when they are all rows.
        pieces: requests with several rows; None when there is none. Its ``block_table`` is not used.
        piece_rows: int64, their rows; None when they are all rows.
        piece_key_start_loc: int32, the keys of each piece: what it needs of the ring, then itself.
        kept: int64, slots that pieces read; empty when none has a past.
        kept_at, new_at: int64, where those and the new rows go among the keys of the pieces.
    """

    slots: Tensor
    singles: Span | None
    single_rows: Tensor | None
    pieces: Span | None
    piece_rows: Tensor | None
    piece_key_start_loc: Tensor
    kept: Tensor
    kept_at: Tensor
    new_at: Tensor


def span_of(batch: Batch, group: int, page_size: int, device: torch.device) -> Span:
    """Rows of a batch over blocks that grow."""
    past, new = np.array(batch.past, dtype=np.int64), np.array(batch.new, dtype=np.int64)
    table = _table(batch.blocks[group])
    row, position = _rows(past, new)
    slots = table[row, position // page_size] * page_size + position % page_size
    lens = past + new
    starts = np.concatenate([[0], np.cumsum(new)])
    return Span(
        _tensor(slots, device),
        _tensor(starts.astype(np.int32), device),
        _tensor(lens.astype(np.int32), device),
        _tensor(table.astype(np.int32), device),
        int(new.max()),
        int(lens.max()),
    )


def ring_of(batch: Batch, group: int, page_size: int, window: int, device: torch.device) -> Ring:
    """Rows of a batch over rings of ``window`` tokens."""
    past, new = np.array(batch.past, dtype=np.int64), np.array(batch.new, dtype=np.int64)
    table = _table(batch.blocks[group])

    def slot(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        at = positions % window
        return table[rows, at // page_size] * page_size + at % page_size

    row, position = _rows(past, new)
    lasts = position >= (past + new)[row] - window
    slots = np.where(lasts, slot(row, np.where(lasts, position, 0)), PAD_SLOT)
    single = new == 1
    singles = pieces = None
    if single.any():
        lens = np.minimum(past[single] + 1, window)
        singles = Span(
            _tensor(slots[single[row]], device),
            _tensor(np.arange(len(lens) + 1, dtype=np.int32), device),
            _tensor(lens.astype(np.int32), device),
            _tensor(table[single].astype(np.int32), device),
            1,
            int(lens.max()),
        )
    many = np.flatnonzero(~single)
    kept_len, new_len = np.minimum(past[many], window - 1), new[many]
    total = kept_len + new_len
    ends = np.cumsum(total)
    kept_row, kept_position = _rows(past[many] - kept_len, kept_len)
    if len(many):
        empty = torch.zeros(0, dtype=torch.int32)
        starts = np.concatenate([[0], np.cumsum(new_len)]).astype(np.int32)
        pieces = Span(empty, _tensor(starts, device), empty, empty, int(new_len.max()), int(total.max()))
    return Ring(
        slots=_tensor(slots, device),
        singles=singles,
        single_rows=None if single.all() else _tensor(np.flatnonzero(single[row]), device),
        pieces=pieces,
        piece_rows=None if not single.any() else _tensor(np.flatnonzero(~single[row]), device),
        piece_key_start_loc=_tensor(np.concatenate([[0], ends]).astype(np.int32), device),
        kept=_tensor(slot(many[kept_row], kept_position), device),
        kept_at=_tensor(_rows(ends - total, kept_len)[1], device),
        new_at=_tensor(_rows(ends - new_len, new_len)[1], device),
    )


def _table(blocks: list[list[int]]) -> np.ndarray:
    """``[B, width]`` int64, 0 past the end of a row."""
    table = np.zeros((len(blocks), max(1, max(map(len, blocks)))), dtype=np.int64)
    for row, ids in enumerate(blocks):
        table[row, : len(ids)] = ids
    return table


def _rows(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For ``count[b]`` consecutive numbers from ``first[b]`` on: which b, and which number."""
    row = np.repeat(np.arange(len(count)), count)
    before = np.cumsum(count) - count
    return row, np.arange(int(count.sum())) + np.repeat(first - before, count)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
