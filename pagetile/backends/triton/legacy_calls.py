"""From an attention over an x-packed cache to its launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall
from pagetile.backends.triton.calls import FAR, LOG2E, log2_block
from pagetile.backends.triton.launch import Launch
from pagetile.backends.triton.legacy import add_partitions_kernel, attend_packed_kernel
from pagetile.backends.triton.quantised import KINDS
from pagetile.backends.triton.scales import as_bytes, scale_number, scale_strides
from pagetile.backends.triton.tuning import DeviceFacts, power_of_two
from pagetile.backends.verbs import PARTITION_KEYS, PartitionedCall
from pagetile.contracts.problem import AttendProblem

MAX_HEAD_SIZE = 256
"""Larger heads would need a second part of a key, which these kernels do not have."""

MAX_PARTIAL_BYTES = 1 << 30
"""Partition states above this are not worth their memory: one pass then."""


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """The shape of one program's work, and the reasons.

    Attributes:
        rows, tokens, heads, head_tiles: rows of a tile, ``tokens * heads`` of them used; head tiles a group needs.
        keys, stages, warps: keys a step; of the launch.
        split: a program a partition of 512 keys, added by a second launch.
    """

    rows: int
    tokens: int
    heads: int
    head_tiles: int
    keys: int
    stages: int
    warps: int
    split: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        how = (
            f"a program a partition of {PARTITION_KEYS} keys, then a launch that adds them"
            if self.split
            else "one pass"
        )
        shape = f"{self.rows} rows ({self.tokens} tokens x {self.heads} heads) x {self.keys} keys, {self.warps} warps"
        return "\n".join([f"x-packed: {shape}, {how}", *(f"- {reason}" for reason in self.reasons)])


def plan_packed(problem: AttendProblem, device: DeviceFacts, states: bool) -> PackedPlan:
    """How an attention over an x-packed cache is cut; ``states``: the partitions' states are wanted."""
    heads = min(problem.group, 16)
    wide = max(problem.head_size, problem.head_size_v)
    tokens = 1
    if problem.max_q_len > 1 and not problem.batch_invariant:
        tokens = max(1, min(power_of_two(problem.max_q_len), 64 // heads))
    rows = max(16, power_of_two(tokens * heads))
    # Compiled for an H100: 114 registers, four programs a multiprocessor; 64 keys a step take 191, and two fit.
    keys = 32 if wide <= 128 and problem.dtype != "float32" else 16
    head_tiles = -(-problem.group // heads)
    programs = problem.num_seqs * problem.num_kv_heads * head_tiles * -(-problem.max_q_len // tokens)
    parts = -(-problem.max_k_len // PARTITION_KEYS)
    size = problem.num_tokens * problem.num_q_heads * parts * (problem.head_size_v + 2) * 4
    if states or problem.batch_invariant:
        split, why = True, "a state for each partition is wanted, or bits that do not depend on the batch"
    elif problem.num_splits:
        split, why = problem.num_splits > 1, f"num_splits={problem.num_splits} was asked for"
    elif parts == 1 or size > MAX_PARTIAL_BYTES:
        split, why = False, "one partition" if parts == 1 else f"partition states of {size >> 20} MiB are too large"
    else:
        split = programs < 4 * device.processors
        why = f"{programs} programs for {device.processors} multiprocessors"
    return PackedPlan(rows, tokens, heads, head_tiles, keys, 2, 8 if rows >= 64 else 4, split, (why,))


def attend_packed(call: AttendCall, device: DeviceFacts, native: bool, error: Tensor, on: Callable[..., None]) -> None:
    """Launch an attention over an x-packed cache."""
    problem = call.problem
    wanted = isinstance(call, PartitionedCall)
    plan = plan_packed(problem, device, wanted)
    out, q = call.out, call.q
    if wanted:
        states = (call.exp_sums, call.max_logits, call.tmp_out)
        parts = states[0].shape[2]
    elif plan.split:
        parts = max(1, -(-problem.max_k_len // PARTITION_KEYS))
        shape = (problem.num_tokens, problem.num_q_heads, parts)
        states = tuple(
            torch.empty(each, dtype=torch.float32, device=q.device)
            for each in (shape, shape, (*shape, problem.head_size_v))
        )
    else:
        states, parts = (q, q, q), 1
    lse = q if call.lse is None else call.lse
    caches = (call.k, call.v) if problem.kind not in KINDS else (as_bytes(call.k), as_bytes(call.v))
    scales = tuple(scale if isinstance(scale, Tensor) else error for scale in (call.k_scale, call.v_scale))
    loc, sinks = call.query_start_loc, q if call.sinks is None else call.sinks
    tensors = (
        q, *caches, out, lse, *states, loc, call.seq_lens, call.block_table,
        loc if call.key_starts is None else call.key_starts, q if call.alibi_slopes is None else call.alibi_slopes,
        sinks, *scales, error,
    )  # fmt: skip
    on(q.device, _packed_launch(call, plan, parts, native), *tensors)
    if plan.split:
        on(q.device, _add_launch(call, parts), out, lse, *states, loc, sinks)


def _packed_launch(call: AttendCall, plan: PackedPlan, parts: int, native: bool) -> Launch:
    problem, table, slopes = call.problem, call.block_table, call.alibi_slopes
    assert table is not None
    lse = call.lse.stride() if call.lse is not None else (0, 0)
    k_row, _, k_head = scale_strides(call.k_scale)
    v_row, _, v_head = scale_strides(call.v_scale)
    scale = call.scale * scale_number(call.k_scale)
    score = (scale / call.softcap, float(call.softcap)) if call.softcap else (scale * LOG2E, 0.0)
    scalars = (
        *call.q.stride()[:2], *call.k.stride()[:4], *call.v.stride()[:3], *call.out.stride()[:2], *lse,
        table.stride(0), slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0, k_row, k_head, v_row,
        v_head, table.shape[1], call.k.shape[0], problem.block_size, min(max(call.window[0], 0), FAR),
        min(max(call.window[1], 0), FAR), parts, *score, scale_number(call.v_scale),
    )  # fmt: skip
    log2 = log2_block(problem.block_size)
    pages = max(1, plan.keys >> log2) if log2 >= 0 else 0
    aligned = problem.aligned
    constants = {
        "GROUP": problem.group,
        "HEADS": plan.heads,
        "HEAD_TILES": plan.head_tiles,
        "ROWS": plan.rows,
        "TOKENS": plan.tokens,
        "TILE": plan.keys,
        "STAGES": plan.stages if aligned else 1,
        "PAGES": pages if pages <= 8 else 0,
        "KIND": KINDS.get(problem.kind, 0),
        "NATIVE": native,
        "K_LOADED": isinstance(call.k_scale, Tensor),
        "V_LOADED": isinstance(call.v_scale, Tensor),
        "X": call.k.shape[4],
        "D": problem.head_size,
        "D_PAD": max(16, power_of_two(problem.head_size)),
        "DV": problem.head_size_v,
        "DV_PAD": max(16, power_of_two(problem.head_size_v)),
        "LOG2_BLOCK": log2,
        "LEFT": call.window[0] >= 0,
        "RIGHT": call.window[1] >= 0,
        "SOFTCAP": call.softcap != 0,
        "ALIBI": slopes is not None,
        "SINKS": call.sinks is not None,
        "LSE": call.lse is not None,
        "KEY_STARTS": call.key_starts is not None,
        "SPLIT": plan.split,
        "WIDE": max(call.k.shape[2] * call.k.stride(2), problem.head_size_v * call.v.stride(2)) >= 2**31,
        "DENSE": call.k.stride(3) == call.k.shape[4],
    }
    tiles = -(-problem.max_q_len // plan.tokens)
    num_seqs = call.query_start_loc.shape[0] - 1
    grid = (tiles * parts, problem.num_kv_heads * plan.head_tiles, num_seqs)
    return Launch(attend_packed_kernel, grid, scalars, constants, num_warps=plan.warps)


def _add_launch(call: AttendCall, parts: int) -> Launch:
    problem = call.problem
    lse = call.lse.stride() if call.lse is not None else (0, 0)
    width = power_of_two(problem.head_size_v)
    scalars = (*call.out.stride()[:2], *lse, call.query_start_loc.shape[0] - 1, parts)
    constants = {
        "DV": problem.head_size_v,
        "DV_PAD": width,
        "PARTS": max(1, min(16, 2048 // width)),
        "SINKS": call.sinks is not None,
        "LSE": call.lse is not None,
    }
    grid = (problem.num_tokens, problem.num_q_heads, 1)
    return Launch(add_partitions_kernel, grid, scalars, constants, num_warps=2)
