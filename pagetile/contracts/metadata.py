"""What an attention call must know about its batch, and the arithmetic that makes it.

Writer and reader describe one storage from opposite ends: ``slot_mapping`` says where the new tokens go,
``block_table`` says where all tokens are. Both come out of the same lists of blocks here, so they cannot disagree.

Source: the metadata of vLLM (``slot_mapping``, ``block_table``, ``query_start_loc``, ``seq_lens``) and the
``cu_seqlens_q`` / ``seqused_k`` of FlashAttention's variable-length functions; the same four tensors by other names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagetile.contracts import figure
from pagetile.contracts.errors import ArgumentError, BlockTableError, ShapeError
from pagetile.contracts.geometry import PAD_SLOT, blocks_for

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Where the tokens of a packed batch are. B sequences, T query tokens, both possibly padded.

    The worked example: blocks of 16. The first sequence lives in blocks 7, 2, 9 and is 37 tokens long, the last 17
    of them new (positions 20 to 36); the second lives in block 4 and is 5 tokens long, the last one new. The batch is
    padded to 20 tokens and 3 sequences.

    >>> m = build_metadata([[7, 2, 9], [4]], seq_lens=[37, 5], query_lens=[17, 1], block_size=16,
    ...                    pad_tokens=20, pad_seqs=3)
    >>> m.block_table.tolist()                  # entries past a sequence's blocks, and padded rows, are 0
    [[7, 2, 9], [4, 0, 0], [0, 0, 0]]
    >>> m.slot_mapping.tolist()[:12]            # positions 20 to 31 are in logical block 1, physical block 2
    [36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47]
    >>> m.slot_mapping.tolist()[12:17]          # positions 32 to 36 are in logical block 2, physical block 9
    [144, 145, 146, 147, 148]
    >>> m.slot_mapping.tolist()[17:]            # position 4 of the second sequence; then two rows nobody stores
    [68, -1, -1]
    >>> m.query_start_loc.tolist()              # flat at the end: the padded sequence has no rows
    [0, 17, 18, 18]
    >>> m.seq_lens.tolist(), m.max_query_len, m.max_seq_len
    ([37, 5, 0], 17, 37)

    Attributes:
        block_table: int32 ``[B, width]``, physical block of each logical block; any valid id past the sequence's end.
        slot_mapping: int64 ``[T]``, the slot each token is stored at; -1 is not stored.
        query_start_loc: int32 ``[B + 1]``, the rows of sequence b are ``[loc[b], loc[b + 1])``.
        seq_lens: int32 ``[B]``, tokens of each sequence, the new ones included.
        max_query_len, max_seq_len: host integers, the largest of each (of the real sequences).
        block_size: slots in a block.
    """

    block_table: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    block_size: int

    @property
    def num_seqs(self) -> int:
        """B, padding included."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.slot_mapping.shape[0]

    def _repr_html_(self) -> str:
        """A row a sequence, for notebooks; reads the tensors back from their device."""
        loc, lens, slots = (x.tolist() for x in (self.query_start_loc, self.seq_lens, self.slot_mapping))
        table = self.block_table.tolist()
        rows = []
        for b, length in enumerate(lens):
            blocks = table[b][: blocks_for(length, self.block_size)]
            new = slots[loc[b] : loc[b + 1]]
            rows.append((b, length, len(new), figure.some(blocks), figure.some(new)))
        title = f"{self.num_tokens} rows, {self.num_seqs} sequences, blocks of {self.block_size}"
        return figure.table(title, ("sequence", "seq_len", "new", "blocks", "slots of the new tokens"), rows)


def build_metadata(
    block_lists: Sequence[Sequence[int] | Any],
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    block_size: int,
    *,
    device: torch.device | str = "cpu",
    pad_tokens: int | None = None,
    pad_seqs: int | None = None,
    table_width: int | None = None,
    skip: Sequence[Sequence[tuple[int, int]] | None] | None = None,
) -> AttentionMetadata:
    """Metadata of a batch, built on the host and copied to ``device``. See :class:`AttentionMetadata`.

    Args:
        block_lists: for each sequence its physical blocks, head first (list, array or anything with the buffer
            protocol); at least ``ceil(seq_len / block_size)`` of them, more are ignored.
        seq_lens: tokens of each sequence, the new ones included.
        query_lens: new tokens of each sequence; they stand at the last positions. 0 is legal.
        block_size: slots in a block, any integer of at least 1.
        device: where the tensors go. To a GPU they travel through pinned memory without a synchronisation.
        pad_tokens: fixed number of rows T; the added rows have slot -1.
        pad_seqs: fixed number of sequences B; the added ones have length 0, no rows, and table rows of 0.
        table_width: fixed width of the block table; by default what the longest sequence needs, at least 1.
        skip: for each sequence the half-open ranges of positions that are computed but not written (slot -1), because
            their block already holds them and is shared.

    Raises:
        ShapeError: the lists differ in length, or the batch does not fit the padded shape or the table width.
        ArgumentError: a negative length, a query longer than its sequence, a block size below 1.
        BlockTableError: a sequence has fewer blocks than its length needs, or a negative block id.
    """
    lens, new = _lengths(block_lists, seq_lens, query_lens, block_size)
    num_seqs, num_tokens = len(lens), int(new.sum())
    rows = _padded("pad_seqs", "sequences", pad_seqs, num_seqs)
    tokens = _padded("pad_tokens", "tokens", pad_tokens, num_tokens)
    table = _table(block_lists, -(-lens // block_size), rows, table_width)

    starts = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(new, out=starts[1 : num_seqs + 1])
    starts[num_seqs + 1 :] = num_tokens

    owner = np.repeat(np.arange(num_seqs), new)
    positions = np.arange(num_tokens, dtype=np.int64) + np.repeat(lens - new - starts[:num_seqs], new)
    slots = np.full(tokens, PAD_SLOT, dtype=np.int64)
    logical = positions // block_size
    slots[:num_tokens] = table[owner, logical] * block_size + (positions - logical * block_size)
    if skip is not None:
        _apply_skip(slots, skip, lens, new, starts)

    padded_lens = np.zeros(rows, dtype=np.int32)
    padded_lens[:num_seqs] = lens
    return AttentionMetadata(
        block_table=to_device(table.astype(np.int32), device),
        slot_mapping=to_device(slots, device),
        query_start_loc=to_device(starts, device),
        seq_lens=to_device(padded_lens, device),
        max_query_len=int(new.max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
        block_size=int(block_size),
    )


def slots_on_device(
    block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, block_size: int, num_tokens: int
) -> Tensor:
    """``slot_mapping`` from the other three tensors, where they live: the twin of :func:`build_metadata`.

    All shapes are fixed by host facts and nothing is read back, so the call can be captured and replayed in a CUDA
    graph with any lengths. What the host builder refuses cannot raise here and becomes -1 instead: a token before
    position 0, a position past the end of its table row, a negative block id.

    Args:
        block_table: int32 or int64 ``[B, width]``.
        seq_lens: int32 ``[B]``, the new tokens included.
        query_start_loc: int32 ``[B + 1]``, non-decreasing from 0.
        block_size: slots in a block.
        num_tokens: T, rows of the result; rows from ``query_start_loc[-1]`` on become -1.

    Returns:
        int64 ``[T]`` on the device of ``block_table``.
    """
    device = block_table.device
    num_seqs, width = block_table.shape
    if num_seqs == 0 or width == 0:
        return torch.full((num_tokens,), PAD_SLOT, dtype=torch.int64, device=device)
    loc = query_start_loc.to(torch.int64)
    rows = torch.arange(num_tokens, dtype=torch.int64, device=device)
    # The owner of a row is the first sequence that ends after it; sequences without rows end where they start.
    owner = torch.searchsorted(loc[1:].contiguous(), rows, right=True)
    real = owner < num_seqs
    owner = owner.clamp(max=num_seqs - 1)
    positions = rows - loc[1:][owner] + seq_lens.to(torch.int64)[owner]
    logical = torch.div(positions, block_size, rounding_mode="floor")
    inside = (logical >= 0) & (logical < width)
    blocks = block_table[owner, logical.clamp(0, width - 1)].to(torch.int64)
    slots = blocks * block_size + (positions - logical * block_size)
    return torch.where(real & inside & (blocks >= 0), slots, PAD_SLOT)


def to_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """A tensor of the array's values; through pinned memory, without a synchronisation, when it goes to a GPU."""
    tensor = torch.from_numpy(array)
    device = torch.device(device)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _lengths(block_lists: Sequence, seq_lens: Sequence[int], query_lens: Sequence[int], block_size: int):
    """Both length lists as int64 arrays, checked against each other."""
    if block_size < 1:
        raise ArgumentError(f"block_size is {block_size}; a block holds at least 1 slot")
    lens, new = (np.asarray(x, dtype=np.int64).reshape(-1) for x in (seq_lens, query_lens))
    if not len(block_lists) == len(lens) == len(new):
        raise ShapeError(
            f"block_lists has {len(block_lists)} sequences, seq_lens has {len(lens)}, query_lens has {len(new)}; "
            "they must agree"
        )
    wrong = np.flatnonzero((new < 0) | (new > lens) | (lens > INT32_MAX))
    if wrong.size:
        b = int(wrong[0])
        raise ArgumentError(
            f"query_lens[{b}] is {new[b]} and seq_lens[{b}] is {lens[b]}; 0 <= query_len <= seq_len < 2**31 must hold "
            "(seq_len counts the new tokens too)"
        )
    return lens, new


