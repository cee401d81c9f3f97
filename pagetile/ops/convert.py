"""``convert_fp8``: between a tensor of numbers and what a quantised cache would store for them.

Source: vLLM's op of that name, whose arguments these are; it took e4m3 alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.backends.protocol import Scale
from pagetile.contracts.dtypes import dtype_name, storage_kind
from pagetile.contracts.errors import ArgumentError, DTypeError, ShapeError
from pagetile.contracts.shapes import require_device, require_no_overlap, require_tensor
from pagetile.ops.checks import QUANTISED, QUERY_DTYPES, bump_version, check_no_grad, is_plain, scale_granularity
from pagetile.ops.overlap import shares_memory
from pagetile.ops.quantised import check_scale
from pagetile.ops.scales import split_scale
from pagetile.reference.quantise import bits_of, dequantise, head_scale, quantise

_SLICE_ELEMENTS = 1 << 24
"""Elements converted at a time: the float32 intermediates of a slice stay small beside a cache."""


def convert_fp8(dst: Tensor, src: Tensor, scale: Scale = 1.0, kv_dtype: str = "fp8_e4m3") -> None:
    """Quantise ``src`` into ``dst``, or dequantise it: the one of the two that has eight bits an element is stored.

    Bytes are those that a write with this scale would store, on every device: ``stored = x / scale`` in float32 with
    true division, rounded to nearest even and saturated; ``x = stored * scale``, rounded to ``dst``'s dtype.

    Args:
        dst, src: one shape, any strides, one device. One of them float32, float16, bfloat16 (or float64), the other
            ``torch.float8_e4m3fn``, ``torch.float8_e5m2``, ``int8``, or ``uint8`` holding what ``kv_dtype`` says.
        scale: None (1), a float, float32 0-d or ``[1]``, or ``[Hkv]`` for tensors ``[..., Hkv, D]``.
        kv_dtype: ``auto`` (by the dtype), ``fp8`` (= ``fp8_e4m3``), ``fp8_e4m3``, ``fp8_e5m2``, ``int8``.

    Raises:
        DTypeError: not exactly one of the two is stored, or ``kv_dtype`` contradicts its dtype.
        ShapeError, DeviceError, ArgumentError: tensors or a scale that do not agree, or share memory.
        UnsupportedError: a tensor requires grad.
    """
    for name, tensor in (("dst", dst), ("src", src)):
        require_tensor(name, tensor)
    if torch.is_grad_enabled():
        check_no_grad((("dst", dst), ("src", src)))
    if is_plain(dst, src):
        run_convert(dst, src, scale, kv_dtype)
        return
    torch.ops.pagetile.convert(dst, src, *split_scale(scale), kv_dtype)


def run_convert(dst: Tensor, src: Tensor, scale: Scale, kv_dtype: str) -> None:
    """Validate and convert plain tensors."""
    kind = bind_convert(dst, src, scale, kv_dtype)
    check_scale("scale", scale)
    if shares_memory(dst, src):
        raise ArgumentError("dst and src share memory; pass a dst of its own")
    divisor = head_scale(scale, src.device)
    rows = max(1, _SLICE_ELEMENTS // max(1, src[:1].numel() if src.dim() else 1))
    parts = zip(dst.split(rows), src.split(rows), strict=True) if src.dim() else ((dst, src),)
    for to, part in parts:
        if part.dtype in QUERY_DTYPES:
            bits_of(to).copy_(bits_of(quantise(part, kind, divisor)))
        else:
            to.copy_(dequantise(part, kind, divisor))
    if torch.is_grad_enabled():
        bump_version(dst)


def bind_convert(dst: Tensor, src: Tensor, scale: Scale, kv_dtype: str) -> str:
    """The kind of the side that is stored, after holding the arguments to each other. Reads no values."""
    require_device("dst", dst, "src", src.device)
    if dst.shape != src.shape:
        axis = next((i for i, (a, b) in enumerate(zip(dst.shape, src.shape, strict=False)) if a != b), None)
        where = f"{dst.dim()} axes, but src {src.dim()}" if axis is None else f"{dst.shape[axis]} along axis {axis}"
        other = "" if axis is None else f", but src {src.shape[axis]}"
        raise ShapeError(f"dst has {where}{other}; dst is {list(dst.shape)} and src {list(src.shape)}, pass one shape")
    require_no_overlap("dst", dst)
    stored = [x for x in (dst, src) if x.dtype not in QUERY_DTYPES]
    if len(stored) != 1:
        raise DTypeError(
            f"dst is {dtype_name(dst.dtype)} and src is {dtype_name(src.dtype)}; one of them must be float32, float16 "
            "or bfloat16, and the other float8_e4m3fn, float8_e5m2, int8 or uint8"
        )
    kind = storage_kind(dtype_name(stored[0].dtype), kv_dtype)
    if kind not in QUANTISED:
        raise DTypeError(
            f"{'dst' if stored[0] is dst else 'src'} is {kind}, which no quantised cache holds; pass float8_e4m3fn, "
            "float8_e5m2, int8 or uint8"
        )
    heads = src.shape[-2] if src.dim() > 1 else 1
    scale_granularity("scale", scale, kind=kind, num_kv_heads=heads, device_of="src", device=src.device)
    return kind
