"""Launches of the metadata and checking kernels; the errors are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall, WriteCall
from pagetile.backends.triton.calls import log2_block
from pagetile.backends.triton.launch import Launch
from pagetile.backends.triton.metadata import check_blocks_kernel, check_slots_kernel, slots_kernel
from pagetile.contracts.errors import BlockTableError, SlotError, UnsupportedError
from pagetile.contracts.geometry import blocks_held, slots_held

NOTHING = 2**63 - 1


def slots_launch(table: Tensor, block_size: int, num_tokens: int, num_blocks: int, positions: bool) -> Launch:
    """The launch of ``slots_kernel``."""
    num_seqs, width = table.shape
    scalars = (table.stride(0), num_seqs, num_tokens, width, num_blocks, block_size)
    constants = {"ROWS": 128, "LOG2_BLOCK": log2_block(block_size), "POSITIONS": positions}
    return Launch(slots_kernel, (-(-num_tokens // 128), 1, 1), scalars, constants, num_warps=4)


def check_call(call: WriteCall | AttendCall, run: Callable[..., None]) -> None:
    """Raise for the first bad slot of a write, or the first bad block id that an attention needs."""
    tensor = call.key if isinstance(call, WriteCall) else call.q
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "validate=True waits for the device, which cannot be done while a CUDA graph is captured; "
            "pass validate=False or validate='deferred'"
        )
    first = torch.full((1,), NOTHING, dtype=torch.int64, device=tensor.device)
    if isinstance(call, WriteCall):
        _check_slots(call, first, run)
    elif call.block_table is not None:
        _check_blocks(call, first, run)


def _check_slots(call: WriteCall, first: Tensor, run: Callable[..., None]) -> None:
    slots = call.slot_mapping.contiguous()
    num_blocks, block_size = call.key_cache.shape[0], call.problem.block_size
    if not slots.shape[0]:
        return
    scalars = (slots.shape[0], num_blocks * block_size)
    launch = Launch(check_slots_kernel, (-(-slots.shape[0] // 1024), 1, 1), scalars, {"ROWS": 1024}, num_warps=4)
    run(slots.device, launch, first, slots)
    row = int(first)
    if row != NOTHING:
        raise SlotError(
            f"slot_mapping[{row}] is {int(slots[row])}, but {slots_held(num_blocks, block_size)}; use a negative slot "
            "for a row that must not be stored. Nothing was written"
        )


def _check_blocks(call: AttendCall, first: Tensor, run: Callable[..., None]) -> None:
    table, lens = call.block_table, call.seq_lens
    assert table is not None
    assert lens is not None
    if not table.shape[0]:
        return
    num_blocks, block_size = call.k.shape[0], call.problem.block_size
    scalars = (table.stride(0), table.shape[1], num_blocks, block_size)
    constants = {"LOG2_BLOCK": log2_block(block_size), "SCAN": 256}
    run(
        table.device,
        Launch(check_blocks_kernel, (table.shape[0], 1, 1), scalars, constants, num_warps=4),
        first,
        lens,
        table,
    )
    where = int(first)
    if where == NOTHING:
        return
    row, column = divmod(where, 2**32)
    if column >= table.shape[1]:
        raise BlockTableError(
            f"seq_lens[{row}] is {int(lens[row])}, but block_table[{row}] has {table.shape[1]} columns of {block_size} "
            f"tokens, so at most {table.shape[1] * block_size}; widen block_table or shorten the sequence"
        )
    raise BlockTableError(
        f"block_table[{row}, {column}] is {int(table[row, column])}, but {blocks_held(num_blocks)}; sequence {row} has "
        f"{int(lens[row])} tokens (block size {block_size})"
    )
