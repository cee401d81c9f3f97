"""``flash_attn_varlen_func``: ragged queries over paged or ragged keys and values.

Source: the function of that name in FlashAttention and in vLLM's fork of it, whose arguments these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall, Backend, Scale
from pagetile.contracts.errors import ArgumentError, BlockTableError, PagetileError
from pagetile.contracts.problem import AttendProblem
from pagetile.contracts.shapes import require_tensor
from pagetile.ops.append import check_lengths_and_table
from pagetile.ops.arguments import check_keys, check_softcap, default_scale, float_sinks, fold_window, refuse_training
from pagetile.ops.attend_again import settle_attend
from pagetile.ops.bind_attention import KVCACHE, KVCACHE_ROWS, AttendArgs, bind_attend, op_arguments
from pagetile.ops.checks import (
    QUANTISED,
    bump_version,
    check_named,
    check_no_grad,
    check_sinks,
    check_slopes,
    check_validate,
    check_values,
    check_workspace,
    host_bound,
    is_plain,
    refuse_odd,
    unit_scale,
)
from pagetile.ops.dispatch import select
from pagetile.ops.overlap import Apart
from pagetile.ops.plans import PLANS, Plan, tensor_key
from pagetile.ops.quantised import check_scale
from pagetile.ops.xpacked import head_size_v

_INT = {int}


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Any = None,
    q_descale: Tensor | None = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    num_splits: int = 0,
    s_aux: Tensor | None = None,
    *,
    backend: str | Backend = "auto",
    validate: bool | str = False,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
    workspace: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed queries over each sequence's own keys.

    Args:
        q: ``[T, Hq, D]`` float32, float16 or bfloat16, any strides with a contiguous last axis; the rows of sequence b
            are ``cu_seqlens_q[b]`` up to ``cu_seqlens_q[b + 1]``. Rows past ``cu_seqlens_q[-1]`` are neither read nor
            written.
        k, v: with ``block_table`` the caches ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``, or x-packed
            ``[NB, Hkv, D/x, BS, x]`` and ``[NB, Hkv, Dv, BS]``; without, ragged ``[total_k, Hkv, D]`` and
            ``[total_k, Hkv, Dv]``. dtype of ``q``, or quantised; strides each its own.
        max_seqlen_q, max_seqlen_k: host ints, upper bounds of the lengths, of any size.
        cu_seqlens_q: int32 ``[B + 1]``. Other dtypes raise: converting would be a hidden kernel in every call.
        cu_seqlens_k: int32 ``[B + 1]``, ragged keys only.
        seqused_k: int32 ``[B]``, number of keys of each sequence, paged keys only (required there).
        softmax_scale: finite, default ``D ** -0.5``.
        causal: query i of a sequence sees keys ``j <= i + seq_len - q_len`` (aligned to the bottom right).
        window_size: ``(left, right)``, both ends inclusive, -1 unbounded, None for ``(-1, -1)``. A model's
            ``sliding_window`` goes through :func:`pagetile.window_from_sliding`.
        softcap: ``cap * tanh(s / cap)``; 0 is off.
        alibi_slopes: float32 ``[Hq]`` or ``[B, Hq]``, finite (looked at on the CPU only).
        deterministic: accepted; the result is always deterministic.
        block_table: int32 or int64 ``[B, width]``, last axis contiguous. Entries past ``ceil(seqused_k / BS)`` may be
            anything.
        return_softmax_lse: return the log-sum-exp too.
        out: ``[T, Hq, Dv]``, dtype of ``q``, any strides (a last axis that is not contiguous costs a copy). It may be
            ``q`` itself, and shares no memory with anything else.
        scheduler_metadata: accepted and not used; there is no plan step.
        k_descale, v_descale: of a quantised cache, value = q * scale: None, a float, float32 0-d, ``[1]``, ``[Hkv]``,
            ``[B, Hkv]`` or ``[NB, BS, Hkv]``.
        num_splits: splits of the keys; 0 leaves the choice to the backend, and more than can have work are as good as
            all of those.
        s_aux: ``[Hq]``, any floating dtype: sinks, a logit that joins the denominator only. -inf is no sink; +inf and
            NaN raise on the CPU (elsewhere nobody looks, and the row and its lse are what they make of it).
        q_v, dropout_p, return_attn_probs, q_descale: not implemented; anything but the default raises.
        backend: ``auto``, the name of one backend, or a backend object.
        validate: see :func:`pagetile.reshape_and_cache_flash`.
        batch_invariant: a row's bits do not depend on what else is in the batch.
        kv_cache_dtype: what a quantised cache holds, see :func:`pagetile.reshape_and_cache_flash`.
        workspace: scratch memory of the caller, or None.

    Returns:
        ``out`` ``[T, Hq, Dv]``, or ``(out, lse)`` with lse float32 ``[Hq, T]``, natural logarithm. A row that sees no
        key is 0, its lse -inf (the sink, where there is one).

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree; the message names both.
        BlockTableError: a block id outside the cache, in a range that is used (CPU).
        UnsupportedError: an argument that is not implemented, or an input that requires grad.
        BackendError: the backend cannot take the problem; ``.reasons`` says why.
    """
    del deterministic, scheduler_metadata  # every result is deterministic, and there is no plan step to describe
    question = None
    if (
        cu_seqlens_k is alibi_slopes is s_aux is k_descale is v_descale is workspace is q_v is q_descale is None
        and validate is False
        and type(max_seqlen_q) is type(max_seqlen_k) is type(num_splits) is int
        and (window_size is None or (type(window_size) is tuple and set(map(type, window_size)) == _INT))
        and not torch.compiler.is_compiling()
    ):
        question = (
            (max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, return_attn_probs),
            (return_softmax_lse, num_splits, backend, batch_invariant, kv_cache_dtype, out is None),
        )
        try:
            answers = PLANS.settled.get(question)
        except TypeError:  # an argument that has no hash
            question = answers = None
        if answers is not None:
            tensors = (q, k, v, cu_seqlens_q, seqused_k, block_table, out)
            if out is None:
                tensors = tensors[:6]
            for check, again in answers:
                if check(*tensors):
                    done = again(*tensors)
                    if done is not None:
                        return done
    refuse_training(q_v=q_v, dropout_p=dropout_p, return_attn_probs=return_attn_probs, q_descale=q_descale)
    check_keys(k, cu_seqlens_k, seqused_k, block_table)
    args = AttendArgs(
        out=out,
        lse=None,
        q=require_tensor("q", q),
        k=k,
        v=v,
        query_start_loc=cu_seqlens_q,
        seq_lens=seqused_k,
        key_start_loc=cu_seqlens_k,
        block_table=block_table,
        max_q_len=host_bound("max_seqlen_q", max_seqlen_q),
        max_k_len=host_bound("max_seqlen_k", max_seqlen_k),
        scale=default_scale(q, softmax_scale),
        window=fold_window(window_size, causal),
        softcap=check_softcap(softcap),
        alibi_slopes=alibi_slopes,
        sinks=None if s_aux is None else float_sinks(s_aux),
        k_scale=k_descale,
        v_scale=v_descale,
        kv_cache_dtype=kv_cache_dtype,
        num_splits=host_bound("num_splits", num_splits),
        batch_invariant=batch_invariant,
        workspace=workspace,
        backend=backend,
        validate=validate,
        with_lse=return_softmax_lse,
    )
    out, lse = attend(args)
    if question is not None and PLANS.settled.possible() and is_plain(*args.plain_tensors()):
        settle_attend(question, args, plan_attend(args))
    return (out, lse) if lse is not None else out


