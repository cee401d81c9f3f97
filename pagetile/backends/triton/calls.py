"""From a call and its plan to launches: everything but the pointers, which are read at every call.

What is built here is kept under the strides, sizes and flags it was built from (:class:`Kept`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall, MergeCall, Scale, WriteCall
from pagetile.backends.triton.attend import attend_kernel
from pagetile.backends.triton.invariant import combine_in_order_kernel, invariant_kernel
from pagetile.backends.triton.launch import Launch
from pagetile.backends.triton.merge import merge_kernel
from pagetile.backends.triton.quantised import KINDS
from pagetile.backends.triton.scales import (
    as_bytes,
    quantise_launch,
    read_form,
    scale_address,
    scale_number,
)
from pagetile.backends.triton.split import combine_kernel, split_kernel
from pagetile.backends.triton.strides import cache_strides, log2_block, result_strides, sizes, strides
from pagetile.backends.triton.tuning import (
    AttendPlan,
    InvariantPlan,
    RowsPlan,
    SplitPlan,
    Tile,
    WritePlan,
    partial_bytes,
    plan_merge,
    power_of_two,
)
from pagetile.backends.triton.write import write_heads_kernel, write_span_kernel
from pagetile.contracts.errors import ArgumentError

LOG2E = 1.4426950408889634
MAX_KEPT = 4096
FAR = 1 << 29
"""A window side longer than any sequence that fits in memory; keeps position arithmetic inside 31 bits."""


class Kept:
    """Built launches by key, the oldest dropped when there are too many; holds what its keys name by identity."""

    def __init__(self) -> None:
        self._kept: dict[tuple, Any] = {}
        self.get = self._kept.get

    def put(self, key: tuple, value: Any) -> Any:
        """Keep ``value``; safe when several threads build the same key."""
        while len(self._kept) >= MAX_KEPT:
            self._kept.pop(next(iter(self._kept), None), None)
        self._kept[key] = value
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


def copies_aligned(call: AttendCall) -> bool:
    """Whether K and V can be copied 16 bytes at a time: bases and strides.

    Where they cannot, loads go through registers and nothing is gained by a pipeline, so there is none: pipelined block
    ids over loads that are not led to faults and wrong keys on an H200 under Triton 3.6 (the cause is not known).
    """
    size = call.k.element_size()
    strides = (*call.k.stride()[:-1], *call.v.stride()[:-1])
    return not ((call.k.data_ptr() | call.v.data_ptr()) & 15) and not any(s * size & 15 for s in strides)


class AttendLaunches:
    """The launches of one attention; call it with a call of the same shape."""

    def __init__(self, call: AttendCall, plan: AttendPlan) -> None:
        self.problem = call.problem  # held, since the key names it by identity
        self.plan = plan
        self.stages: list[tuple[str, Launch]] = []
        self.partials: tuple[int, int, int] | None = None  # floats of the sums, of the peaks, in all
        self.needs_middle = plan.split is not None or plan.invariant is not None
        if plan.rows:
            self.stages.append(("attend", _rows_launch(call, plan.rows, plan.fp8)))
        if plan.split:
            self._size_partials(plan.split if plan.split.combine else None)
            self.stages.append(("split", _split_launch(call, plan.split, plan.fp8)))
            if plan.split.combine:
                self.stages.append(("combine", _combine_launch(call, plan.split)))
        if plan.invariant:
            self._size_partials(plan.invariant if plan.invariant.spread else None)
            self.stages.append(("split", _invariant_launch(call, plan.invariant, plan.fp8)))
            if plan.invariant.spread:
                self.stages.append(("combine", _combine_in_order_launch(call, plan.invariant)))

    def _size_partials(self, plan: SplitPlan | InvariantPlan | None) -> None:
        if plan is None:
            return
        states = partial_bytes(self.problem, plan) // (4 * (self.problem.head_size_v + 2))
        states = -(-states // 4) * 4  # keeps the second and third part 16-byte aligned
        self.partials = (states * self.problem.head_size_v, states, states * (self.problem.head_size_v + 2))

    def workspace(self, given: Tensor | None, like: Tensor) -> Tensor:
        """One float32 buffer for sums, peaks and totals: the caller's workspace, or memory of the current stream.

        The caching allocator hands memory of a stream out again in the order of that stream, and memory of a captured
        graph within that graph, so nothing is kept here that two streams or two graphs could share.
        """
        total = self.partials[2] if self.partials else 0
        if given is not None:
            return _as_float32(given, total)
        return torch.empty(total, dtype=torch.float32, device=like.device)

    def __call__(self, call: AttendCall, device: int, error: Tensor) -> None:
        """Launch everything on the current stream of ``device``, the current device."""
        lens: Any = call.key_start_loc if call.block_table is None else call.seq_lens
        self.run(
            device, error, call.q, call.k, call.v, call.out, call.lse, call.query_start_loc, lens, call.block_table,
            call.key_starts, call.alibi_slopes, call.sinks, call.workspace, call.k_scale, call.v_scale,
        )  # fmt: skip

    def run(
        self, device: int, error: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, loc: Tensor,
        lens: Tensor, table: Tensor | None, starts: Tensor | None = None, slopes: Tensor | None = None,
        sinks: Tensor | None = None, workspace: Tensor | None = None, k_scale: Scale = None, v_scale: Scale = None,
    ) -> None:  # fmt: skip
        """The same from the tensors themselves; ``lens`` are ``key_start_loc`` where there is no table."""
        q_at = q.data_ptr()
        head_at = (q_at, k.data_ptr(), v.data_ptr(), out.data_ptr(), q_at if lse is None else lse.data_ptr())
        tail_at = (
            loc.data_ptr(), lens.data_ptr(), q_at if table is None else table.data_ptr(),
            q_at if starts is None else starts.data_ptr(), q_at if slopes is None else slopes.data_ptr(),
            q_at if sinks is None else sinks.data_ptr(),
            q_at if k_scale is None else scale_address(k_scale, q_at),
            q_at if v_scale is None else scale_address(v_scale, q_at), error.data_ptr(),
        )  # fmt: skip
        middle_at: tuple[int, ...] = ()
        scratch = q
        if self.partials is not None:
            scratch = self.workspace(workspace, q)
            base = scratch.data_ptr()
            middle_at = (base, base + 4 * self.partials[0], base + 4 * (self.partials[0] + self.partials[1]))
        elif self.needs_middle:
            middle_at = (q_at, q_at, q_at)
        for name, launch in self.stages:
            if name == "attend":
                at = head_at + tail_at
            elif name == "split":
                at = head_at + middle_at + tail_at
            else:
                at = (*head_at[3:], *middle_at, tail_at[0], tail_at[1], tail_at[3], tail_at[5])
            if not launch.direct(device, at):
                rest = (lse, loc, lens, table, starts, slopes, sinks, k_scale, v_scale)
                given = (tensor if isinstance(tensor, Tensor) else q for tensor in rest)
                head, tail = (q, as_bytes(k), as_bytes(v), out, next(given)), (*given, error)
                middle = (scratch,) if self.needs_middle else ()
                launch.public(device, self._tensors(name, head, middle, tail))

    def _tensors(self, name: str, head: tuple, middle: tuple, tail: tuple) -> tuple[Tensor, ...]:
        """The tensors of one stage, in the order of its kernel's signature."""
        if name == "attend":
            return (*head, *tail)
        if self.partials is not None:
            sums, states = self.partials[:2]
            middle = (middle[0], middle[0][sums:], middle[0][sums + states :])
        else:
            middle = middle * 3
        if name == "split":
            return (*head, *middle, *tail)
        return (*head[3:], *middle, tail[0], tail[1], tail[3], tail[5])


