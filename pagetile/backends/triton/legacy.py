"""Attend over an x-packed cache: one pass over the keys, or a state for each partition of 512 and a second launch.

Contract: every row ends in the state of all keys it sees (:class:`pagetile.backends.protocol.AttendCall`), and the
partitions' states stay where :class:`pagetile.backends.verbs.PartitionedCall` wants them. Grid: ``(query tiles x
partitions, KV heads x head tiles, sequences)``, then ``(tokens, query heads)``. Reads each K and V element of a
program's keys once, for the whole group of query heads; packs of a key and neighbours of a value channel are loaded 16
bytes wide.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.attend import store_result, store_rows
from pagetile.backends.triton.device import (
    LN2,
    LOG2E,
    NO_COLUMN,
    SIZES,
    empty_state,
    find_sequence,
    first_bad_column,
    load_rows,
    locate,
    page_ids,
    reciprocal,
    report_bad_column,
    tanh,
    tile_bounds,
    tile_rows,
    visible_range,
    weigh_values,
)
from pagetile.backends.triton.quantised import decode
from pagetile.backends.verbs import PARTITION_KEYS

PARTITION = tl.constexpr(PARTITION_KEYS)


@triton.jit
def blocks_of_tile(ids, num_blocks, TILE: tl.constexpr, LOG2_BLOCK: tl.constexpr, PAGES: tl.constexpr):
    """``(block, held)`` of the keys of a tile that starts at a page or lies within one; block 0 if it has none.

    As a division, so that the compiler sees which keys share a block and loads their values together.
    """
    page = tl.arange(0, TILE) // (1 << LOG2_BLOCK)
    block = tl.zeros([TILE], tl.int64) + ids[0]
    for i in tl.static_range(1, PAGES):
        block = tl.where(page >= i, ids[i].to(tl.int64), block)
    held = (block >= 0) & (block < num_blocks)
    return tl.where(held, block, 0), held


@triton.jit
def find_keys(start, key_lo, key_hi, ids, place, TILE: tl.constexpr, PAGES: tl.constexpr, LOG2_BLOCK: tl.constexpr):
    """``(position, block, offset, usable, held)`` of the keys of a tile.

    ``held`` says that a key's memory may be read, wanted or not: whole vectors of neighbours are loaded by it.
    """
    j = start + tl.arange(0, TILE)
    wanted = (j >= key_lo) & (j < key_hi)
    if PAGES > 0:
        block, held = blocks_of_tile(ids, place[2], TILE, LOG2_BLOCK, PAGES)
        usable = held & wanted
        offset = (tl.arange(0, TILE) % (1 << LOG2_BLOCK)).to(tl.int64)
        if PAGES == 1:
            offset += start & ((1 << LOG2_BLOCK) - 1)
    else:
        block, offset, usable = locate(j, wanted, place, True, LOG2_BLOCK, False)
        held = usable
    return j, block, offset, usable, held


@triton.jit
def attend_packed_tile(
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
    X: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    TILE: tl.constexpr,
    PAGES: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    GUARD: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add the keys ``[start, start + TILE)`` to a softmax state ``(peak, total, acc)``, in base 2."""
    peak, total, acc = state
    position, row_lo, row_hi, slope = rows
    k_ptr, k_block, k_pack, k_token = keys
    v_ptr, v_block, v_channel = values
    scale, cap = score
    j, block, offset, usable, held = find_keys(start, bounds[0], bounds[1], ids, place, TILE, PAGES, LOG2_BLOCK)

    element = tl.arange(0, D_PAD)
    pack = element // X
    channel = tl.arange(0, DV_PAD)
    if WIDE:  # packs or channels so far apart that 31 bits do not hold the distance
        pack = pack.to(tl.int64)
        channel = channel.to(tl.int64)
    in_packs = pack * k_pack + element % X
    k_at = k_ptr + (block * k_block + offset * k_token)
    k = tl.load(
        k_at[:, None] + in_packs[None, :], mask=usable[:, None] & (element < D)[None, :], other=0
    )  # [keys, elements]
    s = tl.dot(query, tl.trans(decode(k, query, KIND, NATIVE)), input_precision="ieee") * scale  # [rows, keys]
    if SOFTCAP:
        s = cap * tanh(s) * LOG2E
    if ALIBI:
        s = s - slope[:, None] * tl.abs(position[:, None] - j[None, :]).to(tl.float32)
    seen = (j[None, :] >= row_lo[:, None]) & (j[None, :] < row_hi[:, None]) & usable[None, :]
    s = tl.where(seen, s, float("-inf"))

    peak_new = tl.maximum(peak, tl.max(s, 1))
    safe = tl.where(peak_new == float("-inf"), 0.0, peak_new)
    p = tl.math.exp2(s - safe[:, None])
    decay = tl.math.exp2(peak - safe)
    total = total * decay + tl.sum(p, 1)
    v_at = v_ptr + (block * v_block + offset)
    v = tl.load(
        v_at[:, None] + (channel * v_channel)[None, :], mask=held[:, None] & (channel < DV)[None, :], other=0
    )  # [keys, channels]
    if PAGES > 0:  # what is not wanted was read along, and may be anything
        v = tl.where(usable[:, None], v, 0)
    acc = weigh_values(acc * decay[:, None], p, decode(v, query, KIND, NATIVE), seen, GUARD)
    return peak_new, total, acc


