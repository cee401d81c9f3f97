"""Write into a quantised cache, from the host. The kernel is :mod:`pagetile.backends.cpu.kernels.quantise`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.faults import slot_fault, wide_index
from pagetile.backends.cpu.kernels.quantise import CHUNKS, SERIAL
from pagetile.backends.cpu.kernels.write import CHECK
from pagetile.backends.cpu.launch import available_threads, launch
from pagetile.backends.cpu.scratch import MEMORY
from pagetile.backends.cpu.tuning import WritePlan, plan_write
from pagetile.backends.protocol import Scale, WriteCall


def plan_for(call: WriteCall) -> WritePlan:
    """The plan that :func:`write_quantised` follows."""
    key, value = call.key, call.value
    whole = call.problem.scale in ("none", "tensor")
    return plan_write(
        call.problem,
        available_threads(),
        key.element_size(),
        whole and _joined(key, call.key_cache),
        whole and _joined(value, call.value_cache),
    )


def write_quantised(call: WriteCall) -> None:
    """Store keys and values at their slots, and the scale of each token and head where those are outputs.

    Raises:
        SlotError: a slot past the end of the cache. Nothing has been written.
    """
    slots = call.slot_mapping
    count = slots.shape[0]
    if not count:
        return
    plan = plan_for(call)
    memory = MEMORY
    block, problem = memory.integers, call.problem
    num_blocks, block_size = call.key_cache.shape[:2]
    block[P.ERROR] = 0
    block[P.W_TICKET] = 0
    block[P.W_SLOTS] = slots.data_ptr()
    block[P.W_SLOT_STEP] = slots.stride(0) * slots.element_size()
    block[P.W_WIDE] = wide_index("slot_mapping", slots)
    block[P.W_COUNT] = count
    block[P.W_BLOCK_SIZE] = block_size
    block[P.W_LIMIT] = num_blocks * block_size
    block[P.W_CHUNK] = plan.chunk
    block[P.W_DTYPE] = P.DTYPE_CODES[problem.dtype]
    block[P.W_KIND] = P.KIND_CODES[problem.kind]
    block[P.W_OWN_SCALES] = problem.scale == "token_head"
    k_scale = _scale(call.k_scale)
    v_scale = _scale(call.v_scale)
    _side(block, P.W_K_FROM, call.key, call.key_cache, plan.k_spans)
    _side(block, P.W_V_FROM, call.value, call.value_cache, plan.v_spans)
    block[P.W_K_SIZE] = plan.k_bytes // call.key.element_size()
    block[P.W_V_SIZE] = plan.v_bytes // call.value.element_size()
    _scale_slots(block, P.W_K_SCALE, k_scale)
    _scale_slots(block, P.W_V_SCALE, v_scale)

    threads = min(plan.threads, -(-count // plan.chunk))
    if threads <= 1:
        SERIAL(memory.address)
    else:
        CHECK(memory.address)
    if block[P.ERROR]:
        raise slot_fault(call, block[P.ERROR_ROW], block[P.ERROR_VALUE])
    if threads > 1:
        launch(CHUNKS, memory.address, threads)


def _side(block, first: int, rows: Tensor, cache: Tensor, spans: int) -> None:
    """Where K or V come from and go to; ``first`` is the slot of the source's address, the others follow it."""
    size = rows.element_size()
    row, head, _ = rows.stride()
    home, token, cache_head, _ = cache.stride()
    for slot, value in enumerate(
        (rows.data_ptr(), row * size, head * size, cache.data_ptr(), home, token, cache_head, spans), start=first
    ):
        block[slot] = value


def _scale(scale: Scale) -> Tensor:
    """A tensor to hold on to while the kernel reads its address."""
    if isinstance(scale, Tensor):
        return scale
    return torch.full((), 1.0 if scale is None else scale, dtype=torch.float32)


def _scale_slots(block, first: int, scale: Tensor) -> None:
    """Address and ``(block, token, head)`` steps in bytes; one scale for all takes no step."""
    steps = (0, 0, 0)
    if scale.dim() == 3:
        steps = scale.stride()
    elif scale.numel() > 1:
        steps = (0, 0, scale.stride(0))
    for slot, value in enumerate((scale.data_ptr(), *(4 * step for step in steps)), start=first):
        block[slot] = value


def _joined(rows: Tensor, cache: Tensor) -> bool:
    """The heads of a token are one span on both sides; one head always is, whatever its stride says."""
    return rows.shape[1] == 1 or rows.stride(1) == cache.stride(2) == rows.shape[2]
