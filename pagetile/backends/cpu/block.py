"""A parameter block for one call: named 64-bit slots at an address that kernels are given.

The slots are attributes of a class in the kernel's own file, counted from 0. Beside the blocks of
:mod:`pagetile.backends.cpu.scratch`, which one thread keeps for its calls that come every step.
"""

from __future__ import annotations

import struct
from array import array


class Block:
    """``count`` slots, integers or float64, for one call."""

    def __init__(self, count: int) -> None:
        self._slots = array("q", bytes(8 * count))

    @property
    def address(self) -> int:
        """Of the first slot; good for as long as this object is held."""
        return self._slots.buffer_info()[0]

    def __setitem__(self, slot: int, value: int) -> None:
        self._slots[slot] = value

    def __getitem__(self, slot: int) -> int:
        return self._slots[slot]

    def put(self, first: int, *values: int) -> None:
        """Neighbouring integers from slot ``first`` on."""
        for slot, value in enumerate(values, start=first):
            self._slots[slot] = value

    def put_float(self, slot: int, value: float) -> None:
        """A float64."""
        self._slots[slot] = struct.unpack("q", struct.pack("d", value))[0]
