"""Attend from short queries: one launch, the keys of the whole batch shared out evenly, five roles.

Contract: every row of a sequence of 1 to ``max_q`` queries ends in the state of all keys it sees; ``max_q * PACKED``
rows fit in 64.
Grid: ``(programs,)``. The key tiles of all (sequence, KV head) pairs form one flat list, of which each program takes
one stretch (stream-K, Osama et al. 2023): balanced within a tile whatever the lengths. A pair that falls in one
stretch is finished there; of another, each program leaves a float32 state, and the last one to arrive adds them in
the order of the programs, so that the bits do not depend on who was last. Its counter is 0 again afterwards.

A scheduler warp leaves a note of each piece; one warp loads queries, one keys, one values; one warpgroup computes.
Reads each K and V row once; writes ``out`` and ``lse`` of active rows, and 2 states a program.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

from pagetile.backends.hopper import facts as fact
from pagetile.backends.hopper import notes as memo
from pagetile.backends.hopper.compat import (
    fence_async_shared,
    gdc_launch_dependents,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from pagetile.backends.hopper.device import LOG2E, clear_values, edit, hide, hide_bad, row_range, softmax_step
from pagetile.backends.hopper.loading import cache_role, query_role
from pagetile.backends.hopper.states import finish_rows, leave_state, store_rows
from pagetile.backends.hopper.stretch import schedule

ROWS = gl.constexpr(64)

SIZES = (
    "lse_head", "lse_token", "table_row", "slope_seq", "num_seqs", "num_cols", "num_blocks", "kv_heads", "min_tiles",
    "left", "right", "max_q",
)  # fmt: skip
"""Integers that differ from step to step, or say nothing about alignment: no value of theirs compiles a kernel anew."""


@gluon.jit
def consume_span(begin, end, first, step, state, q, k_s, v_s, bars, rows, bad, facts, note_at, score, slope, position,
                 PAGE: gl.constexpr, IDS: gl.constexpr, BOX: gl.constexpr, LEFT: gl.constexpr, MASKED: gl.constexpr,
                 SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, PRESCALE: gl.constexpr):  # fmt: skip
    """Add the tiles ``[begin, end)`` of a piece to a state."""
    peak, total, acc = state
    k_full, k_empty, v_full, v_empty = bars
    STAGES: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = acc.type.layout
    part: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout=scores)
    for i in range(begin, end):
        stage = (step + i) % STAGES
        phase = ((step + i) // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        s_ = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s_,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        start = (first + i) * KEYS
        s = edit(s, start, score, slope, position, SOFTCAP, ALIBI, PRESCALE)
        if MASKED:
            s = hide(s, start, rows, LEFT)
            if bad != 0:
                s = hide_bad(s, start, facts, note_at, PAGE, IDS, BOX)
        unit = score[0]
        if SOFTCAP or ALIBI or PRESCALE:
            unit = 1.0
        p, peak, total, decay = softmax_step(s, peak, total, unit, MASKED)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, sums), assert_trivial=True)[:, None]
        weights = gl.convert_layout(p.to(v_s.dtype), part, assert_trivial=True)
        mbarrier.wait(v_full.index(stage), phase)
        if MASKED:
            clear_values(v_s, stage, start, note_at)
        acc_ = warpgroup_mma(weights, v_s.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc_,))
        mbarrier.arrive(v_empty.index(stage), count=1)
    return peak, total, acc


@gluon.jit
def consume(notes, note_full, note_empty, facts, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            out, states, peaks, out_token, out_head, scale, cap, HELD: gl.constexpr, PARTS: gl.constexpr,
            PART: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr, PAGE: gl.constexpr,
            IDS: gl.constexpr, BOX: gl.constexpr, LEFT: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr,
            PRESCALE: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr):  # fmt: skip
    """Role: the rows of every piece, from scores to the stored result or state."""
    KEYS: gl.constexpr = k_s.shape[1]
    WIDE: gl.constexpr = v_s.shape[2]
    QUERIES: gl.constexpr = q_s.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    bars = (k_full, k_empty, v_full, v_empty)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))
    step = gl.program_id(0) * 0
    turn = step
    note = memo.read_note(notes, note_full, turn)
    while memo.entry(note, memo.END) != 0:
        first, count, bad = memo.entry(note, memo.TILE), memo.entry(note, memo.COUNT), memo.entry(note, memo.BAD)
        edge_a, edge_b = memo.entry(note, memo.EDGE_A), memo.entry(note, memo.EDGE_B)
        position = memo.entry(note, memo.POSITION) + r // PACKED
        rows = row_range(
            position, memo.entry(note, memo.SEQ_LEN), memo.entry(note, memo.FIRST_KEY),
            fact.number(facts, fact.LEFT), fact.number(facts, fact.RIGHT), LEFT,
        )  # fmt: skip
        slope = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, scores))
        if ALIBI:
            at = memo.entry(note, memo.SEQ) * fact.stride(facts, fact.SLOPE_SEQ) + memo.entry(note, memo.HEAD) * GROUP
            at = fact.pointer(facts, fact.SLOPES, gl.float32) + at
            slope = gl.load(at + r % PACKED, mask=r % PACKED < GROUP, other=0.0) * LOG2E
        note_at = (notes, note_full, turn)
        state = (
            gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores)),
            gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, scores)),
            gl.zeros([ROWS, WIDE], gl.float32, layout=sums),
        )
        q = q_s.index(turn % QUERIES)
        mbarrier.wait(q_full.index(turn % QUERIES), (turn // QUERIES) & 1)
        if LEFT:
            state = consume_span(
                0, edge_a, first, step, state, q, k_s, v_s, bars, rows, bad, facts, note_at, (scale, cap), slope,
                position, PAGE, IDS, BOX, LEFT, True, SOFTCAP, ALIBI, PRESCALE,
            )  # fmt: skip
        state = consume_span(
            edge_a, edge_b, first, step, state, q, k_s, v_s, bars, rows, bad, facts, note_at, (scale, cap), slope,
            position, PAGE, IDS, BOX, LEFT, False, SOFTCAP, ALIBI, PRESCALE,
        )  # fmt: skip
        state = consume_span(
            edge_b, count, first, step, state, q, k_s, v_s, bars, rows, bad, facts, note_at, (scale, cap), slope,
            position, PAGE, IDS, BOX, LEFT, True, SOFTCAP, ALIBI, PRESCALE,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(turn % QUERIES), count=1)
        step += count
        note = memo.read_note(notes, note_full, turn)
        if count == memo.entry(note, memo.TILES):
            peak, total, acc = state
            factor = finish_rows(peak, total, r, note, facts, PACKED, GROUP, SINKS, LSE)
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, sums), assert_trivial=True)[:, None]
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums))
            element = gl.arange(0, WIDE, layout=gl.SliceLayout(0, sums))
            store_rows(acc, row, element, note, out, out_token, out_head, PACKED, GROUP, DV)
        else:
            leave_state(
                state, r, note, facts, states, peaks, out, out_token, out_head, HELD, PARTS, PART, PACKED, GROUP, DV,
                SINKS, LSE,
            )  # fmt: skip
        memo.drop_note(note_empty, turn)
        turn += 1
        note = memo.read_note(notes, note_full, turn)


@gluon.jit(do_not_specialize=SIZES)
def decode_kernel(q_map, k_map, v_map, out, lse, states, peaks, q_loc, key_lens, table, key_starts, slopes, sinks,
                  counters, error, out_token, out_head, lse_head, lse_token, table_row, slope_seq, num_seqs, num_cols,
                  num_blocks, kv_heads, min_tiles, left, right, max_q, scale, cap, GROUP: gl.constexpr,
                  PACKED: gl.constexpr, HELD: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr, DV: gl.constexpr,
                  PAGE: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
                  QUERIES: gl.constexpr, LEFT: gl.constexpr, KEY_STARTS: gl.constexpr, SOFTCAP: gl.constexpr,
                  ALIBI: gl.constexpr, PRESCALE: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
                  BEFORE: gl.constexpr, WORKER_REGS: gl.constexpr):  # fmt: skip
    """Sequences with ``0 < q_len <= max_q``; the prefill kernel takes the others. All strides are in elements.

    ``HELD`` rows of a state are kept, a power of two. ``BEFORE``: the next kernel of the stream may start at once.
    """
    dtype: gl.constexpr = k_map.dtype
    one: gl.constexpr = mbarrier.MBarrierLayout()
    if BEFORE:
        gdc_launch_dependents()
    q_s = gl.allocate_shared_memory(dtype, [QUERIES, ROWS, q_map.block_type.shape[2]], gl.NVMMASharedLayout(128, 16, 2))
    k_s = gl.allocate_shared_memory(dtype, [STAGES, KEYS, k_map.block_type.shape[3]], gl.NVMMASharedLayout(128, 16, 2))
    v_s = gl.allocate_shared_memory(dtype, [STAGES, KEYS, v_map.block_type.shape[3]], gl.NVMMASharedLayout(128, 16, 2))
    notes, note_full, note_empty = memo.desk()
    facts = fact.room()
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], one)
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], one)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    for i in gl.static_range(2):
        mbarrier.init(note_full.index(i), count=1)
        mbarrier.init(note_empty.index(i), count=4)
    for i in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    fact.leave_all(
        facts, q_loc, key_lens, key_starts, num_seqs, table, table_row, num_cols, num_blocks, left, right, kv_heads,
        max_q, counters, min_tiles, error, lse, lse_head, lse_token, sinks, slopes, slope_seq,
    )  # fmt: skip
    fence_async_shared()
    ids: gl.constexpr = table.dtype.element_ty
    lefty: gl.constexpr = LEFT or KEY_STARTS

    # fmt: off
    gl.warp_specialize([
        (consume, (notes, note_full, note_empty, facts, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full,
                   v_empty, out, states, peaks, out_token, out_head, scale, cap, HELD, PARTS, PART, PACKED, GROUP, DV,
                   PAGE, ids, BOX, lefty, SOFTCAP, ALIBI, PRESCALE, SINKS, LSE)),
        (query_role, (notes, note_full, note_empty, q_map, q_s, q_full, q_empty, GROUP, PACKED)),
        (cache_role, (notes, note_full, note_empty, facts, k_map, k_s, k_full, k_empty, PAGE, ids, BOX, 1)),
        (cache_role, (notes, note_full, note_empty, facts, v_map, v_s, v_full, v_empty, PAGE, ids, BOX, 1)),
        (schedule, (notes, note_full, note_empty, facts, KEYS, PAGE, ids, lefty, KEY_STARTS)),
    ], [1, 1, 1, 1], [WORKER_REGS, WORKER_REGS, WORKER_REGS, WORKER_REGS])
    # fmt: on
