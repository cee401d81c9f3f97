"""``rope_and_cache``: norm and rotation of new queries and keys, and the write of keys and values, in one pass.

The result is that of the sequence it stands for, rounded once: RMS norm (where there are weights), rotary embedding,
then ``reshape_and_cache_flash`` of the rotated keys in their own dtype, whose bytes a quantised cache holds.

Source: Su et al. 2021, RoFormer; norms of queries and keys as in Qwen3; the fusion is that of FlashInfer's
``rope_quantize_fp8_append_paged_kv_cache`` and vLLM's ``fused_qk_norm_rope``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagetile.backends.protocol import Backend, Scale
from pagetile.backends.verbs import FusedWriteCall, verb_of
from pagetile.contracts.errors import ArgumentError, ShapeError, UnsupportedError
from pagetile.contracts.problem import FusedWriteProblem
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
    QUERY_DTYPES,
    bump_version,
    check_named,
    check_no_grad,
    check_validate,
    check_values,
    host_float,
    is_plain,
)
from pagetile.ops.dispatch import select
from pagetile.ops.overlap import Apart
from pagetile.ops.plans import PLANS, Plan, tensor_key
from pagetile.ops.scales import split_scale
from pagetile.ops.write import bind_write, write_call
from pagetile.ops.xpacked import is_xpacked


@dataclass(slots=True, eq=False)
class FusedArgs:
    """Everything a fused write takes but its outputs, as in :func:`rope_and_cache`."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    positions: Tensor
    rotary_cos: Tensor
    rotary_sin: Tensor
    kv_cache_dtype: str = "auto"
    k_scale: Scale = None
    v_scale: Scale = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6
    interleaved: bool = False
    backend: str | Backend = "auto"
    validate: bool | str = False

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors that are there (scales apart), by name."""
        named = [(name, getattr(self, name)) for name in (*_INPUTS, "q_weight", "k_weight")]
        return [(name, tensor) for name, tensor in named if tensor is not None]


_INPUTS = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "slot_mapping",
    "positions",
    "rotary_cos",
    "rotary_sin",
)


def rope_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    rotary_cos: Tensor,
    rotary_sin: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = None,
    v_scale: Scale = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    out: Tensor | None = None,
    key_out: Tensor | None = None,
    backend: str | Backend = "auto",
    validate: bool | str = False,
) -> Tensor:
    """Rotate queries and keys to their positions, and store keys and values in the caches, in place.

    All arithmetic is float32. A head is rounded once, to its dtype; a quantised cache holds those rounded keys, divided
    by the scale, as :func:`pagetile.reshape_and_cache_flash` would store them.

    Args:
        query: ``[T, Hq, D]`` float32, float16 or bfloat16, any strides with a contiguous last axis (a slice of a packed
            QKV row is fine).
        key, value: ``[T, Hkv, D]`` and ``[T, Hkv, Dv]``, dtype of ``query``, likewise.
        key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale: see
            :func:`pagetile.reshape_and_cache_flash`. A row whose slot is negative, or past the end of ``slot_mapping``,
            is rotated and not stored.
        positions: int32 or int64 ``[T]``: rows of the tables. One outside them raises on the CPU; elsewhere it turns
            its row to NaN.
        rotary_cos, rotary_sin: ``[rows, rotary_dim / 2]``, dtype of ``query`` or float32, last axis contiguous;
            ``rotary_dim <= D``, and the channels from there on are not rotated (partial rotary).
        q_weight, k_weight: ``[D]``, dtype of ``query`` or float32: weights of an RMS norm over a whole head before the
            rotation, ``x / sqrt(mean(x ** 2) + eps) * weight``; None for no norm. Both or neither.
        eps: of the norms, 0 or more.
        interleaved: pairs of channels ``(0, 1), (2, 3), ...`` (GPT-J); else channel i with ``i + rotary_dim / 2``
            (GPT-NeoX, Llama).
        out: ``[T, Hq, D]`` to fill, any strides with a contiguous last axis; may be ``query`` itself. None allocates.
        key_out: ``[T, Hkv, D]``, filled with the keys as they are stored, or None; may be ``key`` itself.
        backend, validate: see :func:`pagetile.reshape_and_cache_flash`.

    Returns:
        The rotated queries, ``[T, Hq, D]``.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree; the message names both.
        ArgumentError: a position outside the tables (CPU). SlotError: a slot outside the cache (CPU). Nothing has been
            written.
        UnsupportedError: an x-packed cache, or an input that requires grad.
        BackendError: the backend cannot take the problem; ``.reasons`` says why.
    """
    args = FusedArgs(
        query,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        positions,
        rotary_cos,
        rotary_sin,
        kv_cache_dtype,
        k_scale,
        v_scale,
        q_weight,
        k_weight,
        host_float("eps", eps),
        bool(interleaved),
        backend,
        validate,
    )
    if out is None:
        out = torch.empty_like(require_tensor("query", query), memory_format=torch.contiguous_format)
    plain = is_plain(*[tensor for _, tensor in args.tensors()], out, key_out)
    if plain:
        run_fused(out, key_out, args)
        return out
    for name, tensor in args.tensors():
        require_tensor(name, tensor)
    if torch.is_grad_enabled():
        check_no_grad((*args.tensors(), ("out", out), ("key_out", key_out)))
    check_validate(validate)
    check_named(backend)
    k_tensor, k_float = split_scale(k_scale)
    v_tensor, v_float = split_scale(v_scale)
    torch.ops.pagetile.rope_and_cache(
        out,
        key_out,
        *[getattr(args, name) for name in _INPUTS],
        kv_cache_dtype,
        k_tensor,
        v_tensor,
        k_float,
        v_float,
        q_weight,
        k_weight,
        args.eps,
        args.interleaved,
        backend,
        str(validate),
    )
    return out


def run_fused(out: Tensor, key_out: Tensor | None, args: FusedArgs) -> None:
    """Validate, dispatch and run a fused write on plain tensors."""
    named = [*args.tensors(), ("out", out), ("key_out", key_out)]
    if torch.is_grad_enabled():
        check_no_grad(named)
    if args.validate is not False:
        check_validate(args.validate)
    tensors = (out, key_out, *(getattr(args, name) for name in _INPUTS), args.q_weight, args.k_weight)
    for name, tensor in named:
        if tensor is not None:
            require_tensor(name, tensor)
    four = (args.key, args.value, args.key_cache, args.value_cache)
    aligned = not any(tensor.data_ptr() & 15 for tensor in four)
    plan_key = (
        "fused",
        *map(tensor_key, (*tensors, args.k_scale, args.v_scale)),
        *(args.kv_cache_dtype, args.interleaved, aligned, args.backend),
    )
    plan: Plan[FusedWriteProblem] | None = PLANS.get(plan_key)
    if plan is None:
        problem = bind_fused(out, key_out, args, aligned)
        plan = PLANS.put(plan_key, Plan(problem, select(problem, args.backend), Apart(tensors, _APART)))
    addresses = tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    plan.apart.check(addresses, tensors, ("out", "key_out", *_INPUTS, "q_weight", "k_weight"))
    write_plan = Plan(plan.problem.write, plan.backend)
    write = write_call(write_plan, *four, args.slot_mapping, args.k_scale, args.v_scale)
    if args.validate is True:
        check_values(plan.backend, write)
    call = FusedWriteCall(
        plan.problem,
        write,
        args.query,
        out,
        args.positions,
        args.rotary_cos,
        args.rotary_sin,
        args.q_weight,
        args.k_weight,
        args.eps,
        key_out,
    )
    verb_of(plan.backend, "fused_write", plan.problem)(call)
    if torch.is_grad_enabled():
        for tensor in (out, key_out, args.key_cache, args.value_cache):
            if tensor is not None:
                bump_version(tensor)


_OUT, _KEY_OUT, _QUERY, _KEY, _VALUE, _KEY_CACHE, _VALUE_CACHE = range(7)
_APART = (
    (_OUT, _QUERY, True),
    (_KEY_OUT, _KEY, True),
    *((_OUT, other, False) for other in (_KEY_OUT, _KEY, _VALUE, _KEY_CACHE, _VALUE_CACHE)),
    *((_KEY_OUT, other, False) for other in (_QUERY, _VALUE, _KEY_CACHE, _VALUE_CACHE)),
    *((cache, other, False) for cache in (_KEY_CACHE, _VALUE_CACHE) for other in (_QUERY, _KEY, _VALUE)),
    (_KEY_CACHE, _VALUE_CACHE, False),
)
"""In place is right: a head of a result depends on the same head alone. Nothing else may be shared."""


def bind_fused(out: Tensor, key_out: Tensor | None, args: FusedArgs, aligned: bool) -> FusedWriteProblem:
    """Hold the tensors of a fused write to each other, and say what is asked. Reads no values."""
    query, key = args.query, args.key
    if is_xpacked(args.key_cache):
        raise UnsupportedError(
            "key_cache has 5 axes, the x-packed layout, which a fused write does not take; rotate first and call "
            "reshape_and_cache, or pass a cache [NB, BS, Hkv, D]"
        )
    write = bind_write(
        key, args.value, args.key_cache, args.value_cache, args.slot_mapping, args.kv_cache_dtype, args.k_scale,
        args.v_scale, aligned,
    )  # fmt: skip
    for name, tensor in (*args.tensors(), ("out", out), ("key_out", key_out)):
        if tensor is not None:
            require_device(name, require_tensor(name, tensor), "key", key.device)
    sizes = Sizes()
    sizes.bind("key", key, "T Hkv D")
    sizes.bind("query", query, "T Hq D")
    sizes.bind("out", out, "T Hq D")
    sizes.bind("positions", args.positions, "T")
    require_dtype("positions", args.positions, INDEX_DTYPES)
    for name, tensor in (("query", query), ("out", out), ("key_out", key_out)):
        if tensor is not None:
            require_same_dtype(name, tensor, "key", key.dtype)
            require_contiguous_last(name, tensor)
    require_no_overlap("out", out)
    if key_out is not None:
        sizes.bind("key_out", key_out, "T Hkv D")
        require_no_overlap("key_out", key_out)
    _bind_tables(args, sizes)
    _bind_norms(args, sizes)
    return FusedWriteProblem(
        write, sizes["Hq"], 2 * args.rotary_cos.shape[1], args.interleaved, args.q_weight is not None
    )


def _bind_tables(args: FusedArgs, sizes: Sizes) -> None:
    for name, table in (("rotary_cos", args.rotary_cos), ("rotary_sin", args.rotary_sin)):
        sizes.bind(name, table, "rows rotary/2")
        _require_float(name, table, args.key)
        require_contiguous_last(name, table)
    require_same_dtype("rotary_sin", args.rotary_sin, "rotary_cos", args.rotary_cos.dtype)
    if 2 * args.rotary_cos.shape[1] > sizes["D"]:
        raise ShapeError(
            f"rotary_cos: axis 1 (rotary_dim / 2) is {args.rotary_cos.shape[1]}, but key has D = {sizes['D']} and "
            "rotary_dim may be at most that; pass narrower tables"
        )


def _bind_norms(args: FusedArgs, sizes: Sizes) -> None:
    if (args.q_weight is None) != (args.k_weight is None):
        raise ArgumentError("one of q_weight and k_weight is given without the other; pass both, or neither")
    for name, weight in (("q_weight", args.q_weight), ("k_weight", args.k_weight)):
        if weight is not None:
            sizes.bind(name, weight, "D")
            _require_float(name, weight, args.key)
            require_contiguous_last(name, weight)
    if args.q_weight is not None and args.k_weight is not None:
        require_same_dtype("k_weight", args.k_weight, "q_weight", args.q_weight.dtype)
    if args.eps < 0:
        raise ArgumentError(f"eps is {args.eps}; it must be 0 or more")


def _require_float(name: str, tensor: Tensor, key: Tensor) -> None:
    allowed = (key.dtype,) if key.dtype in (torch.float32, torch.float64) else (key.dtype, torch.float32)
    require_dtype(name, tensor, tuple(dtype for dtype in QUERY_DTYPES if dtype in allowed))
