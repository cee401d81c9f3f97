"""Checks that the public ops share. None of them reads a value from a device."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall, Backend, WriteCall
from pagetile.contracts.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from pagetile.contracts.problem import Granularity
from pagetile.contracts.shapes import require_device, require_dtype, require_tensor
from pagetile.contracts.visibility import FARTHEST
from pagetile.ops.quantised import refuse_nan

QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8")
"""Kinds of cache whose elements mean something only together with a scale."""

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes of queries, keys and values; float64 is for the reference."""

INDEX_DTYPES = (torch.int32, torch.int64)

_transform_in_progress = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]

_PLAIN = (Tensor, torch.nn.Parameter)
_FINEST: tuple[Granularity, ...] = ("none", "tensor", "head", "sequence_head", "token_head")


def is_plain(*tensors: Any) -> bool:
    """Whether a call may skip the dispatcher: ordinary tensors with memory, nothing being traced or transformed."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            if tensor is None:
                continue
            return False
    first = tensors[0]
    return (first.is_cpu or first.is_cuda) and _transform_in_progress() is None


def check_no_grad(tensors: Iterable[tuple[str, Any]]) -> None:
    """Refuse inputs that require grad where gradients are recorded.

    Raises:
        UnsupportedError: one of the tensors requires grad, under grad mode.
    """
    for name, tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad, and pagetile has no backward; "
                f"call under torch.no_grad(), or pass {name}.detach()"
            )


def bump_version(tensor: Tensor) -> None:
    """Tell autograd that a tensor was written to, so that a backward that saved the old values complains."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def check_validate(validate: bool | str) -> None:
    """Hold ``validate=`` to its three values.

    Raises:
        ArgumentError: not ``False``, ``True`` or ``"deferred"``.
    """
    if validate is not False and validate is not True and validate != "deferred":
        raise ArgumentError(f"validate is {validate!r}; it must be False, True or 'deferred'")


def check_values(backend: Backend, call: WriteCall | AttendCall) -> None:
    """``validate=True``: look at every slot or block id before the op (on the CPU the op itself does), and for NaN
    among what int8 is to store.

    Raises:
        ArgumentError: a NaN that would become 0; nothing has been written.
        SlotError, BlockTableError: a value outside the cache; nothing has been written.
        UnsupportedError: the backend cannot look, or a CUDA graph is being captured.
    """
    if call.problem.device != "cpu":
        check = getattr(backend, "check", None)
        if check is None:
            raise UnsupportedError(
                f"validate=True: the backend {backend.name} cannot check values on {call.problem.device}; "
                "pass validate=False, or take a backend that can"
            )
        check(call)
    if isinstance(call, WriteCall) and call.problem.kind == "int8":
        refuse_nan(call)


def refuse_odd(tensors: Iterable[tuple[str, Any]]) -> None:
    """Say which tensor it is that has no strides or no memory, after torch has refused to give them.

    Raises:
        DTypeError, ArgumentError: naming it.
    """
    for name, tensor in tensors:
        if tensor is not None:
            require_tensor(name, tensor)


def check_sinks(name: str, sinks: Tensor) -> None:
    """Hold sinks on the CPU to numbers below +inf (-inf is no sink); elsewhere they are taken as they are.

    Raises:
        ArgumentError: a sink is +inf or NaN, with which the log-sum-exp would be.
    """
    if sinks.is_cpu and sinks.numel() and not float(sinks.max()) < float("inf"):
        head = int((~(sinks < float("inf"))).nonzero()[0])
        raise ArgumentError(
            f"{name}[{head}] is {float(sinks[head])}, the sink of query head {head}; a sink is a finite logit, or -inf "
            "for none"
        )


def check_slopes(name: str, slopes: Tensor) -> None:
    """Hold ALiBi slopes on the CPU to finite numbers; elsewhere they are taken as they are.

    Raises:
        ArgumentError: a slope is not finite, which times a distance of 0 is NaN.
    """
    if slopes.is_cpu and slopes.numel() and not float(slopes.abs().max()) < float("inf"):
        where = (~slopes.isfinite()).nonzero()[0].tolist()
        raise ArgumentError(f"{name}{where} is {float(slopes[tuple(where)])}; a slope is a finite number")


def check_workspace(backend: Backend, call: AttendCall) -> None:
    """Hold the caller's scratch to what the backend says that it will use.

    Raises:
        ArgumentError: it is not contiguous, or too small.
    """
    buffer = call.workspace
    assert buffer is not None
    needs = getattr(backend, "workspace_bytes", None)
    size = buffer.numel() * buffer.element_size()
    needed = 0 if needs is None else needs(call)
    if not buffer.is_contiguous() or size < needed:
        raise ArgumentError(
            f"workspace has {size} bytes ({'' if buffer.is_contiguous() else 'not '}contiguous), but this call needs "
            f"{needed} contiguous bytes; pass a larger one, or None"
        )


def check_named(backend: str | Backend) -> None:
    """Hold ``backend=`` to a name where it becomes part of a graph.

    Raises:
        UnsupportedError: it is an object.
    """
    if not isinstance(backend, str):
        raise UnsupportedError(
            f"backend is an object ({type(backend).__name__}), which a compiled graph, fake tensors or tensor "
            "subclasses cannot carry; pass a name"
        )


