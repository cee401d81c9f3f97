"""One logical tensor, many storages: the stride families that engines really use.

A family is a pair: the shapes of the buffers to allocate, and how to look at them as the logical tensor. Every
buffer has room outside the view (guard blocks, guard rows, the other layer's pages), so a kernel that strays is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError

CACHE_FAMILIES = (
    "nhd",  # [NB, BS, H, D], K and V apart
    "hnd",  # [NB, H, BS, D]
    "kv_first",  # [2, NB, BS, H, D]: one buffer, K then V
    "block_first",  # [NB, 2, BS, H, D]: K and V alternate block by block
    "halves",  # [NB, H, BS, D + Dv]: one row, cut in two on the last dimension
    "padded",  # [NB, BS, H, D + pad], the pad cut off; nothing is 16-byte aligned
    "every_second",  # every second block of a bigger pool
    "layers",  # [NB, 3 layers, 2, BS, H, D]: the pages of all layers alternate in one buffer
    "mixed",  # K is NHD, V is HND
    "odd_singletons",  # NHD, and dimensions of size 1 carry strides that mean nothing
    "unaligned",  # NHD, one element off every alignment
)
"""Storages of a paged cache, seen in vLLM, FlashInfer, Transformers and FlashAttention."""

ROW_FAMILIES = ("contiguous", "packed", "padded", "transposed", "unaligned")
"""Storages of ``[T, H, D]``: a slice of a packed QKV row, a padded last dimension, ``[H, T, D]`` transposed, ..."""


@dataclass(frozen=True)
class Storage:
    """Buffers to allocate, and the logical tensors that live in them.

    Attributes:
        shapes: of the buffers, each contiguous.
        look: buffers to logical views; works on any buffers of these shapes (a boolean mask, a clone).
    """

    shapes: tuple[tuple[int, ...], ...]
    look: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]

    def allocate(self, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        """Zeroed buffers."""
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in self.shapes]


def cache_storage(
    family: str, num_blocks: int, block_size: int, num_heads: int, head_size: int, head_size_v: int, x: int = 0
) -> Storage:
    """Storage whose views are ``key_cache`` and ``value_cache``; ``x`` elements a pack for family ``xpacked``."""
    nb, bs, h, d, dv = num_blocks + 2, block_size, num_heads, head_size, head_size_v  # a guard block at either end
    wide = max(d, dv)
    inner = slice(1, -1)
    if family == "xpacked":
        return Storage(((nb, h, d // x, bs, x), (nb, h, dv, bs)), lambda b: (b[0][inner], b[1][inner]))
    table: dict[str, Storage] = {
        "nhd": Storage(((nb, bs, h, d), (nb, bs, h, dv)), lambda b: (b[0][inner], b[1][inner])),
        "hnd": Storage(((nb, h, bs, d), (nb, h, bs, dv)), lambda b: (_swap(b[0][inner]), _swap(b[1][inner]))),
        "mixed": Storage(((nb, bs, h, d), (nb, h, bs, dv)), lambda b: (b[0][inner], _swap(b[1][inner]))),
        "kv_first": Storage(((2, nb, bs, h, wide),), lambda b: (b[0][0, inner, ..., :d], b[0][1, inner, ..., :dv])),
        "block_first": Storage(((nb, 2, bs, h, wide),), lambda b: (b[0][inner, 0, ..., :d], b[0][inner, 1, ..., :dv])),
        "halves": Storage(((nb, h, bs, d + dv),), lambda b: (_swap(b[0][inner, ..., :d]), _swap(b[0][inner, ..., d:]))),
        "padded": Storage(
            ((nb, bs, h, d + 3), (nb, bs, h, dv + 5)), lambda b: (b[0][inner, ..., :d], b[1][inner, ..., 1 : dv + 1])
        ),
        "every_second": Storage(((2 * nb, bs, h, d), (2 * nb, bs, h, dv)), lambda b: (b[0][2:-2:2], b[1][3:-1:2])),
        "layers": Storage(
            ((nb, 3, 2, bs, h, wide),), lambda b: (b[0][inner, 1, 0, ..., :d], b[0][inner, 1, 1, ..., :dv])
        ),
        "odd_singletons": Storage(
            ((nb, bs, h, d), (nb, bs, h, dv)), lambda b: (_odd_singletons(b[0][inner]), _odd_singletons(b[1][inner]))
        ),
        "unaligned": Storage(
            ((nb * bs * h * d + 1,), (nb * bs * h * dv + 1,)),
            lambda b: (b[0][1:].view(nb, bs, h, d)[inner], b[1][1:].view(nb, bs, h, dv)[inner]),
        ),
    }
    return _pick(table, family)


def row_storage(family: str, num_rows: int, num_heads: int, head_size: int) -> Storage:
    """Storage with one view ``[num_rows, num_heads, head_size]``, a guard row before and after it."""
    t, h, d = num_rows + 2, num_heads, head_size
    inner = slice(1, -1)
    table = {
        "contiguous": Storage(((t, h, d),), lambda b: (b[0][inner],)),
        "packed": Storage(((t, (h + 4) * d),), lambda b: (b[0][inner, 2 * d : (2 + h) * d].unflatten(1, (h, d)),)),
        "padded": Storage(((t, h, d + 3),), lambda b: (b[0][inner, :, 1 : d + 1],)),
        "transposed": Storage(((h, t, d),), lambda b: (b[0][:, inner].transpose(0, 1),)),
        "unaligned": Storage(((t * h * d + 1,),), lambda b: (b[0][1:].view(t, h, d)[inner],)),
    }
    return _pick(table, family)


def lse_storage(family: str, num_rows: int, num_heads: int) -> Storage:
    """Storage with one view ``[num_heads, num_rows]``: ``contiguous``, or ``transposed`` out of ``[T, H]``."""
    t, h = num_rows + 2, num_heads
    if family == "transposed":
        return Storage(((t, h),), lambda b: (b[0][1:-1].T,))
    return Storage(((h, t),), lambda b: (b[0][:, 1:-1],))


def is_aligned(*tensors: Tensor, to: int = 16) -> bool:
    """Whether every base, and every stride that is ever stepped, is a multiple of ``to`` bytes."""
    return all(
        math.prod(t.shape) == 0
        or (
            t.data_ptr() % to == 0
            and all(s * t.element_size() % to == 0 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1)
        )
        for t in tensors
    )


def _pick(table: dict[str, Storage], family: str) -> Storage:
    if family not in table:
        raise ArgumentError(f"storage family is {family!r}; it must be one of {', '.join(table)}")
    return table[family]


def _swap(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _odd_singletons(x: Tensor) -> Tensor:
    strides = [s if n != 1 else 7 for n, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, [*strides[:-1], 1])
