"""Attend with the keys of a sequence spread over several programs: decode, short queries, few long chunks.

Two launches. ``split_kernel`` leaves one float32 partial state a work item (or the finished row, when its sequence is
one item); ``combine_kernel`` adds the states of a row. The host fixes only how many programs there are; which keys
each takes follows on the device from the lengths of the moment, so a captured graph replays for any lengths.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.attend import attend_range, load_query, store_result, store_rows
from pagetile.backends.triton.device import (
    LOG2E,
    SIZES,
    add_sink,
    find_sequence,
    natural_lse,
    reciprocal,
    tile_bounds,
    tile_rows,
    visible_range,
)
from pagetile.backends.triton.quantised import head_scale, scaled_state


@triton.jit
def key_tiles(q_len, seq_len, first_key, window, TILE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """``(first tile, tiles)`` of the keys that any query of a sequence sees."""
    lo, _ = visible_range(tl.zeros_like(q_len), q_len, seq_len, first_key, window, LEFT, RIGHT)
    _, hi = visible_range(q_len - 1, q_len, seq_len, first_key, window, LEFT, RIGHT)
    return lo // TILE, tl.maximum(tl.cdiv(hi, TILE) - lo // TILE, 0)


@triton.jit
def share_out(
    q_loc,
    key_lens,
    key_starts,
    num_seqs,
    max_q,
    programs,
    min_tiles,
    window,
    SEQS: tl.constexpr,
    TILE: tl.constexpr,
    PAGED: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    KEY_STARTS: tl.constexpr,
):
    """``(items of each sequence, tiles an item)``: about ``programs`` items of equal length over the whole batch.

    Every sequence of 1 to ``max_q`` queries gets at least one item, the others none; in all at most
    ``programs + num_seqs``.
    """
    index = tl.arange(0, SEQS)
    real = index < num_seqs
    seq = tl.where(real, index, 0)
    _, q_len, seq_len, first_key, _ = find_sequence(seq, q_loc, key_lens, key_starts, PAGED, KEY_STARTS)
    taken = real & (q_len > 0) & (q_len <= max_q)
    _, tiles = key_tiles(q_len, seq_len, first_key, window, TILE, LEFT, RIGHT)
    tiles = tl.where(taken, tiles, 0)
    per_item = tl.maximum(min_tiles, tl.cdiv(tl.sum(tiles, 0), programs))
    return tl.where(taken, tl.maximum(tl.cdiv(tiles, per_item), 1), 0), per_item


@triton.jit(do_not_specialize=SIZES)
def split_kernel(
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
    num_seqs,
    num_cols,
    num_blocks,
    block_size,
    left,
    right,
    max_q,
    programs,
    min_tiles,
    head_slots,
    scale,
    cap,
    v_number,
    SEQS: tl.constexpr,
    FIXED: tl.constexpr,
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
):
    """Grid ``(items x head slots, query tiles)``, a head slot being a KV head or one of its head tiles.

    ``FIXED``: ``programs`` items for every sequence, wanted or not. Else ``programs + num_seqs`` items, shared out by
    length (``share_out``). Reads K and V of its item once; writes one partial state, or ``out`` and ``lse``.
    """
    head_slot = tl.program_id(0) % head_slots
    item = tl.program_id(0) // head_slots
    window = (left, right)
    if FIXED:
        seq = item // programs
        part = item % programs
        count = 0
        per_item = 0
    else:
        items, per_item = share_out(
            q_loc, key_lens, key_starts, num_seqs, max_q, programs, min_tiles, window, SEQS, TILE, PAGED, LEFT, RIGHT,
            KEY_STARTS,
        )  # fmt: skip
        index = tl.arange(0, SEQS)
        seq = tl.sum((tl.cumsum(items, 0) <= item).to(tl.int32), 0)
        if seq >= num_seqs:
            return
        part = item - tl.sum(tl.where(index < seq, items, 0), 0)
        count = tl.sum(tl.where(index == seq, items, 0), 0)
    q_start, q_len, seq_len, first_key, key_base = find_sequence(seq, q_loc, key_lens, key_starts, PAGED, KEY_STARTS)
    tile = tl.program_id(1)
    if (q_len > max_q) | (tile * TOKENS >= q_len):
        return
    first_tile, tiles = key_tiles(q_len, seq_len, first_key, window, TILE, LEFT, RIGHT)
    if FIXED:
        per_item = tl.maximum(min_tiles, tl.cdiv(tiles, programs))
        count = tl.maximum(tl.cdiv(tiles, per_item), 1)
        if part >= count:
            return

    kv_head = head_slot // HEAD_TILES
    head_tile = head_slot % HEAD_TILES
    token, group_head, active = tile_rows(tile, head_tile, q_len, ROWS, TOKENS, HEADS, GROUP)
    heads = kv_head * GROUP + group_head
    row = (q_start + token).to(tl.int64)
    query = load_query(q, row * q_token + heads.to(tl.int64) * q_head, active, D, D1, D2)
    row_lo, row_hi = visible_range(token, q_len, seq_len, first_key, window, LEFT, RIGHT)
    lo, hi, full_lo, full_hi = tile_bounds(tile, q_len, seq_len, first_key, window, TOKENS, LEFT, RIGHT)
    per_item = tl.cdiv(tiles, count)  # the items of one sequence are equal, whatever is left of the batch's share
    part_lo = (first_tile + part * per_item) * TILE
    lo = tl.maximum(lo, part_lo)
    hi = tl.minimum(hi, part_lo + per_item * TILE)
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
    if count == 1:
        store_result(
            state, heads, active, out, row * out_token + heads.to(tl.int64) * out_head, lse,
            row * lse_token + heads.to(tl.int64) * lse_head, sinks, DV, DV1, DV2, SINKS, LSE,
        )  # fmt: skip
    else:
        slot = (item * tl.num_programs(1) + tile).to(tl.int64) * head_slots + head_slot
        slot = slot * ROWS + tl.arange(0, ROWS)
        peak, total, acc, acc2 = state
        tl.store(partial_peak + slot, peak, mask=active)
        tl.store(partial_total + slot, total, mask=active)
        store_rows(partial, slot * DV, acc, active, 0, DV1, DV)
        if DV2 > 0:
            store_rows(partial, slot * DV, acc2, active, DV1, DV2, DV)


@triton.jit(do_not_specialize=SIZES)
def combine_kernel(
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
    num_seqs,
    left,
    right,
    max_q,
    programs,
    min_tiles,
    head_slots,
    query_tiles,
    SEQS: tl.constexpr,
    FIXED: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGED: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    KEY_STARTS: tl.constexpr,
):
    """Grid ``(sequences x max_q, query heads)``: one row each, ``PARTS`` partial states at a time, ascending."""
    head = tl.program_id(1)
    seq = tl.program_id(0) // max_q
    token = tl.program_id(0) % max_q
    q_start, q_len, seq_len, first_key, _ = find_sequence(seq, q_loc, key_lens, key_starts, PAGED, KEY_STARTS)
    window = (left, right)
    if FIXED:
        _, tiles = key_tiles(q_len, seq_len, first_key, window, TILE, LEFT, RIGHT)
        count = tl.maximum(tl.cdiv(tiles, tl.maximum(min_tiles, tl.cdiv(tiles, programs))), 1)
        first = seq * programs
    else:
        items, _ = share_out(
            q_loc, key_lens, key_starts, num_seqs, max_q, programs, min_tiles, window, SEQS, TILE, PAGED, LEFT, RIGHT,
            KEY_STARTS,
        )  # fmt: skip
        index = tl.arange(0, SEQS)
        first = tl.sum(tl.where(index < seq, items, 0), 0)
        count = tl.sum(tl.where(index == seq, items, 0), 0)
    if (q_len > max_q) | (token >= q_len) | (count == 1):
        return

    group_head = head % GROUP
    head_slot = head // GROUP * HEAD_TILES + group_head // HEADS
    row = token % TOKENS * HEADS + group_head % HEADS
    element = tl.arange(0, DV_PAD)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([DV_PAD], tl.float32)
    for start in tl.range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        real = part < count
        slot = ((first + part) * query_tiles + token // TOKENS).to(tl.int64) * head_slots + head_slot
        slot = slot * ROWS + row
        peaks = tl.load(partial_peak + slot, mask=real, other=float("-inf"))
        totals = tl.load(partial_total + slot, mask=real, other=0.0)
        sums = tl.load(
            partial + slot[:, None] * DV + element[None, :], mask=real[:, None] & (element < DV)[None, :], other=0.0
        )  # [parts, elements]
        peak_new = tl.maximum(peak, tl.max(peaks, 0))
        safe = tl.where(peak_new == float("-inf"), 0.0, peak_new)
        weight = tl.math.exp2(peaks - safe)
        decay = tl.math.exp2(peak - safe)
        total = total * decay + tl.sum(totals * weight, 0)
        acc = acc * decay + tl.sum(sums * weight[:, None], 0)
        peak = peak_new

    factor = 1.0
    nothing = total == 0.0
    if SINKS:
        sink = tl.load(sinks + head)
        peak, total, factor = add_sink(peak, total, sink)
    acc = acc * (factor * reciprocal(total))
    q_row = (q_start + token).to(tl.int64)
    at = q_row * out_token + head.to(tl.int64) * out_head
    tl.store(out + at + element, acc.to(out.dtype.element_ty), mask=element < DV)
    if LSE:
        result = natural_lse(peak, total)
        if SINKS:
            result = tl.where(nothing, sink, result)
        tl.store(lse + q_row * lse_token + head.to(tl.int64) * lse_head, result)