def attend(args: AttendArgs) -> tuple[Tensor, Tensor | None]:
    """Run an attention, allocating what is missing: directly where that is all there is to it, else as an op."""
    if is_plain(*args.plain_tensors()):
        return run_attend(args)
    for name, tensor in args.tensors():
        require_tensor(name, tensor)
    if torch.is_grad_enabled():
        check_no_grad((*args.tensors(), ("k_descale", args.k_scale), ("v_descale", args.v_scale)))
    check_validate(args.validate)
    check_named(args.backend)
    inputs = op_arguments(args)
    q, out, lse = args.q, args.out, args.lse
    if out is not None or args.workspace is not None:
        if out is None:
            out = q.new_empty((q.shape[0], q.shape[1], head_size_v(args.v, args.k)))
        if args.with_lse and lse is None:
            lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        torch.ops.pagetile.attend_out(out, lse, args.workspace, *inputs)
        return out, lse
    if args.with_lse:
        return torch.ops.pagetile.attend_lse(*inputs)
    return torch.ops.pagetile.attend(*inputs), None


def run_attend(args: AttendArgs) -> tuple[Tensor, Tensor | None]:
    """Validate, dispatch and run an attention on plain tensors."""
    return execute(plan_attend(args), args)


def plan_attend(args: AttendArgs) -> Plan[AttendProblem]:
    """The validated problem and its backend; kept by everything that does not depend on data."""
    if torch.is_grad_enabled():
        check_no_grad((*args.tensors(), ("k_descale", args.k_scale), ("v_descale", args.v_scale)))
    q, k, v, loc, lens, table = args.q, args.k, args.v, args.query_start_loc, args.seq_lens, args.block_table
    if args.validate is not False:
        check_validate(args.validate)
    try:
        aligned = not (k.data_ptr() | v.data_ptr()) & 15
        plan_key = (
            "attend",
            (q.shape, q.stride(), q.dtype, q.device, q.is_neg()),
            (k.shape, k.stride(), k.dtype, k.device, k.is_neg()),
            (v.shape, v.stride(), v.dtype, v.device, v.is_neg()),
            (loc.shape, loc.stride(), loc.dtype, loc.device, loc.is_neg()),
            None if lens is None else (lens.shape, lens.stride(), lens.dtype, lens.device, lens.is_neg()),
            None if table is None else (table.shape, table.stride(), table.dtype, table.device, table.is_neg()),
            *_optional_keys(args),
            (args.max_q_len, args.max_k_len, args.window, args.softcap > 0, args.kv_cache_dtype, args.num_splits),
            (args.batch_invariant, args.with_lse, aligned, args.backend),
        )
    except RuntimeError:  # sparse and nested tensors have no strides
        refuse_odd((*args.tensors(), ("k_descale", args.k_scale), ("v_descale", args.v_scale)))
        raise
    plan = PLANS.get(plan_key)
    if plan is None:
        problem = bind_attend(args, aligned)
        plan = PLANS.put(plan_key, Plan(problem, select(problem, args.backend), Apart(_shared(args), _APART)))
    if args.out is not None:
        _check_apart(plan, args)
    return plan


