"""Attend over an x-packed cache, from the host. The kernels are :mod:`pagetile.backends.cpu.kernels.legacy`.

All values are looked at first. Then come passes over the query rows, each so many that the states of their partitions
fit in a bounded buffer; a call that wants those states gets them in one pass, in the buffers it gave.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.block import Block
from pagetile.backends.cpu.faults import wide_index
from pagetile.backends.cpu.kernels import legacy as K
from pagetile.backends.cpu.kernels.packed_products import TOKENS
from pagetile.backends.cpu.kernels.vector import W
from pagetile.backends.cpu.launch import available_threads, launch
from pagetile.backends.protocol import AttendCall, Scale
from pagetile.backends.verbs import PARTITION_KEYS, PartitionedCall
from pagetile.contracts.dtypes import QUANTISED
from pagetile.reference.checks import (
    check_block_table,
    check_bound,
    check_key_starts,
    check_seq_lens,
    check_start_loc,
)
from pagetile.reference.storage import by_token

PASS_BYTES = 32 << 20
"""Partition states that one pass leaves before they are added."""


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """Cut of one attention over an x-packed cache.

    Attributes:
        parts: partitions a row, by the bound of the lengths (or by the buffers that are to be filled).
        rows: query rows a pass.
        threads: that take part.
    """

    parts: int
    rows: int
    threads: int

    def __str__(self) -> str:
        return (
            f"x-packed: a task a token, KV head and partition of {PARTITION_KEYS} keys, {self.parts} partitions a row; "
            f"{self.rows} rows a pass, whose states fill at most {PASS_BYTES >> 20} MiB; {self.threads} threads"
        )


def plan_for(call: AttendCall, parts: int = 0) -> PackedPlan:
    """The plan that :func:`attend_xpacked` follows; ``parts`` where the longest row is known."""
    problem, threads = call.problem, available_threads()
    if isinstance(call, PartitionedCall):
        assert call.exp_sums is not None
        return PackedPlan(call.exp_sums.shape[2], problem.num_tokens, threads)
    parts = parts or max(1, -(-problem.max_k_len // PARTITION_KEYS))
    state = 4 * max(1, problem.num_q_heads) * parts * (problem.head_size_v + 2)
    return PackedPlan(parts, max(1, min(problem.num_tokens, PASS_BYTES // state)), threads)


@dataclass(slots=True)
class _Rows:
    """Of each query row, int64: its sequence, position and visible keys ``[low, high)``."""

    seq: np.ndarray
    position: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def partitions(self) -> int:
        """That the longest row needs."""
        return -(-int(self.high.max(initial=0)) // PARTITION_KEYS)


def attend_xpacked(call: AttendCall) -> None:
    """Fill ``out`` and ``lse``, and the partition states where they are wanted.

    Raises:
        ArgumentError, BlockTableError: as :func:`pagetile.backends.cpu.attend.attend`.
    """
    _check(call)
    rows = _rows(call)
    count = len(rows.seq)
    if not count or not call.q.shape[1]:
        return
    block = Block(K.SLOTS)
    kept = _put_tensors(block, call, rows)
    plan = plan_for(call, max(1, rows.partitions))
    kept.append(_put_scratch(block, call, plan.threads))
    if isinstance(call, PartitionedCall):
        states = (call.exp_sums, call.max_logits, call.tmp_out)
    else:
        shape = (plan.rows, call.q.shape[1], plan.parts)
        states = (torch.empty(shape), torch.empty(shape), torch.empty(*shape, call.problem.head_size_v))
    _put_states(block, states)
    block[K.PARTS] = plan.parts
    block[K.SCORE_AT] = K.SCORE[call.problem.kind].address
    block[K.WEIGH_AT] = K.WEIGH[call.problem.kind].address
    for first in range(0, count, plan.rows):
        here = min(plan.rows, count - first)
        block.put(K.TICKET, 0, 0, first, here)
        launch(K.PARTITIONS, block.address, min(plan.threads, here * call.problem.num_kv_heads * plan.parts))
        block.put(K.TICKET, 0, 0)
        launch(K.ADD, block.address, min(plan.threads, here))
    del kept  # alive until here: the block holds only addresses


def _check(call: AttendCall) -> None:
    keys, lens, table = by_token(call.k, "xpacked"), call.seq_lens, call.block_table
    assert lens is not None
    assert table is not None
    check_start_loc("query_start_loc", call.query_start_loc, "q", call.q.shape[0])
    check_key_starts(call.key_starts)
    check_seq_lens(lens, table, keys.shape[1])
    check_block_table(table, lens, min(call.k.shape[0], call.v.shape[0]), keys.shape[1])
    check_bound("queries", call.query_start_loc.diff(), "max_q_len", call.problem.max_q_len)
    check_bound("keys", lens, "max_k_len", call.problem.max_k_len)


def _rows(call: AttendCall) -> _Rows:
    """:func:`pagetile.contracts.visibility.visible_range`, for all rows at once."""
    assert call.seq_lens is not None
    starts, lens = call.query_start_loc.numpy().astype(np.int64), call.seq_lens.numpy().astype(np.int64)
    q_lens = np.diff(starts)
    seq = np.repeat(np.arange(len(lens)), q_lens)
    position = np.arange(starts[-1]) - starts[:-1][seq] + lens[seq] - q_lens[seq]
    low, high = np.zeros_like(position), lens[seq]
    if call.key_starts is not None:
        low = call.key_starts.numpy().astype(np.int64)[seq]
    left, right = call.window
    if left >= 0:
        low = np.maximum(low, position - left)
    if right >= 0:
        high = np.minimum(high, position + right + 1)
    return _Rows(seq, position, np.ascontiguousarray(low), np.ascontiguousarray(high))


def _put_tensors(block: Block, call: AttendCall, rows: _Rows) -> list:
    """Fill the slots of what is read and written; returns what has to stay alive."""
    q, k, v, out, table = call.q, call.k, call.v, call.out, call.block_table
    assert table is not None
    size, stored, problem = q.element_size(), k.element_size(), call.problem
    block.put(K.LOW, *(x.ctypes.data for x in (rows.low, rows.high, rows.position, rows.seq)))
    block.put(K.Q, q.data_ptr(), q.stride(0) * size, q.stride(1) * size, P.DTYPE_CODES[problem.dtype], size)
    home, head, pack, token, _ = (stride * stored for stride in k.stride())
    block.put(K.K, k.data_ptr(), home, head, pack, token)
    home, head, channel, token = (stride * stored for stride in v.stride())
    block.put(K.V, v.data_ptr(), home, head, channel, token)
    step = table.stride(0) * table.element_size()
    block.put(K.TABLE, table.data_ptr(), step, wide_index("block_table", table), problem.block_size)
    sizes = (problem.head_size, problem.head_size_v, k.shape[2])
    block.put(K.HEADS, problem.num_kv_heads, problem.group, *sizes)
    block.put_float(K.SCALE_F, call.scale)
    block.put_float(K.CAP_F, call.softcap)
    slopes = call.alibi_slopes
    if slopes is not None:
        block.put(K.SLOPES, slopes.data_ptr(), slopes.stride(0) * 4 if slopes.dim() == 2 else 0, slopes.stride(-1) * 4)
    quantised = problem.kind in QUANTISED
    scales = [_scale(scale if quantised else None) for scale in (call.k_scale, call.v_scale)]
    block.put(K.K_SCALE, *_scale_slots(scales[0]), *_scale_slots(scales[1]))
    block.put(K.OUT, out.data_ptr(), out.stride(0) * size, out.stride(1) * size)
    if call.lse is not None:
        block.put(K.LSE, call.lse.data_ptr(), call.lse.stride(1) * 4, call.lse.stride(0) * 4)
    if call.sinks is not None:
        block.put(K.SINKS, call.sinks.data_ptr(), call.sinks.stride(0) * 4)
    return [rows, scales]


def _scale(scale: Scale) -> Tensor:
    if isinstance(scale, Tensor):
        return scale
    return torch.full((), 1.0 if scale is None else scale, dtype=torch.float32)


def _scale_slots(scale: Tensor) -> tuple[int, int, int]:
    """Address, and byte steps of the sequence and of the head."""
    if scale.numel() <= 1:
        return scale.data_ptr(), 0, 0
    return scale.data_ptr(), 4 * scale.stride(0) if scale.dim() == 2 else 0, 4 * scale.stride(-1)


def _put_states(block: Block, states: tuple) -> None:
    """Maxima, sums and outputs of partitions, contiguous ``[rows, heads, parts]`` and one axis more."""
    sums, maxima, partial = states
    block.put(K.SUMS, sums.data_ptr(), maxima.data_ptr(), 4 * sums.stride(1), 4 * sums.stride(0))
    each = partial.element_size()
    row, head, part, _ = partial.stride()
    code = P.DTYPE_CODES[str(partial.dtype).removeprefix("torch.")]
    block.put(K.PARTIAL, partial.data_ptr(), part * each, head * each, row * each, code, each)


def _put_scratch(block: Block, call: AttendCall, threads: int) -> Tensor:
    problem = call.problem
    group, vectors = problem.group, -(-problem.head_size_v // W)
    worker = 0
    for slot, part in (
        (K.S_QUERY, (group * problem.head_size + W) * 4),
        (K.S_SCORES, group * K.SCORE_BYTES),
        (K.S_KEYS, (PARTITION_KEYS + TOKENS) * 8),
        (K.S_PIECES, PARTITION_KEYS * 16),
        (K.S_TAILS, PARTITION_KEYS * 16),
        (K.S_SUMS, max(2, group) * vectors * W * 4 + group * 8),
    ):
        block[slot] = worker
        worker += -(-part // 64) * 64
    scratch = torch.empty(threads * worker + 64, dtype=torch.uint8)
    block.put(K.SCRATCH, -(-scratch.data_ptr() // 64) * 64, worker)
    return scratch
