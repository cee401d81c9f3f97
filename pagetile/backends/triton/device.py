"""Device-side helpers, one a question: where is this token, which keys may this row see, what is my softmax state.

Every kernel of this backend quotes these. The arithmetic is that of :mod:`pagetile.contracts.geometry` (in 64 bits
from the block id on) and of :mod:`pagetile.contracts.visibility`; tests hold the kernels to those two rooms.

Scores live in base 2 (multiplied by ``LOG2E``), since the hardware's exponential is ``2 ** x``; a state turns back
into natural units when it is stored.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.
# ruff: noqa: RUF059, SIM108

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.quantised import OF_TOKENS, decode, scale_values

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
BAD_SLOT = tl.constexpr(1)
BAD_BLOCK = tl.constexpr(2)
NO_COLUMN = tl.constexpr(2147483647)

SIZES = (
    "table_row", "slope_seq", "lse_head", "lse_token", "out_lse_head", "out_lse_token", "a_lse_head", "a_lse_token",
    "b_lse_head", "b_lse_token", "num_seqs", "num_cols", "num_blocks", "block_size", "num_rows", "num_slots", "left",
    "right", "min_q", "max_q", "programs", "min_tiles", "head_slots", "query_tiles", "max_chunks", "ks_row", "ks_token",
    "ks_head", "vs_row", "vs_token", "vs_head",
)  # fmt: skip
"""Integers that differ from step to step, or say nothing about alignment: no value of theirs compiles a kernel anew."""


@triton.jit
def split_position(position, block_size, LOG2_BLOCK: tl.constexpr):
    """``(position // block_size, position % block_size)``; a shift when the block size is a power of two."""
    if LOG2_BLOCK >= 0:
        return position >> LOG2_BLOCK, position & ((1 << LOG2_BLOCK) - 1)
    return position // block_size, position % block_size


@triton.jit
def locate(position, wanted, place, PAGED: tl.constexpr, LOG2_BLOCK: tl.constexpr, TRUSTED: tl.constexpr):
    """Where the tokens at these positions are: ``(block, offset, usable)``, all in 64 bits.

    ``place`` is ``(table_row, num_cols, num_blocks, block_size, key_base)``. A key is usable when it is wanted, the
    table row has its column and the id there is a block of the cache; nothing else is ever dereferenced.
    ``TRUSTED`` says that a scan found every id of the range good.
    """
    table_row, num_cols, num_blocks, block_size, key_base = place
    if PAGED:
        column, offset = split_position(position, block_size, LOG2_BLOCK)
        if TRUSTED:
            block = tl.load(table_row + column).to(tl.int64)
            usable = wanted
        else:
            inside = wanted & (column < num_cols)
            block = tl.load(table_row + column, mask=inside, other=-1).to(tl.int64)
            usable = inside & (block >= 0) & (block < num_blocks)
            block = tl.where(usable, block, 0)
        return block, offset.to(tl.int64), usable
    return tl.zeros_like(position).to(tl.int64), key_base + position.to(tl.int64), wanted


@triton.jit
def page_ids(start, key_hi, place, LOG2_BLOCK: tl.constexpr, PAGES: tl.constexpr):
    """The ``PAGES`` table entries from the one of ``start`` on, as scalars; -1 where the keys below ``key_hi`` end.

    They are the bare entries: whoever uses them checks them, so that nothing waits for these loads before then.
    """
    table_row, num_cols, num_blocks, block_size, key_base = place
    first = start >> LOG2_BLOCK
    end = tl.minimum(num_cols, tl.cdiv(key_hi, 1 << LOG2_BLOCK))
    if PAGES == 1:
        ids = (tl.load(table_row + first, mask=first < end, other=-1),)
    else:
        half: tl.constexpr = PAGES // 2
        ids = page_ids(start, key_hi, place, LOG2_BLOCK, half) + page_ids(
            start + (half << LOG2_BLOCK), key_hi, place, LOG2_BLOCK, half
        )
    return ids


@triton.jit
def page_of_each_key(ids, num_blocks, TILE: tl.constexpr, LOG2_BLOCK: tl.constexpr, PAGES: tl.constexpr):
    """``(block, usable)`` of the keys of a tile that starts at a page or lies within one; block 0 if not usable."""
    page = tl.arange(0, TILE) >> LOG2_BLOCK
    block = tl.zeros([TILE], tl.int64) + ids[0]
    for i in tl.static_range(1, PAGES):
        block = tl.where(page >= i, ids[i], block)
    usable = (block >= 0) & (block < num_blocks)
    return tl.where(usable, block, 0), usable


@triton.jit
def first_bad_column(lo, hi, place, LOG2_BLOCK: tl.constexpr, SCAN: tl.constexpr):
    """The first column of this row that the keys ``[lo, hi)`` need and that names no block; else ``NO_COLUMN``."""
    table_row, num_cols, num_blocks, block_size, _ = place
    found = tl.full([SCAN], NO_COLUMN, tl.int32)
    if hi > lo:
        start, start_offset = split_position(lo, block_size, LOG2_BLOCK)
        last, last_offset = split_position(hi - 1, block_size, LOG2_BLOCK)
        for base in range(start, last + 1, SCAN):
            column = base + tl.arange(0, SCAN)
            needed = column <= last
            block = tl.load(table_row + column, mask=needed & (column < num_cols), other=-1).to(tl.int64)
            bad = needed & ((block < 0) | (block >= num_blocks))
            found = tl.minimum(found, tl.where(bad, column, NO_COLUMN))
    return tl.min(found, 0)


@triton.jit
def report(error_ptr, kind, row, column, value, limit):
    """Leave the first offender in the device's sticky error word: ``[kind, row, column, value, limit]``, int64."""
    held = tl.atomic_cas(error_ptr, tl.zeros([], tl.int64), tl.zeros([], tl.int64) + kind)
    if held == 0:
        zero = tl.zeros([], tl.int64)
        tl.store(error_ptr + 1, zero + row)
        tl.store(error_ptr + 2, zero + column)
        tl.store(error_ptr + 3, zero + value)
        tl.store(error_ptr + 4, zero + limit)


@triton.jit
def report_bad_column(error_ptr, seq, column, place):
    """Report the table entry at ``[seq, column]`` (the row's end counts as value -1)."""
    table_row, num_cols, num_blocks, _, _ = place
    value = tl.load(table_row + column, mask=column < num_cols, other=-1)
    report(error_ptr, BAD_BLOCK, seq, column, value, num_blocks)


@triton.jit
def visible_range(token, q_len, seq_len, first_key, window, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Half-open range of keys that a query token sees; :func:`pagetile.contracts.visibility.visible_range`."""
    left, right = window
    position = token + seq_len - q_len
    lo = first_key + tl.zeros_like(position)
    if LEFT:
        lo = tl.maximum(lo, position - left)
    hi = seq_len + tl.zeros_like(position)
    if RIGHT:
        hi = tl.minimum(hi, position + right + 1)
    return tl.maximum(lo, 0), tl.maximum(hi, 0)


@triton.jit
def tanh(x):
    """Hyperbolic tangent that never overflows and keeps float32 precision near 0 (odd series below 1/4)."""
    y = x * x
    series = 62.0 / 2835.0 + y * (-1382.0 / 155925.0 + y * (21844.0 / 6081075.0))
    series = x + x * y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * series)))
    decay = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def load_rows(ptr, offsets, usable, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Elements ``[FIRST, FIRST + WIDTH)`` of rows at ``offsets``, 0 past ``SIZE`` and in rows that are not usable."""
    element = FIRST + tl.arange(0, WIDTH)
    pointers = ptr + offsets[:, None] + element[None, :]  # [rows, elements]
    if MASKED:
        if FIRST + WIDTH > SIZE:
            return tl.load(pointers, mask=usable[:, None] & (element < SIZE)[None, :], other=0.0)
        return tl.load(pointers, mask=usable[:, None], other=0.0)
    if FIRST + WIDTH > SIZE:
        return tl.load(pointers, mask=(element < SIZE)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def weigh_values(acc, p, v, seen, GUARD: tl.constexpr):
    """``acc + p @ v``, exact about NaN: with ``GUARD``, a value that is not finite reaches only rows that see its key.

    A weight of 0 does not stop a NaN (``0 * NaN``), so in a tile that some rows see in part the product runs over
    the finite values, and a second product of 0/1 matrices counts, for each row and element, the others it sees.
    """
    if GUARD:
        wide = v.to(tl.float32)
        bad = (wide - wide) != 0.0
        acc = tl.dot(p.to(v.dtype), tl.where(bad, 0.0, wide).to(v.dtype), acc, input_precision="ieee")
        if tl.max(tl.max(bad.to(tl.int32), 1), 0) > 0:
            hits = tl.dot(seen.to(v.dtype), bad.to(v.dtype), input_precision="ieee")
            acc = tl.where(hits > 0.0, float("nan"), acc)
        return acc
    return tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def find_sequence(seq, q_loc, key_lens, key_starts, PAGED: tl.constexpr, KEY_STARTS: tl.constexpr):
    """``(q_start, q_len, seq_len, first_key, key_base)`` of one sequence, or of a vector of them.

    ``key_lens`` holds lengths ``[B]`` when paged and prefix sums ``[B + 1]`` when ragged.
    """
    q_start = tl.load(q_loc + seq)
    q_len = tl.load(q_loc + seq + 1) - q_start
    if PAGED:
        key_base = tl.zeros_like(q_start).to(tl.int64)
        seq_len = tl.load(key_lens + seq)
    else:
        key_base = tl.load(key_lens + seq).to(tl.int64)
        seq_len = tl.load(key_lens + seq + 1) - key_base.to(tl.int32)
    first_key = tl.zeros_like(q_start)
    if KEY_STARTS:
        first_key = tl.load(key_starts + seq)
    return q_start, q_len, tl.maximum(seq_len, 0), first_key, key_base


@triton.jit
def tile_rows(
    tile, head_tile, q_len, ROWS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr
):
    """``(token, head of the group, active)`` of a tile's rows: ``TOKENS`` tokens by ``HEADS`` heads of one group."""
    row = tl.arange(0, ROWS)
    token = tile * TOKENS + row // HEADS
    head = head_tile * HEADS + row % HEADS
    return token, head, (row < TOKENS * HEADS) & (token < q_len) & (head < GROUP)


@triton.jit
def tile_bounds(tile, q_len, seq_len, first_key, window, TOKENS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """``(lo, hi, full_lo, full_hi)``: the keys that some row of the tile sees, and those that all rows see."""
    first = tile * TOKENS
    last = tl.minimum(first + TOKENS, q_len) - 1
    lo, full_hi = visible_range(first, q_len, seq_len, first_key, window, LEFT, RIGHT)
    full_lo, hi = visible_range(last, q_len, seq_len, first_key, window, LEFT, RIGHT)
    return lo, hi, full_lo, full_hi


@triton.jit
def attend_tile(
    start,
    ids,
    state,
    query,
    rows,
    bounds,
    place,
    keys,
    values,
    score,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    TILE: tl.constexpr,
    PAGES: tl.constexpr,
    PAGED: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRESCALE: tl.constexpr,
    MASKED: tl.constexpr,
    GUARD: tl.constexpr,
):
    """Add the keys ``[start, start + TILE)`` to a softmax state ``(peak, total, acc, acc2)``.

    ``keys`` and ``values`` are ``(pointer, block and token stride, pointer, block and token stride of the scales)``.
    ``peak`` is the running maximum in base 2, ``total`` the denominator, ``acc`` (and ``acc2``, the second part of a
    split value head) the weighted sum. A row that sees none of the tile keeps its state bit for bit. Also returns which
    wanted keys had no usable block.
    """
    peak, total, acc, acc2 = state
    q, q2 = query
    position, row_lo, row_hi, slope = rows
    key_lo, key_hi = bounds
    k_ptr, k_block, k_token, k_scale, ks_row, ks_token = keys
    v_ptr, v_block, v_token, v_scale, vs_row, vs_token = values
    scale, cap = score

    j = start + tl.arange(0, TILE)
    wanted = (j >= key_lo) & (j < key_hi)
    if PAGES > 0:
        block, usable = page_of_each_key(ids, place[2], TILE, LOG2_BLOCK, PAGES)
        usable = usable & wanted
        offset = (j & ((1 << LOG2_BLOCK) - 1)).to(tl.int64)
    else:
        block, offset, usable = locate(j, wanted, place, PAGED, LOG2_BLOCK, not MASKED)
    k_at = block * k_block + offset * k_token
    v_at = block * v_block + offset * v_token

    k = decode(load_rows(k_ptr, k_at, usable, 0, D1, D, MASKED), q, KIND, NATIVE)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [rows, keys]
    if D2 > 0:
        k2 = decode(load_rows(k_ptr, k_at, usable, D1, D2, D, MASKED), q, KIND, NATIVE)
        s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
    if K_FORM == OF_TOKENS:
        s = s * tl.load(k_scale + block * ks_row + offset * ks_token, mask=usable, other=1.0)[None, :]

    unit = scale
    if SOFTCAP:
        s = cap * tanh(s * scale)
        unit = LOG2E
    if ALIBI:
        s = s * unit - slope[:, None] * tl.abs(position[:, None] - j[None, :]).to(tl.float32)
        unit = 1.0
    elif PRESCALE:  # a scale of 0 or less must not reach the maximum
        s = s * unit
        unit = 1.0
    seen = usable[None, :]
    if MASKED:
        seen = (j[None, :] >= row_lo[:, None]) & (j[None, :] < row_hi[:, None]) & usable[None, :]
        s = tl.where(seen, s, float("-inf"))

    peak_new = tl.maximum(peak, tl.max(s, 1) * unit)
    safe = tl.where(peak_new == float("-inf"), 0.0, peak_new)
    p = tl.math.exp2(s * unit - safe[:, None])
    decay = tl.math.exp2(peak - safe)
    total = total * decay + tl.sum(p, 1)
    v = decode(load_rows(v_ptr, v_at, usable, 0, DV1, DV, MASKED), q, KIND, NATIVE)
    by = p
    if V_FORM == OF_TOKENS:
        own = tl.load(v_scale + block * vs_row + offset * vs_token, mask=usable, other=0.0)
        v, by = scale_values(v, p, own, seen, MASKED)
    acc = weigh_values(acc * decay[:, None], by, v, seen, GUARD)
    if DV2 > 0:
        v2 = decode(load_rows(v_ptr, v_at, usable, DV1, DV2, DV, MASKED), q, KIND, NATIVE)
        if V_FORM == OF_TOKENS:
            v2, by = scale_values(v2, p, own, seen, MASKED)
        acc2 = weigh_values(acc2 * decay[:, None], by, v2, seen, GUARD)
    return peak_new, total, acc, acc2, wanted & (usable == 0)


@triton.jit
def empty_state(ROWS: tl.constexpr, DV1: tl.constexpr, DV2: tl.constexpr):
    """The identity: nothing seen."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV1], tl.float32)
    if DV2 > 0:
        acc2 = tl.zeros([ROWS, DV2], tl.float32)
    else:
        acc2 = tl.zeros([ROWS, 1], tl.float32)
    return peak, total, acc, acc2


@triton.jit
def add_sink(peak, total, sink):
    """Let a sink (a logit in natural units) join the denominator: ``(peak, total, decay of acc)``."""
    sink = sink * LOG2E
    peak_new = tl.maximum(peak, sink)
    safe = tl.where(peak_new == float("-inf"), 0.0, peak_new)
    decay = tl.math.exp2(peak - safe)
    return peak_new, total * decay + tl.math.exp2(sink - safe), decay


@triton.jit
def reciprocal(total):
    """``1 / total``; 0 for a row that saw nothing."""
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))


@triton.jit
def natural_lse(peak, total):
    """Natural log-sum-exp of a base-2 state; ``-inf`` for a row that saw nothing."""
    return tl.where(total == 0.0, float("-inf"), peak * LN2 + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def join_in_order(peak, total, acc, peak_b, total_b, acc_b):
    """Add state b to state a with the roundings written out, so that every kernel that does so gets the same bits.

    A compiler may contract ``a * x + b * y`` in two ways; an explicit fused multiply-add over a rounded product
    leaves it none. Shapes: ``peak``, ``total`` as given, ``acc`` with one more axis at the end.
    """
    peak_new = tl.maximum(peak, peak_b)
    safe = tl.where(peak_new == float("-inf"), 0.0, peak_new)
    w = tl.math.exp2(peak - safe)
    w_b = tl.math.exp2(peak_b - safe)
    total = tl.math.fma(total, w, total_b * w_b)
    acc = tl.math.fma(acc, tl.expand_dims(w, -1) + tl.zeros_like(acc), acc_b * tl.expand_dims(w_b, -1))
    return peak_new, total, acc
