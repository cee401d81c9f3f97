"""``reshape_and_cache_flash``: store new keys and values at their slots.

Source: the op of that name in vLLM (``csrc/cache_kernels.cu``), whose arguments these are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagetile.backends.protocol import Backend, Scale, WriteCall
from pagetile.contracts.dtypes import dtype_name, storage_kind
from pagetile.contracts.errors import DTypeError, ShapeError
from pagetile.contracts.problem import Granularity, WriteProblem
from pagetile.contracts.shapes import (
    Sizes,
    require_contiguous_last,
    require_device,
    require_dtype,
    require_no_overlap,
    require_same_dtype,
    require_tensor,
)
from pagetile.ops.checks import (
    INDEX_DTYPES,
    QUANTISED,
    QUERY_DTYPES,
    bump_version,
    check_named,
    check_no_grad,
    check_validate,
    check_values,
    finest,
    is_plain,
    refuse_odd,
    scale_granularity,
    unit_scale,
)
from pagetile.ops.dispatch import select
from pagetile.ops.overlap import Apart
from pagetile.ops.plans import PLANS, Plan, tensor_key
from pagetile.ops.quantised import check_scale
from pagetile.ops.scales import split_scale
from pagetile.ops.xpacked import bind_caches


@dataclass(frozen=True, slots=True)
class WriteNames:
    """What the caller calls the tensors."""

    key: str = "key"
    value: str = "value"
    key_cache: str = "key_cache"
    value_cache: str = "value_cache"
    slot_mapping: str = "slot_mapping"
    k_scale: str = "k_scale"
    v_scale: str = "v_scale"

    def tensors(self) -> tuple[str, ...]:
        """The names of the five tensors."""
        return self.key, self.value, self.key_cache, self.value_cache, self.slot_mapping


WRITE = WriteNames()


def reshape_and_cache_flash(
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
    """Store the keys and values of new tokens in the caches, in place.

    Args:
        key: ``[T, Hkv, D]`` float32, float16 or bfloat16; any strides with a contiguous last axis (a slice of a packed
            QKV row is fine).
        value: ``[T, Hkv, Dv]``, dtype of ``key``, strides of its own.
        key_cache: ``[NB, BS, Hkv, D]``, any strides with a contiguous last axis (NHD and HND are strides), dtype of
            ``key``, or quantised.
        value_cache: ``[NB, BS, Hkv, Dv]``, dtype of ``key_cache``, strides of its own. Both caches may be views of one
            buffer, but no element is in both, or in a source.
        slot_mapping: int32 or int64 ``[T']`` with ``T' <= T``: row t goes to slot ``block * BS + offset``. Any negative
            slot skips its row, rows past T' are not read. With equal slots it is undefined which row stays.
        kv_cache_dtype: what the cache holds: ``auto`` (by its dtype), ``fp8`` (= ``fp8_e4m3``), ``fp8_e4m3``,
            ``fp8_e5m2``, ``int8``. A ``uint8`` cache needs one of the fp8 names.
        k_scale, v_scale: of a quantised cache, stored = x / scale: None (1), a float, float32 0-d, ``[1]`` or
            ``[Hkv]``. A cache that is not quantised has none; there a scale other than 1 raises (on the CPU, and for
            floats).
        backend: ``auto``, the name of one backend, or a backend object.
        validate: slots are always checked on the CPU. On a GPU a slot outside the cache is skipped and kept for
            :func:`pagetile.raise_deferred` (``False`` and ``"deferred"``: nothing waits), or raises before anything is
            written (``True``: a checking kernel and one synchronisation, refused while a graph is captured).

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree; the message names both.
        SlotError: a slot past the end of the cache (CPU). Nothing has been written.
        UnsupportedError: a tensor requires grad.
        BackendError: the backend cannot take the problem; ``.reasons`` says why.
    """
    question = None
    if (
        (k_scale is None or type(k_scale) is float)
        and (v_scale is None or type(v_scale) is float)
        and validate is False
        and not torch.compiler.is_compiling()
    ):
        question = ("write", kv_cache_dtype, k_scale, v_scale, backend)
        try:
            answers = PLANS.settled.get(question)
        except TypeError:  # an argument that has no hash
            question = answers = None
        if answers is not None:
            for check, again in answers:
                if check(key, value, key_cache, value_cache, slot_mapping) and again(
                    key, value, key_cache, value_cache, slot_mapping
                ):
                    return
    if is_plain(key, value, key_cache, value_cache, slot_mapping):
        run_write(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, backend, validate)
        if question is not None and PLANS.settled.possible():
            tensors = (key, value, key_cache, value_cache, slot_mapping)
            plan = plan_write(*tensors, kv_cache_dtype, k_scale, v_scale, backend, validate)
            _settle(question, plan, tensors, k_scale, v_scale)
        return
    tensors = named(key, value, key_cache, value_cache, slot_mapping)
    for name, tensor in tensors:
        require_tensor(name, tensor)
    if torch.is_grad_enabled():
        check_no_grad(tensors)
    check_validate(validate)
    check_named(backend)
    k_tensor, k_float = split_scale(k_scale)
    v_tensor, v_float = split_scale(v_scale)
    torch.ops.pagetile.write(
        *(tensor for _, tensor in tensors), kv_cache_dtype, k_tensor, v_tensor, k_float, v_float, backend, str(validate)
    )


def run_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    backend: str | Backend,
    validate: bool | str,
) -> None:
    """Validate, dispatch and run a write on plain tensors."""
    if torch.is_grad_enabled():
        check_no_grad(named(key, value, key_cache, value_cache, slot_mapping))
    plan = plan_write(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, backend, validate
    )
    call = write_call(plan, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    if validate is True:
        check_values(plan.backend, call)
    run_write_call(plan, call)


def _settle(
    question: Hashable,
    plan: Plan[WriteProblem],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """Keep a write that has just been run, so that the next like it is found by its guard.

    What is left then is to read the addresses, to see that the caches are still apart, and to launch.
    """
    call = write_call(plan, *tensors, k_scale, v_scale)
    problem, apart, write = plan.problem, plan.apart, plan.backend.write
    scales = call.k_scale, call.v_scale
    prepare = getattr(plan.backend, "write_again", None)
    run = None if prepare is None else prepare(call)
    aligned = not (tensors[0].data_ptr() | tensors[1].data_ptr() | tensors[2].data_ptr() | tensors[3].data_ptr()) & 15

    def again(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> bool:
        a, b, c, d = at = key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        if (not (a | b | c | d) & 15) is not aligned:
            return False
        if at not in apart.seen:
            apart.check(at, (key, value, key_cache, value_cache), WRITE.tensors())
        if run is not None:
            run(key, value, key_cache, value_cache, slots)
        else:
            write(WriteCall(problem, key, value, key_cache, value_cache, slots, *scales))
        if torch.is_grad_enabled():
            bump_version(key_cache)
            bump_version(value_cache)
        return True

    PLANS.settled.put(question, tensors, again)


def write_call(
    plan: Plan[WriteProblem],
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Scale,
    v_scale: Scale,
    names: WriteNames = WRITE,
) -> WriteCall:
    """What the backend will be asked.

    Raises:
        ArgumentError: a scale other than 1 for a cache that is not quantised; on the CPU, one that is not above 0.
    """
    problem = plan.problem
    if problem.kind not in QUANTISED:
        if k_scale is not None:
            unit_scale(names.k_scale, k_scale, problem.kind)
        if v_scale is not None:
            unit_scale(names.v_scale, v_scale, problem.kind)
        k_scale = v_scale = None
    else:
        check_scale(names.k_scale, k_scale)
        check_scale(names.v_scale, v_scale)
    return WriteCall(problem, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


def run_write_call(plan: Plan[WriteProblem], call: WriteCall) -> None:
    """Run a prepared write."""
    plan.backend.write(call)
    if torch.is_grad_enabled():
        bump_version(call.key_cache)
        bump_version(call.value_cache)


def plan_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    backend: str | Backend,
    validate: bool | str,
    names: WriteNames = WRITE,
) -> Plan[WriteProblem]:
    """The validated problem and its backend; kept by everything that does not depend on data."""
    if validate is not False:
        check_validate(validate)
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    try:
        addresses = (key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr())
        aligned = not (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15
        plan_key = (
            "write",
            (key.shape, key.stride(), key.dtype, key.device, key.is_neg()),
            (value.shape, value.stride(), value.dtype, value.device, value.is_neg()),
            (key_cache.shape, key_cache.stride(), key_cache.dtype, key_cache.device, key_cache.is_neg()),
            (value_cache.shape, value_cache.stride(), value_cache.dtype, value_cache.device, value_cache.is_neg()),
            tensor_key(slot_mapping),
            kv_cache_dtype,
            None if k_scale is None else tensor_key(k_scale),
            None if v_scale is None else tensor_key(v_scale),
            aligned,
            backend,
        )
    except RuntimeError:  # sparse and nested tensors have no strides
        refuse_odd((*named(*tensors, names), (names.k_scale, k_scale), (names.v_scale, v_scale)))
        raise
    plan = PLANS.get(plan_key)
    if plan is None:
        problem = bind_write(*tensors, kv_cache_dtype, k_scale, v_scale, aligned, names)
        plan = PLANS.put(plan_key, Plan(problem, select(problem, backend), Apart(tensors[:4], _APART)))
    plan.apart.check(addresses, tensors, names.tensors())
    return plan


_APART = ((0, 2, False), (0, 3, False), (1, 2, False), (1, 3, False), (2, 3, False))
"""Neither cache is the other, or a source."""


def bind_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    aligned: bool,
    names: WriteNames = WRITE,
) -> WriteProblem:
    """Hold the tensors of a write to each other, and say what is asked. Reads no values.

    ``aligned``: whether the four base addresses are multiples of 16 bytes.
    """
    tensors = named(key, value, key_cache, value_cache, slot_mapping, names)
    for name, tensor in tensors:
        require_tensor(name, tensor)
        require_device(name, tensor, names.key, key.device)
    sizes = Sizes()
    for (name, tensor), axes in zip(
        (tensors[0], tensors[1], tensors[4]), ("T Hkv D", "T Hkv Dv", "slots"), strict=True
    ):
        sizes.bind(name, tensor, axes)
    layout = bind_caches(sizes, names.key_cache, key_cache, names.value_cache, value_cache)
    if sizes["slots"] > sizes["T"]:
        raise ShapeError(
            f"{names.slot_mapping}: axis 0 is {sizes['slots']}, but {names.key} has only T = {sizes['T']} rows; "
            f"pass at most one slot for each row of {names.key}"
        )
    require_dtype(names.slot_mapping, slot_mapping, INDEX_DTYPES)
    for name, tensor in tensors[:4]:
        require_contiguous_last(name, tensor)
    require_no_overlap(names.key_cache, key_cache)
    require_no_overlap(names.value_cache, value_cache)
    kind = bind_kind(
        names.key, key, names.value, value, names.key_cache, key_cache, names.value_cache, value_cache, kv_cache_dtype
    )
    covers: list[Granularity] = [
        scale_granularity(name, scale, kind=kind, num_kv_heads=sizes["Hkv"], device_of=names.key, device=key.device)
        for name, scale in ((names.k_scale, k_scale), (names.v_scale, v_scale))
    ]
    four = (key, value, key_cache, value_cache)
    return WriteProblem(
        device=key.device.type,
        dtype=dtype_name(key.dtype),
        kind=kind,
        layout=layout,
        num_tokens=sizes["slots"],
        num_kv_heads=sizes["Hkv"],
        head_size=sizes["D"],
        head_size_v=sizes["Dv"],
        block_size=sizes["BS"],
        aligned=aligned and all(aligned_strides(tensor) for tensor in four),
        heads_contiguous=all(t.shape[-2] == 1 or t.stride(-2) == t.shape[-1] for t in four),
        scale=finest(covers[0], covers[1]),
    )


def bind_kind(
    key_name: str,
    key: Tensor,
    value_name: str,
    value: Tensor,
    key_cache_name: str,
    key_cache: Tensor,
    value_cache_name: str,
    value_cache: Tensor,
    kv_cache_dtype: str,
) -> str:
    """What the caches hold, after the four dtypes have been held to each other."""
    require_dtype(key_name, key, QUERY_DTYPES)
    require_same_dtype(value_name, value, key_name, key.dtype)
    require_same_dtype(value_cache_name, value_cache, key_cache_name, key_cache.dtype)
    kind = storage_kind(dtype_name(key_cache.dtype), kv_cache_dtype)
    if kind not in QUANTISED and key_cache.dtype != key.dtype:
        raise DTypeError(
            f"{key_name} is {dtype_name(key.dtype)}, but {key_cache_name} is {dtype_name(key_cache.dtype)}; "
            f"a cache holds the dtype of {key_name}, or is quantised (float8_e4m3fn, float8_e5m2, int8, or uint8 with "
            f"kv_cache_dtype). Convert {key_name}, or allocate the cache as {dtype_name(key.dtype)}"
        )
    return kind


def aligned_strides(tensor: Tensor) -> bool:
    """Whether every stride but the last is a multiple of 16 bytes (an axis of size 1 is never stepped along)."""
    size = tensor.element_size()
    return all(
        n <= 1 or stride * size % 16 == 0 for n, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )


def named(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    names: WriteNames = WRITE,
) -> tuple[tuple[str, Tensor], ...]:
    """The tensors of a write with their names."""
    return tuple(zip(names.tensors(), (key, value, key_cache, value_cache, slot_mapping), strict=True))
