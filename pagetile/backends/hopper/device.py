"""What both kernels ask, one helper a question: which keys, where are they, may I see this key, what is my state.

Positions and lengths are int32; a block id goes to the copy engine as a coordinate, so no address is ever computed
for K and V, and an id outside the cache is filled with zeros instead of read. Scores are in base 2.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

from pagetile.backends.hopper import facts as fact
from pagetile.backends.hopper import notes as memo
from pagetile.backends.hopper.compat import fence_async_shared, gl, gluon, reinterpret

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
BAD_BLOCK = gl.constexpr(2)
NO_COLUMN = gl.constexpr(2147483647)


@gluon.jit
def key_range(pos0, tokens, seq_len, first_key, left, right, LEFT: gl.constexpr):
    """``(lo, hi, full_lo, full_hi)`` of ``tokens`` queries from position ``pos0`` on: keys that some of them see, and
    keys that all of them see; :func:`pagetile.contracts.visibility.visible_range`. ``lo <= hi`` always."""
    last = pos0 + tokens - 1
    hi = gl.maximum(gl.minimum(seq_len, last + right + 1), 0)
    full_hi = gl.maximum(gl.minimum(seq_len, pos0 + right + 1), 0)
    lo = gl.minimum(gl.maximum(first_key, 0), hi)
    full_lo = lo
    if LEFT:
        lo = gl.minimum(gl.maximum(lo, pos0 - left), hi)
        full_lo = gl.maximum(full_lo, last - left)
    return lo, hi, full_lo, full_hi


@gluon.jit
def row_range(position, seq_len, first_key, left, right, LEFT: gl.constexpr):
    """Half-open range of keys that the query at each position sees."""
    hi = gl.minimum(seq_len, position + right + 1)
    lo = gl.maximum(first_key, 0) + position * 0
    if LEFT:
        lo = gl.maximum(lo, position - left)
    return lo, hi


@gluon.jit
def sequence(seq, q_loc, key_lens, key_starts, KEY_STARTS: gl.constexpr):
    """``(q_start, q_len, seq_len, first_key)`` of one sequence or of a vector of them."""
    q_start = gl.load(q_loc + seq)
    q_len = gl.load(q_loc + seq + 1) - q_start
    seq_len = gl.maximum(gl.load(key_lens + seq), 0)
    first_key = q_start * 0
    if KEY_STARTS:
        first_key = gl.load(key_starts + seq)
    return q_start, q_len, seq_len, first_key


@gluon.jit
def first_bad_column(row, lo, hi, num_cols, num_blocks, PAGE: gl.constexpr, SCAN: gl.constexpr):
    """The first column that the keys ``[lo, hi)`` need and that names no block; else ``NO_COLUMN``. One warp."""
    lanes: gl.constexpr = gl.BlockedLayout([SCAN // 32], [32], [1], [0])
    found = gl.full([SCAN], NO_COLUMN, gl.int32, layout=lanes)
    if hi > lo:
        for base in range(lo // PAGE, (hi - 1) // PAGE + 1, SCAN):
            column = base + gl.arange(0, SCAN, layout=lanes)
            needed = column <= (hi - 1) // PAGE
            page = gl.load(row + column, mask=needed & (column < num_cols), other=-1)
            bad = needed & ((page < 0) | (page >= num_blocks))
            found = gl.minimum(found, gl.where(bad, column, NO_COLUMN))
    return gl.min(found, axis=0)


@gluon.jit
def report(error, seq, column, row, num_cols, num_blocks):
    """Leave the table entry ``[seq, column]`` in the sticky error word (the row's end counts as value -1)."""
    zero = gl.to_tensor(0).to(gl.int64)
    held = gl.atomic_cas(error, zero, zero + BAD_BLOCK)
    if held == 0:
        value = gl.load(row + column, mask=column < num_cols, other=-1)
        gl.store(error + 1, zero + seq)
        gl.store(error + 2, zero + column)
        gl.store(error + 3, zero + value)
        gl.store(error + 4, zero + num_blocks)


@gluon.jit
def keys_from(start, s):
    """The keys of the columns of ``s``, made anew at each use: kept through a loop they would fill the registers."""
    at = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    fresh = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)
    return start + fresh


@gluon.jit
def hide(s, start, rows, LEFT: gl.constexpr):
    """Scores of the keys from ``start`` on, with -inf where a row does not see them."""
    row_lo, row_hi = rows
    key = keys_from(start, s)
    s = gl.where(key[None, :] < row_hi[:, None], s, float("-inf"))
    if LEFT:
        s = gl.where(key[None, :] >= row_lo[:, None], s, float("-inf"))
    return s


