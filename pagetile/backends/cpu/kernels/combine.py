"""Second pass over split attentions: add the states of each row's segments, in ascending order, and finish it."""

from __future__ import annotations

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.attend import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    _clear_state,
    add_segment,
    fill_ranges,
)
from pagetile.backends.cpu.kernels.elements import slot_value, take_ticket, vectors_of
from pagetile.backends.cpu.kernels.finish import finish_rows
from pagetile.backends.cpu.kernels.vector import ROW_BYTES


@inlined
def _combine_group(block, scratch, task):
    heads, tokens, group = slot_value(task, P.T_HEADS), slot_value(task, P.T_TOKENS), slot_value(block, P.A_GROUP)
    rows, vectors = heads * tokens * group, vectors_of(slot_value(block, P.A_SIZE_V))
    ranges, total = scratch + slot_value(block, P.A_S_RANGE), scratch + slot_value(block, P.A_S_TOTAL)
    fill_ranges(block, ranges, task)
    _clear_state(total, rows, vectors)
    state = slot_value(block, P.A_PARTIALS) + slot_value(task, P.T_PARTIAL) * (vectors * ROW_BYTES + 8)
    for segment in range(slot_value(task, P.T_FIRST_SEGMENT), slot_value(task, P.T_LAST_SEGMENT)):
        add_segment(ranges, segment, total, state, heads, tokens, group, vectors)
        state += rows * (vectors * ROW_BYTES + 8)
    dtype = slot_value(block, P.A_DTYPE)
    if dtype == P.FLOAT32:
        finish_rows(block, task, ranges, total, FLOAT32)
    elif dtype == P.BFLOAT16:
        finish_rows(block, task, ranges, total, BFLOAT16)
    else:
        finish_rows(block, task, ranges, total, FLOAT16)


@inlined
def _combine_groups(block):
    worker = take_ticket(block + P.A_WORKER * 8)
    scratch = slot_value(block, P.A_SCRATCH) + worker * slot_value(block, P.A_SCRATCH_BYTES)
    while True:
        ticket = take_ticket(block + P.A_MERGE_TICKET * 8)
        if ticket >= slot_value(block, P.A_NUM_GROUPS):
            break
        _combine_group(block, scratch, slot_value(block, P.A_GROUPS) + ticket * P.TASK_BYTES)


def attend_combine(block):
    """All groups of split tasks."""
    _combine_groups(block)


COMBINE = Kernel(attend_combine)
