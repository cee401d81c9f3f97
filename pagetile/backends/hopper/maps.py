"""Tensor maps: how the copy engine sees queries and caches.

A map is rank 3 ``[T, Hq, D]`` or rank 4 ``[NB, BS, Hkv, D]`` with the tensor's own strides, so every layout that is
aligned to 16 bytes is one, and a coordinate outside reads as zeros. Encoding one takes the driver a few microseconds,
so they are kept by what they were made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_KEPT = 1024
_kept: dict[tuple, tuple] = {}  # what a map was made from -> the arguments it is to a launch


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


def mappable(tensor: Tensor) -> bool:
    """Whether a 16-bit tensor can be mapped: base and steps multiples of 16 bytes."""
    _, strides = view(tensor)
    return not tensor.data_ptr() & 15 and not any(stride & 7 for stride in strides[:-1])


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


def arguments(tensor: Tensor, meta: dict[str, Any], encode: Any, types: dict[int, int]) -> tuple:
    """The arguments of a direct launch for one map: the encoded map, its shape, its strides.

    ``meta`` is what the compiled kernel says of this map, ``encode`` and ``types`` are Triton's own.
    """
    shape, strides = view(tensor)
    key = (tensor.data_ptr(), shape, strides, tuple(meta["block_size"]), meta["swizzle"], meta["elem_type"])
    found = _kept.get(key)
    if found is None:
        encoded = encode(
            tensor.data_ptr(), meta["swizzle"], meta["elem_size"], types[meta["elem_type"]], meta["block_size"], shape,
            strides, 0,
        )  # fmt: skip
        found = (encoded, *shape, *strides)
        while len(_kept) >= MAX_KEPT:
            _kept.pop(next(iter(_kept), None), None)
        _kept[key] = found
    return found


def forget() -> None:
    """Drop every kept map."""
    _kept.clear()


def kept() -> int:
    """Maps that are kept."""
    return len(_kept)


def nonempty(cache: Tensor) -> Tensor:
    """The cache, or a block of zeros in its place where it has none: a map has no axis of size 0."""
    if cache.shape[0]:
        return cache
    return torch.zeros((1, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
