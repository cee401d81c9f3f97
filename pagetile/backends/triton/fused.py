"""Norm and rotation of new queries and keys, and the write of keys and values, in one launch.

Contract: :class:`pagetile.backends.verbs.FusedWriteCall`; a head is rounded once, and what is stored is made of that.
Grid: ``(token tiles, query heads + KV heads)``. A program takes one head of its tokens; that of a KV head stores its
value, too. Channels are in three parts: the first and the second of each pair, and those that are not rotated. Reads
each source element once and writes each result once.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.
# ruff: noqa: SIM108

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagetile.backends.triton.calls import log2_block
from pagetile.backends.triton.device import SIZES
from pagetile.backends.triton.launch import Launch
from pagetile.backends.triton.quantised import KINDS, as_float32, quantise_rows
from pagetile.backends.triton.scales import as_bytes, scale_number, scale_strides
from pagetile.backends.triton.tuning import power_of_two
from pagetile.backends.triton.write import load_slots, split_slot
from pagetile.backends.verbs import FusedWriteCall


@triton.jit
def load_part(base, row, channel, real, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """float32 of the channels of rows at ``row``, 0 where they are not real or not of this part."""
    wanted = real[:, None] & (channel < COUNT)[None, :]
    return as_float32(tl.load(base + row[:, None] + channel_at(channel, FIRST)[None, :], mask=wanted, other=0.0))


@triton.jit
def channel_at(channel, FIRST: tl.constexpr):
    """Where channels of a part are: from ``FIRST`` on, or (``FIRST < 0``) every second from ``-1 - FIRST`` on."""
    if FIRST < 0:
        return 2 * channel + (-1 - FIRST)
    return channel + FIRST


@triton.jit
def weights_of(weight, channel, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """float32 weights of a part's channels."""
    return as_float32(tl.load(weight + channel_at(channel, FIRST), mask=channel < COUNT, other=0.0))


@triton.jit
def turn_head(
    base,
    row,
    real,
    cos,
    sin,
    weight,
    eps,
    NORM: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    ONE: tl.constexpr,
    TWO: tl.constexpr,
):
    """The three parts of rows of one head, normalised and rotated, float32."""
    pair = tl.arange(0, PAIRS)
    rest = tl.arange(0, REST)
    x = load_part(base, row, pair, real, ONE, HALF)
    y = load_part(base, row, pair, real, TWO, HALF)
    z = load_part(base, row, rest, real, 2 * HALF, D - 2 * HALF)
    if NORM:
        total = tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1)
        factor = (1.0 / tl.sqrt_rn(total / D + eps))[:, None]
        x = x * factor * weights_of(weight, pair, ONE, HALF)[None, :]
        y = y * factor * weights_of(weight, pair, TWO, HALF)[None, :]
        z = z * factor * weights_of(weight, rest, 2 * HALF, D - 2 * HALF)[None, :]
    return x * cos - y * sin, y * cos + x * sin, z


