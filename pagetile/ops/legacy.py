"""``paged_attention_v1`` and ``paged_attention_v2``: one query a sequence over the x-packed cache of vLLM's first ops.

Source: vLLM 0.24 ``csrc/attention/paged_attention_v1.cu`` and ``_v2.cu``, whose arguments these are. That v1 ends where
shared memory does; these take any context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall, Backend, Scale
from pagetile.backends.verbs import PARTITION_KEYS, PartitionedCall
from pagetile.contracts.errors import ArgumentError, PagetileError, ShapeError, UnsupportedError
from pagetile.contracts.problem import AttendProblem
from pagetile.contracts.shapes import Sizes, require_device, require_dtype, require_same_dtype, require_tensor
from pagetile.ops.attention import attend, attend_call, check_call, op_arguments, plan_attend, run_attend_call
from pagetile.ops.bind_attention import DECODE, AttendArgs
from pagetile.ops.checks import (
    bump_version,
    check_named,
    check_no_grad,
    check_validate,
    host_bound,
    host_float,
    is_plain,
)
from pagetile.ops.legacy_cache import require_xpacked
from pagetile.ops.overlap import Apart
from pagetile.ops.plans import PLANS, Plan, tensor_key


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = None,
    v_scale: Scale = None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    backend: str | Backend = "auto",
    validate: bool | str = False,
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """Attention of one query a sequence over an x-packed cache, in one pass over the context, into ``out``.

    Args:
        out: ``[B, Hq, Dv]``, dtype of ``query``; may be ``query``.
        query: ``[B, Hq, D]`` float32, float16 or bfloat16, any strides with a contiguous last axis; the last position
            of each sequence.
        key_cache: ``[NB, Hkv, D/x, BS, x]``, dtype of ``query`` or quantised; any strides, last axis contiguous.
        value_cache: ``[NB, Hkv, Dv, BS]``.
        num_kv_heads, block_size: Hkv and BS; they have to agree with the caches.
        scale: of the scores, finite.
        block_tables: int32 or int64 ``[B, width]``, last axis contiguous.
        seq_lens: int32 ``[B]``, keys of each sequence, the query's own among them; 0 gives rows of 0.
        max_seq_len: an upper bound of them, of any size.
        alibi_slopes: float32 ``[Hq]`` or ``[B, Hq]``, or None.
        kv_cache_dtype: what a quantised cache holds, see :func:`pagetile.reshape_and_cache_flash`.
        k_scale, v_scale: of a quantised cache: None, a float, float32 0-d, ``[1]``, ``[Hkv]`` or ``[B, Hkv]``.
        tp_rank: accepted; only a block-sparse pattern depends on it.
        blocksparse_vert_stride: 0 or 1, a dense context. More asks for a block-sparse pattern, which raises. The other
            three ``blocksparse_`` arguments describe that pattern and mean nothing without it.
        backend, validate, batch_invariant, workspace: see :func:`pagetile.flash_attn_varlen_func`.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: tensors that do not agree; the message names both.
        BlockTableError: a block id outside the cache, in a range that is used (CPU).
        UnsupportedError: block sparsity, or an input that requires grad.
        BackendError: the backend cannot take the problem; ``.reasons`` says why.
    """
    del tp_rank, blocksparse_local_blocks, blocksparse_block_size, blocksparse_head_sliding_step
    _refuse_sparse(blocksparse_vert_stride)
    args = decode_args(
        out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        backend,
        validate,
        batch_invariant,
        workspace,
    )
    with _own_words():
        attend(args)


def paged_attention_v2(
    out: Tensor,
    exp_sums: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = None,
    v_scale: Scale = None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    backend: str | Backend = "auto",
    validate: bool | str = False,
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """:func:`paged_attention_v1` in partitions of 512 keys, whose states stay behind in three buffers.

    Args:
        exp_sums: float32 ``[B, Hq, P]``, contiguous, ``P >= ceil(max_seq_len / 512)``: the sum of
            ``exp(score - maximum)`` over the keys of each partition; 0 where there are none.
        max_logits: likewise, the maximum of the scores (scaled, with ALiBi), in natural units; -inf where there are
            none.
        tmp_out: ``[B, Hq, P, Dv]``, contiguous, dtype of ``query``: the output over the partition's keys alone, rounded
            to that dtype; 0 where there are none. ``out`` is what the three add up to.
        The other arguments are those of :func:`paged_attention_v1`; ``out`` shares no memory with the buffers.

    Raises:
        As there.
    """
    del tp_rank, blocksparse_local_blocks, blocksparse_block_size, blocksparse_head_sliding_step
    _refuse_sparse(blocksparse_vert_stride)
    args = decode_args(
        out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        backend,
        validate,
        batch_invariant,
        workspace,
    )
    buffers = (exp_sums, max_logits, tmp_out)
    for name, buffer in zip(_BUFFERS, buffers, strict=True):
        require_tensor(name, buffer)
    with _own_words():
        if is_plain(query, key_cache, value_cache, out, block_tables, seq_lens, *buffers):
            run_partitioned(args, *buffers)
            return
        if torch.is_grad_enabled():
            check_no_grad((*args.tensors(), *zip(_BUFFERS, buffers, strict=True)))
        check_validate(validate)
        check_named(backend)
        torch.ops.pagetile.attend_partitions(out, *buffers, *op_arguments(args))


_BUFFERS = ("exp_sums", "max_logits", "tmp_out")


def decode_args(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    backend: str | Backend,
    validate: bool | str,
    batch_invariant: bool,
    workspace: Tensor | None,
) -> AttendArgs:
    """One query a sequence, as an attention of packed queries."""
    require_xpacked(key_cache)
    require_tensor("out", out)
    if require_tensor("query", query).dim() != 3:
        raise ShapeError(f"query: {query.dim()} axes {list(query.shape)}, but query must have 3: [B, Hq, D]")
    for name, given, axis, letter in (("num_kv_heads", num_kv_heads, 1, "Hkv"), ("block_size", block_size, 3, "BS")):
        if host_bound(name, given) != key_cache.shape[axis]:
            raise ShapeError(
                f"key_cache: axis {axis} ({letter}) is {key_cache.shape[axis]}, but {name} is {given}; "
                "pass the number that the cache has"
            )
    batch = query.shape[0]
    return AttendArgs(
        out=out,
        lse=None,
        q=query,
        k=key_cache,
        v=require_tensor("value_cache", value_cache),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=query.device),
        seq_lens=require_tensor("seq_lens", seq_lens),
        key_start_loc=None,
        block_table=require_tensor("block_tables", block_tables),
        max_q_len=1,
        max_k_len=host_bound("max_seq_len", max_seq_len),
        scale=host_float("scale", scale),
        window=(-1, -1),
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_dtype=kv_cache_dtype,
        batch_invariant=batch_invariant,
        workspace=workspace,
        backend=backend,
        validate=validate,
        caller=DECODE.caller,
    )


def run_partitioned(args: AttendArgs, exp_sums: Tensor, max_logits: Tensor, tmp_out: Tensor) -> None:
    """Validate, dispatch and run ``paged_attention_v2`` on plain tensors."""
    plan = plan_attend(args)
    buffers, out = (exp_sums, max_logits, tmp_out), args.out
    assert out is not None
    tensors = (out, args.q, args.k, args.v, *buffers)
    key = ("attend_partitions", *map(tensor_key, tensors), args.max_k_len)
    shared = PLANS.get(key)
    if shared is None:
        bind_partitions(plan.problem, args, *buffers)
        shared = PLANS.put(key, Plan(plan.problem, plan.backend, Apart(tensors, _APART)))
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    shared.apart.check(addresses, tensors, ("out", "query", "key_cache", "value_cache", *_BUFFERS))
    if torch.is_grad_enabled():
        check_no_grad(zip(_BUFFERS, buffers, strict=True))
    call, out = attend_call(plan, args)
    check_call(plan, call, args)
    given = {each.name: getattr(call, each.name) for each in fields(AttendCall)}
    run_attend_call(plan, PartitionedCall(**given, **dict(zip(_BUFFERS, buffers, strict=True))), args, out)
    if torch.is_grad_enabled():
        for buffer in buffers:
            bump_version(buffer)


_APART = tuple((4 + i, j, False) for i in range(3) for j in range(4 + i))
"""No buffer is another one, nor ``out``, nor an input."""


def bind_partitions(
    problem: AttendProblem, args: AttendArgs, exp_sums: Tensor, max_logits: Tensor, tmp_out: Tensor
) -> None:
    """Hold the buffers of ``paged_attention_v2`` to the attention. Reads no values.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: naming the buffer.
    """
    sizes = Sizes()
    sizes.fix("B", problem.num_tokens, "query")
    sizes.fix("Hq", problem.num_q_heads, "query")
    sizes.fix("Dv", problem.head_size_v, "value_cache")
    for name, buffer in zip(_BUFFERS, (exp_sums, max_logits, tmp_out), strict=True):
        require_device(name, buffer, "query", args.q.device)
        sizes.bind(name, buffer, "B Hq P Dv" if name == "tmp_out" else "B Hq P")
        if name == "tmp_out":
            require_same_dtype(name, buffer, "query", args.q.dtype)
        else:
            require_dtype(name, buffer, (torch.float32,))
        if not buffer.is_contiguous():
            raise ArgumentError(
                f"{name} has the strides {list(buffer.stride())} for the shape {list(buffer.shape)}; pass a contiguous "
                "tensor, the states of a row lie together"
            )
    if sizes["P"] * PARTITION_KEYS < args.max_k_len:
        raise ShapeError(
            f"exp_sums: axis 2 (P) is {sizes['P']}, but max_seq_len is {args.max_k_len}, which has "
            f"{-(-args.max_k_len // PARTITION_KEYS)} partitions of {PARTITION_KEYS} keys; pass larger buffers"
        )


def _refuse_sparse(vert_stride: int) -> None:
    if vert_stride > 1:
        raise UnsupportedError(
            f"blocksparse_vert_stride is {vert_stride}, which asks for a block-sparse pattern, and every context here "
            "is dense; pass 0"
        )


@contextmanager
def _own_words() -> Iterator[None]:
    """Errors speak of the scales by the names that they have here."""
    try:
        yield
    except PagetileError as error:
        error.rename({"k_descale": "k_scale", "v_descale": "v_scale"})
        raise