@triton.jit(do_not_specialize=(*SIZES, "parts"))
def attend_packed_kernel(
    q,
    k,
    v,
    out,
    lse,
    sums,
    maxima,
    partial,
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
    k_head,
    k_pack,
    k_token,
    v_block,
    v_head,
    v_channel,
    out_token,
    out_head,
    lse_head,
    lse_token,
    table_row,
    slope_seq,
    ks_row,
    ks_head,
    vs_row,
    vs_head,
    num_cols,
    num_blocks,
    block_size,
    left,
    right,
    parts,
    scale,
    cap,
    v_number,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PAGES: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    K_LOADED: tl.constexpr,
    V_LOADED: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    KEY_STARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
    DENSE: tl.constexpr,
):
    """``SPLIT``: one partition a program, its state to ``sums``, ``maxima``, ``partial``; else ``out`` and ``lse``."""
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    tile = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    seq = tl.program_id(2)
    q_start, q_len, seq_len, first_key, key_base = find_sequence(seq, q_loc, key_lens, key_starts, True, KEY_STARTS)
    if tile * TOKENS >= q_len:
        return
    token, group_head, active = tile_rows(tile, head_tile, q_len, ROWS, TOKENS, HEADS, GROUP)
    heads = kv_head * GROUP + group_head
    row = (q_start + token).to(tl.int64)
    query = load_rows(q, row * q_token + heads.to(tl.int64) * q_head, active, 0, D_PAD, D, True)
    window = (left, right)
    row_lo, row_hi = visible_range(token, q_len, seq_len, first_key, window, LEFT, RIGHT)
    lo, hi, _, _ = tile_bounds(tile, q_len, seq_len, first_key, window, TOKENS, LEFT, RIGHT)
    if SPLIT:
        lo = tl.maximum(lo, part * PARTITION)
        hi = tl.minimum(hi, (part + 1) * PARTITION)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + seq.to(tl.int64) * slope_seq + heads, mask=active, other=0.0) * LOG2E
    if K_LOADED:
        scale = scale * tl.load(k_scale + seq.to(tl.int64) * ks_row + kv_head * ks_head)
    by = v_number
    if V_LOADED:
        by = by * tl.load(v_scale + seq.to(tl.int64) * vs_row + kv_head * vs_head)

    place = (table + seq.to(tl.int64) * table_row, num_cols, num_blocks, block_size, key_base)
    column = first_bad_column(lo, hi, place, LOG2_BLOCK, 64)
    if column != NO_COLUMN:
        report_bad_column(error, seq, column, place)
    # A constant where it can be: a step of 8 says nothing of alignment to a compiler that looks for multiples of 16.
    token_step = X if DENSE else k_token
    keys = (k + kv_head.to(tl.int64) * k_head, k_block, k_pack, token_step)
    values = (v + kv_head.to(tl.int64) * v_head, v_block, v_channel)
    rows = (token + seq_len - q_len, row_lo, row_hi, slope)
    peak, total, acc, unused = empty_state(ROWS, DV_PAD, 0)
    start = lo // TILE * TILE
    ids = (start,)
    if PAGES > 0:
        ids = page_ids(start, hi, place, LOG2_BLOCK, PAGES)
    for at in tl.range(start, hi, TILE, num_stages=STAGES):
        next_ids = ids
        if PAGES > 0:
            next_ids = page_ids(at + TILE, hi, place, LOG2_BLOCK, PAGES)
        peak, total, acc = attend_packed_tile(
            at, ids, (peak, total, acc), query, rows, (lo, hi), place, keys, values, (scale, cap), KIND, NATIVE, X, D,
            D_PAD, DV, DV_PAD, TILE, PAGES, LOG2_BLOCK, SOFTCAP, ALIBI, TOKENS > 1, WIDE,
        )  # fmt: skip
        ids = next_ids
    acc = acc * by
    if SPLIT:
        slot = (row * (tl.num_programs(1) // HEAD_TILES * GROUP) + heads) * parts + part
        tl.store(maxima + slot, tl.where(total == 0.0, float("-inf"), peak * LN2), mask=active)
        tl.store(sums + slot, total, mask=active)
        store_rows(partial, slot * DV, acc * reciprocal(total)[:, None], active, 0, DV_PAD, DV)
    else:
        store_result(
            (peak, total, acc, unused), heads, active, out, row * out_token + heads.to(tl.int64) * out_head, lse,
            row * lse_token + heads.to(tl.int64) * lse_head, sinks, DV, DV_PAD, 0, SINKS, LSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=(*SIZES, "parts"))
def add_partitions_kernel(
    out,
    lse,
    sums,
    maxima,
    partial,
    q_loc,
    sinks,
    out_token,
    out_head,
    lse_head,
    lse_token,
    num_seqs,
    parts,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Grid ``(tokens, query heads)``: one row each, ``PARTS`` partitions at a time, ascending."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if row >= tl.load(q_loc + num_seqs):
        return
    first = (row * tl.num_programs(1) + head) * parts
    element = tl.arange(0, DV_PAD)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([DV_PAD], tl.float32)
    for start in tl.range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        own = tl.load(sums + first + part, mask=part < parts, other=0.0)
        peaks = tl.load(maxima + first + part, mask=part < parts, other=float("-inf"))
        some = own != 0.0
        at = (first + part)[:, None] * DV + element[None, :]
        states = tl.load(partial + at, mask=some[:, None] & (element < DV)[None, :], other=0.0).to(tl.float32)
        peak_new = tl.maximum(peak, tl.max(peaks, 0))
        safe = tl.where(peak_new == float("-inf"), 0.0, peak_new)
        weight = tl.where(some, own * tl.exp(peaks - safe), 0.0)
        decay = tl.exp(peak - safe)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(states * weight[:, None], 0)
        peak = peak_new
    nothing = total == 0.0
    factor = 1.0
    if SINKS:
        sink = tl.load(sinks + head)
        peak_new = tl.maximum(peak, sink)
        safe = tl.where(peak_new == float("-inf"), 0.0, peak_new)
        factor = tl.exp(peak - safe)
        total = total * factor + tl.exp(sink - safe)
        peak = peak_new
    acc = acc * (factor * reciprocal(total))
    tl.store(
        out + row * out_token + head.to(tl.int64) * out_head + element, acc.to(out.dtype.element_ty), mask=element < DV
    )
    if LSE:
        result = tl.where(total == 0.0, float("-inf"), peak + tl.log(tl.where(total == 0.0, 1.0, total)))
        if SINKS:
            result = tl.where(nothing, sink, result)
        tl.store(lse + row * lse_token + head.to(tl.int64) * lse_head, result)
