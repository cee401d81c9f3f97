"""From an error code in a parameter block to an exception that names the tensor, the place, the value and the way out.

Kernels look at every value before anything is written, so none of these leaves half a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.backends.cpu import params as P
from pagetile.backends.protocol import AttendCall, WriteCall
from pagetile.contracts.errors import ArgumentError, BlockTableError, DTypeError, PagetileError, SlotError
from pagetile.contracts.geometry import blocks_held, slots_held


def wide_index(name: str, tensor: Tensor) -> bool:
    """Whether an index tensor is int64, rather than int32; it is read as it is."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"{name} is {tensor.dtype}; it must be int32 or int64")
    return tensor.dtype is torch.int64


def slot_fault(call: WriteCall, row: int, value: int) -> PagetileError:
    num_blocks, block_size = call.key_cache.shape[:2]
    return SlotError(
        f"slot_mapping[{row}] is {value}, but {slots_held(num_blocks, block_size)}; use a negative slot for a row that "
        "must not be stored. Nothing was written"
    )


def attend_fault(call: AttendCall, code: int, row: int, column: int, value: int) -> PagetileError:
    """The exception for what ``attend_prepare`` found."""
    if code in (P.BAD_BLOCK, P.SEQ_PAST_TABLE):
        return _table_fault(call, code, row, column, value)
    if code in (P.QUERY_LOC_START, P.QUERY_LOC_ORDER, P.QUERY_LOC_END):
        return _loc_fault("query_start_loc", "q", call.q.shape[0], code - P.QUERY_LOC_START, row, column, value)
    if code in (P.KEY_LOC_START, P.KEY_LOC_ORDER, P.KEY_LOC_END):
        rows = min(call.k.shape[0], call.v.shape[0])
        return _loc_fault("key_start_loc", "k", rows, code - P.KEY_LOC_START, row, column, value)
    if code == P.BAD_SEQ_LEN:
        return ArgumentError(f"seq_lens[{row}] is {value}; use 0 for a sequence without keys")
    if code == P.BAD_KEY_START:
        return ArgumentError(f"key_starts[{row}] is {value}; use 0 to hide no key")
    if code == P.QUERY_PAST_BOUND:
        return ArgumentError(
            f"sequence {row} has {value} queries by query_start_loc, but max_q_len is {call.problem.max_q_len}; "
            "pass the largest length, or more"
        )
    return ArgumentError(
        f"sequence {row} has {value} keys, but max_k_len is {call.problem.max_k_len}; pass the largest length, or more"
    )


def _table_fault(call: AttendCall, code: int, row: int, column: int, value: int) -> PagetileError:
    num_blocks, block_size = call.k.shape[:2]
    if code == P.SEQ_PAST_TABLE:
        width = call.block_table.shape[1] if call.block_table is not None else 0
        return BlockTableError(
            f"seq_lens[{row}] is {value}, but block_table[{row}] has {width} columns of {block_size} tokens, so at "
            f"most {width * block_size}; widen block_table or shorten the sequence"
        )
    tokens = int(call.seq_lens[row]) if call.seq_lens is not None else 0
    return BlockTableError(
        f"block_table[{row}, {column}] is {value}, but {blocks_held(num_blocks)}; sequence {row} has {tokens} tokens "
        f"and needs {-(-tokens // block_size)} valid entries "
        f"(block size {block_size})"
    )


def _loc_fault(name: str, of: str, limit: int, kind: int, row: int, column: int, value: int) -> PagetileError:
    if kind == 0:
        return ArgumentError(f"{name}[0] is {value}; the first sequence starts at row 0")
    if kind == 1:
        return ArgumentError(
            f"{name} decreases from {column} at [{row}] to {value} at [{row + 1}]; it must be a cumulative sum of "
            "lengths, where an empty sequence repeats the value before it"
        )
    return ArgumentError(
        f"{name}[{row}] is {value}, but {of} has {limit} rows; pass {of} with all its rows, or shorten the last "
        "sequence"
    )
