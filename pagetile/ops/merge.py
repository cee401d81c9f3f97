"""``merge_attn_states``: add two results over disjoint sets of keys.

Source: the op of that name in vLLM; Milakov and Gimelshein 2018, online normalizer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.backends.protocol import Backend, MergeCall
from pagetile.contracts.dtypes import dtype_name
from pagetile.contracts.problem import MergeProblem
from pagetile.contracts.shapes import (
    Sizes,
    require_device,
    require_dtype,
    require_no_overlap,
    require_same_dtype,
    require_tensor,
)
from pagetile.ops.checks import (
    QUERY_DTYPES,
    bump_version,
    check_named,
    check_no_grad,
    check_validate,
    is_plain,
    refuse_odd,
)
from pagetile.ops.dispatch import select
from pagetile.ops.overlap import Apart
from pagetile.ops.plans import PLANS, Plan, tensor_key


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    *,
    backend: str | Backend = "auto",
    validate: bool | str = False,
) -> None:
    """Add two states, in place of ``output`` and ``output_lse``.

    Args:
        output: ``[T, H, D]``, any strides; may be one of the two inputs, and shares no other memory with them.
        prefix_output, suffix_output: ``[T, H, D]`` float32, float16 or bfloat16, all three of one dtype.
        prefix_lse, suffix_lse: float32 ``[H, T]``, any strides, natural logarithm. -inf (and +inf) is an empty state.
        output_lse: float32 ``[H, T]``, any strides, or None; may be one of the two inputs likewise.
        backend: ``auto``, the name of one backend, or a backend object.
        validate: there are no values to check; its own value is.

    The empty state is the identity, bit for bit; two empty states make the empty state (0, -inf).

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree; the message names both.
        UnsupportedError: a tensor requires grad.
        BackendError: the backend cannot take the problem; ``.reasons`` says why.
    """
    tensors = (output, prefix_output, prefix_lse, suffix_output, suffix_lse)
    if is_plain(*tensors, output_lse):
        run_merge(*tensors, output_lse, backend, validate)
        return
    for name, tensor in _named(*tensors, output_lse):
        require_tensor(name, tensor)
    if torch.is_grad_enabled():
        check_no_grad(_named(*tensors, output_lse))
    check_validate(validate)
    check_named(backend)
    torch.ops.pagetile.merge_out(*tensors, output_lse, backend)


def run_merge(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None,
    backend: str | Backend,
    validate: bool | str = False,
) -> None:
    """Validate, dispatch and run a merge on plain tensors."""
    states = (output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)
    if torch.is_grad_enabled():
        check_no_grad(_named(*states))
    if validate is not False:
        check_validate(validate)
    plan, addresses = plan_merge(states, backend)
    plan.apart.check(addresses, states, _NAMES)
    merge_planned(plan, states)


States = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""``output``, ``prefix_output``, ``prefix_lse``, ``suffix_output``, ``suffix_lse``, ``output_lse``."""


def plan_merge(states: States, backend: str | Backend) -> tuple[Plan[MergeProblem], tuple[int, ...]]:
    """The validated problem with its backend, and the addresses of the tensors."""
    try:
        plan_key = ("merge", *[tensor_key(tensor) for tensor in states], backend)
        addresses = tuple([0 if tensor is None else tensor.data_ptr() for tensor in states])
    except RuntimeError:  # sparse and nested tensors have no strides
        refuse_odd(_named(*states))
        raise
    plan: Plan[MergeProblem] | None = PLANS.get(plan_key)
    if plan is None:
        problem = bind_merge(*states)
        plan = PLANS.put(plan_key, Plan(problem, select(problem, backend), Apart(states, _APART)))
    return plan, addresses


def merge_planned(plan: Plan[MergeProblem], states: States, query_start_loc: Tensor | None = None) -> None:
    """Run a planned merge; with ``query_start_loc`` rows from its last element on stay as they are."""
    output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse = states
    plan.backend.merge(
        MergeCall(
            plan.problem, output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse, query_start_loc
        )
    )
    if torch.is_grad_enabled():
        bump_version(output)
        if output_lse is not None:
            bump_version(output_lse)


def bind_merge(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None,
) -> MergeProblem:
    """Hold the tensors of a merge to each other, and say what is asked. Reads no values."""
    sizes = Sizes()
    for name, tensor in _named(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse):
        require_tensor(name, tensor)
        require_device(name, tensor, "output", output.device)
        if name.endswith("lse"):
            sizes.bind(name, tensor, "H T")
            require_dtype(name, tensor, (torch.float32,))
        else:
            sizes.bind(name, tensor, "T H D")
            require_dtype(name, tensor, QUERY_DTYPES)
            require_same_dtype(name, tensor, "output", output.dtype)
    require_no_overlap("output", output)
    if output_lse is not None:
        require_no_overlap("output_lse", output_lse)
    return MergeProblem(
        device=output.device.type,
        dtype=dtype_name(output.dtype),
        num_tokens=sizes["T"],
        num_heads=sizes["H"],
        head_size=sizes["D"],
    )


def _named(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None,
) -> list[tuple[str, Tensor]]:
    tensors = (output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)
    return [(name, tensor) for name, tensor in zip(_NAMES, tensors, strict=True) if tensor is not None]


_NAMES = ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse")
_APART = (
    *((0, 1, True), (0, 3, True), (5, 2, True), (5, 4, True)),
    *((0, 2, False), (0, 4, False), (5, 1, False), (5, 3, False), (0, 5, False)),
)
"""In place is right: an element of each result depends on the same element of each input alone."""
