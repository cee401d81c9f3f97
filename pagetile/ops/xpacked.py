"""The x-packed layout of a cache, as the binders of writes and of attentions see it.

Key cache ``[NB, Hkv, D/x, BS, x]`` with ``x = 16 / itemsize``, value cache ``[NB, Hkv, Dv, BS]``. A key cache of five
axes says so by itself.

Source: the cache of vLLM's ``reshape_and_cache`` and ``paged_attention_v1``.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pagetile.contracts.errors import ShapeError
from pagetile.contracts.shapes import Sizes

Layout = Literal["paged", "xpacked"]

PACK_BYTES = 16
"""Bytes of a pack: ``x`` elements of one key that lie together."""


def is_xpacked(key_cache: Tensor) -> bool:
    """Whether a key cache is laid out in packs."""
    return key_cache.dim() == 5


def head_size_v(value_cache: Tensor, key_cache: Tensor) -> int:
    """Dv of the values that belong to ``key_cache``: paged, ragged or x-packed."""
    return value_cache.shape[-2] if is_xpacked(key_cache) else value_cache.shape[-1]


def bind_caches(sizes: Sizes, key_name: str, key: Tensor, value_name: str, value: Tensor) -> Layout:
    """Bind NB, BS, Hkv and Dv by two paged caches, D being known; the layout, ``paged`` or ``xpacked``.

    Raises:
        ShapeError: the two do not agree, or packs are not of 16 bytes.
    """
    if not is_xpacked(key):
        sizes.bind(key_name, key, "NB BS Hkv D")
        sizes.bind(value_name, value, "NB BS Hkv Dv")
        axis = 1
    else:
        pack = PACK_BYTES // key.element_size()
        if key.shape[4] != pack:
            raise ShapeError(
                f"{key_name}: axis 4 (x) is {key.shape[4]}, but a pack has 16 bytes, {pack} elements of {key.dtype}; "
                f"{key_name} [NB, Hkv, D/x, BS, x] is {list(key.shape)}, make it with pagetile.to_legacy"
            )
        # As the messages about a cache name its axes: by what they mean, in the order they have.
        sizes.bind(key_name, key, "NB Hkv _ BS _")
        if sizes["D"] != key.shape[2] * pack:
            raise ShapeError(
                f"{key_name}: axis 2 (D/x) is {key.shape[2]} and x is {pack}, so D = {key.shape[2] * pack}, but "
                f"{sizes.said_by('D')} has D = {sizes['D']}; the head size must be a multiple of x, and the same"
            )
        sizes.bind(value_name, value, "NB Hkv Dv BS")
        axis = 3
    if sizes["BS"] < 1:
        raise ShapeError(f"{key_name}: axis {axis} (BS) is 0, but a block holds at least one slot")
    return "xpacked" if is_xpacked(key) else "paged"
