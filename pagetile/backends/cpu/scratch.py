"""Memory that a call works in: a parameter block and scratch, one of each a Python thread.

Kept between calls and grown on demand, up to a limit; beyond that it is taken for one call and given back.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from pagetile.backends.cpu import params

KEEP_BYTES = 64 << 20
"""The most scratch a thread keeps between calls."""

_SLOTS = max(params.ATTEND_SLOTS, params.WRITE_SLOTS, params.MERGE_SLOTS)


class Memory(threading.local):
    """Parameter block and scratch of the calling thread.

    Attributes:
        integers, floats: the block's slots, as int64 and as float64.
        address: of the block.
    """

    def __init__(self) -> None:
        self._block = ctypes.create_string_buffer(_SLOTS * 8)
        self.address = ctypes.addressof(self._block)
        view = memoryview(self._block)
        self.integers = view.cast("B").cast("q")
        self.floats = view.cast("B").cast("d")
        self._kept: torch.Tensor | None = None

    def scratch(self, size: int) -> torch.Tensor:
        """At least ``size`` bytes; hold on to the tensor for as long as they are used."""
        if self._kept is not None and self._kept.numel() >= size:
            return self._kept
        if size > KEEP_BYTES:
            return torch.empty(size, dtype=torch.uint8)
        self._kept = torch.empty(min(KEEP_BYTES, max(size, 1 << 16) * 3 // 2), dtype=torch.uint8)
        return self._kept

    def clear(self) -> None:
        """Give the kept scratch back."""
        self._kept = None


MEMORY = Memory()
