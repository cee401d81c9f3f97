"""Where the new tokens of ``flash_attn_with_kvcache`` go, decided and checked before anything is written."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError, BlockTableError
from pagetile.contracts.geometry import blocks_held
from pagetile.contracts.visibility import FARTHEST


def append_slots(
    seq_lens: Tensor,
    block_table: Tensor,
    num_new: int,
    num_blocks: int,
    block_size: int,
    leftpad: Tensor | None = None,
    rotary_rows: int = -1,
    rotary_span: int = 0,
    table_name: str = "block_table",
) -> Tensor:
    """Slots of positions ``seq_lens[b]`` up to ``seq_lens[b] + num_new``, through the block table.

    On the CPU every value that the write and the attention will use is checked here, so that an error leaves the
    cache as it was. On other devices a position without a usable block gets a slot outside the cache, which is not
    written.

    Args:
        seq_lens: int32 ``[B]``, keys before the new ones.
        block_table: ``[B, width]``.
        num_new: new tokens of each sequence.
        num_blocks, block_size: of the cache.
        leftpad: int32 ``[B]`` or None: keys below it are padding; rotary positions count from there.
        rotary_rows: rows of the rotary tables, -1 for none.
        rotary_span: positions from ``seq_lens - leftpad`` on that will be rotated.
        table_name: ``cache_batch_idx`` where each sequence has one row of the cache and no block table, for messages.

    Returns:
        int64 ``[B * num_new]``.

    Raises:
        ArgumentError: a length that is negative, too long for its row or for the rotary tables (CPU).
        BlockTableError: a block id outside the cache (CPU).
    """
    if seq_lens.device.type == "cpu":
        return _on_host(
            seq_lens, block_table, num_new, num_blocks, block_size, leftpad, rotary_rows, rotary_span, table_name
        )
    positions = seq_lens.long().unsqueeze(1) + torch.arange(num_new, device=seq_lens.device)  # [B, num_new]
    logical = positions // block_size
    width = block_table.shape[1]
    if width == 0:
        return torch.full((positions.numel(),), num_blocks * block_size, dtype=torch.int64, device=seq_lens.device)
    usable = (logical >= 0) & (logical < width)
    blocks = block_table.long().gather(1, logical.clamp(0, width - 1))
    usable &= (blocks >= 0) & (blocks < num_blocks)
    slots = torch.where(usable, blocks * block_size + positions % block_size, num_blocks * block_size)
    return slots.flatten()


def _on_host(
    seq_lens: Tensor,
    block_table: Tensor,
    num_new: int,
    num_blocks: int,
    block_size: int,
    leftpad: Tensor | None,
    rotary_rows: int,
    rotary_span: int,
    table_name: str,
) -> Tensor:
    """The same in NumPy, a few times cheaper a call, with every value checked."""
    before, table = check_lengths_and_table(seq_lens, block_table, num_new, num_blocks, block_size, table_name)
    if leftpad is not None or rotary_rows >= 0:
        _check_rotary(before, 0 if leftpad is None else leftpad.numpy(), rotary_rows, rotary_span)
    positions = before[:, None] + np.arange(num_new)  # [B, num_new]
    blocks = np.take_along_axis(table, positions // block_size, axis=1).astype(np.int64)
    return torch.from_numpy((blocks * block_size + positions % block_size).reshape(-1))


def check_lengths_and_table(
    seq_lens: Tensor, block_table: Tensor, num_new: int, num_blocks: int, block_size: int, table_name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths before the new tokens (int64) and the table, both on the CPU, after looking at every value in use.

    Raises:
        ArgumentError: a length that is negative or, with the new tokens, too long for its row.
        BlockTableError: a block id outside the cache, in a range that is used.
    """
    before = seq_lens.numpy().astype(np.int64)
    table = block_table.numpy()
    _check_lengths(before, table.shape[1], num_new, block_size, table_name)
    used = -(-(before + num_new) // block_size)  # [B]
    bad = (np.arange(table.shape[1]) < used[:, None]) & ((table < 0) | (table >= num_blocks))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        if table_name != "block_table":
            raise BlockTableError(
                f"{table_name}[{row}] is {table[row, 0]}, but k_cache has {num_blocks} rows; nothing has been written"
            )
        raise BlockTableError(
            f"block_table[{row}, {column}] is {table[row, column]}, but {blocks_held(num_blocks)}, and sequence {row} "
            f"uses {used[row]} entries; nothing has been written"
        )
    return before, table


def _check_lengths(before: np.ndarray, width: int, num_new: int, block_size: int, table_name: str) -> None:
    room = min(width * block_size, FARTHEST)
    wrong = (before < 0) | (before + num_new > room)
    if not wrong.any():
        return
    seq = int(wrong.argmax())
    length = int(before[seq])
    if length < 0:
        raise ArgumentError(f"cache_seqlens[{seq}] is {length}; a length is 0 or more")
    grown = f", and {num_new} new tokens make {length + num_new}" if num_new else ""
    place, way_out = f"{width} blocks of {block_size}", "give it more blocks first"
    if table_name != "block_table":
        place, way_out = "a row of k_cache", "pass a cache with longer rows"
    raise ArgumentError(
        f"cache_seqlens[{seq}] is {length}{grown}, but the sequence has room for {room} ({place}); {way_out}"
    )


def _check_rotary(before: np.ndarray, pads: np.ndarray | int, rows: int, span: int) -> None:
    for seq, (length, pad) in enumerate(np.broadcast(before, pads)):
        if pad < 0:
            raise ArgumentError(f"cache_leftpad[{seq}] is {pad}; it counts keys, so it is 0 or more")
        if rows >= 0 and pad > length:
            raise ArgumentError(
                f"cache_leftpad[{seq}] is {pad}, but cache_seqlens[{seq}] is {length}; rotary positions count on from "
                "the padding, so it cannot be longer than the sequence"
            )
        if rows >= 0 and length - pad > rows - span:
            raise ArgumentError(
                f"rotary_cos: axis 0 is {rows}, but sequence {seq} rotates positions {length - pad} to "
                f"{length - pad + span - 1}; pass tables with a row for each position"
            )