@gluon.jit
def hide_bad(s, start, facts, note_at, PAGE: gl.constexpr, IDS: gl.constexpr, BOX: gl.constexpr):
    """Scores with -inf in the boxes whose id names no block; a box at a time, since one id is one scalar."""
    num_cols, num_blocks = fact.number(facts, fact.NUM_COLS), fact.number(facts, fact.NUM_BLOCKS)
    note = memo.read_note(note_at[0], note_at[1], note_at[2])
    lo, hi = memo.entry(note, memo.LO), memo.entry(note, memo.HI)
    row = fact.pointer(facts, fact.TABLE, IDS) + memo.entry(note, memo.SEQ) * fact.stride(facts, fact.TABLE_ROW)
    at = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    for i in gl.static_range(s.shape[1] // BOX):
        key = start + i * BOX
        column = key // PAGE
        wanted = (key + BOX > lo) & (key < hi) & (column < num_cols)
        page = gl.load(row + column, mask=wanted, other=-1)
        bad = (page < 0) | (page >= num_blocks)
        s = gl.where(((at // BOX == i) & bad)[None, :], float("-inf"), s)
    return s


@gluon.jit
def edit(s, start, score, slope, position, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, PRESCALE: gl.constexpr):
    """Scores in base 2 where something other than a positive factor stands between them and ``q @ k``.

    The hyperbolic tangent is ``1 - 2 / (1 + exp(2x))``: its absolute error is a float32 step at 1, its ends are exact.
    """
    scale, cap = score
    if SOFTCAP:
        ends = 1.0 + gl.exp2(s * (scale * 2.0 * LOG2E))
        ends = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [ends], dtype=gl.float32, is_pure=True, pack=1
        )
        s = cap - (2.0 * cap) * ends
    elif ALIBI or PRESCALE:
        s = s * scale
    if ALIBI:
        key = keys_from(start, s)
        s -= slope[:, None] * gl.abs(position[:, None] - key[None, :]).to(gl.float32)
    return s


@gluon.jit
def softmax_step(s, peak, total, unit, MASKED: gl.constexpr):
    """``(weights, peak, total, decay)`` after the scores ``s * unit``; ``MASKED``: a row may have seen nothing yet."""
    peak_new = gl.maximum(peak, gl.max(s, axis=1) * unit)
    safe = peak_new
    if MASKED:
        safe = gl.where(peak_new == float("-inf"), 0.0, peak_new)
    p = gl.exp2(s * unit - safe[:, None])
    decay = gl.exp2(peak - safe)
    return p, peak_new, total * decay + gl.sum(p, axis=1), decay


@gluon.jit
def clear_values(tiles, stage, key, note_at):
    """Zero the rows of a V tile, keys from ``key`` on, that are no keys of the sequence or below those of the note.

    They may be dead slots, and a weight of 0 does not stop a NaN that lies in one. Eight rows at a time, the unit of
    the swizzle, so that it takes few registers beside a state.
    """
    note = memo.read_note(note_at[0], note_at[1], note_at[2])
    lo, end = memo.entry(note, memo.LO), memo.entry(note, memo.SEQ_LEN)
    GROUPS: gl.constexpr = tiles.shape[1] // 8
    CHUNKS: gl.constexpr = tiles.shape[2] // 64
    shape: gl.constexpr = [tiles.shape[0] * CHUNKS * GROUPS, 8, 64]
    lanes: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    parts = reinterpret(tiles, tiles.dtype, shape, gl.NVMMASharedLayout(128, 16, 2))
    for group in range(GROUPS):
        first = key + group * 8
        if (first < lo) | (first + 8 > end):
            j = first + gl.arange(0, 8, layout=gl.SliceLayout(1, lanes))
            live = ((j >= lo) & (j < end))[:, None]
            for chunk in gl.static_range(CHUNKS):
                part = parts.index((stage * CHUNKS + chunk) * GROUPS + group)
                part.store(gl.where(live, part.load(lanes), 0.0))
    fence_async_shared()


@gluon.jit
def add_sink(peak, total, sink):
    """Let a sink (a logit in natural units) join the denominator: ``(peak, total, decay)``."""
    sink = sink * LOG2E
    peak_new = gl.maximum(peak, sink)
    safe = gl.where(peak_new == float("-inf"), 0.0, peak_new)
    decay = gl.exp2(peak - safe)
    return peak_new, total * decay + gl.exp2(sink - safe), decay


@gluon.jit
def finish(peak, total, head, active, sinks, SINKS: gl.constexpr):
    """``(factor of the weighted sum, natural log-sum-exp)`` of a state; 0 and -inf (or the sink) where nothing was
    seen."""
    nothing = total == 0.0
    factor = gl.full_like(total, 1.0)
    if SINKS:
        sink = gl.load(sinks + head, mask=active, other=float("-inf"))
        peak, total, factor = add_sink(peak, total, sink)
    safe = gl.where(total == 0.0, 1.0, total)
    factor = gl.where(nothing, 0.0, factor / safe)
    result = gl.where(total == 0.0, float("-inf"), (peak + gl.log2(safe)) * LN2)
    if SINKS:
        result = gl.where(nothing, sink, result)
    return factor, result
