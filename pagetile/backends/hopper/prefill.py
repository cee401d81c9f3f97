"""Attend from long queries: one persistent program a multiprocessor, 128 packed rows a tile, six roles.

Contract: every row of a sequence with more than ``min_q`` queries ends in the state of all keys it sees.
Grid: ``(programs,)``; tiles are dealt out by a counter, the longest of a sequence first. A tile is ``128 / PACKED``
tokens by the query heads of one KV head, padded to ``PACKED``.

A scheduler warp finds the next tile and leaves a note of it; one warp loads queries, one keys, one values, a page-sized
box at a time into one swizzled tile; two warpgroups of 64 rows each compute. They meet at mbarriers only, so the loads
of the next tile run under the end of the last. Keys are walked from the last tile to the first, so that masks come
first, and a tile's scores are issued before the last tile's values are weighed (FlashAttention-3, Shah et al. 2024).
Reads each K and V row once a tile of rows; writes ``out`` and ``lse`` of active rows.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.
# ruff: noqa: SIM102

from __future__ import annotations

from pagetile.backends.hopper import facts as fact
from pagetile.backends.hopper import notes as memo
from pagetile.backends.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from pagetile.backends.hopper.device import LOG2E, clear_values, edit, finish, hide, hide_bad, row_range, softmax_step
from pagetile.backends.hopper.loading import cache_role, query_role
from pagetile.backends.hopper.tiles import schedule

ROWS = gl.constexpr(64)
"""Rows of one consumer warpgroup."""

SIZES = (
    "lse_head", "lse_token", "table_row", "slope_seq", "num_seqs", "num_cols", "num_blocks", "kv_heads", "num_items",
    "left", "right", "min_q",
)  # fmt: skip
"""Integers that differ from step to step, or say nothing about alignment: no value of theirs compiles a kernel anew."""


@gluon.jit
def weigh(p, values, acc, part: gl.constexpr):
    """Start ``acc += p @ values``."""
    weights = gl.convert_layout(p.to(values.dtype), part, assert_trivial=True)
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def consume_span(begin, end, last, count, step, state, q, k_s, v_s, bars, tokens, rows, bad, facts, note_at, score,
                 slope, position, PAGE: gl.constexpr, IDS: gl.constexpr, BOX: gl.constexpr, LEFT: gl.constexpr,
                 MASKED: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, PRESCALE: gl.constexpr,
                 TAKE_TURNS: gl.constexpr):  # fmt: skip
    """Tiles ``[begin, end)`` of a tile's ``count``: scores of this one, then values of the one before it.

    The wait for the next keys stands between the exponentials and the wait for the values: a branch there keeps
    ptxas from moving the second wait above the first.
    """
    p, peak, total, acc = state
    k_full, k_empty, v_full, v_empty = bars
    STAGES: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[1]
    scores: gl.constexpr = p.type.layout
    sums: gl.constexpr = acc.type.layout
    part: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout=scores)
    for i in range(begin, end):
        at = step + i
        stage = at % STAGES
        before = (at - 1) % STAGES
        after = at + 1
        if TAKE_TURNS:
            mbarrier.wait(tokens[0], at & 1)
        s_ = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((at - 1) // STAGES) & 1)
        acc_ = weigh(p, v_s.index(before), acc, part)
        if TAKE_TURNS:
            mbarrier.arrive(tokens[1], count=1)
        s = warpgroup_mma_wait(1, deps=(s_,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        start = (last - 1 - i) * KEYS
        s = edit(s, start, score, slope, position, SOFTCAP, ALIBI, PRESCALE)
        if MASKED:
            s = hide(s, start, rows, LEFT)
            if bad != 0:
                s = hide_bad(s, start, facts, note_at, PAGE, IDS, BOX)
        unit = score[0]
        if SOFTCAP or ALIBI or PRESCALE:
            unit = 1.0
        p, peak, total, decay = softmax_step(s, peak, total, unit, MASKED)
        mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1, pred=i + 1 < count)
        acc = warpgroup_mma_wait(0, deps=(acc_,))
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, sums), assert_trivial=True)[:, None]
    return p, peak, total, acc


@gluon.jit
def first_scores(last, count, step, q, k_s, bars, tokens, rows, bad, facts, note_at, score, slope, position,
                 peak, total, PAGE: gl.constexpr, IDS: gl.constexpr, BOX: gl.constexpr, LEFT: gl.constexpr,
                 SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, PRESCALE: gl.constexpr,
                 TAKE_TURNS: gl.constexpr):  # fmt: skip
    """The last tile of keys, which is always masked: its weights and the state without its values."""
    k_full, k_empty, _, _ = bars
    STAGES: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout=scores)
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    if TAKE_TURNS:
        mbarrier.wait(tokens[0], step & 1)
    s_ = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    if TAKE_TURNS:
        mbarrier.arrive(tokens[1], count=1)
    s = warpgroup_mma_wait(0, deps=(s_,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    start = (last - 1) * KEYS
    s = edit(s, start, score, slope, position, SOFTCAP, ALIBI, PRESCALE)
    s = hide(s, start, rows, LEFT)
    if bad != 0:
        s = hide_bad(s, start, facts, note_at, PAGE, IDS, BOX)
    unit = score[0]
    if SOFTCAP or ALIBI or PRESCALE:
        unit = 1.0
    p, peak, total, _ = softmax_step(s, peak, total, unit, True)
    after = step + 1
    mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1, pred=count > 1)
    return p, peak, total


@gluon.jit
def store_tile(acc, factor, staged, row0, tokens, head, out, out_token, out_head, WG: gl.constexpr,
               PACKED: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr):  # fmt: skip
    """Rows of one warpgroup, divided and rounded, through its query rows in shared memory to ``out``."""
    WIDE: gl.constexpr = acc.shape[1]
    sums: gl.constexpr = acc.type.layout
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, sums), assert_trivial=True)[:, None]
    target = staged.slice(0, WIDE, 1)
    target.store(acc.to(staged.dtype))
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [gl.num_warps(), 1], [1, 0])
    o = target.load(wide)
    row = WG * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    element = gl.arange(0, WIDE, layout=gl.SliceLayout(0, wide))
    active = (row // PACKED < tokens) & (row % PACKED < GROUP)
    at = (row0 + row // PACKED).to(gl.int64) * out_token + (head * GROUP + row % PACKED).to(gl.int64) * out_head
    mask = active[:, None]
    if DV < WIDE:
        mask = mask & (element < DV)[None, :]
    gl.store(out + at[:, None] + element[None, :], o, mask=mask)


@gluon.jit
def consume(notes, note_full, note_empty, facts, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            mine, other, out, out_token, out_head, scale, cap, WG: gl.constexpr, PACKED: gl.constexpr,
            GROUP: gl.constexpr, DV: gl.constexpr, PAGE: gl.constexpr, IDS: gl.constexpr, BOX: gl.constexpr,
            LEFT: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, PRESCALE: gl.constexpr,
            SINKS: gl.constexpr, LSE: gl.constexpr, TAKE_TURNS: gl.constexpr):  # fmt: skip
    """Role: 64 rows of every tile, from scores to the stored result."""
    STAGES: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[1]
    WIDE: gl.constexpr = v_s.shape[2]
    QUERIES: gl.constexpr = q_s.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    part: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    bars = (k_full, k_empty, v_full, v_empty)
    tokens_ = (mine, other)
    r = WG * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores))
    step = gl.program_id(0) * 0
    turn = step
    note = memo.read_note(notes, note_full, turn)
    while memo.entry(note, memo.END) != 0:
        note_at = (notes, note_full, turn)
        last, count, bad = memo.entry(note, memo.TILE) + 1, memo.entry(note, memo.COUNT), memo.entry(note, memo.BAD)
        masked, plain = memo.entry(note, memo.EDGE_A), memo.entry(note, memo.EDGE_B)
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
        peak = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores))
        total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, scores))
        acc = gl.zeros([ROWS, WIDE], gl.float32, layout=sums)

        slot = turn % QUERIES
        q = q_s.index(slot).slice(WG * ROWS, ROWS, 0)
        if last * KEYS > memo.entry(note, memo.SEQ_LEN):
            mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
            clear_values(v_s, step % STAGES, (last - 1) * KEYS, note_at)
        mbarrier.wait(q_full.index(slot), (turn // QUERIES) & 1)
        p, peak, total = first_scores(
            last, count, step, q, k_s, bars, tokens_, rows, bad, facts, note_at, (scale, cap), slope, position, peak,
            total, PAGE, IDS, BOX, LEFT, SOFTCAP, ALIBI, PRESCALE, TAKE_TURNS,
        )  # fmt: skip
        state = (p, peak, total, acc)
        state = consume_span(
            1, masked, last, count, step, state, q, k_s, v_s, bars, tokens_, rows, bad, facts, note_at, (scale, cap),
            slope, position, PAGE, IDS, BOX, LEFT, True, SOFTCAP, ALIBI, PRESCALE, TAKE_TURNS,
        )  # fmt: skip
        state = consume_span(
            masked, plain, last, count, step, state, q, k_s, v_s, bars, tokens_, rows, bad, facts, note_at,
            (scale, cap), slope, position, PAGE, IDS, BOX, LEFT, False, SOFTCAP, ALIBI, PRESCALE, TAKE_TURNS,
        )  # fmt: skip
        if LEFT:
            state = consume_span(
                plain, count, last, count, step, state, q, k_s, v_s, bars, tokens_, rows, bad, facts, note_at,
                (scale, cap), slope, position, PAGE, IDS, BOX, LEFT, True, SOFTCAP, ALIBI, PRESCALE, TAKE_TURNS,
            )  # fmt: skip
        p, peak, total, acc = state
        step += count
        stage = (step - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
        if LEFT:
            if (last - count) * KEYS < memo.entry(memo.read_note(notes, note_full, turn), memo.LO):
                clear_values(v_s, stage, (last - count) * KEYS, note_at)
        acc_ = weigh(p, v_s.index(stage), acc, part)
        # read again, so that no register holds it through the loops
        note = memo.read_note(notes, note_full, turn)
        head, row0, tokens = memo.entry(note, memo.HEAD), memo.entry(note, memo.ROW), memo.entry(note, memo.TOKENS)
        active = (r // PACKED < tokens) & (r % PACKED < GROUP)
        query_head = head * GROUP + r % PACKED
        factor, result = finish(peak, total, query_head, active, fact.pointer(facts, fact.SINKS, gl.float32), SINKS)
        if LSE:
            at = (row0 + r // PACKED) * fact.stride(facts, fact.LSE_TOKEN)
            at += query_head * fact.stride(facts, fact.LSE_HEAD)
            gl.store(fact.pointer(facts, fact.LSE, gl.float32) + at, result, mask=active)
        acc = warpgroup_mma_wait(0, deps=(acc_,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        store_tile(acc, factor, q, row0, tokens, head, out, out_token, out_head, WG, PACKED, GROUP, DV)
        fence_async_shared()
        mbarrier.arrive(q_empty.index(slot), count=1)
        memo.drop_note(note_empty, turn)
        turn += 1
        note = memo.read_note(notes, note_full, turn)


@gluon.jit(do_not_specialize=SIZES)
def prefill_kernel(q_map, k_map, v_map, out, lse, q_loc, key_lens, table, key_starts, slopes, sinks, counters, error,
                   out_token, out_head, lse_head, lse_token, table_row, slope_seq, num_seqs, num_cols, num_blocks,
                   kv_heads, num_items, left, right, min_q, scale, cap, GROUP: gl.constexpr, PACKED: gl.constexpr,
                   DV: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
                   QUERIES: gl.constexpr, SECTION: gl.constexpr, LEFT: gl.constexpr, KEY_STARTS: gl.constexpr,
                   SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, PRESCALE: gl.constexpr, SINKS: gl.constexpr,
                   LSE: gl.constexpr, TAKE_TURNS: gl.constexpr, AFTER: gl.constexpr,
                   CONSUMER_REGS: gl.constexpr, WORKER_REGS: gl.constexpr):  # fmt: skip
    """Sequences with ``q_len > min_q``; the decode kernel takes the others. All strides are in elements.

    ``AFTER``: launched while the kernel before it on the stream still runs, and ends after it.
    """
    dtype: gl.constexpr = k_map.dtype
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(
        dtype, [QUERIES, 2 * ROWS, q_map.block_type.shape[2]], gl.NVMMASharedLayout(128, 16, 2)
    )
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
    tokens = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    for i in gl.static_range(2):
        mbarrier.init(note_full.index(i), count=1)
        mbarrier.init(note_empty.index(i), count=5)
        mbarrier.init(tokens.index(i), count=1)
    for i in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fact.leave_all(
        facts, q_loc, key_lens, key_starts, num_seqs, table, table_row, num_cols, num_blocks, left, right, kv_heads,
        min_q, counters, num_items, error, lse, lse_head, lse_token, sinks, slopes, slope_seq,
    )  # fmt: skip
    fence_async_shared()
    if TAKE_TURNS:
        mbarrier.arrive(tokens.index(0), count=1)
    ids: gl.constexpr = table.dtype.element_ty
    lefty: gl.constexpr = LEFT or KEY_STARTS

    # fmt: off
    gl.warp_specialize([
        (consume, (notes, note_full, note_empty, facts, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full,
                   v_empty, tokens.index(0), tokens.index(1), out, out_token, out_head, scale, cap, 0, PACKED, GROUP,
                   DV, PAGE, ids, BOX, lefty, SOFTCAP, ALIBI, PRESCALE, SINKS, LSE, TAKE_TURNS)),
        (consume, (notes, note_full, note_empty, facts, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full,
                   v_empty, tokens.index(1), tokens.index(0), out, out_token, out_head, scale, cap, 1, PACKED, GROUP,
                   DV, PAGE, ids, BOX, lefty, SOFTCAP, ALIBI, PRESCALE, SINKS, LSE, TAKE_TURNS)),
        (query_role, (notes, note_full, note_empty, q_map, q_s, q_full, q_empty, GROUP, PACKED)),
        (cache_role, (notes, note_full, note_empty, facts, k_map, k_s, k_full, k_empty, PAGE, ids, BOX, -1)),
        (cache_role, (notes, note_full, note_empty, facts, v_map, v_s, v_full, v_empty, PAGE, ids, BOX, -1)),
        (schedule, (notes, note_full, note_empty, facts, 2 * ROWS // PACKED, SECTION, KEYS, PAGE, ids, lefty,
                    KEY_STARTS, AFTER)),
    ], [4, 1, 1, 1, 1], [CONSUMER_REGS, WORKER_REGS, WORKER_REGS, WORKER_REGS, WORKER_REGS])
    # fmt: on
