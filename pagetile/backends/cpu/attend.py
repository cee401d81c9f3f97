"""Attend, from the host: fill the parameter block, have the values checked and the work cut, then launch.

The kernels are :mod:`pagetile.backends.cpu.kernels.prepare`, ``attend``, ``score`` and ``value``.
"""

from __future__ import annotations

import functools
import math
from array import array
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.faults import attend_fault, wide_index
from pagetile.backends.cpu.isa import host_isa
from pagetile.backends.cpu.kernels.address import ADDRESS_BYTES
from pagetile.backends.cpu.kernels.attend import ATTEND
from pagetile.backends.cpu.kernels.pairs import WEIGHT_BYTES
from pagetile.backends.cpu.kernels.prepare import BUCKETS, PREPARE
from pagetile.backends.cpu.kernels.score import SCORE, SCORE_BYTES
from pagetile.backends.cpu.kernels.value import ADD
from pagetile.backends.cpu.kernels.vector import W
from pagetile.backends.cpu.kernels.weigh import WEIGH
from pagetile.backends.cpu.launch import available_threads, launch
from pagetile.backends.cpu.scratch import MEMORY, Memory
from pagetile.backends.cpu.tuning import CHUNK, ROW_LIMIT, SCORE_PAD, AttendPlan, plan_attend
from pagetile.backends.protocol import AttendCall
from pagetile.contracts.errors import ArgumentError, DTypeError
from pagetile.contracts.problem import AttendProblem

SMALLER = 40.0
"""Weights are 2**-40 as large where sums overflowed: the sum over 2**40 keys does not."""

_FAR = 1 << 40  # a window wider than any sequence
_NEEDED = "paged keys (k of 4 axes) need block_table and seq_lens, ragged ones (3 axes) need key_start_loc"


def plan_for(call: AttendCall) -> AttendPlan:
    """The plan that :func:`attend` follows."""
    return _layout(call.problem, available_threads(), _near_heads(call.k)).plan


def attend(call: AttendCall) -> None:
    """Fill ``out`` and ``lse``.

    Raises:
        ArgumentError: lengths or starts that are negative, decrease, or exceed what the tensors or the bounds hold.
        BlockTableError: a block id outside the cache, or a table row too short for its sequence.
        DTypeError: an index tensor of a dtype that this backend would have to convert.
    """
    if not call.q.shape[1]:
        return
    threads = available_threads()
    form = _form(call, threads)
    memory = MEMORY
    block = memory.integers
    block[P.A_FIXED : P.ATTEND_SLOTS] = form.slots
    _put_tensors(block, call)
    kept = None if call.k_scale is call.v_scale is None else _put_scales(block, call)
    scratch = _put_scratch(block, call, form.layout, threads)
    PREPARE(memory.address)
    if block[P.ERROR]:
        raise attend_fault(call, *(block[slot] for slot in (P.ERROR, P.ERROR_ROW, P.ERROR_COLUMN, P.ERROR_VALUE)))
    _run(memory, threads)
    if block[P.A_BAD]:  # sums that overflowed, or NaN: once more, for those rows, with smaller weights
        memory.floats[P.A_BIAS_F] = SMALLER
        _run(memory, threads)
    del scratch, kept  # kept alive until here: the block holds only their addresses


def _run(memory: Memory, threads: int) -> None:
    """All tasks, then the sums of split ones."""
    block = memory.integers
    tasks, groups = block[P.A_NUM_TASKS], block[P.A_NUM_GROUPS]
    if tasks:
        block[P.A_TICKET] = block[P.A_WORKER] = block[P.A_PHASE] = 0
        launch(ATTEND, memory.address, min(threads, tasks))
    if groups:
        block[P.A_TICKET] = block[P.A_WORKER] = 0
        block[P.A_PHASE] = 1
        launch(ATTEND, memory.address, min(threads, groups))


def scratch_bytes(call: AttendCall) -> int:
    """Bytes of ``workspace`` that a call needs, by shapes and bounds alone."""
    return _layout(call.problem, available_threads(), _near_heads(call.k)).total


def _near_heads(k: Tensor) -> int:
    """KV heads that lie side by side in memory: all of a token's (NHD, ragged keys), or 1 where a head's tokens do."""
    return k.shape[-2] if k.stride(-2) <= k.stride(-3) else 1


