"""Store new keys and values at their slots of a quantised cache.

Contract: the bytes of :func:`pagetile.reference.quantise` at the places of :mod:`pagetile.backends.triton.write`
(:class:`pagetile.backends.protocol.WriteCall`). Two work splits over the helpers of that file: a token's heads as one
run where one scale serves all, a head at a time otherwise. Both read each source element once and write each byte once;
where each token and head gets a scale of its own, that is written beside it.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.device import SIZES
from pagetile.backends.triton.quantised import HEAD, NUMBER, ONE, OWN, UNSCALED, own_scale, quantise_rows
from pagetile.backends.triton.write import load_slots, split_slot

_NUMBER = tl.constexpr(NUMBER)
_ONE = tl.constexpr(ONE)
_HEAD = tl.constexpr(HEAD)
_OWN = tl.constexpr(OWN)
_UNSCALED = tl.constexpr(UNSCALED)


@triton.jit
def scale_of_rows(x, scales, number, head, step, KIND: tl.constexpr, FORM: tl.constexpr):
    """The divisor of each row of ``x``, float32 ``[rows]``."""
    scale = tl.zeros([x.shape[0]], tl.float32) + 1.0
    if FORM == _NUMBER:
        scale = scale * number
    elif FORM == _ONE:
        scale = scale * tl.load(scales)
    elif FORM == _HEAD:
        scale = tl.load(scales + head * step)
    elif FORM == _OWN:
        scale = own_scale(x, KIND)
    return scale


@triton.jit(do_not_specialize=(*SIZES, "k_number", "v_number"))
def quantise_span_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    k_scale,
    v_scale,
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
    k_number,
    v_number,
    SPAN_K: tl.constexpr,
    SPAN_V: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
):
    """Grid ``(row tiles, element tiles)``: ``ROWS`` tokens by ``WIDTH`` elements of K and of V, one scale for each."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real = (row < num_rows)[:, None]
    source = row.to(tl.int64)[:, None]
    # Both loads start before the slots are known, so that their latencies overlap.
    k = tl.load(key + source * key_token + element[None, :], mask=real & (element < SPAN_K)[None, :], other=0.0)
    v = tl.load(value + source * value_token + element[None, :], mask=real & (element < SPAN_V)[None, :], other=0.0)
    slot, keep = load_slots(slots, row, num_rows, num_slots, error)
    block, offset = split_slot(slot, block_size, LOG2_BLOCK, NARROW)
    k_at = block * k_block + offset * k_token
    v_at = block * v_block + offset * v_token
    k_by = scale_of_rows(k, k_scale, k_number, row, 0, KIND, K_FORM)
    v_by = scale_of_rows(v, v_scale, v_number, row, 0, KIND, V_FORM)
    tl.store(
        key_cache + k_at[:, None] + element[None, :],
        quantise_rows(k, k_by, KIND, NATIVE, K_FORM != _UNSCALED),
        mask=keep[:, None] & (element < SPAN_K)[None, :],
    )
    tl.store(
        value_cache + v_at[:, None] + element[None, :],
        quantise_rows(v, v_by, KIND, NATIVE, V_FORM != _UNSCALED),
        mask=keep[:, None] & (element < SPAN_V)[None, :],
    )


@triton.jit(do_not_specialize=(*SIZES, "k_number", "v_number"))
def quantise_heads_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    k_scale,
    v_scale,
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
    ks_row,
    ks_token,
    ks_head,
    vs_row,
    vs_token,
    vs_head,
    num_rows,
    num_slots,
    block_size,
    k_number,
    v_number,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    K_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
):
    """Grid ``(tiles of (token, head) pairs,)``: ``ROWS`` pairs of one head each, of K and of V."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = (pair // HEADS).to(tl.int32)
    head = pair % HEADS
    element = tl.arange(0, WIDTH)
    real = (row < num_rows)[:, None]
    k_from = row.to(tl.int64) * key_token + head * key_head
    v_from = row.to(tl.int64) * value_token + head * value_head
    k = tl.load(key + k_from[:, None] + element[None, :], mask=real & (element < D)[None, :], other=0.0)
    v = tl.load(value + v_from[:, None] + element[None, :], mask=real & (element < DV)[None, :], other=0.0)
    slot, keep = load_slots(slots, row, num_rows, num_slots, error)
    block, offset = split_slot(slot, block_size, LOG2_BLOCK, NARROW)
    k_at = block * k_block + offset * k_token + head * k_head
    v_at = block * v_block + offset * v_token + head * v_head
    k_by = scale_of_rows(k, k_scale, k_number, head, ks_head, KIND, K_FORM)
    v_by = scale_of_rows(v, v_scale, v_number, head, vs_head, KIND, V_FORM)
    if K_FORM == _OWN:
        tl.store(k_scale + block * ks_row + offset * ks_token + head * ks_head, k_by, mask=keep)
        tl.store(v_scale + block * vs_row + offset * vs_token + head * vs_head, v_by, mask=keep)
    tl.store(
        key_cache + k_at[:, None] + element[None, :],
        quantise_rows(k, k_by, KIND, NATIVE, K_FORM != _UNSCALED),
        mask=keep[:, None] & (element < D)[None, :],
    )
    tl.store(
        value_cache + v_at[:, None] + element[None, :],
        quantise_rows(v, v_by, KIND, NATIVE, V_FORM != _UNSCALED),
        mask=keep[:, None] & (element < DV)[None, :],
    )
