"""From a call and its plan to launches: everything but the pointers, which are read at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagetile.backends.hopper import maps, scratch
from pagetile.backends.hopper.decode import decode_kernel
from pagetile.backends.hopper.launch import Launch
from pagetile.backends.hopper.maps import Box
from pagetile.backends.hopper.prefill import prefill_kernel
from pagetile.backends.hopper.tuning import AttendPlan, DecodePlan, PrefillPlan, box_keys
from pagetile.backends.protocol import AttendCall

LOG2E = 1.4426950408889634
FAR = 1 << 29
"""A window side longer than any sequence that fits in memory; keeps position arithmetic inside 31 bits."""


class AttendLaunches:
    """The launches of one attention; call it with a call of the same shape."""

    def __init__(self, call: AttendCall, plan: AttendPlan) -> None:
        self.problem = call.problem  # held, since the key of what is kept names it by identity
        self.plan = plan
        both = plan.together and plan.decode is not None and plan.prefill is not None
        self.decode = _decode_launch(call, plan.decode, both) if plan.decode else None
        self.prefill = _prefill_launch(call, plan.prefill, both) if plan.prefill else None
        self.num_counters = 4 + call.problem.num_seqs * call.problem.num_kv_heads
        self.state_floats = plan.decode.state_floats if plan.decode else 0
        self.sums = self.state_floats // (plan.decode.dv + 2) * plan.decode.dv if plan.decode else 0
        self.steps_fit = maps.steps_fit(call.q)

    def __call__(self, call: AttendCall, device: int, error: Tensor) -> None:
        """Launch everything on the current stream of ``device``, the current device."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        counters = scratch.counters(self.num_counters, device, stream)
        q = call.q if self.steps_fit and not call.q.data_ptr() & 15 else maps.padded(call.q)
        mapped = (q, maps.nonempty(call.k), maps.nonempty(call.v))
        head = (call.out, counters if call.lse is None else call.lse)
        tail = self.tensors(call, counters)
        head_at, tail_at = [t.data_ptr() for t in head], [t.data_ptr() for t in tail]
        counters_at, error_at = counters.data_ptr(), error.data_ptr()
        if self.decode is not None:
            states = scratch.states(call.workspace, self.state_floats, call.q.device)
            at = states.data_ptr()
            pointers = [*head_at, at, at + 4 * self.sums, *tail_at, counters_at + 16, error_at]
            if not self.decode.direct(stream, mapped, pointers):
                middle = (states, states[self.sums :])
                self.decode.public(device, stream, mapped, (*head, *middle, *tail, counters[4:], error))
        if self.prefill is not None and not self.prefill.direct(
            stream, mapped, [*head_at, *tail_at, counters_at, error_at]
        ):
            self.prefill.public(device, stream, mapped, (*head, *tail, counters, error))

    @staticmethod
    def tensors(call: AttendCall, counters: Tensor) -> tuple[Tensor, ...]:
        """What both kernels read besides the maps; ``counters`` stands where there is nothing."""
        table, lens = call.block_table, call.seq_lens
        assert table is not None
        assert lens is not None
        if not table.shape[1]:  # no column: one of ids that name no block
            table = table.new_full((table.shape[0], 1), -1)
        rare = (call.key_starts, call.alibi_slopes, call.sinks)
        return (call.query_start_loc, lens, table, *(counters if t is None else t for t in rare))


def _score(call: AttendCall) -> tuple[float, float]:
    """The two factors of a score: base 2 without a softcap; with one, what its argument and its value are scaled by."""
    if call.softcap:
        return call.scale / call.softcap, call.softcap * LOG2E
    return call.scale * LOG2E, 0.0


def _boxes(call: AttendCall, plan: PrefillPlan | DecodePlan, tokens: int) -> tuple[Box, Box, Box]:
    keys = box_keys(call.problem.block_size, plan.keys)
    return Box((tokens, plan.packed, plan.d)), Box((1, keys, 1, plan.d)), Box((1, keys, 1, plan.dv))


def _scalars(call: AttendCall, work: int, share: int) -> tuple[Any, ...]:
    """The numbers of a launch; ``work`` and ``share`` are what the kernel's signature has in their place."""
    table, slopes = call.block_table, call.alibi_slopes
    assert table is not None
    lse = (call.lse.stride(0), call.lse.stride(1)) if call.lse is not None else (0, 0)
    slope_seq = slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0
    left, right = (FAR if side < 0 else min(side, FAR) for side in call.window)
    return (
        call.out.stride(0), call.out.stride(1), *lse, table.stride(0) if table.shape[1] else 1, slope_seq,
        call.problem.num_seqs, max(table.shape[1], 1), call.k.shape[0], call.problem.num_kv_heads, work, left, right,
        share, *_score(call),
    )  # fmt: skip


def _constants(call: AttendCall, plan: PrefillPlan | DecodePlan) -> dict[str, Any]:
    return {
        "GROUP": call.problem.group,
        "PACKED": plan.packed,
        "DV": call.problem.head_size_v,
        "PAGE": call.problem.block_size,
        "BOX": box_keys(call.problem.block_size, plan.keys),
        "KEYS": plan.keys,
        "STAGES": plan.stages,
        "QUERIES": plan.queries,
    }


def _features(call: AttendCall) -> dict[str, bool]:
    return {
        "LEFT": call.window[0] >= 0,
        "KEY_STARTS": call.key_starts is not None,
        "SOFTCAP": call.softcap != 0,
        "ALIBI": call.alibi_slopes is not None,
        "PRESCALE": call.scale <= 0,
        "SINKS": call.sinks is not None,
        "LSE": call.lse is not None,
    }


def _prefill_launch(call: AttendCall, plan: PrefillPlan, after: bool) -> Launch:
    problem = call.problem
    num_items = (problem.num_tokens // plan.tokens + problem.num_seqs) * problem.num_kv_heads
    constants = {
        **_constants(call, plan),
        "SECTION": plan.section,
        **_features(call),
        "TAKE_TURNS": plan.turns,
        "AFTER": after,
        "CONSUMER_REGS": plan.registers,
        "WORKER_REGS": plan.worker_registers,
    }
    options: dict[str, Any] = {"num_warps": 4} | ({"launch_pdl": True} if after else {})
    boxes, scalars = _boxes(call, plan, plan.tokens), _scalars(call, num_items, plan.min_q)
    return Launch(prefill_kernel, min(plan.programs, num_items), boxes, scalars, constants, **options)


def _decode_launch(call: AttendCall, plan: DecodePlan, before: bool) -> Launch:
    parts, part = plan.part
    constants = {
        **{k: v for k, v in _constants(call, plan).items() if k in ("GROUP", "PACKED")},
        "HELD": plan.held,
        "PARTS": parts,
        "PART": part,
        **{k: v for k, v in _constants(call, plan).items() if k not in ("GROUP", "PACKED")},
        **_features(call),
        "BEFORE": before,
        "WORKER_REGS": plan.worker_registers,
    }
    boxes, scalars = _boxes(call, plan, 64 // plan.packed), _scalars(call, plan.min_tiles, plan.max_q)
    return Launch(decode_kernel, plan.programs, boxes, scalars, constants, num_warps=4, maxnreg=plan.registers)
