"""The scheduling role of the prefill kernel: which tile of query rows comes next, and what it sees.

Sequence s owns the slots from ``q_loc[s] // TOKENS + s`` on, for each KV head: enough for any lengths, at most one
idle each, and found by bisection. Items are dealt out by a counter in device memory.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

from pagetile.backends.hopper import facts as fact
from pagetile.backends.hopper import notes as memo
from pagetile.backends.hopper.compat import gdc_wait, gl, gluon
from pagetile.backends.hopper.device import NO_COLUMN, first_bad_column, key_range, report, sequence


@gluon.jit
def find_slot(x, q_loc, num_seqs, TOKENS: gl.constexpr):
    """The sequence that owns slot ``x``: sequence s owns those from ``q_loc[s] // TOKENS + s`` on."""
    lower = x * 0
    upper = num_seqs
    while upper - lower > 1:
        middle = (lower + upper) // 2
        below = gl.load(q_loc + middle) // TOKENS + middle <= x
        lower = gl.where(below, middle, lower)
        upper = gl.where(below, upper, middle)
    return lower


@gluon.jit
def locate_tile(item, q_loc, num_seqs, kv_heads, min_q, TOKENS: gl.constexpr, SECTION: gl.constexpr):
    """``(seq, KV head, first token, whether there is such a tile)`` of a work item.

    ``SECTION`` heads at a time, so that their keys stay in the L2 cache; within them the last tokens, which see most,
    come first.
    """
    seq = find_slot(item // kv_heads, q_loc, num_seqs, TOKENS)
    q_start = gl.load(q_loc + seq)
    q_len = gl.load(q_loc + seq + 1) - q_start
    rest = item - (q_start // TOKENS + seq) * kv_heads
    levels = gl.maximum((q_len + TOKENS - 1) // TOKENS, 1)
    section = rest // (levels * SECTION)
    rest -= section * levels * SECTION
    width = gl.minimum(SECTION, kv_heads - section * SECTION)
    level = rest // gl.maximum(width, 1)
    head = section * SECTION + rest - level * width
    real = (q_len > min_q) & (width > 0) & (level < levels)
    return seq, head, (levels - 1 - level) * TOKENS, real


@gluon.jit
def describe(seq, head, token, facts, KEYS: gl.constexpr, PAGE: gl.constexpr, IDS: gl.constexpr, LEFT: gl.constexpr,
             KEY_STARTS: gl.constexpr, TOKENS: gl.constexpr):  # fmt: skip
    """The note of one tile, and the first bad column of its keys."""
    q_loc, key_lens = fact.pointer(facts, fact.Q_LOC, gl.int32), fact.pointer(facts, fact.KEY_LENS, gl.int32)
    q_start, q_len, seq_len, first_key = sequence(
        seq, q_loc, key_lens, fact.pointer(facts, fact.KEY_STARTS, gl.int32), KEY_STARTS
    )
    tokens = gl.minimum(q_len - token, TOKENS)
    position = token + seq_len - q_len
    left, right = fact.number(facts, fact.LEFT), fact.number(facts, fact.RIGHT)
    lo, hi, full_lo, full_hi = key_range(position, tokens, seq_len, first_key, left, right, LEFT)
    note = memo.put(memo.blank(), memo.END, 1)
    note = memo.put(memo.put(note, memo.SEQ, seq), memo.HEAD, head)
    note = memo.put(memo.put(note, memo.ROW, q_start + token), memo.TOKENS, tokens)
    note = memo.put(memo.put(note, memo.POSITION, position), memo.SEQ_LEN, seq_len)
    note = memo.put(memo.put(memo.put(note, memo.FIRST_KEY, first_key), memo.LO, lo), memo.HI, hi)

    num_cols, num_blocks = fact.number(facts, fact.NUM_COLS), fact.number(facts, fact.NUM_BLOCKS)
    row = fact.pointer(facts, fact.TABLE, IDS) + seq * fact.stride(facts, fact.TABLE_ROW)
    SCAN: gl.constexpr = 64 if PAGE <= 32 else 32
    column = first_bad_column(row, lo, hi, num_cols, num_blocks, PAGE, SCAN)
    bad = column != NO_COLUMN
    first = lo // KEYS
    last = gl.maximum((hi + KEYS - 1) // KEYS, first + 1)
    count = last - first
    masked = gl.minimum(gl.maximum(last - gl.maximum(full_hi // KEYS, first), 1), count)
    masked = gl.where(bad, count, masked)
    plain = count
    if LEFT:
        plain = gl.maximum(gl.minimum(last - (full_lo + KEYS - 1) // KEYS, count), masked)
    note = memo.put(memo.put(note, memo.TILE, last - 1), memo.COUNT, count)
    note = memo.put(memo.put(note, memo.EDGE_A, masked), memo.EDGE_B, plain)
    return memo.put(note, memo.BAD, bad.to(gl.int32)), column


@gluon.jit
def schedule(notes, note_full, note_empty, facts, TOKENS: gl.constexpr, SECTION: gl.constexpr, KEYS: gl.constexpr,
             PAGE: gl.constexpr, IDS: gl.constexpr, LEFT: gl.constexpr, KEY_STARTS: gl.constexpr,
             AFTER: gl.constexpr):  # fmt: skip
    """Role: take work items from the counter until there are none; the last program to finish resets it."""
    item = gl.program_id(0)
    turn = item * 0
    while item < fact.number(facts, fact.WORK):
        seq, head, token, real = locate_tile(
            item, fact.pointer(facts, fact.Q_LOC, gl.int32), fact.number(facts, fact.NUM_SEQS),
            fact.number(facts, fact.KV_HEADS), fact.number(facts, fact.SHARE), TOKENS, SECTION,
        )  # fmt: skip
        if real:
            note, column = describe(seq, head, token, facts, KEYS, PAGE, IDS, LEFT, KEY_STARTS, TOKENS)
            memo.leave_note(notes, note_full, note_empty, turn, note)
            turn += 1
            if column != NO_COLUMN:
                row = fact.pointer(facts, fact.TABLE, IDS) + seq * fact.stride(facts, fact.TABLE_ROW)
                report(
                    fact.pointer(facts, fact.ERROR, gl.int64), seq, column, row, fact.number(facts, fact.NUM_COLS),
                    fact.number(facts, fact.NUM_BLOCKS),
                )  # fmt: skip
        counters = fact.pointer(facts, fact.COUNTERS, gl.int32)
        item = gl.num_programs(0) + gl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    memo.leave_note(notes, note_full, note_empty, turn, memo.blank())
    counters = fact.pointer(facts, fact.COUNTERS, gl.int32)
    done = gl.atomic_add(counters + 1, 1, sem="acq_rel", scope="gpu")
    if done == gl.num_programs(0) - 1:
        gl.atomic_xchg(counters, 0, sem="relaxed", scope="gpu")
        gl.atomic_xchg(counters + 1, 0, sem="relaxed", scope="gpu")
    if AFTER:
        gdc_wait()