_APART = ((0, 1, True), (0, 2, False), (0, 3, False), (0, 4, False), (4, 1, False), (4, 2, False), (4, 3, False))
"""``out`` may be ``q``: a row is read by the work that writes it. Keys and values are read by all of it."""


def _shared(args: AttendArgs) -> tuple[Tensor | None, ...]:
    return args.out, args.q, args.k, args.v, args.lse


def _check_apart(plan: Plan[AttendProblem], args: AttendArgs) -> None:
    tensors, names = _shared(args), args.names
    addresses = tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
    plan.apart.check(addresses, tensors, ("out", names.q, names.k, names.v, "lse"))


def execute(plan: Plan[AttendProblem], args: AttendArgs) -> tuple[Tensor, Tensor | None]:
    """Run a planned attention; allocates the outputs that are missing."""
    call, out = attend_call(plan, args)
    check_call(plan, call, args)
    return run_attend_call(plan, call, args, out)


def admit_attend(args: AttendArgs) -> None:
    """Everything short of running an attention that can fail, for a graph that writes before it attends."""
    plan = plan_attend(args)
    call, _ = attend_call(plan, args)
    check_call(plan, call, args)


def check_call(plan: Plan[AttendProblem], call: AttendCall, args: AttendArgs) -> None:
    """What the host can know before anything is written, and the values of the device under ``validate=True``.

    Raises:
        ArgumentError: scratch that is too small; on the CPU, sinks or slopes that are not numbers.
        BlockTableError, UnsupportedError: under ``validate=True``.
    """
    if call.workspace is not None:
        check_workspace(plan.backend, call)
    if call.sinks is not None:
        check_sinks("s_aux", call.sinks)
    if call.alibi_slopes is not None:
        check_slopes("alibi_slopes", call.alibi_slopes)
    if args.validate is True:
        try:
            check_values(plan.backend, call)
        except PagetileError as error:
            error.rename(args.names.words())
            raise


