"""Quantise and dequantise: eight bits an element and a scale.

``stored = round(x / scale)`` and ``x = stored * scale``, in float32 with true division; round to nearest even and
saturate. The bytes are part of the contract: every device writes the same ones.

Source: OCP 8-bit floating point (E4M3 without infinities, E5M2); saturation and the one NaN byte are pagetile's rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.contracts.dtypes import dtype_name, storage_kind

Scale = Tensor | float | None

LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
"""Largest magnitude each quantised kind stores."""

STORED_AS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}

NAN_BYTE = 0x7F
"""How either fp8 kind stores a NaN of whatever sign."""


def is_quantised(kind: str) -> bool:
    """Whether a storage kind is one of the eight-bit ones."""
    return kind in LARGEST


def quantise(x: Tensor, kind: str, scale: Tensor | float = 1.0) -> Tensor:
    """Elements as the cache stores them; a floating kind passes through.

    Args:
        x: any floating dtype, any shape.
        scale: float32, broadcastable against ``x``.
    """
    if not is_quantised(kind):
        return x
    # A tensor divisor: dividing by a host number may be done as a product with its reciprocal, which rounds twice.
    scaled = x.to(torch.float32) / torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    saturated = scaled.clamp(-LARGEST[kind], LARGEST[kind])
    if kind == "int8":
        return saturated.nan_to_num(nan=0.0).round().to(torch.int8)
    stored = saturated.to(STORED_AS[kind]).view(torch.uint8)
    return torch.where(scaled.isnan(), NAN_BYTE, stored).view(STORED_AS[kind])


def dequantise(stored: Tensor, kind: str, scale: Tensor | float = 1.0) -> Tensor:
    """Values of stored elements, float32; a floating kind passes through.

    Args:
        stored: elements of a cache; fp8 as ``torch.float8_*`` or as ``uint8``.
        scale: float32, broadcastable against ``stored``.
    """
    if not is_quantised(kind):
        return stored
    if stored.dtype == torch.uint8:
        stored = stored.view(STORED_AS[kind])
    return stored.to(torch.float32) * torch.as_tensor(scale, dtype=torch.float32, device=stored.device)


def token_head_scale(x: Tensor, kind: str) -> Tensor:
    """The scale of each token and head: the largest finite magnitude over ``LARGEST``, 1 where that is 0.

    ``x`` is ``[..., D]``; the result is float32 ``[...]``.
    """
    magnitude = x.to(torch.float32).abs()
    largest = torch.full((), LARGEST[kind], device=x.device)
    scale = magnitude.where(magnitude.isfinite(), 0.0).amax(-1) / largest
    return scale.where(scale > 0, 1.0)


def head_scale(scale: Scale, device: torch.device) -> Tensor:
    """None, a float, one element, or ``[..., Hkv]``, made float32 and broadcastable against ``[..., Hkv, D]``."""
    scale = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=device)
    return scale.reshape(()) if scale.numel() == 1 else scale.unsqueeze(-1)


def kind_of(cache: Tensor) -> str:
    """What a cache holds going by its dtype alone; ``uint8`` does not say, and raises ``DTypeError``."""
    return storage_kind(dtype_name(cache.dtype), "auto")


def bits_of(x: Tensor) -> Tensor:
    """Eight-bit elements as ``uint8``, so that a copy moves bytes and never converts; others as they are."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