def _int32(name: str, tensor: Tensor | None) -> int:
    """Address of a contiguous int32 vector."""
    if tensor is None:
        raise ArgumentError(f"{name} is missing; {_NEEDED}")
    if tensor.dtype is not torch.int32 or not tensor.is_contiguous():
        raise DTypeError(f"{name} is {tensor.dtype}, strides {tensor.stride()}; it must be contiguous int32")
    return tensor.data_ptr()


def _float32(name: str, tensor: Tensor) -> int:
    """Address of a float32 tensor."""
    if tensor.dtype is not torch.float32:
        raise DTypeError(f"{name} is {tensor.dtype}; it must be float32")
    return tensor.data_ptr()


def _put_tensors(block, call: AttendCall) -> None:
    """Addresses, and what may change from call to call."""
    block[P.A_Q] = call.q.data_ptr()
    block[P.A_K] = call.k.data_ptr()
    block[P.A_V] = call.v.data_ptr()
    block[P.A_OUT] = call.out.data_ptr()
    block[P.A_QUERY_LOC] = _int32("query_start_loc", call.query_start_loc)
    if block[P.A_BLOCK_SIZE]:
        table = call.block_table
        if table is None:
            raise ArgumentError(f"block_table is missing; {_NEEDED}")
        block[P.A_SEQ_LENS] = _int32("seq_lens", call.seq_lens)
        block[P.A_TABLE] = table.data_ptr()
        block[P.A_TABLE_WIDE] = wide = wide_index("block_table", table)
        block[P.A_TABLE_ROW] = table.stride(0) * (8 if wide else 4)
        block[P.A_TABLE_WIDTH] = table.shape[1]
    else:
        block[P.A_KEY_LOC] = _int32("key_start_loc", call.key_start_loc)
    if call.lse is not None:
        head, row = call.lse.stride()
        block[P.A_LSE] = _float32("lse", call.lse)
        block[P.A_LSE_HEAD] = head * 4
        block[P.A_LSE_ROW] = row * 4
    if call.key_starts is not None:
        block[P.A_KEY_STARTS] = _int32("key_starts", call.key_starts)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes
        block[P.A_SLOPES] = _float32("alibi_slopes", slopes)
        block[P.A_SLOPES_SEQ] = slopes.stride(0) * 4 if slopes.dim() == 2 else 0
        block[P.A_SLOPES_HEAD] = slopes.stride(-1) * 4
    if call.sinks is not None:
        block[P.A_SINKS] = _float32("sinks", call.sinks)
        block[P.A_SINKS_HEAD] = call.sinks.stride(0) * 4


@dataclass(frozen=True, slots=True)
class _Layout:
    """What depends on the problem alone: the plan, and how scratch is laid out for it.

    Attributes:
        total: bytes of scratch.
        worker: bytes of one worker's share.
        fixed: the slots from ``A_HEADS`` to the end.
    """

    plan: AttendPlan
    total: int
    worker: int
    fixed: array


def _put_scales(block, call: AttendCall) -> list[Tensor]:
    """Addresses and steps of the scales of K and V; what must stay alive for them."""
    kept = []
    for first, scale in ((P.A_KS, call.k_scale), (P.A_VS, call.v_scale)):
        if scale is None:
            continue
        if not isinstance(scale, Tensor):
            scale = torch.full((), scale, dtype=torch.float32)
        kept.append(scale)
        seq = home = token = head = 0
        if scale.dim() == 3:
            home, token, head = scale.stride()
        elif scale.dim() == 2:
            seq, head = scale.stride()
        elif scale.numel() > 1:
            head = scale.stride(0)
        steps = (seq * 4, home * 4, token * 4, head * 4, scale.dim() == 3)
        for slot, value in enumerate((_float32("a scale", scale), *steps), start=first):
            block[slot] = value
    return kept


class _Form(NamedTuple):
    """A parameter block with all that does not change between calls of the same shapes.

    Attributes:
        problem: kept, so that its identity stays its own.
        facts: what else the slots were made from.
        slots: from ``A_FIXED`` to the end; addresses are 0.
    """

    problem: AttendProblem
    facts: tuple
    layout: _Layout
    slots: array


