"""Attend, from the host: fill the parameter block, have the values checked and the work cut, then launch.

The kernels are :mod:`pagetile.backends.cpu.kernels.prepare`, ``attend``, ``score`` and ``value``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.faults import attend_fault
from pagetile.backends.cpu.kernels.attend import ATTEND
from pagetile.backends.cpu.kernels.prepare import BUCKETS, PREPARE
from pagetile.backends.cpu.kernels.score import SCORE, SCORE_BYTES
from pagetile.backends.cpu.kernels.value import ADD
from pagetile.backends.cpu.kernels.vector import W
from pagetile.backends.cpu.kernels.weigh import WEIGH
from pagetile.backends.cpu.launch import available_threads, launch
from pagetile.backends.cpu.scratch import MEMORY
from pagetile.backends.cpu.tuning import CHUNK, ROW_LIMIT, SCORE_PAD, AttendPlan, plan_attend
from pagetile.backends.protocol import AttendCall
from pagetile.contracts.errors import ArgumentError, DTypeError

_FAR = 1 << 40  # a window wider than any sequence


def plan_for(call: AttendCall) -> AttendPlan:
    """The plan that :func:`attend` follows."""
    return plan_attend(call.problem, available_threads(), _heads_adjacent(call.k))


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
    plan = plan_attend(call.problem, threads, _heads_adjacent(call.k))
    memory = MEMORY
    block = memory.integers
    block[P.ERROR] = 0
    _put_tensors(block, call)
    _put_numbers(block, memory.floats, call)
    scratch = _put_scratch(block, call, plan, threads)
    PREPARE(memory.address)
    if block[P.ERROR]:
        raise attend_fault(call, *(block[slot] for slot in (P.ERROR, P.ERROR_ROW, P.ERROR_COLUMN, P.ERROR_VALUE)))
    tasks, groups = block[P.A_NUM_TASKS], block[P.A_NUM_GROUPS]
    if tasks:
        block[P.A_TICKET] = block[P.A_WORKER] = block[P.A_PHASE] = 0
        block[P.A_SCORE] = SCORE[call.problem.kind].address
        block[P.A_WEIGH] = WEIGH.address
        block[P.A_ADD] = ADD[call.problem.kind].address
        launch(ATTEND, memory.address, min(threads, tasks))
    if groups:
        block[P.A_TICKET] = block[P.A_WORKER] = 0
        block[P.A_PHASE] = 1
        launch(ATTEND, memory.address, min(threads, groups))
    del scratch  # kept alive until here: the block holds only its address


def scratch_bytes(call: AttendCall) -> int:
    """Bytes of ``workspace`` that a call needs, by shapes and bounds alone."""
    threads = available_threads()
    plan = plan_attend(call.problem, threads, _heads_adjacent(call.k))
    return _scratch_parts(call.problem, plan, threads)[0]


def _heads_adjacent(k: Tensor) -> bool:
    """The heads of a token are closer together than the tokens of a head (NHD, or ragged keys)."""
    return k.stride(-2) <= k.stride(-3)


def _int32(name: str, tensor: Tensor) -> int:
    """Address of a contiguous int32 vector."""
    if tensor.dtype is not torch.int32 or not tensor.is_contiguous():
        raise DTypeError(f"{name} is {tensor.dtype}, strides {tensor.stride()}; it must be contiguous int32")
    return tensor.data_ptr()


def _put_tensors(block, call: AttendCall) -> None:
    q, k, v, out = call.q, call.k, call.v, call.out
    size = q.element_size()
    paged = k.dim() == 4
    row, head, _ = q.stride()
    block[P.A_Q] = q.data_ptr()
    block[P.A_Q_ROW] = row * size
    block[P.A_Q_HEAD] = head * size
    row, head, _ = out.stride()
    block[P.A_OUT] = out.data_ptr()
    block[P.A_OUT_ROW] = row * size
    block[P.A_OUT_HEAD] = head * size
    *home, token, head, _ = k.stride()
    block[P.A_K] = k.data_ptr()
    block[P.A_K_BLOCK] = home[0] * size if paged else 0
    block[P.A_K_TOKEN] = token * size
    block[P.A_K_HEAD] = head * size
    *home, token, head, _ = v.stride()
    block[P.A_V] = v.data_ptr()
    block[P.A_V_BLOCK] = home[0] * size if paged else 0
    block[P.A_V_TOKEN] = token * size
    block[P.A_V_HEAD] = head * size
    block[P.A_LSE] = 0
    if call.lse is not None:
        head, row = call.lse.stride()
        block[P.A_LSE] = call.lse.data_ptr()
        block[P.A_LSE_HEAD] = head * 4
        block[P.A_LSE_ROW] = row * 4
    block[P.A_QUERY_LOC] = _int32("query_start_loc", call.query_start_loc)
    block[P.A_NUM_SEQS] = call.query_start_loc.shape[0] - 1
    if paged:
        table = call.block_table
        assert table is not None
        assert call.seq_lens is not None
        block[P.A_SEQ_LENS] = _int32("seq_lens", call.seq_lens)
        block[P.A_KEY_LOC] = 0
        block[P.A_TABLE] = table.data_ptr()
        block[P.A_TABLE_ROW] = table.stride(0) * table.element_size()
        block[P.A_TABLE_WIDE] = table.dtype is torch.int64
        block[P.A_TABLE_WIDTH] = table.shape[1]
        block[P.A_BLOCK_SIZE] = k.shape[1]
        block[P.A_NUM_BLOCKS] = min(k.shape[0], v.shape[0])
    else:
        assert call.key_start_loc is not None
        block[P.A_KEY_LOC] = _int32("key_start_loc", call.key_start_loc)
        block[P.A_BLOCK_SIZE] = 0
        block[P.A_NUM_BLOCKS] = min(k.shape[0], v.shape[0])


def _put_numbers(block, floats, call: AttendCall) -> None:
    problem = call.problem
    (left, right), cap, scale = call.window, call.softcap, call.scale
    block[P.A_NUM_ROWS] = call.q.shape[0]
    block[P.A_HEADS] = problem.num_kv_heads
    block[P.A_GROUP] = problem.num_q_heads // problem.num_kv_heads
    block[P.A_SIZE] = problem.head_size
    block[P.A_SIZE_V] = problem.head_size_v
    block[P.A_DTYPE] = P.DTYPE_CODES[problem.dtype]
    block[P.A_LEFT] = min(left, _FAR)
    block[P.A_RIGHT] = min(right, _FAR)
    block[P.A_MAX_Q] = problem.max_q_len
    block[P.A_MAX_K] = problem.max_k_len
    floats[P.A_SCALE_F] = scale
    floats[P.A_CAP_F] = cap
    floats[P.A_INNER_F] = scale / cap if cap else 0.0
    floats[P.A_NATURAL_F] = natural = 1.0 if cap or call.alibi_slopes is not None else abs(scale)
    floats[P.A_UNIT_F] = natural * math.log2(math.e)
    block[P.A_KEY_STARTS] = block[P.A_SLOPES] = block[P.A_SINKS] = 0
    if call.key_starts is not None:
        block[P.A_KEY_STARTS] = _int32("key_starts", call.key_starts)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes
        block[P.A_SLOPES] = slopes.data_ptr()
        block[P.A_SLOPES_SEQ] = slopes.stride(0) * 4 if slopes.dim() == 2 else 0
        block[P.A_SLOPES_HEAD] = slopes.stride(-1) * 4
    if call.sinks is not None:
        block[P.A_SINKS] = call.sinks.data_ptr()
        block[P.A_SINKS_HEAD] = call.sinks.stride(0) * 4


def _scratch_parts(problem, plan: AttendPlan, threads: int) -> tuple[int, int, dict[int, int], int]:
    """Total bytes, a worker's bytes, offsets of its parts by slot, and the stride of staged rows."""
    size, size_v = -(-problem.head_size // W) * W * 4, -(-problem.head_size_v // W) * W * 4
    rows, keys = plan.rows, CHUNK + SCORE_PAD
    stride = max(size, size_v)
    sizes = {
        P.A_S_QUERY: rows * size,
        P.A_S_SCORE: rows * SCORE_BYTES,
        P.A_S_CHUNK: rows * size_v,
        P.A_S_KEEP: rows * 4,
        P.A_S_STATE: rows * (size_v + 8),
        P.A_S_TOTAL: rows * (size_v + 8),
        P.A_S_KADDR: keys * 8,
        P.A_S_VADDR: keys * 8,
        P.A_S_STAGE: keys * stride,
        P.A_S_SADDR: keys * 8,
        P.A_S_RANGE: rows * 16,
    }
    offsets, used = {}, 0
    for slot, part in sizes.items():
        offsets[slot] = used
        used += -(-part // 64) * 64
    tasks = plan.max_tasks * (2 * P.TASK_BYTES + 16) + (BUCKETS + 1) * 8
    total = 64 + threads * used + tasks + plan.max_partial_rows * (size_v + 8)
    return total, used, offsets, stride


def _put_scratch(block, call: AttendCall, plan: AttendPlan, threads: int) -> Tensor:
    """Lay the scratch out: a worker's share each, the task arrays, the partial states."""
    total, worker, offsets, stride = _scratch_parts(call.problem, plan, threads)
    scratch = call.workspace
    if scratch is None:
        scratch = MEMORY.scratch(total)
    elif not scratch.is_contiguous() or scratch.numel() * scratch.element_size() < total:
        raise ArgumentError(
            f"workspace has {scratch.numel() * scratch.element_size()} bytes (strides {scratch.stride()}); this call "
            f"needs {total} contiguous bytes. Pass a larger one, or None"
        )
    base = -(-scratch.data_ptr() // 64) * 64
    for slot, offset in offsets.items():
        block[slot] = offset
    block[P.A_STAGE_STRIDE] = stride
    block[P.A_SCRATCH] = base
    block[P.A_SCRATCH_BYTES] = worker
    base += threads * worker
    block[P.A_TASKS] = base
    block[P.A_GROUPS] = base = base + plan.max_tasks * P.TASK_BYTES
    block[P.A_TASK_COST] = base = base + plan.max_tasks * P.TASK_BYTES
    block[P.A_TASK_ORDER] = base = base + plan.max_tasks * 8
    block[P.A_BUCKETS] = base = base + plan.max_tasks * 8
    block[P.A_PARTIALS] = base + (BUCKETS + 1) * 8
    block[P.A_ROW_LIMIT] = ROW_LIMIT
    block[P.A_TILE_TOKENS] = plan.tile_tokens
    block[P.A_ALL_HEADS] = plan.all_heads
    block[P.A_SPLITS] = plan.splits
    block[P.A_STAGE_ROWS] = plan.stage_rows
    block[P.A_DIRECT_K] = call.problem.head_size % W == 0
    block[P.A_DIRECT_V] = call.problem.head_size_v % W == 0
    return scratch
