"""Store new keys and values at their slots.

Contract: row t goes to ``cache[slot // block_size, slot % block_size]``
(:class:`pagetile.backends.protocol.WriteCall`).
A negative slot is skipped; so is a slot past the cache, which is also reported. Two work splits over one helper:
``write_span_kernel`` moves a token's heads as one run of elements, ``write_heads_kernel`` a head at a time.
Both read each source element once and write each stored element once; accesses are 16 bytes wide where bases and
strides allow it (the launch is keyed by their alignment) and single elements elsewhere.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.device import BAD_SLOT, SIZES, report, split_position


@triton.jit
def load_slots(slots, row, num_rows, num_slots, error):
    """``(slot, keep)`` of source rows: int64, 0 where nothing is stored; a slot past the cache is reported."""
    real = row < num_rows
    slot = tl.load(slots + row, mask=real, other=-1).to(tl.int64)
    keep = (slot >= 0) & (slot < num_slots)
    past = slot >= num_slots
    if tl.max(past.to(tl.int32), 0) > 0:
        first = tl.min(tl.where(past, row, 2147483647), 0)
        value = tl.load(slots + first).to(tl.int64)
        report(error, BAD_SLOT, first, 0, value, num_slots)
    return tl.where(keep, slot, 0), keep


@triton.jit
def encode(x, cache):
    """What is stored for ``x``: the same element; a quantised cache will scale, round and saturate here."""
    return x.to(cache.dtype.element_ty)


@triton.jit
def split_slot(slot, block_size, LOG2_BLOCK: tl.constexpr, NARROW: tl.constexpr):
    """``(block, offset)`` of a slot in 64 bits; ``NARROW``: every slot fits in 31 bits, so a short division does."""
    if NARROW and LOG2_BLOCK < 0:
        block, offset = split_position(slot.to(tl.int32), block_size, LOG2_BLOCK)
        return block.to(tl.int64), offset.to(tl.int64)
    return split_position(slot, block_size, LOG2_BLOCK)


@triton.jit(do_not_specialize=SIZES)
def write_span_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    error,
    key_token,
    value_token,
    k_block,
    k_token,
    v_block,
    v_token,
    num_rows,
    num_slots,
    block_size,
    SPAN_K: tl.constexpr,
    SPAN_V: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Grid ``(row tiles, element tiles)``: ``ROWS`` tokens by ``WIDTH`` elements of K and of V."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = (row < num_rows)[:, None]
    source = row.to(tl.int64)[:, None]
    # Both loads start before the slots are known, so that their latencies overlap.
    k = tl.load(key + source * key_token + element[None, :], mask=real & (element < SPAN_K)[None, :])
    v = tl.load(value + source * value_token + element[None, :], mask=real & (element < SPAN_V)[None, :])
    slot, keep = load_slots(slots, row, num_rows, num_slots, error)
    block, offset = split_slot(slot, block_size, LOG2_BLOCK, NARROW)
    k_at = block * k_block + offset * k_token
    v_at = block * v_block + offset * v_token
    tl.store(
        key_cache + k_at[:, None] + element[None, :],
        encode(k, key_cache),
        mask=keep[:, None] & (element < SPAN_K)[None, :],
    )
    tl.store(
        value_cache + v_at[:, None] + element[None, :],
        encode(v, value_cache),
        mask=keep[:, None] & (element < SPAN_V)[None, :],
    )


@triton.jit(do_not_specialize=SIZES)
def write_heads_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    error,
    key_token,
    key_head,
    value_token,
    value_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    num_rows,
    num_slots,
    block_size,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Grid ``(tiles of (token, head) pairs,)``: ``ROWS`` pairs of one head each, of K and of V."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = (pair // HEADS).to(tl.int32)
    head = pair % HEADS
    element = tl.arange(0, WIDTH)
    real = (row < num_rows)[:, None]
    k_from = row.to(tl.int64) * key_token + head * key_head
    v_from = row.to(tl.int64) * value_token + head * value_head
    k = tl.load(key + k_from[:, None] + element[None, :], mask=real & (element < D)[None, :])
    v = tl.load(value + v_from[:, None] + element[None, :], mask=real & (element < DV)[None, :])
    slot, keep = load_slots(slots, row, num_rows, num_slots, error)
    block, offset = split_slot(slot, block_size, LOG2_BLOCK, NARROW)
    k_at = block * k_block + offset * k_token + head * k_head
    v_at = block * v_block + offset * v_token + head * v_head
    tl.store(
        key_cache + k_at[:, None] + element[None, :],
        encode(k, key_cache),
        mask=keep[:, None] & (element < D)[None, :],
    )
    tl.store(
        value_cache + v_at[:, None] + element[None, :],
        encode(v, value_cache),
        mask=keep[:, None] & (element < DV)[None, :],
    )