_FORMS: dict[int, _Form] = {}
_MAX_FORMS = 1024


def _form(call: AttendCall, threads: int) -> _Form:
    """The form of a call: looked up by the identity of its problem, then held to everything else it depends on."""
    q, k, v, problem = call.q, call.k, call.v, call.problem
    facts = (
        threads,
        q.stride(),
        k.stride(),
        v.stride(),
        call.out.stride(),
        k.shape,
        v.shape,
        q.shape,
        call.query_start_loc.shape,
        call.scale,
        call.softcap,
        call.window,
        call.alibi_slopes is None,
    )
    form = _FORMS.get(id(problem))
    if form is None or form.problem is not problem or form.facts != facts:
        while len(_FORMS) >= _MAX_FORMS:
            _FORMS.pop(next(iter(_FORMS)), None)
        form = _FORMS[id(problem)] = _make_form(call, threads, facts)
    return form


def _make_form(call: AttendCall, threads: int, facts: tuple) -> _Form:
    layout = _layout(call.problem, threads, _near_heads(call.k))
    memory = array("q", bytes(8 * P.ATTEND_SLOTS))
    integers = memoryview(memory)
    floats = integers.cast("B").cast("d")
    kind = call.problem.kind
    integers[P.A_SCORE], integers[P.A_WEIGH], integers[P.A_ADD] = (
        kernels[kind].address for kernels in (SCORE, WEIGH, ADD)
    )
    integers[P.A_HEADS : P.ATTEND_SLOTS] = layout.fixed
    _put_strides(integers, call)
    _put_numbers(integers, floats, call)
    return _Form(call.problem, facts, layout, memory[P.A_FIXED :])


def _put_strides(block, call: AttendCall) -> None:
    q, k, v, out = call.q, call.k, call.v, call.out
    size = q.element_size()
    paged = k.dim() == 4
    row, head, _ = q.stride()
    block[P.A_Q_ROW] = row * size
    block[P.A_Q_HEAD] = head * size
    row, head, _ = out.stride()
    block[P.A_OUT_ROW] = row * size
    block[P.A_OUT_HEAD] = head * size
    size = k.element_size()
    *home, token, head, _ = k.stride()
    block[P.A_K_BLOCK] = home[0] * size if paged else 0
    block[P.A_K_TOKEN] = token * size
    block[P.A_K_HEAD] = head * size
    block[P.A_K_BYTES] = k.shape[-1] * size
    *home, token, head, _ = v.stride()
    block[P.A_V_BLOCK] = home[0] * size if paged else 0
    block[P.A_V_TOKEN] = token * size
    block[P.A_V_HEAD] = head * size
    block[P.A_V_BYTES] = v.shape[-1] * size
    block[P.A_BLOCK_SIZE] = k.shape[1] if paged else 0
    block[P.A_NUM_BLOCKS] = min(k.shape[0], v.shape[0])
    block[P.A_NUM_ROWS] = q.shape[0]
    block[P.A_NUM_SEQS] = call.query_start_loc.shape[0] - 1


def _put_numbers(block, floats, call: AttendCall) -> None:
    (left, right), cap, scale = call.window, call.softcap, call.scale
    block[P.A_LEFT] = min(left, _FAR)
    block[P.A_RIGHT] = min(right, _FAR)
    floats[P.A_SCALE_F] = scale
    floats[P.A_CAP_F] = cap
    block[P.A_EDITS] = bool(cap) or scale < 0 or call.alibi_slopes is not None
    floats[P.A_INNER_F] = scale / cap if cap else 0.0
    floats[P.A_NATURAL_F] = natural = 1.0 if cap or call.alibi_slopes is not None else abs(scale)
    floats[P.A_UNIT_F] = natural * math.log2(math.e)


