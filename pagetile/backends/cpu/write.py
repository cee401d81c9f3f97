"""Write, from the host: bytes of each token to its slot. The kernel is :mod:`pagetile.backends.cpu.kernels.write`."""

from __future__ import annotations

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.faults import slot_fault, wide_index
from pagetile.backends.cpu.kernels.write import CHECK, CHUNKS, SERIAL, STREAMS
from pagetile.backends.cpu.launch import available_threads, launch
from pagetile.backends.cpu.scratch import MEMORY
from pagetile.backends.cpu.tuning import WritePlan, plan_write
from pagetile.backends.protocol import WriteCall


def plan_for(call: WriteCall) -> WritePlan:
    """The plan that :func:`write` follows."""
    key, value, size = call.key, call.value, call.key.element_size()
    return plan_write(
        call.problem,
        available_threads(),
        size,
        _joined(key.stride(1), call.key_cache.stride(2), key.shape[1], key.shape[2]),
        _joined(value.stride(1), call.value_cache.stride(2), value.shape[1], value.shape[2]),
    )


def write(call: WriteCall) -> None:
    """Store keys and values at their slots.

    Raises:
        SlotError: a slot past the end of the cache. Nothing has been written.
    """
    slots = call.slot_mapping
    count = slots.shape[0]
    if not count:
        return
    plan = plan_for(call)
    memory = MEMORY
    block, size = memory.integers, call.key.element_size()
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

    row, head, _ = call.key.stride()
    home, token, cache_head, _ = call.key_cache.stride()
    block[P.W_K_FROM] = call.key.data_ptr()
    block[P.W_K_FROM_ROW] = row * size
    block[P.W_K_FROM_SPAN] = head * size
    block[P.W_K_TO] = call.key_cache.data_ptr()
    block[P.W_K_TO_BLOCK] = home * size
    block[P.W_K_TO_TOKEN] = token * size
    block[P.W_K_TO_SPAN] = cache_head * size
    block[P.W_K_SPANS] = plan.k_spans
    block[P.W_K_BYTES] = plan.k_bytes

    row, head, _ = call.value.stride()
    home, token, cache_head, _ = call.value_cache.stride()
    block[P.W_V_FROM] = call.value.data_ptr()
    block[P.W_V_FROM_ROW] = row * size
    block[P.W_V_FROM_SPAN] = head * size
    block[P.W_V_TO] = call.value_cache.data_ptr()
    block[P.W_V_TO_BLOCK] = home * size
    block[P.W_V_TO_TOKEN] = token * size
    block[P.W_V_TO_SPAN] = cache_head * size
    block[P.W_V_SPANS] = plan.v_spans
    block[P.W_V_BYTES] = plan.v_bytes

    threads = min(plan.threads, -(-count // plan.chunk))
    if threads <= 1 and not plan.stream:
        SERIAL(memory.address)
    else:
        CHECK(memory.address)
    if block[P.ERROR]:
        raise slot_fault(call, block[P.ERROR_ROW], block[P.ERROR_VALUE])
    if threads > 1 or plan.stream:
        launch(STREAMS if plan.stream else CHUNKS, memory.address, threads)


def _joined(source_head: int, cache_head: int, heads: int, size: int) -> bool:
    """The heads of a token are one span on both sides; one head always is, whatever its stride says."""
    return heads == 1 or source_head == cache_head == size
