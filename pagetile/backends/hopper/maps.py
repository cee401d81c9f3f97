"""Tensor maps: how the copy engine sees queries and caches.

A map is rank 3 ``[T, Hq, D]`` or rank 4 ``[NB, BS, Hkv, D]`` with the tensor's own strides, so every layout that is
aligned to 16 bytes is one, and a coordinate outside reads as zeros. Encoding one takes the driver a few microseconds,
so each launch keeps those of the addresses it has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_KEPT = 512
"""Maps of one argument of one launch: the layers of a model, and the addresses that queries get."""


@dataclass(frozen=True, slots=True)
class Box:
    """What one copy moves: elements along each axis; powers of two."""

    sizes: tuple[int, ...]


def view(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(shape, strides)`` of a map; an axis of size 1 gets a stride that a map may have, whatever it carries."""
    shape, strides = tuple(tensor.shape), list(tensor.stride())
    for axis, size in enumerate(shape):
        if size == 1:
            strides[axis] = 8 * -(-shape[-1] // 8)
    strides[-1] = 1
    return shape, tuple(strides)


def steps_fit(tensor: Tensor) -> bool:
    """Whether the steps of a 16-bit tensor are multiples of 16 bytes; its address must be one too to be mapped."""
    return not any(stride & 7 for stride in view(tensor)[1][:-1])


def padded(tensor: Tensor) -> Tensor:
    """A copy that can be mapped: rows of a multiple of 16 bytes, of which the tensor is the beginning."""
    room = tensor.new_empty((*tensor.shape[:-1], -(-tensor.shape[-1] // 8) * 8))
    part = room[..., : tensor.shape[-1]]
    part.copy_(tensor)
    return part


def descriptor(tensor: Tensor, box: Box) -> Any:
    """The host object that Triton's public launch path takes."""
    from pagetile.backends.hopper.compat import TensorDescriptor, gl

    shape, strides = view(tensor)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    return TensorDescriptor(tensor, list(shape), list(strides), list(box.sizes), layout)


class Encoder:
    """Encoded maps of one argument of one compiled kernel, for tensors that differ in their address only.

    Args:
        meta: what the compiled kernel says of the argument.
        encode, types: Triton's own encoder, and its translation of element types.
    """

    __slots__ = ("_encode", "_kept", "_meta", "_types")

    def __init__(self, meta: dict[str, Any], encode: Any, types: dict[int, int]) -> None:
        self._meta = meta
        self._encode = encode
        self._types = types
        self._kept: dict[int, tuple] = {}

    def __call__(self, tensor: Tensor) -> tuple:
        """The map, its shape and its strides, as a direct launch takes them."""
        address = tensor.data_ptr()
        found = self._kept.get(address)
        if found is None:
            meta = self._meta
            shape, strides = view(tensor)
            encoded = self._encode(
                address, meta["swizzle"], meta["elem_size"], self._types[meta["elem_type"]], meta["block_size"], shape,
                strides, 0,
            )  # fmt: skip
            found = (encoded, *shape, *strides)
            while len(self._kept) >= MAX_KEPT:
                self._kept.pop(next(iter(self._kept), 0), None)
            self._kept[address] = found
        return found


def nonempty(cache: Tensor) -> Tensor:
    """The cache, or a block of zeros in its place where it has none: a map has no axis of size 0."""
    if cache.shape[0]:
        return cache
    return torch.zeros((1, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
