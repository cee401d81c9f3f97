"""Store new keys and values in an x-packed cache.

Contract: row t goes to offset ``slot % block_size`` of block ``slot // block_size``, a key in packs of 16 bytes, a
value one element a channel (:class:`pagetile.backends.protocol.WriteCall`). Grid: ``(token tiles, KV heads)``. Values
are stored with tokens along the lanes: rows for neighbouring slots then fill whole sectors of a channel.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagetile.backends.protocol import WriteCall
from pagetile.backends.triton.calls import log2_block
from pagetile.backends.triton.device import SIZES
from pagetile.backends.triton.fused import divisor, stored
from pagetile.backends.triton.launch import Launch
from pagetile.backends.triton.quantised import KINDS
from pagetile.backends.triton.scales import as_bytes, scale_number, scale_strides
from pagetile.backends.triton.tuning import WritePlan, power_of_two
from pagetile.backends.triton.write import load_slots, split_slot
from pagetile.contracts.problem import WriteProblem


@triton.jit(do_not_specialize=(*SIZES, "k_number", "v_number"))
def write_packed_kernel(
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
    k_head,
    k_pack,
    k_token,
    v_block,
    v_head,
    v_channel,
    ks_head,
    vs_head,
    num_rows,
    num_slots,
    block_size,
    k_number,
    v_number,
    D: tl.constexpr,
    DV: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    SCALED: tl.constexpr,
    K_LOADED: tl.constexpr,
    V_LOADED: tl.constexpr,
    DENSE: tl.constexpr,
):
    """One head of ``ROWS`` tokens, K and V."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    real = row < num_rows
    source = row.to(tl.int64)
    element = tl.arange(0, WIDTH)
    channel = tl.arange(0, WIDTH_V)
    k_from = key + (source * key_token + head * key_head)[:, None] + element[None, :]
    v_from = value + (source * value_token + head * value_head)[:, None] + channel[None, :]
    k = tl.load(k_from, mask=real[:, None] & (element < D)[None, :], other=0.0)  # [rows, elements]
    v = tl.load(v_from, mask=real[:, None] & (channel < DV)[None, :], other=0.0)
    slot, keep = load_slots(slots, row, num_rows, num_slots, error)
    block, offset = split_slot(slot, block_size, LOG2_BLOCK, NARROW)
    k_by = divisor(k, k_scale, k_number, head, ks_head, K_LOADED)
    v_by = divisor(v, v_scale, v_number, head, vs_head, V_LOADED)
    # A constant where it can be: a step of 8 says nothing of alignment to a compiler that looks for multiples of 16.
    k_at = block * k_block + head * k_head + offset * (X if DENSE else k_token)
    in_packs = (element // X).to(tl.int64) * k_pack + element % X
    tl.store(
        key_cache + k_at[:, None] + in_packs[None, :],
        stored(k, k_by, KIND, NATIVE, SCALED),
        mask=keep[:, None] & (element < D)[None, :],
    )
    v_at = block * v_block + head * v_head + offset
    across = channel.to(tl.int64) * v_channel
    tl.store(
        value_cache + across[:, None] + v_at[None, :],  # [channels, rows]
        tl.trans(stored(v, v_by, KIND, NATIVE, SCALED)),
        mask=(channel < DV)[:, None] & keep[None, :],
    )


def plan_packed_write(problem: WriteProblem, fp8: bool = True) -> WritePlan:
    """A head of so many tokens a program, that a channel's neighbours are stored together."""
    width = max(16, power_of_two(max(problem.head_size, problem.head_size_v)))
    rows = max(16, min(64, 8192 // width))
    why = f"{rows} tokens of one head, so that rows for neighbouring slots fill the sectors of a value channel"
    # Quantising takes registers: with half as many elements a thread next to nothing spills (sm_80 and sm_90).
    return WritePlan(False, rows, width, 8 if problem.kind in KINDS else 4, (why,), fp8)


def write_packed_launch(call: WriteCall, native: bool) -> Launch:
    """The launch of one write into an x-packed cache."""
    problem, key, value = call.problem, call.key, call.value
    num_rows, plan = call.slot_mapping.shape[0], plan_packed_write(call.problem, native)
    num_slots, rows = call.key_cache.shape[0] * problem.block_size, plan.rows
    width, width_v = (max(16, power_of_two(n)) for n in (problem.head_size, problem.head_size_v))
    scalars = (
        *key.stride()[:2], *value.stride()[:2], *call.key_cache.stride()[:4], *call.value_cache.stride()[:3],
        scale_strides(call.k_scale)[2], scale_strides(call.v_scale)[2], num_rows, num_slots, problem.block_size,
        scale_number(call.k_scale), scale_number(call.v_scale),
    )  # fmt: skip
    constants = {
        "D": problem.head_size,
        "DV": problem.head_size_v,
        "X": call.key_cache.shape[4],
        "ROWS": rows,
        "WIDTH": width,
        "WIDTH_V": width_v,
        "LOG2_BLOCK": log2_block(problem.block_size),
        "NARROW": num_slots < 2**31,
        "KIND": KINDS.get(problem.kind, 0),
        "NATIVE": native,
        "SCALED": call.k_scale is not None or call.v_scale is not None,
        "K_LOADED": isinstance(call.k_scale, Tensor),
        "V_LOADED": isinstance(call.v_scale, Tensor),
        "DENSE": call.key_cache.stride(3) == call.key_cache.shape[4],
    }
    grid = (-(-num_rows // rows), problem.num_kv_heads, 1)
    return Launch(write_packed_kernel, grid, scalars, constants, num_warps=plan.warps)


def write_packed_tensors(call: WriteCall, error: Tensor) -> tuple[Tensor, ...]:
    """The tensors of the kernel, in the order of its signature."""
    caches = (call.key_cache, call.value_cache)
    if call.problem.kind in KINDS:
        caches = (as_bytes(call.key_cache), as_bytes(call.value_cache))
    slots = call.slot_mapping if call.slot_mapping.stride(0) == 1 else call.slot_mapping.contiguous()
    scales = (scale if isinstance(scale, Tensor) else error for scale in (call.k_scale, call.v_scale))
    return call.key, call.value, *caches, slots, *scales, error
