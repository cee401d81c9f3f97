"""How a problem is cut into work: pure functions from a problem to a printable plan.

None of this changes a bit of any result. The two numbers that do, the keys of a chunk and of a segment, are constants:
a row's softmax state is restarted at absolute multiples of the segment and its maximum is updated at absolute multiples
of the chunk, so a row comes out the same alone or in a batch, as a decode or inside a prefill, split or whole.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from pagetile.contracts.problem import AttendProblem, WriteProblem

CHUNK = 128
"""Keys between two updates of a row's maximum. The scores of 64 rows x 128 keys are 32 KiB: they stay in cache."""

SEGMENT = 1024
"""Keys between two restarts of a row's state, and the smallest piece that a split can take: 1024 keys of one head
are 0.5 MB of bf16 K and V, enough to pay for the few microseconds of a task."""

SCORE_PAD = 32
"""Floats after a row of scores: the last tile of keys of a row may write that far."""

ROW_LIMIT = 64
"""Rows (tokens x group) of a task. Queries, scores and accumulators of 64 rows fit the L2 cache at any head size up
to 576; more rows would save reads of K and V that the L2 cache already serves."""

CHUNK_BYTES = 256 << 10
"""Bytes of K (or V) that a task walks through a chunk. While it scores a chunk's keys it asks for their values, and
while it adds those, for the next chunk's keys: all of that must fit the L2 cache. Twice as much was 1.15 times slower
than no prefetch at all, this is 1.1 to 1.6 times faster."""

STAGE_ROWS = 16
"""From this many rows a KV head, values are first copied to contiguous float32. Four register blocks then reuse each
row, which pays for the copy; a cache's own row stride (often 4 KiB) would put them all in the same L1 sets."""

STAGED_KEYS = 32
"""Keys staged at a time: 32 rows of 128 floats are 16 KiB, which stay in the L1 cache while every row reads them."""

DIRECT_KEYS = 16
"""Keys read in place at a time before the next head's turn: the heads of a token are neighbours, so this walks the
cache in address order."""

TASKS_A_THREAD = 4
"""Tasks wanted for each thread, so that the last one to finish keeps the others waiting for a quarter of their time."""

PARTIAL_LIMIT = 256 << 20
"""Bytes of partial states beyond which a split is not worth its memory. Only long prefills reach it, and those have
tasks enough without splits."""

WRITE_SERIAL_BYTES = 128 << 10
"""Below this, one thread: waking a second costs more than the copy (64 KiB copy in about 3 microseconds)."""

WRITE_STREAM_BYTES = 4 << 20
"""From here on, stores go past the caches: the copy is as large as an L2 cache, and memory need not be read before it
is written. Below, the next attention finds the new tokens in cache."""

WRITE_CHUNK_BYTES = 64 << 10
"""Bytes a ticket of a parallel write."""