def attend_call(plan: Plan[AttendProblem], args: AttendArgs) -> tuple[AttendCall, Tensor]:
    """What the backend will be asked, and the ``out`` that the caller gets."""
    problem = plan.problem
    k_scale, v_scale = scales_of(problem, args)
    q, out, lse = args.q, args.out, args.lse
    if out is None:
        shape = (problem.num_tokens, problem.num_q_heads, problem.head_size_v)
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    if lse is None and args.with_lse:
        lse = torch.empty((problem.num_q_heads, problem.num_tokens), dtype=torch.float32, device=q.device)
    target = out
    if out.stride(2) != 1 and out.shape[2] > 1:
        # A backend writes rows. The copy starts as what is there, for the rows that must stay as they are.
        target = out.clone(memory_format=torch.contiguous_format)
    call = AttendCall(
        problem,
        q,
        args.k,
        args.v,
        target,
        lse,
        args.query_start_loc,
        args.seq_lens,
        args.key_start_loc,
        args.block_table,
        args.scale,
        args.window,
        args.softcap,
        args.key_starts,
        args.alibi_slopes,
        args.sinks,
        k_scale,
        v_scale,
        args.workspace,
    )
    return call, out


def run_attend_call(
    plan: Plan[AttendProblem], call: AttendCall, args: AttendArgs, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Run a prepared attention."""
    try:
        plan.backend.attend(call)
    except PagetileError as error:
        restate(error, call, args)
        raise
    if call.out is not out:
        out.copy_(call.out)
    if torch.is_grad_enabled():
        if args.out is not None:
            bump_version(out)
        if args.lse is not None:
            bump_version(args.lse)
    return out, call.lse


def restate(error: PagetileError, call: AttendCall, args: AttendArgs) -> None:
    """Have the error of a backend speak of what the caller passed.

    ``flash_attn_with_kvcache`` gives no bounds, and maybe no table: there a bad value is looked up again.
    """
    names, table, lens = args.names, call.block_table, call.seq_lens
    if names in (KVCACHE, KVCACHE_ROWS) and isinstance(error, ArgumentError | BlockTableError) and call.q.is_cpu:
        assert table is not None
        assert lens is not None
        check_lengths_and_table(lens, table, 0, call.k.shape[0], call.k.shape[1], names.block_table)
    error.rename(names.words())


def scales_of(problem: AttendProblem, args: AttendArgs) -> tuple[Scale, Scale]:
    """The scales that the cache has: those given, or none where it is not quantised.

    Raises:
        ArgumentError: a scale other than 1 for a cache that is not quantised; on the CPU, one that is not above 0.
    """
    if problem.kind in QUANTISED:
        check_scale("k_descale", args.k_scale)
        check_scale("v_descale", args.v_scale)
        return args.k_scale, args.v_scale
    if args.k_scale is not None:
        unit_scale("k_descale", args.k_scale, problem.kind)
    if args.v_scale is not None:
        unit_scale("v_descale", args.v_scale, problem.kind)
    return None, None


def _optional_keys(args: AttendArgs) -> tuple[Any, ...]:
    rare = (
        args.out,
        args.lse,
        args.key_start_loc,
        args.key_starts,
        args.alibi_slopes,
        args.sinks,
        args.k_scale,
        args.v_scale,
        args.workspace,
    )
    return tuple([None if tensor is None else tensor_key(tensor) for tensor in rare])