@functools.lru_cache(maxsize=256)
def _layout(problem: AttendProblem, threads: int, near_heads: int) -> _Layout:
    plan = plan_attend(problem, threads, near_heads, host_isa().dot)
    size, size_v = -(-problem.head_size // W) * W * 4, -(-problem.head_size_v // W) * W * 4
    rows, stride = plan.rows, -(-max(problem.head_size, problem.head_size_v) // 32) * 32 * 4
    dot = bool(host_isa().dot) and problem.kind == "bfloat16"
    block, block_v = -(-problem.head_size // 32), -(-problem.head_size_v // 32)
    if dot:
        size_v = block_v * 128
    parts = {
        P.A_S_QUERY: rows * size,
        P.A_S_SCORE: (rows + 3) * SCORE_BYTES,
        P.A_S_CHUNK: rows * size_v,
        P.A_S_KEEP: rows * 4,
        P.A_S_STATE: rows * (size_v + 8),
        P.A_S_TOTAL: rows * (size_v + 8),
        P.A_S_KADDR: 2 * ADDRESS_BYTES,
        P.A_S_VADDR: 2 * ADDRESS_BYTES,
        P.A_S_STAGE: (CHUNK + SCORE_PAD) * stride,
        P.A_S_SADDR: ADDRESS_BYTES,
        P.A_S_RANGE: rows * 16,
        P.A_S_PACKED: rows * block * 64 if dot else 0,
        P.A_S_WEIGHT: rows * WEIGHT_BYTES if dot else 0,
        P.A_S_TILES: 64,
        P.A_S_ALONE: 16 * size_v,
        P.A_S_ZEROS: size_v,
        P.A_S_TURN: 2048,
        P.A_S_FACTORS: 2 * SCORE_BYTES,
        P.A_S_TURNED: plan.task_heads * block * 2048 if dot else 0,
    }
    values, worker = {}, 0
    for slot, part in parts.items():
        values[slot] = worker
        worker += -(-part // 64) * 64
    values |= {
        P.A_HEADS: problem.num_kv_heads,
        P.A_GROUP: problem.group,
        P.A_SIZE: problem.head_size,
        P.A_SIZE_V: problem.head_size_v,
        P.A_DTYPE: P.DTYPE_CODES[problem.dtype],
        P.A_MAX_Q: problem.max_q_len,
        P.A_MAX_K: problem.max_k_len,
        P.A_ROW_LIMIT: ROW_LIMIT,
        P.A_TILE_TOKENS: plan.tile_tokens,
        P.A_TASK_HEADS: plan.task_heads,
        P.A_SPLITS: plan.splits,
        P.A_STAGE_ROWS: plan.stage_rows,
        P.A_DIRECT_K: problem.head_size % W == 0,
        P.A_DIRECT_V: problem.head_size_v % W == 0,
        P.A_SCRATCH_BYTES: worker,
        P.A_STAGE_STRIDE: stride,
        P.A_SUM_VECTORS: size_v // 4 // W,
        P.A_DOT: dot,
    }
    tasks = plan.max_tasks * (2 * P.TASK_BYTES + 16) + (BUCKETS + 1) * 8
    total = 64 + threads * worker + tasks + plan.max_partial_rows * (size_v + 8)
    return _Layout(plan, total, worker, array("q", [values[slot] for slot in range(P.A_HEADS, P.ATTEND_SLOTS)]))


def _put_scratch(block, call: AttendCall, layout: _Layout, threads: int) -> Tensor:
    """Lay the scratch out: a worker's share each, the task arrays, the partial states."""
    scratch = call.workspace
    if scratch is None:
        scratch = MEMORY.scratch(layout.total)
    elif not scratch.is_contiguous() or scratch.numel() * scratch.element_size() < layout.total:
        raise ArgumentError(
            f"workspace has {scratch.numel() * scratch.element_size()} bytes (strides {scratch.stride()}); this call "
            f"needs {layout.total} contiguous bytes. Pass a larger one, or None"
        )
    tasks = layout.plan.max_tasks
    block[P.A_SCRATCH] = base = -(-scratch.data_ptr() // 64) * 64
    block[P.A_TASKS] = base = base + threads * layout.worker
    block[P.A_GROUPS] = base = base + tasks * P.TASK_BYTES
    block[P.A_TASK_COST] = base = base + tasks * P.TASK_BYTES
    block[P.A_TASK_ORDER] = base = base + tasks * 8
    block[P.A_BUCKETS] = base = base + tasks * 8
    block[P.A_PARTIALS] = base + (BUCKETS + 1) * 8
    return scratch