def _as_float32(buffer: Tensor, total: int) -> Tensor:
    """The caller's workspace as float32.

    Raises:
        ArgumentError: it is not contiguous, or too small.
    """
    if not buffer.is_contiguous() or buffer.numel() * buffer.element_size() < 4 * total:
        raise ArgumentError(
            f"workspace has {buffer.numel() * buffer.element_size()} bytes (contiguous: {buffer.is_contiguous()}), but "
            f"this problem needs {4 * total} contiguous bytes; pass a larger one, or None"
        )
    return buffer.view(-1).view(torch.uint8)[: 4 * total].view(torch.float32)


def _window(call: AttendCall) -> tuple[int, int]:
    return min(max(call.window[0], 0), FAR), min(max(call.window[1], 0), FAR)


def _score(call: AttendCall) -> tuple[float, float, float]:
    """The two factors of a score (base 2 without a softcap; with one, what its argument and its value are scaled by),
    with the scale of K where that is a number; and the scale of V."""
    scale, v_number = call.scale * scale_number(call.k_scale), scale_number(call.v_scale)
    if call.softcap:
        return scale / call.softcap, float(call.softcap), v_number
    return scale * LOG2E, 0.0, v_number


def _tile_constants(tile: Tile, group: int) -> dict[str, int]:
    return {
        "GROUP": group,
        "HEADS": tile.heads,
        "HEAD_TILES": tile.head_tiles,
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
    }