@triton.jit
def store_part(base, row, channel, x, keep, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Store one part of rows."""
    at = row[:, None] + channel_at(channel, FIRST)[None, :]
    tl.store(base + at, x, mask=keep[:, None] & (channel < COUNT)[None, :])


@triton.jit
def store_head(base, row, x, y, z, keep, D: tl.constexpr, HALF: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr):
    """Store the three parts of rows of one head."""
    pair = tl.arange(0, x.shape[1])
    rest = tl.arange(0, z.shape[1])
    store_part(base, row, pair, x, keep, ONE, HALF)
    store_part(base, row, pair, y, keep, TWO, HALF)
    store_part(base, row, rest, z, keep, 2 * HALF, D - 2 * HALF)


@triton.jit
def stored(x, scale, KIND: tl.constexpr, NATIVE: tl.constexpr, SCALED: tl.constexpr):
    """What a cache holds for rounded rows: they themselves, or bytes."""
    if KIND > 0:
        found = quantise_rows(x, scale, KIND, NATIVE, SCALED)
    else:
        found = x
    return found


@triton.jit
def divisor(x, scales, number, head, step, LOADED: tl.constexpr):
    """The scale of rows, float32 ``[rows]``."""
    scale = tl.zeros([x.shape[0]], tl.float32) + number
    if LOADED:
        scale = scale * tl.load(scales + head * step)
    return scale


@triton.jit(do_not_specialize=(*SIZES, "num_tokens", "num_positions", "k_number", "v_number", "eps"))
def fused_kernel(
    query_out,
    key_out,
    query,
    key,
    value,
    key_cache,
    value_cache,
    slots,
    positions,
    cos,
    sin,
    q_weight,
    k_weight,
    k_scale,
    v_scale,
    error,
    out_token,
    out_head,
    key_out_token,
    key_out_head,
    query_token,
    query_head,
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
    cos_row,
    sin_row,
    ks_head,
    vs_head,
    num_tokens,
    num_positions,
    num_rows,
    num_slots,
    block_size,
    k_number,
    v_number,
    eps,
    Q_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    KEY_OUT: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    SCALED: tl.constexpr,
    K_LOADED: tl.constexpr,
    V_LOADED: tl.constexpr,
):
    """All strides in elements; ``num_rows`` is the number of slots, ``num_tokens`` that of queries."""
    ONE: tl.constexpr = -1 if INTERLEAVED else 0
    TWO: tl.constexpr = -2 if INTERLEAVED else HALF
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    real = token < num_tokens
    row = token.to(tl.int64)
    position = tl.load(positions + token, mask=real, other=0).to(tl.int64)
    known = (position >= 0) & (position < num_positions)
    place = tl.where(known, position, 0)
    pair = tl.arange(0, PAIRS)
    # A position outside the tables turns its row to NaN, rather than to another position.
    lost = tl.where(known, 0.0, float("nan"))[:, None]
    c = load_part(cos, place * cos_row, pair, real & known, 0, HALF) + lost
    s = load_part(sin, place * sin_row, pair, real & known, 0, HALF) + lost
    dtype: tl.constexpr = key.dtype.element_ty
    if head < Q_HEADS:
        q_at = row * query_token + head * query_head
        qx, qy, qz = turn_head(query, q_at, real, c, s, q_weight, eps, NORM, D, HALF, PAIRS, REST, ONE, TWO)
        out = row * out_token + head * out_head
        store_head(query_out, out, qx.to(dtype), qy.to(dtype), qz.to(dtype), real, D, HALF, ONE, TWO)
    else:
        kv_head = head - Q_HEADS
        at = row * key_token + kv_head * key_head
        kx, ky, kz = turn_head(key, at, real, c, s, k_weight, eps, NORM, D, HALF, PAIRS, REST, ONE, TWO)
        x = kx.to(dtype)
        y = ky.to(dtype)
        z = kz.to(dtype)
        if KEY_OUT:
            store_head(key_out, row * key_out_token + kv_head * key_out_head, x, y, z, real, D, HALF, ONE, TWO)
        element = tl.arange(0, WIDTH)
        wanted = real[:, None] & (element < DV)[None, :]
        v_from = (row * value_token + kv_head * value_head)[:, None] + element[None, :]
        v = tl.load(value + v_from, mask=wanted, other=0.0)
        slot, keep = load_slots(slots, token, num_rows, num_slots, error)
        block, offset = split_slot(slot, block_size, LOG2_BLOCK, NARROW)
        k_by = divisor(x, k_scale, k_number, kv_head, ks_head, K_LOADED)
        v_by = divisor(x, v_scale, v_number, kv_head, vs_head, V_LOADED)
        k_at = block * k_block + offset * k_token + kv_head * k_head
        v_at = block * v_block + offset * v_token + kv_head * v_head
        store_head(
            key_cache, k_at, stored(x, k_by, KIND, NATIVE, SCALED), stored(y, k_by, KIND, NATIVE, SCALED),
            stored(z, k_by, KIND, NATIVE, SCALED), keep, D, HALF, ONE, TWO,
        )  # fmt: skip
        tl.store(
            value_cache + v_at[:, None] + element[None, :],
            stored(v, v_by, KIND, NATIVE, SCALED),
            mask=keep[:, None] & (element < DV)[None, :],
        )


def fused_launch(call: FusedWriteCall, native: bool) -> Launch:
    """The launch of one fused write."""
    write, problem = call.write, call.problem
    size, size_v, half = problem.write.head_size, problem.write.head_size_v, problem.rotary_size // 2
    heads, key_out = problem.write.num_kv_heads, write.key if call.key_out is None else call.key_out
    num_slots = write.key_cache.shape[0] * problem.write.block_size
    width = max(16, power_of_two(size_v))
    rows = max(1, 2048 // max(width, power_of_two(size)))
    scalars = (
        *call.query_out.stride()[:2], *key_out.stride()[:2], *call.query.stride()[:2], *write.key.stride()[:2],
        *write.value.stride()[:2], *write.key_cache.stride()[:3], *write.value_cache.stride()[:3],
        call.cos.stride(0), call.sin.stride(0), scale_strides(write.k_scale)[2], scale_strides(write.v_scale)[2],
        write.key.shape[0], call.cos.shape[0], write.slot_mapping.shape[0], num_slots, problem.write.block_size,
        scale_number(write.k_scale), scale_number(write.v_scale), float(call.eps),
    )  # fmt: skip
    constants = {
        "Q_HEADS": problem.num_q_heads,
        "D": size,
        "DV": size_v,
        "HALF": half,
        "PAIRS": power_of_two(max(1, half)),
        "REST": power_of_two(max(1, size - 2 * half)),
        "WIDTH": width,
        "ROWS": rows,
        "INTERLEAVED": problem.interleaved,
        "NORM": problem.norm,
        "KEY_OUT": call.key_out is not None,
        "LOG2_BLOCK": log2_block(problem.write.block_size),
        "NARROW": num_slots < 2**31,
        "KIND": KINDS.get(problem.kind, 0),
        "NATIVE": native,
        "SCALED": write.k_scale is not None or write.v_scale is not None,
        "K_LOADED": isinstance(write.k_scale, Tensor),
        "V_LOADED": isinstance(write.v_scale, Tensor),
    }
    grid = (-(-write.key.shape[0] // rows), problem.num_q_heads + heads, 1)
    return Launch(fused_kernel, grid, scalars, constants, num_warps=4)


def fused_tensors(call: FusedWriteCall, error: Tensor) -> tuple[Tensor, ...]:
    """The tensors of the kernel, in the order of its signature."""
    write = call.write
    caches = (write.key_cache, write.value_cache)
    if call.problem.kind in KINDS:
        caches = (as_bytes(write.key_cache), as_bytes(write.value_cache))
    slots, positions = (x if x.stride(0) == 1 else x.contiguous() for x in (write.slot_mapping, call.positions))
    key_out = write.key if call.key_out is None else call.key_out
    weights = (call.cos if weight is None else weight for weight in (call.q_weight, call.k_weight))
    scales = (scale if isinstance(scale, torch.Tensor) else error for scale in (write.k_scale, write.v_scale))
    return (
        call.query_out, key_out, call.query, write.key, write.value, *caches, slots, positions, call.cos, call.sin,
        *weights, *scales, error,
    )  # fmt: skip
