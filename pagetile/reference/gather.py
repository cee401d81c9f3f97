"""Gather: tokens out of a paged cache, in order and dequantised; the inverse of :mod:`pagetile.reference.write`."""

from __future__ import annotations

from torch import Tensor

from pagetile.contracts.geometry import split_slot
from pagetile.reference.checks import check_slots
from pagetile.reference.quantise import Scale, dequantise, head_scale, is_quantised, kind_of
from pagetile.reference.storage import by_token


def gather_rows(
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kind: str | None = None,
    layout: str = "paged",
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Fill ``key[row]`` and ``value[row]`` with the token at ``slots[row]``, in place.

    Args:
        key_cache, value_cache: ``[NB, BS, Hkv, D]`` and ``[.., Dv]`` by any strides, or x-packed.
        slots: integers ``[T']`` with ``T' <= T``; a negative slot leaves its row as it is.
        key, value: ``[T, Hkv, D]`` and ``[T, Hkv, Dv]``; where the cache is not quantised, of its dtype.
        kind: what the caches hold, see :func:`pagetile.contracts.dtypes.storage_kind`; None goes by the cache's dtype.
        k_scale, v_scale: None, a float, one element, ``[Hkv]``, or ``[T', Hkv]`` (a scale for each row and head):
            value = stored * scale in float32, rounded once to the dtype of the row.

    Raises:
        SlotError: a slot is not below ``NB * BS``. Nothing has been written.
        ShapeError: ``slots`` is longer than ``key``.
    """
    key_cache, value_cache = by_token(key_cache, layout), by_token(value_cache, layout)
    num_blocks, block_size = key_cache.shape[:2]
    kind = kind or kind_of(key_cache)
    check_slots(slots, len(key), num_blocks, block_size)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = split_slot(slot, block_size)
        for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            stored = cache[block, offset].reshape(rows.shape[1:])
            if is_quantised(kind):
                if isinstance(scale, Tensor) and scale.dim() == 2:
                    scale = scale[row]
                stored = dequantise(stored, kind, head_scale(scale, stored.device))
            rows[row].copy_(stored)
