"""Where the rows of a gather or scatter are, by the block table; and the scale of each row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagetile.backends.protocol import Scale
from pagetile.contracts.errors import ArgumentError, BlockTableError, UnsupportedError
from pagetile.contracts.geometry import blocks_held
from pagetile.ops.checks import QUANTISED


def row_slots(
    block_table: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None,
    num_rows: int,
    num_blocks: int,
    block_size: int,
) -> Tensor:
    """The slot of each row, int64 ``[num_rows]``; -1 from ``cu_seq_lens[-1]`` on.

    On the CPU every value is checked. Elsewhere a row without a usable block gets the first slot past the cache.

    Raises:
        ArgumentError: sums that do not begin at 0, decrease or end past the rows; a start below 0 (CPU).
        BlockTableError: a block id outside the cache, or a table row too short (CPU).
    """
    if block_table.is_cpu:
        return _on_host(block_table, cu_seq_lens, seq_starts, num_rows, num_blocks, block_size)
    device, (num_seqs, width) = block_table.device, block_table.shape
    if num_seqs == 0:
        return torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    ends = cu_seq_lens[1:].long().contiguous()
    rows = torch.arange(num_rows, device=device)
    owner = torch.searchsorted(ends, rows, right=True)
    real = owner < num_seqs
    owner = owner.clamp(max=num_seqs - 1)
    position = rows - cu_seq_lens[:-1].long()[owner]
    if seq_starts is not None:
        position = position + seq_starts.long()[owner]
    logical = torch.div(position, block_size, rounding_mode="floor")
    past = num_blocks * block_size
    if width == 0:
        return torch.where(real, past, -1)
    block = block_table[owner, logical.clamp(0, width - 1)].long()
    usable = (logical >= 0) & (logical < width) & (block >= 0) & (block < num_blocks)
    slot = torch.where(usable, block * block_size + position % block_size, past)
    return torch.where(real, slot, -1)


def _on_host(
    block_table: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None,
    num_rows: int,
    num_blocks: int,
    block_size: int,
) -> Tensor:
    table, sums = block_table.numpy(), cu_seq_lens.numpy().astype(np.int64)
    lengths = np.diff(sums)
    if sums[0] != 0:
        raise ArgumentError(f"cu_seq_lens[0] is {sums[0]}; the first sequence starts at row 0")
    if (lengths < 0).any():
        b = int((lengths < 0).argmax())
        raise ArgumentError(
            f"cu_seq_lens decreases from {sums[b]} at [{b}] to {sums[b + 1]} at [{b + 1}]; it is a running sum, where "
            "an empty sequence repeats the value before it"
        )
    if sums[-1] > num_rows:
        raise ArgumentError(f"cu_seq_lens[{len(lengths)}] is {sums[-1]}, but key has {num_rows} rows; pass more rows")
    starts = np.zeros(len(lengths), np.int64) if seq_starts is None else seq_starts.numpy().astype(np.int64)
    _check_table(table, starts, lengths, num_blocks, block_size)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(sums[-1]) - sums[:-1][owner] + starts[owner]
    slots = np.full(num_rows, -1, np.int64)
    if len(owner):
        slots[: sums[-1]] = table[owner, position // block_size].astype(np.int64) * block_size + position % block_size
    return torch.from_numpy(slots)


def _check_table(table: np.ndarray, starts: np.ndarray, lengths: np.ndarray, num_blocks: int, block_size: int) -> None:
    """The entries of blocks that hold a wanted token; nothing else is looked at."""
    width = table.shape[1]
    if (starts < 0).any():
        b = int((starts < 0).argmax())
        raise ArgumentError(f"seq_starts[{b}] is {starts[b]}; a position is 0 or more")
    ends = starts + lengths
    short = (lengths > 0) & (ends > width * block_size)
    if short.any():
        b = int(short.argmax())
        raise BlockTableError(
            f"sequence {b} is wanted up to position {ends[b] - 1}, but block_table[{b}] has {width} columns of "
            f"{block_size} tokens, so at most {width * block_size}; widen block_table. Nothing was written"
        )
    column = np.arange(width)
    used = (column >= (starts // block_size)[:, None]) & (column < -(-ends // block_size)[:, None])
    bad = used & (lengths > 0)[:, None] & ((table < 0) | (table >= num_blocks))
    if bad.any():
        b, at = np.argwhere(bad)[0]
        raise BlockTableError(
            f"block_table[{b}, {at}] is {table[b, at]}, but {blocks_held(num_blocks)}; sequence {b} is wanted from "
            f"position {starts[b]} to {ends[b] - 1} (block size {block_size}). Nothing was written"
        )


def check_on_device(slots: Tensor, num_blocks: int, block_size: int) -> None:
    """``validate=True`` on a GPU: wait, and raise for the first row without a block of the cache."""
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "validate=True waits for the device, which cannot be done while a CUDA graph is captured; "
            "pass validate=False or validate='deferred'"
        )
    bad = (slots >= num_blocks * block_size).nonzero()
    if len(bad):
        raise BlockTableError(
            f"row {int(bad[0])} has no block: its entry of block_table is missing or outside the cache, and "
            f"{blocks_held(num_blocks)}. Nothing was written"
        )


def row_scale(scale: Scale, kind: str, slots: Tensor, cu_seq_lens: Tensor, key_cache: Tensor) -> Tensor | None:
    """A scale of any granularity as float32 ``[1]``, ``[Hkv]`` or, one for each row, ``[T, Hkv]``; None for 1."""
    if scale is None or kind not in QUANTISED:
        return None
    if not isinstance(scale, Tensor):
        return torch.full((1,), float(scale), dtype=torch.float32, device=slots.device)
    if scale.dim() == 3:
        places = slots.clamp(0, max(0, key_cache.shape[0] * key_cache.shape[1] - 1))
        flat = scale.reshape(-1, scale.shape[2])
        return flat[places] if scale.numel() else flat.new_ones(slots.shape[0], scale.shape[2])
    if scale.dim() == 2:
        ends = cu_seq_lens[1:].long().contiguous()
        owner = torch.searchsorted(ends, torch.arange(slots.shape[0], device=slots.device), right=True)
        return scale[owner.clamp(max=max(0, scale.shape[0] - 1))]
    return scale.reshape(-1).contiguous()
