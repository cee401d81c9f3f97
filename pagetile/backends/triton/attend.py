"""Attend, one program a tile of query rows: prefill, chunks and everything that fills the device without a split.

Contract: every row ends in the state of all keys it sees (:class:`pagetile.backends.protocol.AttendCall`).
Grid: ``(tiles, KV heads x head tiles, sequences)``, or ``(tiles of all sequences, KV heads x head tiles)`` with
``SEARCH``; the last tile of a sequence comes first, since with a causal mask it has the most keys.
Reads each K and V row once a tile, for the whole group of query heads; writes ``out`` and ``lse`` of active rows.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.
# ruff: noqa: SIM102, SIM108

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.device import (
    LOG2E,
    NO_COLUMN,
    SIZES,
    add_sink,
    attend_tile,
    empty_state,
    find_sequence,
    first_bad_column,
    load_rows,
    natural_lse,
    page_ids,
    reciprocal,
    report_bad_column,
    tile_bounds,
    tile_rows,
    visible_range,
)
from pagetile.backends.triton.quantised import head_scale, scaled_state


@triton.jit
def load_query(q, at, active, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """The query rows of a tile in their one or two parts."""
    first = load_rows(q, at, active, 0, D1, D, True)
    if D2 > 0:
        second = load_rows(q, at, active, D1, D2, D, True)
    else:
        second = first
    return first, second


@triton.jit
def attend_span(
    lo,
    hi,
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
    STAGES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGED: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRESCALE: tl.constexpr,
    MASKED: tl.constexpr,
    GUARD: tl.constexpr,
):
    """Add the tiles from ``lo`` (a multiple of ``TILE``) to ``hi``; also whether a wanted key had no usable block.

    ``PAGES``: a tile is so many whole pages (1: or lies within one), whose ids are read as scalars one tile ahead of
    their use; 0: the id of every key is looked up.
    """
    peak, total, acc, acc2 = state
    missing = tl.zeros([TILE], tl.int32)
    ids = (lo,)
    if PAGES > 0:
        ids = page_ids(lo, bounds[1], place, LOG2_BLOCK, PAGES)
    for start in tl.range(lo, hi, TILE, num_stages=STAGES):
        next_ids = ids
        if PAGES > 0:
            next_ids = page_ids(start + TILE, bounds[1], place, LOG2_BLOCK, PAGES)
        peak, total, acc, acc2, lost = attend_tile(
            start,
            ids,
            (peak, total, acc, acc2),
            query,
            rows,
            bounds,
            place,
            keys,
            values,
            score,
            KIND,
            NATIVE,
            K_FORM,
            V_FORM,
            D,
            D1,
            D2,
            DV,
            DV1,
            DV2,
            TILE,
            PAGES,
            PAGED,
            LOG2_BLOCK,
            SOFTCAP,
            ALIBI,
            PRESCALE,
            MASKED,
            GUARD,
        )
        ids = next_ids
        if MASKED and PAGED:
            missing = missing | lost.to(tl.int32)
    return (peak, total, acc, acc2), missing


@triton.jit
def attend_range(
    lo,
    hi,
    full_lo,
    full_hi,
    seq,
    query,
    rows,
    place,
    keys,
    values,
    score,
    error,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    TILE: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGED: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRESCALE: tl.constexpr,
    SHARED_VIEW: tl.constexpr,
    LEFT_EDGE: tl.constexpr,
):
    """The state over the keys ``[lo, hi)``, of which all rows see ``[full_lo, full_hi)``.

    ``SHARED_VIEW`` says that all rows see the same keys (one token a tile): then one masked loop does. Else tiles that
    all rows see run without masks, and only the keys at the edges, in steps of ``EDGE``, pay for them and for the exact
    treatment of NaN.
    A table row with a bad id in this range sends every tile through the masked loop, which hides its keys.
    """
    state = empty_state(ROWS, DV1, DV2)
    bounds = (lo, hi)
    lo = lo // TILE * TILE
    if SHARED_VIEW:
        state, missing = attend_span(
            lo, hi, state, query, rows, bounds, place, keys, values, score, KIND, NATIVE, K_FORM, V_FORM, D, D1, D2, DV,
            DV1, DV2, TILE, STAGES, PAGES, PAGED, LOG2_BLOCK, SOFTCAP, ALIBI, PRESCALE, True, False,
        )  # fmt: skip
        if PAGED:
            if tl.max(missing, 0) > 0:
                column = first_bad_column(bounds[0], hi, place, LOG2_BLOCK, 128)
                report_bad_column(error, seq, column, place)
    else:
        full_lo = tl.minimum(tl.cdiv(tl.maximum(full_lo, lo), TILE) * TILE, hi)
        full_hi = tl.maximum(tl.minimum(full_hi, hi) // TILE * TILE, full_lo)
        if PAGED:
            column = first_bad_column(bounds[0], hi, place, LOG2_BLOCK, 256)
            if column != NO_COLUMN:
                report_bad_column(error, seq, column, place)
                full_lo = lo
                full_hi = lo
        if LEFT_EDGE:
            state, _ = attend_span(
                lo, full_lo, state, query, rows, bounds, place, keys, values, score, KIND, NATIVE, K_FORM, V_FORM, D,
                D1, D2, DV, DV1, DV2, EDGE, 1, 0, PAGED, LOG2_BLOCK, SOFTCAP, ALIBI, PRESCALE, True, True,
            )  # fmt: skip
        else:
            full_lo = lo
        state, _ = attend_span(
            full_lo, full_hi, state, query, rows, bounds, place, keys, values, score, KIND, NATIVE, K_FORM, V_FORM, D,
            D1, D2, DV, DV1, DV2, TILE, STAGES, PAGES, PAGED, LOG2_BLOCK, SOFTCAP, ALIBI, PRESCALE, False, False,
        )  # fmt: skip
        state, _ = attend_span(
            full_hi, hi, state, query, rows, bounds, place, keys, values, score, KIND, NATIVE, K_FORM, V_FORM, D, D1,
            D2, DV, DV1, DV2, EDGE, 1, 0, PAGED, LOG2_BLOCK, SOFTCAP, ALIBI, PRESCALE, True, True,
        )  # fmt: skip
    return state


@triton.jit
def store_rows(out, at, values, active, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Store one part of the rows of a tile in the dtype of ``out``."""
    element = FIRST + tl.arange(0, WIDTH)
    mask = active[:, None] & (element < SIZE)[None, :]
    tl.store(out + at[:, None] + element[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_result(
    state,
    heads,
    active,
    out,
    out_at,
    lse,
    lse_at,
    sinks,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Finish a state: the sink joins once, the sum is divided, both leave in the caller's dtypes."""
    peak, total, acc, acc2 = state
    factor = tl.zeros_like(total) + 1.0
    nothing = total == 0.0
    if SINKS:
        sink = tl.load(sinks + heads, mask=active, other=float("-inf"))
        peak, total, factor = add_sink(peak, total, sink)
    factor = factor * reciprocal(total)
    store_rows(out, out_at, acc * factor[:, None], active, 0, DV1, DV)
    if DV2 > 0:
        store_rows(out, out_at, acc2 * factor[:, None], active, DV1, DV2, DV)
    if LSE:
        result = natural_lse(peak, total)
        if SINKS:
            result = tl.where(nothing, sink, result)  # the sink itself, not its way through base 2 and back
        tl.store(lse + lse_at, result, mask=active)


@triton.jit(do_not_specialize=SIZES)
def attend_kernel(
    q,
    k,
    v,
    out,
    lse,
    q_loc,
    key_lens,
    table,
    key_starts,
    slopes,
    sinks,
    k_scale,
    v_scale,
    error,
    q_token,
    q_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    out_token,
    out_head,
    lse_head,
    lse_token,
    table_row,
    slope_seq,
    ks_row,
    ks_token,
    ks_head,
    vs_row,
    vs_token,
    vs_head,
    num_seqs,
    num_cols,
    num_blocks,
    block_size,
    left,
    right,
    min_q,
    scale,
    cap,
    v_number,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
    PAGES: tl.constexpr,
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
    PAGED: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRESCALE: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    KEY_STARTS: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Sequences with ``q_len > min_q``; the split kernel takes the others. All strides are in elements."""
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = tl.program_id(2)
    if (
        SEARCH
    ):  # sequence s owns the tiles from q_loc[s] // TOKENS + s on: enough for any lengths, at most one idle each
        lower: tl.int32 = 0
        upper: tl.int32 = num_seqs
        while upper - lower > 1:
            middle = (lower + upper) // 2
            if tl.load(q_loc + middle) // TOKENS + middle <= tile:
                lower = middle
            else:
                upper = middle
        seq = lower
        tile -= tl.load(q_loc + seq) // TOKENS + seq
    q_start, q_len, seq_len, first_key, key_base = find_sequence(seq, q_loc, key_lens, key_starts, PAGED, KEY_STARTS)
    if (q_len <= min_q) | (tile * TOKENS >= q_len):
        return

    token, group_head, active = tile_rows(tile, head_tile, q_len, ROWS, TOKENS, HEADS, GROUP)
    heads = kv_head * GROUP + group_head
    row = (q_start + token).to(tl.int64)
    query = load_query(q, row * q_token + heads.to(tl.int64) * q_head, active, D, D1, D2)
    window = (left, right)
    row_lo, row_hi = visible_range(token, q_len, seq_len, first_key, window, LEFT, RIGHT)
    lo, hi, full_lo, full_hi = tile_bounds(tile, q_len, seq_len, first_key, window, TOKENS, LEFT, RIGHT)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + seq.to(tl.int64) * slope_seq + heads, mask=active, other=0.0) * LOG2E

    place = (table + seq.to(tl.int64) * table_row, num_cols, num_blocks, block_size, key_base)
    kv = kv_head.to(tl.int64)
    state = attend_range(
        lo, hi, full_lo, full_hi, seq, query, (token + seq_len - q_len, row_lo, row_hi, slope), place,
        (k + kv * k_head, k_block, k_token, k_scale + kv * ks_head, ks_row, ks_token),
        (v + kv * v_head, v_block, v_token, v_scale + kv * vs_head, vs_row, vs_token),
        (head_scale(scale, k_scale, seq, kv_head, ks_row, ks_head, K_FORM), cap), error, KIND, NATIVE, K_FORM, V_FORM,
        ROWS, D, D1, D2, DV, DV1, DV2, TILE, EDGE, STAGES, PAGES, PAGED, LOG2_BLOCK, SOFTCAP, ALIBI, PRESCALE,
        TOKENS == 1, LEFT or KEY_STARTS,
    )  # fmt: skip
    state = scaled_state(state, head_scale(v_number, v_scale, seq, kv_head, vs_row, vs_head, V_FORM), KIND, DV2)
    store_result(
        state, heads, active, out, row * out_token + heads.to(tl.int64) * out_head, lse,
        row * lse_token + heads.to(tl.int64) * lse_head, sinks, DV, DV1, DV2, SINKS, LSE,
    )  # fmt: skip
