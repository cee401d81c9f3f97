"""``shared_prefix_attention``: a prefix that all sequences share, read once for all; then each one's own keys.

Two attentions and a merge. The first takes the rows of all sequences as one sequence over the prefix, the second takes
each sequence over its own keys, and the states over the two disjoint sets of keys are added.

Source: Juravsky et al. 2024 (Hydragen) and the cascade attention of FlashInfer and vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagetile.backends.protocol import Backend, Scale
from pagetile.contracts.errors import ArgumentError, BlockTableError, PagetileError, ShapeError, UnsupportedError
from pagetile.contracts.geometry import blocks_held
from pagetile.contracts.problem import AttendProblem
from pagetile.contracts.shapes import require_device, require_dtype, require_tensor
from pagetile.contracts.visibility import FARTHEST
from pagetile.ops.arguments import check_softcap, default_scale, float_sinks, fold_window
from pagetile.ops.attention import (
    attend_call,
    check_call,
    op_arguments,
    plan_attend,
    restate,
    run_attend,
    run_attend_call,
)
from pagetile.ops.bind_attention import PREFIX, SUFFIX, AttendArgs
from pagetile.ops.checks import check_named, check_no_grad, check_validate, host_bound, host_int, is_plain
from pagetile.ops.merge import merge_planned, plan_merge
from pagetile.ops.plans import Plan


@dataclass(slots=True, eq=False)
class Prefix:
    """What all sequences share: ``table`` ``[width]``, ``lens`` int32 ``[1]``, ``max_len`` a host bound of it."""

    table: Tensor
    lens: Tensor
    max_len: int


def shared_prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    prefix_table: Tensor,
    prefix_len: int | Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
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
    """Attention of packed queries over a prefix common to all sequences, followed by each sequence's own keys.

    A sequence has ``prefix_len + seqused_k[b]`` keys. Those of the prefix are positions 0 to ``prefix_len - 1`` and lie
    in the blocks of ``prefix_table``; the own ones follow at position ``prefix_len`` and lie in the blocks of
    ``block_table[b]``, from the first slot of its first block on, whether or not the prefix fills its last block. The
    result is that of :func:`pagetile.flash_attn_varlen_func` over all these keys (to the rounding of one merge, not bit
    for bit), with K and V of the prefix read once for all sequences.

    Args:
        q: ``[T, Hq, D]``, the last ``q_len`` positions of each sequence, packed as there.
        k_cache, v_cache: ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``, holding the prefix and all own keys.
        cu_seqlens_q: int32 ``[B + 1]``. ``max_seqlen_q``: host int, an upper bound.
        prefix_table: int32 or int64 ``[width]``, contiguous: block ids of the prefix, the same for all. Entries past
            ``ceil(prefix_len / BS)`` may be anything.
        prefix_len: keys of the prefix, 0 or more: a host int, or int32 ``[1]`` or 0-d on the device of ``q`` (then a
            captured CUDA graph replays for any prefix that fits in ``prefix_table``).
        block_table: int32 or int64 ``[B, width]``, last axis contiguous: block ids of the own keys alone.
        seqused_k: int32 ``[B]``: own keys alone, those of the queries with them, so at least the sequence's number of
            queries where these have keys. ``max_seqlen_k``: host int, an upper bound of these lengths.
        causal: query i of a sequence sees the whole prefix and own keys ``j <= i + seqused_k - q_len``. The rows may
            not begin inside the prefix: a sequence has at most ``seqused_k + 1`` queries. On the CPU, and under
            ``validate=True``, more raise; elsewhere nobody looks, and such a row sees the whole prefix.
        window_size: ``(left, right)`` as there. A left side that could hide a key of the prefix raises.
        alibi_slopes: raises, as its distances would differ from row to row of the prefix.
        s_aux: ``[Hq]``: sinks, which join once, not once a part.
        k_descale, v_descale: as there, but not one for each sequence (``[B, Hkv]``): the prefix is one for all.
        softmax_scale, softcap, return_softmax_lse, out, num_splits, backend, validate, batch_invariant,
            kv_cache_dtype, workspace: as there; ``num_splits``, ``batch_invariant`` and ``workspace`` serve both parts.

    Returns:
        ``out`` ``[T, Hq, Dv]``, or ``(out, lse)`` with lse float32 ``[Hq, T]``, as there. Rows past
        ``cu_seqlens_q[-1]`` are neither read nor written.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree; the message names both.
        BlockTableError: a block id outside the cache, in a range that is used (CPU). ``out`` has not been written.
        UnsupportedError: a window or ALiBi that reaches into the prefix, or an input that requires grad.
        BackendError: the backend cannot take the problem; ``.reasons`` says why.
    """
    require_tensor("q", q)
    require_tensor("k_cache", k_cache)
    args = AttendArgs(
        out=out,
        lse=None,
        q=q,
        k=k_cache,
        v=v_cache,
        query_start_loc=cu_seqlens_q,
        seq_lens=require_tensor("seqused_k", seqused_k),
        key_start_loc=None,
        block_table=require_tensor("block_table", block_table),
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
        caller=SUFFIX.caller,
    )
    out, lse = _run_or_record(args, make_prefix(prefix_table, prefix_len, q, k_cache))
    return (out, lse) if return_softmax_lse and lse is not None else out


def make_prefix(table: Any, length: Any, q: Tensor, k_cache: Tensor) -> Prefix:
    """The prefix of a call, held to its own rules.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: naming ``prefix_table`` or ``prefix_len``.
    """
    require_device("prefix_table", require_tensor("prefix_table", table), "q", q.device)
    if table.dim() != 1:
        raise ShapeError(
            f"prefix_table: {table.dim()} axes {list(table.shape)}, but prefix_table must have 1: [width]; it is one "
            "list of block ids, common to all sequences"
        )
    room = table.shape[0] * k_cache.shape[1] if k_cache.dim() == 4 else 0
    if isinstance(length, Tensor):
        require_device("prefix_len", require_tensor("prefix_len", length), "q", q.device)
        require_dtype("prefix_len", length, (torch.int32,))
        if length.numel() != 1 or length.dim() > 1:
            raise ShapeError(f"prefix_len is {list(length.shape)}; it is an int, or one int32 element: [1] or 0-d")
        return Prefix(table, length.view(1), min(room, FARTHEST) if type(room) is int else room)
    length = host_int("prefix_len", length)
    if length > room:
        raise ArgumentError(
            f"prefix_len is {length}, but prefix_table has room for {room} ({table.shape[0]} blocks); give it the "
            "blocks of the whole prefix"
        )
    return Prefix(table, torch.full((1,), length, dtype=torch.int32, device=q.device), length)


def _run_or_record(args: AttendArgs, prefix: Prefix) -> tuple[Tensor, Tensor | None]:
    """Directly where the tensors are plain, else as an operator."""
    plain = is_plain(args.q, args.k, args.v, args.query_start_loc, args.seq_lens, args.block_table)
    if plain and is_plain(prefix.table, prefix.lens):
        return run_shared_prefix(args, prefix)
    for name, tensor in args.tensors():
        require_tensor(name, tensor)
    if torch.is_grad_enabled():
        check_no_grad((*args.tensors(), ("k_descale", args.k_scale), ("v_descale", args.v_scale)))
    check_validate(args.validate)
    check_named(args.backend)
    inputs = (prefix.table, prefix.lens, prefix.max_len, *op_arguments(args))
    q, out, lse = args.q, args.out, args.lse
    if out is None and args.workspace is None:
        if args.with_lse:
            return torch.ops.pagetile.shared_prefix_lse(*inputs)
        return torch.ops.pagetile.shared_prefix(*inputs), None
    if out is None:
        out = q.new_empty((q.shape[0], q.shape[1], args.v.shape[-1]))
    if args.with_lse:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    torch.ops.pagetile.shared_prefix_out(out, lse, args.workspace, *inputs)
    return out, lse


def run_shared_prefix(args: AttendArgs, prefix: Prefix) -> tuple[Tensor, Tensor | None]:
    """Validate, dispatch and run on plain tensors. Everything that can fail does so before ``out`` is written."""
    check_reach(args, prefix)
    wants_lse = args.with_lse
    suffix = replace(args, with_lse=True)
    plan = plan_attend(suffix)
    batch = args.query_start_loc.shape[0] - 1
    if batch == 0:
        return run_attend(args)
    before = prefix_args(suffix, prefix, args.query_start_loc[::batch].contiguous())
    prefix_plan = plan_attend(before)
    if args.q.is_cpu or args.validate is True:
        check_prefix_values(args, prefix)

    prefix_call, prefix_out = attend_call(prefix_plan, before)
    call, out = attend_call(plan, suffix)
    prefix_lse, lse = prefix_call.lse, call.lse
    assert prefix_lse is not None
    assert lse is not None
    states = (out, prefix_out, prefix_lse, out, lse, lse if wants_lse else None)
    merge_plan, _ = plan_merge(states, args.backend)
    check_call(prefix_plan, prefix_call, before)
    check_call(plan, call, suffix)
    _run_prefix(prefix_plan, prefix_call, before)  # before the other: out may be q
    run_attend_call(plan, call, suffix, out)
    merge_planned(merge_plan, states, args.query_start_loc)
    return out, lse if wants_lse else None


def _run_prefix(plan: Plan[AttendProblem], call: Any, args: AttendArgs) -> None:
    try:
        plan.backend.attend(call)
    except PagetileError as error:
        restate(error, call, args)
        raise


def prefix_args(args: AttendArgs, prefix: Prefix, start_loc: Tensor) -> AttendArgs:
    """The attention over the prefix: the rows of all sequences as one sequence that sees all of it.

    ``start_loc``: int32 ``[2]``, 0 and the end of the last sequence's rows.
    """
    return replace(
        args,
        out=None,
        lse=None,
        query_start_loc=start_loc,
        seq_lens=prefix.lens,
        block_table=prefix.table.unsqueeze(0),
        max_q_len=args.q.shape[0],
        max_k_len=prefix.max_len,
        window=(-1, -1),
        sinks=None,
        alibi_slopes=None,
        with_lse=True,
        caller=PREFIX.caller,
    )


def check_reach(args: AttendArgs, prefix: Prefix) -> None:
    """Refuse what would have each row look at the prefix in its own way, and let a window go that hides nothing.

    Raises:
        UnsupportedError: ALiBi, a window's left side within the keys, scales of a sequence.
    """
    if prefix.max_len == 0:
        return
    way_out = "call flash_attn_varlen_func with the prefix's blocks at the head of every row of block_table"
    if args.alibi_slopes is not None:
        raise UnsupportedError(
            f"alibi_slopes is given, but the distance to a key of the prefix differs from row to row; {way_out}"
        )
    for name, scale in (("k_descale", args.k_scale), ("v_descale", args.v_scale)):
        if isinstance(scale, Tensor) and scale.dim() == 2:
            raise UnsupportedError(
                f"{name} is {list(scale.shape)}, a scale for each sequence, but the prefix is one for all; {way_out}"
            )
    left, right = args.window
    if left >= 0:
        keys = prefix.max_len + args.max_k_len
        if left < keys - 1:
            raise UnsupportedError(
                f"window_size: the left side is {left}, but with up to {keys} keys (prefix {prefix.max_len}, "
                f"max_seqlen_k {args.max_k_len}) that would hide a part of the prefix from some rows; {way_out}"
            )
        args.window = (-1, right)


def check_prefix_values(args: AttendArgs, prefix: Prefix) -> None:
    """Hold the values of the prefix to the cache, and the queries to the keys after it. Waits for the device.

    Raises:
        ArgumentError: a length outside the table, or rows that begin inside the prefix.
        BlockTableError: a block id outside the cache.
    """
    num_blocks, block_size = args.k.shape[:2]
    length, width = int(prefix.lens), prefix.table.shape[0]
    if not 0 <= length <= width * block_size:
        raise ArgumentError(
            f"prefix_len is {length}, but prefix_table has {width} blocks of {block_size}, room for 0 to "
            f"{width * block_size} keys"
        )
    used = prefix.table[: -(-length // block_size)]
    bad = (used < 0) | (used >= num_blocks)
    if bool(bad.any()):
        column = int(bad.nonzero()[0])
        raise BlockTableError(
            f"prefix_table[{column}] is {int(used[column])}, but {blocks_held(num_blocks)}; the prefix has {length} "
            f"tokens (block size {block_size})"
        )
    lens = args.seq_lens
    assert lens is not None
    if length and args.window[1] >= 0:
        rows = args.query_start_loc.diff()
        early = rows > lens + args.window[1] + 1
        if bool(early.any()):
            seq = int(early.nonzero()[0])
            raise ArgumentError(
                f"seqused_k[{seq}] is {int(lens[seq])}, but sequence {seq} has {int(rows[seq])} queries, whose first "
                "would begin inside the prefix and not see all of it; seqused_k counts the own keys, with those of "
                "the queries"
            )
