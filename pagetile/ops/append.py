"""Where the new tokens of ``flash_attn_with_kvcache`` go, decided and checked before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError, BlockTableError


def append_slots(
    seq_lens: Tensor,
    block_table: Tensor,
    num_new: int,
    num_blocks: int,
    block_size: int,
    leftpad: Tensor | None = None,
    rotary_rows: int = -1,
    rotary_span: int = 0,
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

    Returns:
        int64 ``[B * num_new]``.

    Raises:
        ArgumentError: a length that is negative, too long for its row or for the rotary tables (CPU).
        BlockTableError: a block id outside the cache (CPU).
    """
    if seq_lens.device.type == "cpu":
        _check_values(seq_lens, block_table, num_new, num_blocks, block_size, leftpad, rotary_rows, rotary_span)
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


def _check_values(
    seq_lens: Tensor,
    block_table: Tensor,
    num_new: int,
    num_blocks: int,
    block_size: int,
    leftpad: Tensor | None,
    rotary_rows: int,
    rotary_span: int,
) -> None:
    room = block_table.shape[1] * block_size
    lens = seq_lens.tolist()
    pads = [0] * len(lens) if leftpad is None else leftpad.tolist()
    for seq, (length, pad) in enumerate(zip(lens, pads, strict=True)):
        if length < 0:
            raise ArgumentError(f"cache_seqlens[{seq}] is {length}; a length is 0 or more")
        if length + num_new > room:
            raise ArgumentError(
                f"cache_seqlens[{seq}] is {length}, and {num_new} new tokens make {length + num_new}, but the sequence "
                f"has room for {room} ({block_table.shape[1]} blocks of {block_size}); give it more blocks first"
            )
        if not pad >= 0:
            raise ArgumentError(f"cache_leftpad[{seq}] is {pad}; it counts keys, so it is 0 or more")
        if rotary_rows >= 0 and not 0 <= length - pad <= rotary_rows - rotary_span:
            raise ArgumentError(
                f"rotary_cos: axis 0 is {rotary_rows}, but sequence {seq} rotates positions {length - pad} to "
                f"{length - pad + rotary_span - 1}; pass tables with a row for each position"
            )
    used = -(-(seq_lens.long() + num_new) // block_size)  # [B]
    columns = torch.arange(block_table.shape[1])
    bad = (columns < used.unsqueeze(1)) & ((block_table < 0) | (block_table >= num_blocks))
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise BlockTableError(
            f"block_table[{row}, {column}] is {int(block_table[row, column])}, but the cache has blocks 0 to "
            f"{num_blocks - 1}, and sequence {row} uses {int(used[row])} entries; nothing has been written"
        )
