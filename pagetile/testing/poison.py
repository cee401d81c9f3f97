"""Poison and canaries: what a kernel must not read is NaN, what it must not write is watched.

Source: the fixtures P and CANARY of the cases from the field; dead slots and dead table entries are poisoned as in
the tests of FlashMLA and DeepGEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagetile.contracts.geometry import blocks_for

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The elements as integers of the same size, so that NaN equals itself and -0.0 differs from 0.0."""
    return x.view(_BITS[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def first_difference(a: Tensor, b: Tensor) -> str:
    """Where two tensors first differ in bits, for a message; empty when they do not."""
    where = (bits(a) != bits(b)).nonzero()
    if not len(where):
        return ""
    at = tuple(where[0].tolist())
    return f"at {list(at)} of {list(a.shape)}: {a[at].item()!r} against {b[at].item()!r}; {len(where)} differ in all"


def poison(buffer: Tensor, kind: str) -> None:
    """Fill a buffer with what must never reach an output: NaN and infinities, or the kind's nearest thing.

    fp8_e4m3 has one NaN of each sign, fp8_e5m2 has three and infinities; int8 has none, so it gets extremes.
    """
    pattern = {"fp8_e4m3": [0x7F, 0xFF], "fp8_e5m2": [0x7D, 0x7E, 0x7F, 0xFF, 0x7C, 0xFC], "int8": [127, 129]}.get(kind)
    flat = buffer.view(-1)
    if pattern is None:
        values = torch.tensor([torch.nan, torch.inf, torch.nan, -torch.inf, torch.nan], dtype=buffer.dtype)
    else:
        values, flat = torch.tensor(pattern, dtype=torch.uint8), flat.view(torch.uint8)
    for i, value in enumerate(values.to(buffer.device)):
        flat[i :: len(values)] = value


def garbage_tails(block_table: Tensor, seq_lens: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Fill every entry past a sequence's last block: a foreign block, -1, ``num_blocks``, 2^31 - 1, -2^31."""
    garbage = [0, -1, num_blocks, 2**31 - 1, -(2**31), num_blocks - 1]
    for row, seq_len in enumerate(seq_lens):
        for column in range(blocks_for(seq_len, block_size), block_table.shape[1]):
            block_table[row, column] = garbage[(row + column) % len(garbage)]


@dataclass
class Canary:
    """A buffer of which only a part may change.

    Attributes:
        name: for the message.
        buffer: contiguous.
        frozen: boolean, shape of the buffer: True where nothing may change.
    """

    name: str
    buffer: Tensor
    frozen: Tensor

    def __post_init__(self) -> None:
        self.before = self.buffer.clone()

    def broken(self) -> str:
        """What changed although it must not; empty when nothing did."""
        changed = (bits(self.buffer) != bits(self.before)) & self.frozen
        if not changed.any():
            return ""
        at = tuple(changed.nonzero()[0].tolist())
        return f"{self.name} changed outside of what the call owns, first at {list(at)} of {list(self.buffer.shape)}"
