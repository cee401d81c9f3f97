"""Gather tokens out of a paged cache, dequantised: a write the other way round.

Contract: row t is what stands at ``slots[t]`` (:class:`pagetile.backends.verbs.GatherCall`). A negative slot leaves its
row as it is; a slot past the cache gives a row of 0, and is reported. Grid: ``(tiles of (token, head) pairs,)``. Reads
each stored element once and writes each row element once.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagetile.backends.triton.calls import log2_block
from pagetile.backends.triton.device import SIZES
from pagetile.backends.triton.launch import Launch
from pagetile.backends.triton.quantised import KINDS, as_float32, decode
from pagetile.backends.triton.scales import as_bytes
from pagetile.backends.triton.tuning import power_of_two
from pagetile.backends.triton.write import load_slots, split_slot
from pagetile.backends.verbs import GatherCall


@triton.jit
def dequantised(stored, scales, at, real, like, KIND: tl.constexpr, NATIVE: tl.constexpr, SCALED: tl.constexpr):
    """Stored rows as numbers of the dtype of ``like``: bytes as they are, or value times scale, rounded once."""
    if KIND == 0:
        x = stored
    else:
        x = as_float32(decode(stored, like, KIND, NATIVE))
        if SCALED:
            x = x * tl.load(scales + at, mask=real, other=1.0)[:, None]
    return x


@triton.jit(do_not_specialize=SIZES)
def gather_kernel(
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
    ks_head,
    vs_row,
    vs_head,
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
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
):
    """Grid ``(tiles of (token, head) pairs,)``: ``ROWS`` pairs of one head each, of K and of V."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = (pair // HEADS).to(tl.int32)
    head = pair % HEADS
    element = tl.arange(0, WIDTH)
    slot, keep = load_slots(slots, row, num_rows, num_slots, error)
    wanted = keep | (tl.load(slots + row, mask=row < num_rows, other=-1) >= num_slots)
    block, offset = split_slot(slot, block_size, LOG2_BLOCK, NARROW)
    k_at = block * k_block + offset * k_token + head * k_head
    v_at = block * v_block + offset * v_token + head * v_head
    k = tl.load(key_cache + k_at[:, None] + element[None, :], mask=keep[:, None] & (element < D)[None, :], other=0)
    v = tl.load(value_cache + v_at[:, None] + element[None, :], mask=keep[:, None] & (element < DV)[None, :], other=0)
    one = tl.zeros([1], key.dtype.element_ty)
    place = row.to(tl.int64)
    k = dequantised(k, k_scale, place * ks_row + head * ks_head, keep, one, KIND, NATIVE, K_SCALED)
    v = dequantised(v, v_scale, place * vs_row + head * vs_head, keep, one, KIND, NATIVE, V_SCALED)
    tl.store(
        key + (place * key_token + head * key_head)[:, None] + element[None, :],
        k.to(key.dtype.element_ty),
        mask=wanted[:, None] & (element < D)[None, :],
    )
    tl.store(
        value + (place * value_token + head * value_head)[:, None] + element[None, :],
        v.to(value.dtype.element_ty),
        mask=wanted[:, None] & (element < DV)[None, :],
    )


def gather_launch(call: GatherCall, native: bool) -> Launch:
    """The launch of one gather."""
    problem, key, value = call.problem, call.key, call.value
    num_rows, heads = call.slots.shape[0], problem.num_kv_heads
    num_slots = call.key_cache.shape[0] * problem.block_size
    width = max(16, power_of_two(max(problem.head_size, problem.head_size_v)))
    rows = max(1, 4096 // (width * key.element_size()))
    scalars = (
        *key.stride()[:2], *value.stride()[:2], *call.key_cache.stride()[:3], *call.value_cache.stride()[:3],
        *_scale_steps(call.k_scale), *_scale_steps(call.v_scale), num_rows, num_slots, problem.block_size,
    )  # fmt: skip
    constants = {
        "HEADS": heads,
        "D": problem.head_size,
        "DV": problem.head_size_v,
        "ROWS": rows,
        "WIDTH": width,
        "LOG2_BLOCK": log2_block(problem.block_size),
        "NARROW": num_slots < 2**31,
        "KIND": KINDS.get(problem.kind, 0),
        "NATIVE": native,
        "K_SCALED": call.k_scale is not None,
        "V_SCALED": call.v_scale is not None,
    }
    return Launch(gather_kernel, (-(-num_rows * heads // rows), 1, 1), scalars, constants, num_warps=4)


def gather_tensors(call: GatherCall, error: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of the kernel, in the order of its signature."""
    caches = (call.key_cache, call.value_cache)
    if call.problem.kind in KINDS:
        caches = (as_bytes(call.key_cache), as_bytes(call.value_cache))
    scales = (error if scale is None else scale for scale in (call.k_scale, call.v_scale))
    return call.key, call.value, *caches, call.slots, *scales, error


def _scale_steps(scale: torch.Tensor | None) -> tuple[int, int]:
    """``(row, head)`` steps of a scale."""
    if scale is None or scale.numel() == 1:
        return 0, 0
    return (scale.stride(0), scale.stride(1)) if scale.dim() == 2 else (0, scale.stride(0))
