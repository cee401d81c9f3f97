"""``reshape_and_cache_flash_per_token_head``: store new keys and values, each token and head with a scale of its own.

Source: vLLM's ``triton_reshape_and_cache_flash_per_token_head_quant`` in its arguments; the rounding, the division and
the scale of a row without magnitude are pagetile's own, the same as in every other quantised write.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pagetile.backends.protocol import Backend, WriteCall
from pagetile.contracts.errors import ArgumentError
from pagetile.contracts.problem import WriteProblem
from pagetile.contracts.shapes import Sizes, require_device, require_dtype, require_no_overlap, require_tensor
from pagetile.ops.checks import (
    QUANTISED,
    bump_version,
    check_named,
    check_no_grad,
    check_validate,
    check_values,
    is_plain,
    refuse_odd,
)
from pagetile.ops.dispatch import select
from pagetile.ops.overlap import Apart
from pagetile.ops.plans import PLANS, Plan, tensor_key
from pagetile.ops.write import WRITE, bind_write

_NAMES = (*WRITE.tensors(), "k_scale_cache", "v_scale_cache")
_APART = tuple((i, j, False) for j in (2, 3, 4, 5) for i in range(j))
"""Neither a cache nor its scales are in another tensor; sources may be."""


def reshape_and_cache_flash_per_token_head(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    *,
    backend: str | Backend = "auto",
    validate: bool | str = False,
) -> None:
    """Store the keys and values of new tokens quantised, in place, and the scale that each token and head got.

    The scale of a row of D elements is its largest finite magnitude over the largest that the kind stores (448, 57344
    or 127), and 1 where that is 0; stored = x / scale. Attention takes the scale caches as ``k_descale`` and
    ``v_descale``.

    Args:
        key, value, slot_mapping, backend, validate: see :func:`pagetile.reshape_and_cache_flash`.
        key_cache: ``[NB, BS, Hkv, D]``, quantised, any strides with a contiguous last axis.
        value_cache: ``[NB, BS, Hkv, Dv]``, dtype of ``key_cache``, strides of its own.
        kv_cache_dtype: ``fp8`` (= ``fp8_e4m3``), ``fp8_e4m3``, ``fp8_e5m2``, ``int8``, or ``auto`` (by the cache's
            dtype; a ``uint8`` cache needs a name).
        k_scale_cache, v_scale_cache: float32 ``[NB, BS, Hkv]``, any strides: written where a token is. They may lie
            between the elements of the caches (the last bytes of each row), but share no byte with them.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree; the message names both.
        SlotError: a slot past the end of the cache (CPU). Nothing has been written.
        UnsupportedError: a tensor requires grad.
        BackendError: the backend cannot take the problem; ``.reasons`` says why.
    """
    tensors = (key, value, key_cache, value_cache, slot_mapping, k_scale_cache, v_scale_cache)
    if is_plain(*tensors):
        run_write_token_head(*tensors, kv_cache_dtype, backend, validate)
        return
    pairs = tuple(zip(_NAMES, tensors, strict=True))
    for name, tensor in pairs:
        require_tensor(name, tensor)
    if torch.is_grad_enabled():
        check_no_grad(pairs)
    check_validate(validate)
    check_named(backend)
    torch.ops.pagetile.write_token_head(
        *tensors[:5], kv_cache_dtype, k_scale_cache, v_scale_cache, backend, str(validate)
    )


def run_write_token_head(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    kv_cache_dtype: str,
    backend: str | Backend,
    validate: bool | str,
) -> None:
    """Validate, dispatch and run on plain tensors."""
    tensors = (key, value, key_cache, value_cache, slot_mapping, k_scale_cache, v_scale_cache)
    if torch.is_grad_enabled():
        check_no_grad(zip(_NAMES, tensors, strict=True))
    check_validate(validate)
    try:
        addresses = tuple([tensor.data_ptr() for tensor in (*tensors[:4], *tensors[5:])])
        aligned = not any(address & 15 for address in addresses[:4])
        plan_key = ("write_token_head", *map(tensor_key, tensors), kv_cache_dtype, aligned, backend)
    except RuntimeError:  # sparse and nested tensors have no strides
        refuse_odd(zip(_NAMES, tensors, strict=True))
        raise
    shared = (*tensors[:4], *tensors[5:])
    plan = PLANS.get(plan_key)
    if plan is None:
        problem = bind_write_token_head(*tensors, kv_cache_dtype, aligned)
        plan = PLANS.put(plan_key, Plan(problem, select(problem, backend), Apart(shared, _APART)))
    plan.apart.check(addresses, shared, (*_NAMES[:4], *_NAMES[5:]))
    call = WriteCall(plan.problem, *tensors)
    if validate is True:
        check_values(plan.backend, call)
    plan.backend.write(call)
    if torch.is_grad_enabled():
        for tensor in (key_cache, value_cache, k_scale_cache, v_scale_cache):
            bump_version(tensor)


def bind_write_token_head(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    kv_cache_dtype: str,
    aligned: bool,
) -> WriteProblem:
    """The problem, after holding the tensors to each other. Reads no values.

    Raises:
        ArgumentError: the cache is not quantised, or a scale cache has several elements at one address.
        ShapeError, DTypeError, DeviceError: tensors that do not agree.
    """
    problem = bind_write(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, None, None, aligned)
    if problem.kind not in QUANTISED:
        raise ArgumentError(
            f"key_cache holds {problem.kind}, which is copied bit by bit and has no scales; pass a cache of "
            f"{', '.join(QUANTISED)}, or call reshape_and_cache_flash"
        )
    sizes = Sizes()
    sizes.bind("key_cache", key_cache, "NB BS Hkv D")
    for name, scales in (("k_scale_cache", k_scale_cache), ("v_scale_cache", v_scale_cache)):
        require_device(name, require_tensor(name, scales), "key", key.device)
        sizes.bind(name, scales, "NB BS Hkv")
        require_dtype(name, scales, (torch.float32,))
        require_no_overlap(name, scales)
    return replace(problem, scale="token_head")
