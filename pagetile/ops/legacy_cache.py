"""The x-packed layout of vLLM's first paged cache: ``reshape_and_cache``, and the way to that layout and back.

Source: vLLM 0.24 ``csrc/cache_kernels.cu``, whose arguments these are. That write drops heads past
``Hkv * D / x = 512``; this one does not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pagetile.backends.protocol import Backend, Scale
from pagetile.contracts.errors import ShapeError
from pagetile.contracts.shapes import Sizes, require_tensor
from pagetile.ops.write import reshape_and_cache_flash
from pagetile.ops.xpacked import PACK_BYTES, is_xpacked
from pagetile.reference.legacy import from_xpacked, to_xpacked


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = None,
    v_scale: Scale = None,
    *,
    backend: str | Backend = "auto",
    validate: bool | str = False,
) -> None:
    """Store the keys and values of new tokens in x-packed caches, in place.

    Args:
        key: ``[T, Hkv, D]`` float32, float16 or bfloat16, any strides with a contiguous last axis.
        value: ``[T, Hkv, Dv]``, likewise.
        key_cache: ``[NB, Hkv, D/x, BS, x]`` with ``x = 16 / itemsize`` of the cache, any strides with a contiguous
            last axis; any ``Hkv * D``.
        value_cache: ``[NB, Hkv, Dv, BS]``, dtype of ``key_cache``, strides of its own, last axis contiguous.
        slot_mapping, kv_cache_dtype, k_scale, v_scale, backend, validate: see
            :func:`pagetile.reshape_and_cache_flash`.

    Raises:
        ShapeError: ``key_cache`` has not five axes, or as there. All other errors are those, too.
    """
    require_xpacked(key_cache)
    reshape_and_cache_flash(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        kv_cache_dtype,
        k_scale,
        v_scale,
        backend=backend,
        validate=validate,
    )


def to_legacy(key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of a strided cache in the x-packed layout, bit by bit.

    Args:
        key_cache: ``[NB, BS, Hkv, D]``, any dtype and strides; D is a multiple of ``x = 16 / itemsize``.
        value_cache: ``[NB, BS, Hkv, Dv]``.

    Returns:
        ``[NB, Hkv, D/x, BS, x]`` and ``[NB, Hkv, Dv, BS]``, contiguous.

    Raises:
        ShapeError: other axes, or a D that packs do not divide.
    """
    sizes = Sizes()
    sizes.bind("key_cache", require_tensor("key_cache", key_cache), "NB BS Hkv D")
    sizes.bind("value_cache", require_tensor("value_cache", value_cache), "NB BS Hkv Dv")
    pack = PACK_BYTES // key_cache.element_size()
    if sizes["D"] % pack:
        raise ShapeError(
            f"key_cache: axis 3 (D) is {sizes['D']}, but a pack has 16 bytes, {pack} elements of {key_cache.dtype}; "
            f"pad the heads to a multiple of {pack}"
        )
    return to_xpacked(key_cache, value_cache, pack)


def from_legacy(key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of an x-packed cache by tokens, bit by bit; the inverse of :func:`to_legacy`.

    Args:
        key_cache: ``[NB, Hkv, D/x, BS, x]``, any dtype and strides.
        value_cache: ``[NB, Hkv, Dv, BS]``.

    Returns:
        ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``, contiguous.

    Raises:
        ShapeError: other axes.
    """
    sizes = Sizes()
    sizes.bind("key_cache", require_tensor("key_cache", key_cache), "NB Hkv D/x BS x")
    sizes.bind("value_cache", require_tensor("value_cache", value_cache), "NB Hkv Dv BS")
    return from_xpacked(key_cache, value_cache)


def require_xpacked(key_cache: Any) -> None:
    """Hold a key cache to the x-packed layout.

    Raises:
        ShapeError: it has not five axes.
    """
    if not is_xpacked(require_tensor("key_cache", key_cache)):
        raise ShapeError(
            f"key_cache: {key_cache.dim()} axes {list(key_cache.shape)}, but an x-packed key cache has 5: "
            "[NB, Hkv, D/x, BS, x]; make one with pagetile.to_legacy, or call the op without packs "
            "(reshape_and_cache_flash, flash_attn_varlen_func)"
        )