def _padded(name: str, what: str, asked: int | None, real: int) -> int:
    if asked is None:
        return real
    if asked < real:
        raise ShapeError(f"{name} is {asked}, but the batch has {real} {what}; pad to {real} or more")
    return asked


def _table(block_lists: Sequence, needed: np.ndarray, rows: int, width: int | None) -> np.ndarray:
    """int64 ``[rows, width]``: the first ``needed`` blocks of each list, 0 elsewhere; every id fits 31 bits."""
    widest = int(needed.max(initial=0))
    if width is None:
        width = max(1, widest)
    elif width < widest:
        raise ShapeError(f"table_width is {width}, but the longest sequence needs {widest} blocks")
    table = np.zeros((rows, width), dtype=np.int64)
    for b, (blocks, count) in enumerate(zip(block_lists, needed.tolist(), strict=True)):
        if len(blocks) < count:
            raise BlockTableError(
                f"block_lists[{b}] has {len(blocks)} blocks, but seq_lens[{b}] needs {count}; append blocks first"
            )
        if count:
            table[b, :count] = np.asarray(blocks)[:count]
    if table.size and (table.min() < 0 or table.max() > INT32_MAX):
        b, column = np.argwhere((table < 0) | (table > INT32_MAX))[0].tolist()
        raise BlockTableError(f"block_lists[{b}][{column}] is {table[b, column]}; a block id is in [0, 2**31)")
    return table


def _apply_skip(slots: np.ndarray, skip: Sequence, lens: np.ndarray, new: np.ndarray, starts: np.ndarray) -> None:
    """Write -1 at the rows of the given position ranges; ranges outside the new tokens have no rows."""
    if len(skip) != len(lens):
        raise ShapeError(f"skip has {len(skip)} entries for {len(lens)} sequences; give one (or None) for each")
    for b, ranges in enumerate(skip):
        first = int(lens[b] - new[b])
        for lo, hi in ranges or ():
            lo, hi = max(lo, first), min(hi, int(lens[b]))
            if lo < hi:
                slots[starts[b] + lo - first : starts[b] + hi - first] = PAD_SLOT
