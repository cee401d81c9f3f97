"""The sticky error word of a device: what a kernel found wrong without anybody waiting for it.

Kernels skip a bad slot and hide the keys of a bad block id, and leave the first offender here. Nothing is read back
until :func:`raise_deferred` is called, at a point the caller knows; a replayed graph reports in the same word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.contracts.errors import BlockTableError, SlotError

_words: dict[torch.device, Tensor] = {}  # one int64[8] a device: kind, row, column, value, limit


def error_word(device: torch.device) -> Tensor:
    """The error word of a device, made on first use."""
    word = _words.get(device)
    if word is None:
        word = _words[device] = torch.zeros(8, dtype=torch.int64, device=device)
    return word


def raise_deferred(device: torch.device | None = None) -> None:
    """Raise the first error that kernels on ``device`` (all devices by default) have found, and clear it.

    Synchronises with each device asked.

    Raises:
        SlotError: a write met a slot past the cache; that row was not stored.
        BlockTableError: an attention met a block id outside the cache, or a sequence longer than its table row;
            those keys counted as not visible.
    """
    for where, word in list(_words.items()):
        if device is not None and where != device:
            continue
        kind, row, column, value, limit = word[:5].tolist()
        if kind:
            word.zero_()
            raise deferred_error(kind, row, column, value, limit)


def deferred_error(kind: int, row: int, column: int, value: int, limit: int) -> Exception:
    """The exception of an error word."""
    if kind == 1:
        return SlotError(
            f"slot_mapping[{row}] is {value}, but the cache has slots 0 to {limit - 1}; that row was not stored. "
            "Use a negative slot for a row that must not be stored"
        )
    return BlockTableError(
        f"block_table[{row}, {column}] is {value}, but the cache has blocks 0 to {limit - 1} (-1 also stands for a "
        f"column past the end of the row); the keys there counted as not visible"
    )
