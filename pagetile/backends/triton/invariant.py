"""Attend so that a row's bits depend on its own query and keys alone (``batch_invariant=True``).

One kernel for every ``q_len``: one tile shape, one loop, always masked. The softmax state starts anew at every absolute
multiple of ``CHUNK`` keys and the chunks of a row are added in ascending order with the roundings written out
(``join_in_order``). Whether the chunks of a tile run in one program, or one program each and are added by
``combine_in_order_kernel``, changes nothing: a tile or chunk that a row does not see leaves its state as it is.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.
# ruff: noqa: RUF059, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.attend import attend_span, load_query, store_result, store_rows
from pagetile.backends.triton.device import (
    LOG2E,
    SIZES,
    add_sink,
    empty_state,
    find_sequence,
    first_bad_column,
    join_in_order,
    natural_lse,
    reciprocal,
    report_bad_column,
    tile_bounds,
    tile_rows,
    visible_range,
)
from pagetile.backends.triton.quantised import head_scale, scaled_state


@triton.jit(do_not_specialize=SIZES)
def invariant_kernel(
    q,
    k,
    v,
    out,
    lse,
    partial,
    partial_peak,
    partial_total,
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
    num_cols,
    num_blocks,
    block_size,
    left,
    right,
    max_chunks,
    head_slots,
    query_tiles,
    scale,
    cap,
    v_number,
    SPREAD: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
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
):
    """Grid ``(sequences x query tiles [x max_chunks] x head slots)``; ``SPREAD``: one chunk a program."""
    head_slot = tl.program_id(0) % head_slots
    item = tl.program_id(0) // head_slots
    chunk = 0
    if SPREAD:
        chunk = item % max_chunks
        item = item // max_chunks
    tile = query_tiles - 1 - item % query_tiles
    seq = item // query_tiles
    q_start, q_len, seq_len, first_key, key_base = find_sequence(seq, q_loc, key_lens, key_starts, PAGED, KEY_STARTS)
    if tile * TOKENS >= q_len:
        return
    window = (left, right)
    lo, hi, _, _ = tile_bounds(tile, q_len, seq_len, first_key, window, TOKENS, LEFT, RIGHT)
    first_chunk = lo // CHUNK
    end_chunk = tl.cdiv(hi, CHUNK)
    if SPREAD:
        if (chunk > 0) & ((chunk < first_chunk) | (chunk >= end_chunk)):
            return
        first_chunk = tl.maximum(first_chunk, chunk)
        end_chunk = tl.minimum(end_chunk, chunk + 1)

    kv_head = head_slot // HEAD_TILES
    head_tile = head_slot % HEAD_TILES
    token, group_head, active = tile_rows(tile, head_tile, q_len, ROWS, TOKENS, HEADS, GROUP)
    heads = kv_head * GROUP + group_head
    row = (q_start + token).to(tl.int64)
    query = load_query(q, row * q_token + heads.to(tl.int64) * q_head, active, D, D1, D2)
    row_lo, row_hi = visible_range(token, q_len, seq_len, first_key, window, LEFT, RIGHT)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + seq.to(tl.int64) * slope_seq + heads, mask=active, other=0.0) * LOG2E
    rows = (token + seq_len - q_len, row_lo, row_hi, slope)
    place = (table + seq.to(tl.int64) * table_row, num_cols, num_blocks, block_size, key_base)
    kv_head = kv_head.to(tl.int64)
    keys = (k + kv_head * k_head, k_block, k_token, k_scale + kv_head * ks_head, ks_row, ks_token)
    values = (v + kv_head * v_head, v_block, v_token, v_scale + kv_head * vs_head, vs_row, vs_token)
    scale = head_scale(scale, k_scale, seq, kv_head, ks_row, ks_head, K_FORM)
    v_number = head_scale(v_number, v_scale, seq, kv_head, vs_row, vs_head, V_FORM)

    peak, total, acc, acc2 = empty_state(ROWS, DV1, DV2)
    missing = tl.zeros([TILE], tl.int32)
    for c in tl.range(first_chunk, end_chunk, num_stages=1):
        start = tl.maximum(c * CHUNK, lo // TILE * TILE)
        end = tl.minimum(c * CHUNK + CHUNK, hi)
        state, lost = attend_span(
            start, end, empty_state(ROWS, DV1, DV2), query, rows, (lo, hi), place, keys, values, (scale, cap), KIND,
            NATIVE, K_FORM, V_FORM, D, D1, D2, DV, DV1, DV2, TILE, STAGES, 0, PAGED, LOG2_BLOCK, SOFTCAP, ALIBI,
            PRESCALE, True, True,
        )  # fmt: skip
        peak_c, total_c, acc_c, acc2_c = scaled_state(state, v_number, KIND, DV2)
        missing = missing | lost
        if DV2 > 0:
            peak_2, total_2, acc2 = join_in_order(peak, total, acc2, peak_c, total_c, acc2_c)
        peak, total, acc = join_in_order(peak, total, acc, peak_c, total_c, acc_c)
    if PAGED:
        if tl.max(missing, 0) > 0:
            report_bad_column(error, seq, first_bad_column(lo, hi, place, LOG2_BLOCK, 128), place)

    if SPREAD:
        slot = (item * max_chunks + chunk).to(tl.int64) * head_slots + head_slot
        slot = slot * ROWS + tl.arange(0, ROWS)
        tl.store(partial_peak + slot, peak, mask=active)
        tl.store(partial_total + slot, total, mask=active)
        store_rows(partial, slot * DV, acc, active, 0, DV1, DV)
        if DV2 > 0:
            store_rows(partial, slot * DV, acc2, active, DV1, DV2, DV)
    else:
        store_result(
            (peak, total, acc, acc2), heads, active, out, row * out_token + heads.to(tl.int64) * out_head, lse,
            row * lse_token + heads.to(tl.int64) * lse_head, sinks, DV, DV1, DV2, SINKS, LSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def combine_in_order_kernel(
    out,
    lse,
    partial,
    partial_peak,
    partial_total,
    q_loc,
    key_lens,
    key_starts,
    sinks,
    out_token,
    out_head,
    lse_head,
    lse_token,
    left,
    right,
    max_q,
    max_chunks,
    head_slots,
    query_tiles,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGED: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    KEY_STARTS: tl.constexpr,
):
    """Grid ``(sequences x max_q, query heads)``: the chunks of one row, one by one in ascending order."""
    head = tl.program_id(1)
    seq = tl.program_id(0) // max_q
    token = tl.program_id(0) % max_q
    q_start, q_len, seq_len, first_key, _ = find_sequence(seq, q_loc, key_lens, key_starts, PAGED, KEY_STARTS)
    if token >= q_len:
        return
    window = (left, right)
    tile = token // TOKENS
    lo, hi, _, _ = tile_bounds(tile, q_len, seq_len, first_key, window, TOKENS, LEFT, RIGHT)
    group_head = head % GROUP
    head_slot = head // GROUP * HEAD_TILES + group_head // HEADS
    item = seq * query_tiles + query_tiles - 1 - tile
    row = token % TOKENS * HEADS + group_head % HEADS
    element = tl.arange(0, DV_PAD)
    one = tl.arange(0, 1)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DV_PAD], tl.float32)
    for chunk in tl.range(lo // CHUNK, tl.cdiv(hi, CHUNK), num_stages=4):
        slot = ((item * max_chunks + chunk).to(tl.int64) * head_slots + head_slot) * ROWS + row
        peak_c = tl.load(partial_peak + slot + one)
        total_c = tl.load(partial_total + slot + one)
        acc_c = tl.load(partial + slot * DV + element[None, :], mask=(element < DV)[None, :], other=0.0)
        peak, total, acc = join_in_order(peak, total, acc, peak_c, total_c, acc_c)

    factor = tl.zeros([1], tl.float32) + 1.0
    nothing = total == 0.0
    if SINKS:
        sink = tl.load(sinks + head + one)
        peak, total, factor = add_sink(peak, total, sink)
    acc = acc * (factor * reciprocal(total))[:, None]
    q_row = (q_start + token).to(tl.int64)
    at = q_row * out_token + head.to(tl.int64) * out_head
    tl.store(out + at + element[None, :], acc.to(out.dtype.element_ty), mask=(element < DV)[None, :])
    if LSE:
        result = natural_lse(peak, total)
        if SINKS:
            result = tl.where(nothing, sink, result)
        tl.store(lse + q_row * lse_token + head.to(tl.int64) * lse_head + one, result)
