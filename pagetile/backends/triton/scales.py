"""Scales of a quantised cache on their way to a kernel: a form, three strides, a number or an address; and the launch
of a quantised write.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from pagetile.backends.protocol import Scale, WriteCall
from pagetile.backends.triton.launch import Launch
from pagetile.backends.triton.quantised import HEAD, KINDS, NUMBER, ONE, OWN, UNSCALED
from pagetile.backends.triton.tuning import WritePlan
from pagetile.backends.triton.write_bytes import quantise_heads_kernel, quantise_span_kernel


def scale_number(scale: Scale) -> float:
    """A scale that is a number, 1 where it is not."""
    return 1.0 if scale is None or isinstance(scale, Tensor) else float(scale)


def read_form(scale: Scale) -> int:
    """The form of a scale that an attention reads; numbers are folded into others of its arguments."""
    if not isinstance(scale, Tensor):
        return UNSCALED
    return OWN if scale.dim() == 3 else HEAD


def write_form(scale: Scale) -> int:
    """The form of a scale that a write divides by, or fills."""
    if not isinstance(scale, Tensor):
        return UNSCALED if scale_number(scale) == 1.0 else NUMBER
    if scale.dim() == 3:
        return OWN
    return ONE if scale.numel() == 1 else HEAD


def scale_strides(scale: Scale) -> tuple[int, int, int]:
    """``(sequence or block, token, head)`` strides of a scale; 0 along an axis that it does not have."""
    if not isinstance(scale, Tensor) or scale.dim() == 0:
        return 0, 0, 0
    if scale.dim() == 3:
        return scale.stride(0), scale.stride(1), scale.stride(2)
    if scale.dim() == 2:
        return scale.stride(0), 0, scale.stride(1)
    return 0, 0, scale.stride(0) if scale.shape[0] > 1 else 0


def scale_key(scale: Scale) -> Hashable:
    """What a launch depends on in a scale: a number by its value, a tensor by its form and strides."""
    return (scale.dim(), scale.stride(), scale.shape[-1:]) if isinstance(scale, Tensor) else scale


def scale_address(scale: Scale, other: int) -> int:
    """The address of a scale that is a tensor, else any address."""
    return scale.data_ptr() if isinstance(scale, Tensor) else other


def as_bytes(tensor: Tensor) -> Tensor:
    """An eight-bit tensor as uint8: kernels decode and encode bits, whatever fp8 dtypes the compiler knows."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 and tensor.dtype != torch.uint8 else tensor


def quantise_launch(call: WriteCall, plan: WritePlan, common: dict, strides: tuple[int, ...]) -> Launch:
    """The launch of one write into a quantised cache.

    Args:
        common: constants of any write.
        strides: ``(block, token, head)`` of the key cache, then of the value cache.
    """
    problem, key, value = call.problem, call.key, call.value
    num_rows, heads = call.slot_mapping.shape[0], problem.num_kv_heads
    block_size = call.key_cache.shape[1]
    sizes = (num_rows, call.key_cache.shape[0] * block_size, block_size)
    numbers = (scale_number(call.k_scale), scale_number(call.v_scale))
    forms = {
        "KIND": KINDS[problem.kind],
        "NATIVE": plan.fp8,
        "K_FORM": write_form(call.k_scale),
        "V_FORM": write_form(call.v_scale),
    }
    if plan.span:
        span_k, span_v = heads * problem.head_size, heads * problem.head_size_v
        grid = (-(-num_rows // plan.rows), -(-max(span_k, span_v) // plan.width), 1)
        scalars = (key.stride(0), value.stride(0), *strides[:2], *strides[3:5], *sizes, *numbers)
        constants = {"SPAN_K": span_k, "SPAN_V": span_v, **common, **forms}
        return Launch(quantise_span_kernel, grid, scalars, constants, num_warps=plan.warps)
    grid = (-(-num_rows * heads // plan.rows), 1, 1)
    scalars = (
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), *strides, *scale_strides(call.k_scale),
        *scale_strides(call.v_scale), *sizes, *numbers,
    )  # fmt: skip
    constants = {"HEADS": heads, "D": problem.head_size, "DV": problem.head_size_v, **common, **forms}
    return Launch(quantise_heads_kernel, grid, scalars, constants, num_warps=plan.warps)