def host_int(name: str, value: Any) -> Any:
    """A host integer, symbolic while tracing (never a tensor: reading one would wait for its device).

    Raises:
        ArgumentError: it is not an integer, or it is negative.
    """
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, Tensor):
        raise ArgumentError(f"{name} is a tensor; pass a Python int, known on the host")
    if not isinstance(value, torch.SymInt):
        try:
            value = operator.index(value)
        except TypeError:
            raise ArgumentError(f"{name} is {value!r}; it must be an integer") from None
    if value < 0:
        raise ArgumentError(f"{name} is {value}; it must be 0 or more")
    return value


def host_bound(name: str, value: Any) -> Any:
    """A host integer that is an upper bound: past :data:`FARTHEST` it bounds nothing more.

    Raises:
        ArgumentError: it is not an integer, or it is negative.
    """
    if type(value) is int and 0 <= value <= FARTHEST:
        return value
    value = host_int(name, value)
    return min(value, FARTHEST) if type(value) is int else value


def host_float(name: str, value: Any) -> float:
    """A host number, finite.

    Raises:
        ArgumentError: a tensor, not a number, or not finite.
    """
    if type(value) is float and -math.inf < value < math.inf:
        return value
    if isinstance(value, Tensor):
        raise ArgumentError(f"{name} is a tensor; pass a Python float, known on the host")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{name} is {value!r}; it must be a number") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ArgumentError(f"{name} is {number}; it must be finite")
    return number


def scale_granularity(
    name: str,
    scale: Tensor | float | None,
    *,
    kind: str,
    num_kv_heads: int,
    device_of: str,
    device: torch.device,
    num_seqs: int | None = None,
    cache_shape: tuple[int, int] | None = None,
) -> Granularity:
    """What one element of ``scale`` covers, by its shape.

    None, a float, 0-d and ``[1]`` cover the tensor, ``[Hkv]`` a KV head, ``[B, Hkv]`` a sequence's KV head (reads),
    ``[NB, BS, Hkv]`` a token's KV head (reads of a cache written with per-token-head scales).

    Args:
        num_seqs: B, or None where scales of a sequence mean nothing (writes).
        cache_shape: ``(NB, BS)``, or None where scales of a token mean nothing.

    Raises:
        ArgumentError: a scale other than 1 with a cache that is not quantised.
        DTypeError: not a float and not float32.
        ShapeError: a shape that is none of the above.
        DeviceError: on another device.
    """
    if scale is None:
        return "none"
    if not isinstance(scale, Tensor):
        return _float_granularity(name, scale, kind)
    require_device(name, require_tensor(name, scale), device_of, device)
    require_dtype(name, scale, (torch.float32,))
    shapes: list[tuple[Granularity, tuple[int, ...]]] = [
        ("tensor", ()),
        ("tensor", (1,)),
        ("head", (num_kv_heads,)),
    ]
    if num_seqs is not None:
        shapes.append(("sequence_head", (num_seqs, num_kv_heads)))
    if cache_shape is not None:
        shapes.append(("token_head", (*cache_shape, num_kv_heads)))
    for granularity, shape in shapes:
        if tuple(scale.shape) == shape:
            return "none" if kind not in QUANTISED else granularity
    allowed = ", ".join(str(list(shape)) for _, shape in shapes)
    raise ShapeError(
        f"{name} is {list(scale.shape)}; a scale here is one of {allowed} "
        f"(the tensor, [Hkv]{', [B, Hkv]' if num_seqs is not None else ''}"
        f"{', [NB, BS, Hkv]' if cache_shape is not None else ''}), and Hkv is {num_kv_heads}"
    )


def _float_granularity(name: str, scale: Any, kind: str) -> Granularity:
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise DTypeError(f"{name} is a {type(scale).__name__}; pass a float, a float32 tensor or None")
    if not host_float(name, scale) > 0:
        raise ArgumentError(f"{name} is {scale}; a scale must be above 0")
    if kind in QUANTISED:
        return "tensor"
    if scale != 1.0:
        raise ArgumentError(_meaningless_scale(name, scale, kind))
    return "none"


def finest(a: Granularity, b: Granularity) -> Granularity:
    """The finer of two granularities."""
    return a if _FINEST.index(a) >= _FINEST.index(b) else b


def unit_scale(name: str, scale: Tensor | float | None, kind: str) -> None:
    """Hold a tensor of scales to 1 where the cache is not quantised; engines hand them to every cache.

    The values are read on the CPU; on any other device that would be a synchronisation, so there they are taken
    as meant: a cache that is not quantised is copied bit by bit.

    Raises:
        ArgumentError: a scale other than 1, which nothing would apply.
    """
    if isinstance(scale, Tensor) and scale.device.type == "cpu" and not bool((scale == 1).all()):
        raise ArgumentError(_meaningless_scale(name, scale.tolist(), kind))


def _meaningless_scale(name: str, scale: Any, kind: str) -> str:
    return (
        f"{name} is {scale}, but the cache holds {kind}, which is copied bit by bit and has no scale; "
        f"pass {name}=None, or a cache of {', '.join(QUANTISED)}"
    )