def _attend_constants(call: AttendCall, tile: Tile, fp8: bool, edges: bool = True) -> dict[str, Any]:
    # The exact treatment of NaN at the edges needs registers; so do scales of tokens.
    edge = 16 if sum(tile.dv) > 128 or call.problem.scale == "token_head" else 32
    return {
        **_tile_constants(tile, call.problem.group),
        "TILE": tile.keys,
        **({"EDGE": min(tile.keys, edge)} if edges else {}),
        "STAGES": tile.stages if copies_aligned(call) else 1,
        **({"PAGES": _scalar_pages(call, tile)} if edges else {}),
        "KIND": KINDS.get(call.problem.kind, 0),
        "NATIVE": fp8,
        "K_FORM": read_form(call.k_scale),
        "V_FORM": read_form(call.v_scale),
        "D": call.problem.head_size,
        "D1": tile.d[0],
        "D2": tile.d[1],
        "DV": call.problem.head_size_v,
        "DV1": tile.dv[0],
        "DV2": tile.dv[1],
        "PAGED": call.block_table is not None,
        "LOG2_BLOCK": log2_block(call.k.shape[1]) if call.block_table is not None else 0,
        "LEFT": call.window[0] >= 0,
        "RIGHT": call.window[1] >= 0,
        "SOFTCAP": call.softcap != 0,
        "ALIBI": call.alibi_slopes is not None,
        "PRESCALE": call.scale <= 0,
        "SINKS": call.sinks is not None,
        "LSE": call.lse is not None,
        "KEY_STARTS": call.key_starts is not None,
    }


def _scalar_pages(call: AttendCall, tile: Tile) -> int:
    """Pages whose ids a step reads as scalars (1, 2, 4 or 8); 0: it looks up the id of every key."""
    log2 = log2_block(call.k.shape[1]) if call.block_table is not None else -1
    pages = max(1, tile.keys >> log2) if log2 >= 0 else 0
    return pages if pages <= min(8, tile.most_pages) else 0


def _combine_constants(call: AttendCall) -> dict[str, Any]:
    return {
        "DV": call.problem.head_size_v,
        "DV_PAD": power_of_two(call.problem.head_size_v),
        "PAGED": call.block_table is not None,
        "LEFT": call.window[0] >= 0,
        "RIGHT": call.window[1] >= 0,
        "SINKS": call.sinks is not None,
        "LSE": call.lse is not None,
        "KEY_STARTS": call.key_starts is not None,
    }


def _head_slots(call: AttendCall, tile: Tile) -> int:
    return call.problem.num_kv_heads * tile.head_tiles


