"""The scheduling role of the decode kernel: this program's stretch of all key tiles, a piece at a time.

The tiles of sequence 0's first KV head come first, then those of its second, and so on; program p takes the tiles
``[p * share, (p + 1) * share)``. A piece is what of a stretch belongs to one (sequence, KV head) pair.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

from pagetile.backends.hopper import facts as fact
from pagetile.backends.hopper import notes as memo
from pagetile.backends.hopper.compat import gl, gluon
from pagetile.backends.hopper.device import NO_COLUMN, first_bad_column, key_range, report, sequence

CHUNK = gl.constexpr(128)
"""Sequences that the scheduler looks at in one step."""


@gluon.jit
def tiles_of(lo, hi, q_len, max_q, KEYS: gl.constexpr):
    """Key tiles of a sequence for each KV head: at least one if it is ours, else none."""
    tiles = gl.maximum((hi + KEYS - 1) // KEYS - lo // KEYS, 1)
    return gl.where((q_len > 0) & (q_len <= max_q), tiles, 0)


@gluon.jit
def look_up(seq, facts, LEFT: gl.constexpr, KEY_STARTS: gl.constexpr):
    """``(q_start, q_len, seq_len, first_key, key ranges)`` of a sequence or of a vector of them."""
    q_start, q_len, seq_len, first_key = sequence(
        seq, fact.pointer(facts, fact.Q_LOC, gl.int32), fact.pointer(facts, fact.KEY_LENS, gl.int32),
        fact.pointer(facts, fact.KEY_STARTS, gl.int32), KEY_STARTS,
    )  # fmt: skip
    left, right = fact.number(facts, fact.LEFT), fact.number(facts, fact.RIGHT)
    ranges = key_range(seq_len - q_len, q_len, seq_len, first_key, left, right, LEFT)
    return q_start, q_len, seq_len, first_key, ranges


@gluon.jit
def chunk_of(base, facts, KEYS: gl.constexpr, LEFT: gl.constexpr, KEY_STARTS: gl.constexpr):
    """Tiles over all KV heads of the sequences ``[base, base + CHUNK)``, and which of these exist."""
    lanes: gl.constexpr = gl.BlockedLayout([CHUNK // 32], [32], [1], [0])
    index = base + gl.arange(0, CHUNK, layout=lanes)
    real = index < fact.number(facts, fact.NUM_SEQS)
    _, q_len, _, _, ranges = look_up(gl.where(real, index, 0), facts, LEFT, KEY_STARTS)
    tiles = tiles_of(ranges[0], ranges[1], q_len, fact.number(facts, fact.SHARE), KEYS)
    return gl.where(real, tiles * fact.number(facts, fact.KV_HEADS), 0), real


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def find_stretch(facts, KEYS: gl.constexpr, LEFT: gl.constexpr, KEY_STARTS: gl.constexpr):
    """``(begin, end, share, seq, start)``: this program's stretch of the flat list of ``share`` tiles a program, and
    the sequence it begins in, whose tiles begin at ``start``."""
    num_seqs = fact.number(facts, fact.NUM_SEQS)
    total = num_seqs * 0
    for base in range(0, num_seqs, CHUNK):
        tiles, _ = chunk_of(base, facts, KEYS, LEFT, KEY_STARTS)
        total += gl.sum(tiles, axis=0)
    programs = gl.num_programs(0)
    share = gl.maximum((total + programs - 1) // programs, fact.number(facts, fact.WORK))
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, total)
    seq = num_seqs * 0
    start = num_seqs * 0
    before = num_seqs * 0
    if begin < end:
        for base in range(0, num_seqs, CHUNK):
            tiles, real = chunk_of(base, facts, KEYS, LEFT, KEY_STARTS)
            sums = before + gl.associative_scan(tiles, 0, add)
            passed = real & (sums <= begin)
            seq += gl.sum(passed.to(gl.int32), axis=0)
            start = gl.maximum(start, gl.max(gl.where(passed, sums, 0), axis=0))
            before += gl.sum(tiles, axis=0)
    return begin, end, share, seq, start


@gluon.jit
def describe(seq, head, tile, count, start, share, looked_up, tiles, facts, KEYS: gl.constexpr, PAGE: gl.constexpr,
             IDS: gl.constexpr, LEFT: gl.constexpr):  # fmt: skip
    """The note of one piece, ``count`` tiles from ``tile`` on of a pair, and the first bad column of its keys."""
    q_start, q_len, seq_len, first_key, ranges = looked_up
    lo, hi, full_lo, full_hi = ranges
    first = lo // KEYS + tile
    row = fact.pointer(facts, fact.TABLE, IDS) + seq * fact.stride(facts, fact.TABLE_ROW)
    piece_lo, piece_hi = gl.maximum(lo, first * KEYS), gl.minimum(hi, (first + count) * KEYS)
    SCAN: gl.constexpr = 64 if PAGE <= 32 else 32
    column = first_bad_column(
        row, piece_lo, piece_hi, fact.number(facts, fact.NUM_COLS), fact.number(facts, fact.NUM_BLOCKS), PAGE, SCAN
    )
    bad = column != NO_COLUMN
    edge_a = count * 0
    if LEFT:
        edge_a = gl.maximum(gl.minimum((full_lo + KEYS - 1) // KEYS - first, count), 0)
    edge_b = gl.maximum(gl.minimum(full_hi // KEYS - first, count), edge_a)
    note = memo.put(memo.put(memo.blank(), memo.END, 1), memo.SEQ, seq)
    note = memo.put(memo.put(note, memo.HEAD, head), memo.ROW, q_start)
    note = memo.put(memo.put(note, memo.TOKENS, q_len), memo.POSITION, seq_len - q_len)
    note = memo.put(memo.put(note, memo.SEQ_LEN, seq_len), memo.FIRST_KEY, first_key)
    note = memo.put(memo.put(note, memo.LO, lo), memo.HI, hi)
    note = memo.put(memo.put(note, memo.TILE, first), memo.COUNT, count)
    note = memo.put(memo.put(note, memo.EDGE_A, edge_a), memo.EDGE_B, gl.where(bad, edge_a, edge_b))
    note = memo.put(memo.put(note, memo.BAD, bad.to(gl.int32)), memo.TILES, tiles)
    return memo.put(memo.put(note, memo.START, start), memo.SHARE, share), column


@gluon.jit
def schedule(notes, note_full, note_empty, facts, KEYS: gl.constexpr, PAGE: gl.constexpr, IDS: gl.constexpr,
             LEFT: gl.constexpr, KEY_STARTS: gl.constexpr):  # fmt: skip
    """Role: walk this program's stretch, a pair at a time."""
    at, end, share, seq, start = find_stretch(facts, KEYS, LEFT, KEY_STARTS)
    turn = at * 0
    while at < end:
        looked_up = look_up(seq, facts, LEFT, KEY_STARTS)
        ranges = looked_up[4]
        tiles = tiles_of(ranges[0], ranges[1], looked_up[1], fact.number(facts, fact.SHARE), KEYS)
        stop = gl.minimum(start + tiles * fact.number(facts, fact.KV_HEADS), end)
        while at < stop:
            head = (at - start) // tiles
            tile = at - start - head * tiles
            count = gl.minimum(tiles - tile, end - at)
            note, column = describe(
                seq, head, tile, count, at - tile, share, looked_up, tiles, facts, KEYS, PAGE, IDS, LEFT
            )
            memo.leave_note(notes, note_full, note_empty, turn, note)
            if column != NO_COLUMN:
                row = fact.pointer(facts, fact.TABLE, IDS) + seq * fact.stride(facts, fact.TABLE_ROW)
                report(
                    fact.pointer(facts, fact.ERROR, gl.int64), seq, column, row, fact.number(facts, fact.NUM_COLS),
                    fact.number(facts, fact.NUM_BLOCKS),
                )  # fmt: skip
            turn += 1
            at += count
        start += tiles * fact.number(facts, fact.KV_HEADS)
        seq += 1
    memo.leave_note(notes, note_full, note_empty, turn, memo.blank())