MERGE_CHUNK = 16 << 10
"""Elements a ticket of a merge: about 10 microseconds of work, so that one ticket is never worth a second thread."""


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of an element; 1 of a quantised one."""


def _print(self) -> str:
    lines = [f"{type(self).__name__}"]
    lines += [f"  {f.name} = {getattr(self, f.name)}" for f in fields(self) if f.name != "why"]
    lines += [f"  {name}: {reason}" for name, reason in self.why]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """Cut of one attention.

    Attributes:
        tile_tokens: query tokens of a task.
        task_heads: KV heads of a task, if their rows are few enough; 1 otherwise.
        splits: pieces that the keys of one task are cut into, at most.
        stage_rows: rows a KV head from which K and V are staged as float32.
        max_tasks: upper bound of tasks, from host facts.
        max_partial_rows: upper bound of (row, segment) pairs kept for the second pass; 0 without splits.
        rows: rows of the largest task.
        why: the choices and their reasons.
    """

    tile_tokens: int
    task_heads: int
    splits: int
    stage_rows: int
    max_tasks: int
    max_partial_rows: int
    rows: int
    why: tuple[tuple[str, str], ...] = ()

    __str__ = _print


_PRODUCTS = {
    "": "float32 multiply-adds: this CPU has no product of bfloat16 pairs, or was told to do without",
    "bf16": "bfloat16 pairs by vdpbf16ps, summed in float32: this CPU has avx512bf16 and no tiles",
    "amx": "bfloat16 pairs by tiles, summed in float32: this CPU has amx-bf16",
}


def plan_attend(problem: AttendProblem, threads: int, near_heads: int, dot: str = "") -> AttendPlan:
    """Cut an attention.

    Args:
        problem: what is asked.
        threads: that may work.
        near_heads: KV heads of a token that lie side by side in memory; 1 where the tokens of a head do.
        dot: what multiplies bfloat16, see :mod:`pagetile.backends.cpu.isa`.
    """
    group, heads = problem.group, problem.num_kv_heads
    tile_tokens = max(1, ROW_LIMIT // group)
    segments = max(1, -(-problem.max_k_len // SEGMENT))
    tiles = -(-problem.num_tokens // tile_tokens) + problem.num_seqs
    wanted = TASKS_A_THREAD * threads
    task_heads, why_heads = _task_heads(problem, near_heads, wanted, segments)
    splits = min(problem.num_splits, segments)
    why_splits = f"{splits}: {problem.num_splits} as asked, of at most {segments} segments"
    if splits <= 0:
        short = problem.max_q_len <= tile_tokens
        tasks = (problem.num_seqs if short else tiles) * -(-heads // task_heads)
        splits = 1 if threads == 1 or tasks >= wanted else min(segments, -(-wanted // max(1, tasks)))
        why_splits = f"{splits}: about {tasks} tasks for {threads} threads, {wanted} wanted"
    partial_rows = problem.num_tokens * problem.num_q_heads * segments if splits > 1 else 0
    if partial_rows * 4 * (problem.head_size_v + 2 * SCORE_PAD) > PARTIAL_LIMIT:
        splits, partial_rows = 1, 0
        why_splits = f"1: partial states would take more than {PARTIAL_LIMIT >> 20} MiB"
    rows = max(ROW_LIMIT, group)
    return AttendPlan(
        tile_tokens=tile_tokens,
        task_heads=task_heads,
        splits=splits,
        stage_rows=STAGE_ROWS,
        max_tasks=tiles * heads * max(1, splits),
        max_partial_rows=partial_rows,
        rows=rows,
        why=(
            ("tile_tokens", f"{tile_tokens} tokens x {group} heads a KV head are at most {rows} rows"),
            ("task_heads", why_heads),
            ("splits", why_splits),
            ("products", _PRODUCTS[dot] if problem.kind == "bfloat16" else f"float32 multiply-adds: {problem.kind}"),
        ),
    )


def _task_heads(problem: AttendProblem, near: int, wanted: int, segments: int) -> tuple[int, str]:
    """KV heads of a task, and why."""
    if near == 1:
        return 1, "1: a head's tokens are neighbours in memory, so one head reads in address order"
    size = max(problem.head_size, problem.head_size_v) * _BYTES.get(problem.kind, 1)
    fit = min(near, max(1, CHUNK_BYTES // (CHUNK * size)))
    if problem.num_seqs * segments * -(-near // fit) < wanted:
        return 1, f"1: {problem.num_seqs} sequences of up to {segments} segments are too few tasks otherwise"
    return (
        fit,
        f"{fit}: the heads of a token are neighbours in memory; a chunk of that many fits {CHUNK_BYTES >> 10} KiB",
    )


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Cut of one write.

    Attributes:
        k_spans, v_spans: contiguous spans a token: 1, or one a head.
        k_bytes, v_bytes: bytes of a span.
        threads: that take part.
        chunk: rows a ticket.
        stream: stores go past the caches.
        why: the choices and their reasons.
    """

    k_spans: int
    k_bytes: int
    v_spans: int
    v_bytes: int
    threads: int
    chunk: int
    stream: bool = False
    why: tuple[tuple[str, str], ...] = ()

    __str__ = _print


@functools.lru_cache(maxsize=256)
def plan_write(problem: WriteProblem, threads: int, itemsize: int, k_joined: bool, v_joined: bool) -> WritePlan:
    """Cut a write.

    Args:
        problem: what is asked.
        threads: that may work.
        itemsize: bytes of an element.
        k_joined, v_joined: the heads of a token are one contiguous span, in the source and in the cache.
    """
    heads = problem.num_kv_heads
    k_head, v_head = problem.head_size * itemsize, problem.head_size_v * itemsize
    row = heads * (k_head + v_head)
    total = row * problem.num_tokens
    if total < WRITE_SERIAL_BYTES:
        threads, why = 1, f"1: {total} bytes, less than {WRITE_SERIAL_BYTES}"
    else:
        why = f"{threads}: {total} bytes"
    return WritePlan(
        k_spans=1 if k_joined else heads,
        k_bytes=heads * k_head if k_joined else k_head,
        v_spans=1 if v_joined else heads,
        v_bytes=heads * v_head if v_joined else v_head,
        threads=threads,
        chunk=max(1, WRITE_CHUNK_BYTES // max(1, row)),
        stream=total >= WRITE_STREAM_BYTES,
        why=(
            ("threads", why),
            ("k_spans", _why_spans(k_joined)),
            ("v_spans", _why_spans(v_joined)),
            ("stream", f"{total} bytes, past the caches from {WRITE_STREAM_BYTES} on"),
        ),
    )


def _why_spans(joined: bool) -> str:
    return "the heads of a token are one span" if joined else "heads are apart, in the source or in the cache"


def merge_cut(rows: int, size: int, threads: int) -> tuple[int, int]:
    """Threads of a merge of ``rows`` rows of ``size`` elements, and rows a ticket."""
    chunk = max(1, MERGE_CHUNK // size)
    return max(1, min(threads, rows // chunk)), chunk