def _rows_launch(call: AttendCall, plan: RowsPlan, fp8: bool) -> Launch:
    problem, tile = call.problem, plan.tile
    num_seqs = call.query_start_loc.shape[0] - 1
    if plan.search:
        grid = (problem.num_tokens // tile.tokens + num_seqs, _head_slots(call, tile), 1)
    else:
        grid = (-(-problem.max_q_len // tile.tokens), _head_slots(call, tile), num_seqs)
    scalars = (*strides(call), num_seqs, *sizes(call), *_window(call), plan.min_q, *_score(call))
    constants = {**_attend_constants(call, tile, fp8), "SEARCH": plan.search}
    return Launch(attend_kernel, grid, scalars, constants, num_warps=tile.warps)


def _sharing(call: AttendCall, plan: SplitPlan) -> dict[str, Any]:
    num_seqs = call.query_start_loc.shape[0] - 1
    seqs = 2 if plan.fixed else max(2, power_of_two(num_seqs))
    return {"SEQS": seqs, "FIXED": plan.fixed}


def _split_launch(call: AttendCall, plan: SplitPlan, fp8: bool) -> Launch:
    tile = plan.tile
    num_seqs = call.query_start_loc.shape[0] - 1
    slots = _head_slots(call, tile)
    grid = (plan.items(num_seqs) * slots, -(-plan.max_q // tile.tokens), 1)
    scalars = (
        *strides(call), num_seqs, *sizes(call), *_window(call), plan.max_q, plan.programs, plan.min_tiles, slots,
        *_score(call),
    )  # fmt: skip
    constants = {**_sharing(call, plan), **_attend_constants(call, tile, fp8)}
    return Launch(split_kernel, grid, scalars, constants, num_warps=tile.warps)


def _combine_launch(call: AttendCall, plan: SplitPlan) -> Launch:
    problem, tile = call.problem, plan.tile
    num_seqs = call.query_start_loc.shape[0] - 1
    scalars = (
        *result_strides(call), num_seqs, *_window(call), plan.max_q, plan.programs, plan.min_tiles,
        _head_slots(call, tile), -(-plan.max_q // tile.tokens),
    )  # fmt: skip
    constants = {
        **_sharing(call, plan),
        **_tile_constants(tile, problem.group),
        "TILE": tile.keys,
        "PARTS": max(1, min(16, 2048 // power_of_two(problem.head_size_v))),
        **_combine_constants(call),
    }
    grid = (num_seqs * plan.max_q, problem.num_q_heads, 1)
    return Launch(combine_kernel, grid, scalars, constants, num_warps=2)


def _invariant_launch(call: AttendCall, plan: InvariantPlan, fp8: bool) -> Launch:
    problem, tile = call.problem, plan.tile
    num_seqs = call.query_start_loc.shape[0] - 1
    slots, query_tiles = _head_slots(call, tile), -(-problem.max_q_len // tile.tokens)
    grid = (num_seqs * query_tiles * slots * (plan.max_chunks if plan.spread else 1), 1, 1)
    scalars = (
        *strides(call), *sizes(call), *_window(call), plan.max_chunks, slots, query_tiles, *_score(call)
    )  # fmt: skip
    constants = {"SPREAD": plan.spread, "CHUNK": plan.chunk, **_attend_constants(call, tile, fp8, edges=False)}
    return Launch(invariant_kernel, grid, scalars, constants, num_warps=tile.warps)


def _combine_in_order_launch(call: AttendCall, plan: InvariantPlan) -> Launch:
    problem, tile = call.problem, plan.tile
    num_seqs = call.query_start_loc.shape[0] - 1
    scalars = (
        *result_strides(call), *_window(call), problem.max_q_len, plan.max_chunks, _head_slots(call, tile),
        -(-problem.max_q_len // tile.tokens),
    )  # fmt: skip
    constants = {"CHUNK": plan.chunk, **_tile_constants(tile, problem.group), **_combine_constants(call)}
    grid = (num_seqs * problem.max_q_len, problem.num_q_heads, 1)
    return Launch(combine_in_order_kernel, grid, scalars, constants, num_warps=1)


def write_launch(call: WriteCall, plan: WritePlan) -> Launch:
    """The launch of one write."""
    problem = call.problem
    num_rows, heads = call.slot_mapping.shape[0], problem.num_kv_heads
    num_blocks, block_size = call.key_cache.shape[0], call.key_cache.shape[1]
    num_slots = num_blocks * block_size
    common = {"ROWS": plan.rows, "WIDTH": plan.width, "LOG2_BLOCK": log2_block(block_size), "NARROW": num_slots < 2**31}
    sizes = (num_rows, num_slots, block_size)
    key, value = call.key, call.value
    k_block, k_token, k_head = cache_strides(call.key_cache)
    v_block, v_token, v_head = cache_strides(call.value_cache)
    if problem.kind in KINDS:
        return quantise_launch(call, plan, common, (k_block, k_token, k_head, v_block, v_token, v_head))
    if plan.span:
        span_k, span_v = heads * problem.head_size, heads * problem.head_size_v
        grid = (-(-num_rows // plan.rows), -(-max(span_k, span_v) // plan.width), 1)
        scalars = (key.stride(0), value.stride(0), k_block, k_token, v_block, v_token, *sizes)
        constants = {"SPAN_K": span_k, "SPAN_V": span_v, **common}
        return Launch(write_span_kernel, grid, scalars, constants, num_warps=plan.warps)
    grid = (-(-num_rows * heads // plan.rows), 1, 1)
    scalars = (
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), k_block, k_token, k_head, v_block, v_token,
        v_head, *sizes,
    )  # fmt: skip
    constants = {"HEADS": heads, "D": problem.head_size, "DV": problem.head_size_v, **common}
    return Launch(write_heads_kernel, grid, scalars, constants, num_warps=plan.warps)


def merge_launch(call: MergeCall) -> Launch:
    """The launch of one merge."""
    problem = call.problem
    num_rows, heads = call.out.shape[0], call.out.shape[1]
    rows, width, warps = plan_merge(problem)
    out_lse = call.out_lse.stride() if call.out_lse is not None else (0, 0)
    scalars = (
        *call.out.stride(), *out_lse, *call.a.stride(), *call.a_lse.stride(), *call.b.stride(), *call.b_lse.stride(),
        num_rows, 0 if call.query_start_loc is None else call.query_start_loc.shape[0] - 1,
    )  # fmt: skip
    constants = {
        "D": problem.head_size,
        "ROWS": rows,
        "WIDTH": width,
        "LSE": call.out_lse is not None,
        "BOUNDED": call.query_start_loc is not None,
    }
    return Launch(merge_kernel, (-(-num_rows // rows), heads, 1), scalars, constants, num_warps=warps)
