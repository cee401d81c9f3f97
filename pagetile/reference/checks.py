"""Value checks: every slot, block id, start and length is looked at before a byte moves.

Shapes and dtypes are the business of :mod:`pagetile.ops`; what stands here needs the tensors' contents. Other CPU
backends do the same checks in their own way and raise the same classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError, BlockTableError, ShapeError, SlotError
from pagetile.contracts.geometry import blocks_held, slots_held


def check_slots(slot_mapping: Tensor, num_rows: int, num_blocks: int, block_size: int) -> None:
    """Every slot is negative (skipped) or below ``num_blocks * block_size``; there are at most ``num_rows`` of them."""
    if len(slot_mapping) > num_rows:
        raise ShapeError(
            f"slot_mapping has {len(slot_mapping)} entries but key has {num_rows} rows; pass at most one slot a row"
        )
    limit = num_blocks * block_size
    row = _first(slot_mapping >= limit)
    if row is not None:
        raise SlotError(
            f"slot_mapping[{row}] is {int(slot_mapping[row])}, but {slots_held(num_blocks, block_size)}; use a "
            "negative slot for a row that must not be stored. Nothing was written"
        )


def check_start_loc(name: str, starts: Tensor, rows_name: str, num_rows: int) -> None:
    """``starts`` begins at 0, never decreases and ends at or before ``num_rows``."""
    if int(starts[0]) != 0:
        raise ArgumentError(f"{name}[0] is {int(starts[0])}; the first sequence starts at row 0")
    seq = _first(starts[1:] < starts[:-1])
    if seq is not None:
        raise ArgumentError(
            f"{name} decreases from {int(starts[seq])} at [{seq}] to {int(starts[seq + 1])} at [{seq + 1}]; "
            "it must be a cumulative sum of lengths, where an empty sequence repeats the value before it"
        )
    if int(starts[-1]) > num_rows:
        raise ArgumentError(
            f"{name}[{len(starts) - 1}] is {int(starts[-1])}, but {rows_name} has {num_rows} rows; "
            f"pass {rows_name} with all its rows, or shorten the last sequence"
        )


def check_seq_lens(seq_lens: Tensor, block_table: Tensor, block_size: int) -> None:
    """Every length is 0 or more, and its row of the block table has enough entries for it."""
    seq = _first(seq_lens < 0)
    if seq is not None:
        raise ArgumentError(f"seq_lens[{seq}] is {int(seq_lens[seq])}; use 0 for a sequence without keys")
    width = block_table.shape[1]
    seq = _first(seq_lens.to(torch.int64) > width * block_size)
    if seq is not None:
        raise BlockTableError(
            f"seq_lens[{seq}] is {int(seq_lens[seq])}, but block_table[{seq}] has {width} columns of {block_size} "
            f"tokens, so at most {width * block_size}; widen block_table or shorten the sequence"
        )


def check_block_table(block_table: Tensor, seq_lens: Tensor, num_blocks: int, block_size: int) -> None:
    """Entries that hold a sequence's tokens name blocks of the cache; the ones past them may be anything."""
    needed = (seq_lens.to(torch.int64) + block_size - 1) // block_size
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    used = columns < needed.to(block_table.device).unsqueeze(1)
    bad = used & ((block_table < 0) | (block_table >= num_blocks))
    where = _first(bad.flatten())
    if where is not None:
        row, column = divmod(where, block_table.shape[1])
        raise BlockTableError(
            f"block_table[{row}, {column}] is {int(block_table[row, column])}, but {blocks_held(num_blocks)}; "
            f"sequence {row} has {int(seq_lens[row])} tokens and needs "
            f"{int(needed[row])} valid entries (block size {block_size})"
        )


def check_key_starts(key_starts: Tensor | None) -> None:
    """Every start is 0 or more."""
    if key_starts is None:
        return
    seq = _first(key_starts < 0)
    if seq is not None:
        raise ArgumentError(f"key_starts[{seq}] is {int(key_starts[seq])}; use 0 to hide no key")


def check_bound(what: str, lengths: Tensor, name: str, bound: int) -> None:
    """No length exceeds an upper bound that the host gave, which may be any integer."""
    seq = _first(lengths.to(torch.int64) > min(bound, 2**63 - 1))
    if seq is not None:
        raise ArgumentError(
            f"sequence {seq} has {int(lengths[seq])} {what}, but {name} is {bound}; pass the largest length, or more"
        )


def _first(bad: Tensor) -> int | None:
    """Index of the first True, or None."""
    found = bad.nonzero()
    return int(found[0]) if len(found) else None
