"""Write: put the new tokens' keys and values at their slots.

Source: the operation is vLLM's ``reshape_and_cache_flash`` (and ``reshape_and_cache`` for the x-packed layout); the
meaning of negative slots, of ``T' < T`` and of errors is pagetile's own.
"""

from __future__ import annotations

from torch import Tensor

from pagetile.contracts.errors import ArgumentError
from pagetile.contracts.geometry import split_slot
from pagetile.reference.checks import check_slots
from pagetile.reference.quantise import Scale, bits_of, head_scale, kind_of, quantise, token_head_scale
from pagetile.reference.storage import by_token


def write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kind: str | None = None,
    layout: str = "paged",
    k_scale: Scale = None,
    v_scale: Scale = None,
    fill_token_head_scales: bool = False,
) -> None:
    """Store ``key[row]`` and ``value[row]`` at ``slot_mapping[row]``, in place.

    Args:
        key, value: ``[T, Hkv, D]`` and ``[T, Hkv, Dv]``, any floating dtype.
        key_cache, value_cache: ``[NB, BS, Hkv, D]`` and ``[.., Dv]`` by any strides, or x-packed, see
            :mod:`pagetile.reference.storage`.
        slot_mapping: integers ``[T']`` with ``T' <= T``; rows past ``T'`` are not read. Any negative slot skips its
            row. Which of two rows with one slot wins is undefined.
        kind: what the caches hold, see :func:`pagetile.contracts.dtypes.storage_kind`; None goes by the cache's dtype.
        k_scale, v_scale: None, a float, one element or ``[Hkv]``: the divisor, for quantised kinds. With
            ``fill_token_head_scales``, float32 ``[NB, BS, Hkv]``: outputs, filled with each token and head's own scale.

    Raises:
        SlotError: a slot is not below ``NB * BS``. Nothing has been written.
        ShapeError: ``slot_mapping`` is longer than ``key``.
        ArgumentError: ``fill_token_head_scales`` without two tensors to fill.
    """
    key_cache, value_cache = by_token(key_cache, layout), by_token(value_cache, layout)
    num_blocks, block_size = key_cache.shape[:2]
    kind = kind or kind_of(key_cache)
    if fill_token_head_scales and not (isinstance(k_scale, Tensor) and isinstance(v_scale, Tensor)):
        raise ArgumentError("k_scale and v_scale are outputs here: pass float32 tensors [NB, BS, Hkv] to fill")
    check_slots(slot_mapping, len(key), num_blocks, block_size)

    for row, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = split_slot(slot, block_size)
        for token, cache, scale in ((key[row], key_cache, k_scale), (value[row], value_cache, v_scale)):
            if fill_token_head_scales and isinstance(scale, Tensor):
                scale[block, offset] = token_head_scale(token, kind)
                divisor = scale[block, offset].unsqueeze(-1)
            else:
                divisor = head_scale(scale, token.device)
            home = cache[block, offset]  # [Hkv, D], or [Hkv, D/x, x] when x-packed
            bits_of(home).copy_(bits_of(quantise(token, kind, divisor)).reshape(home.shape))
