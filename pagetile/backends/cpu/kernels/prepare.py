"""Before an attention: look at every value, then cut the work into tasks, the costliest first."""

from __future__ import annotations

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel, inlined
from pagetile.backends.cpu.kernels.address import key_span, query_span, visible
from pagetile.backends.cpu.kernels.elements import get_i32, get_i64, index_at, put_i64, put_slot, slot_value
from pagetile.backends.cpu.tuning import SEGMENT

BUCKETS = 128


@inlined
def fail(block, error, row, column, value):
    put_slot(block, P.ERROR_ROW, row)
    put_slot(block, P.ERROR_COLUMN, column)
    put_slot(block, P.ERROR_VALUE, value)
    put_slot(block, P.ERROR, error)


@inlined
def _check_loc(block, loc, limit, start_error, order_error, end_error):
    """A cumulative int32 ``[B + 1]``: starts at 0, never decreases, ends within ``limit``."""
    seqs = slot_value(block, P.A_NUM_SEQS)
    before = get_i32(loc)
    if before != 0:
        fail(block, start_error, 0, 0, before)
        return
    for seq in range(seqs):
        after = get_i32(loc + (seq + 1) * 4)
        if after < before:
            fail(block, order_error, seq, before, after)
            return
        before = after
    if before > limit:
        fail(block, end_error, seqs, 0, before)


@inlined
def _check_lengths(block, seq):
    _, q_len = query_span(block, seq)
    if q_len > slot_value(block, P.A_MAX_Q):
        fail(block, P.QUERY_PAST_BOUND, seq, 0, q_len)
        return
    _, seq_len = key_span(block, seq)
    if seq_len < 0:
        fail(block, P.BAD_SEQ_LEN, seq, 0, seq_len)
        return
    if seq_len > slot_value(block, P.A_MAX_K):
        fail(block, P.SEQ_PAST_BOUND, seq, 0, seq_len)
        return
    starts = slot_value(block, P.A_KEY_STARTS)
    if starts:
        first = get_i32(starts + seq * 4)
        if first < 0:
            fail(block, P.BAD_KEY_START, seq, 0, first)


@inlined
def _check_table(block, seq):
    """The entries that hold a sequence's tokens; the ones past them are not looked at."""
    _, seq_len = key_span(block, seq)
    block_size, width = slot_value(block, P.A_BLOCK_SIZE), slot_value(block, P.A_TABLE_WIDTH)
    needed = (seq_len + block_size - 1) // block_size
    if needed > width:
        fail(block, P.SEQ_PAST_TABLE, seq, 0, seq_len)
        return
    row = slot_value(block, P.A_TABLE) + seq * slot_value(block, P.A_TABLE_ROW)
    wide, limit = slot_value(block, P.A_TABLE_WIDE), slot_value(block, P.A_NUM_BLOCKS)
    for column in range(needed):
        entry = index_at(row, column, wide)
        if entry < 0 or entry >= limit:
            fail(block, P.BAD_BLOCK, seq, column, entry)
            return


@inlined
def _check_all(block):
    """True when every value is right; else the first fault stands in the block."""
    loc = slot_value(block, P.A_QUERY_LOC)
    rows = slot_value(block, P.A_NUM_ROWS)
    _check_loc(block, loc, rows, P.QUERY_LOC_START, P.QUERY_LOC_ORDER, P.QUERY_LOC_END)
    keys = slot_value(block, P.A_KEY_LOC)
    if keys and slot_value(block, P.ERROR) == 0:
        limit = slot_value(block, P.A_NUM_BLOCKS)
        _check_loc(block, keys, limit, P.KEY_LOC_START, P.KEY_LOC_ORDER, P.KEY_LOC_END)
    seq = 0
    while slot_value(block, P.ERROR) == 0 and seq < slot_value(block, P.A_NUM_SEQS):
        _check_lengths(block, seq)
        if slot_value(block, P.ERROR) == 0 and keys == 0:
            _check_table(block, seq)
        seq += 1
    return slot_value(block, P.ERROR) == 0


@inlined
def _put_record(record, seq, head, heads, token, tokens, first, last, partial):
    put_slot(record, P.T_SEQ, seq)
    put_slot(record, P.T_HEAD, head)
    put_slot(record, P.T_HEADS, heads)
    put_slot(record, P.T_TOKEN, token)
    put_slot(record, P.T_TOKENS, tokens)
    put_slot(record, P.T_FIRST_SEGMENT, first)
    put_slot(record, P.T_LAST_SEGMENT, last)
    put_slot(record, P.T_PARTIAL, partial)


@inlined
def _add_tile(block, seq, token, tokens, tasks, groups, partial_rows):
    """Tasks of one tile of query tokens, for all heads; returns the three counters."""
    heads, group = slot_value(block, P.A_HEADS), slot_value(block, P.A_GROUP)
    _, q_len = query_span(block, seq)
    _, seq_len = key_span(block, seq)
    low, _ = visible(block, seq, token, q_len, seq_len)
    _, high = visible(block, seq, token + tokens - 1, q_len, seq_len)
    first, last = 0, 0
    if low < high:
        first, last = low // SEGMENT, (high - 1) // SEGMENT + 1
    else:
        low, high = 0, 0
    step = max(1, min(slot_value(block, P.A_TASK_HEADS), slot_value(block, P.A_ROW_LIMIT) // (q_len * group)))
    pieces = max(1, min(slot_value(block, P.A_SPLITS), last - first))
    head = 0
    while head < heads:
        step = min(step, heads - head)
        rows, base = step * tokens * group, -1
        if pieces > 1:
            base = partial_rows
            record = slot_value(block, P.A_GROUPS) + groups * P.TASK_BYTES
            _put_record(record, seq, head, step, token, tokens, first, last, base)
            partial_rows += rows * (last - first)
            groups += 1
        for piece in range(pieces):
            start = first + piece * (last - first) // pieces
            end = first + (piece + 1) * (last - first) // pieces
            record = slot_value(block, P.A_TASKS) + tasks * P.TASK_BYTES
            mine = base + (start - first) * rows if pieces > 1 else -1
            _put_record(record, seq, head, step, token, tokens, start, end, mine)
            keys = min(high, end * SEGMENT) - max(low, start * SEGMENT)
            put_i64(slot_value(block, P.A_TASK_COST) + tasks * 8, rows * (keys + 16))
            tasks += 1
        head += step
    return tasks, groups, partial_rows


@inlined
def _order_tasks(block, tasks):
    """Costliest first, by counting into buckets; equal buckets keep their order."""
    costs, order = slot_value(block, P.A_TASK_COST), slot_value(block, P.A_TASK_ORDER)
    buckets = slot_value(block, P.A_BUCKETS)
    most = 1
    for task in range(tasks):
        most = max(most, get_i64(costs + task * 8))
    for bucket in range(BUCKETS + 1):
        put_i64(buckets + bucket * 8, 0)
    for task in range(tasks):
        bucket = BUCKETS - 1 - get_i64(costs + task * 8) * (BUCKETS - 1) // most
        put_i64(costs + task * 8, bucket)
        count = buckets + (bucket + 1) * 8
        put_i64(count, get_i64(count) + 1)
    for bucket in range(BUCKETS):
        count = buckets + (bucket + 1) * 8
        put_i64(count, get_i64(count) + get_i64(count - 8))
    for task in range(tasks):
        place = buckets + get_i64(costs + task * 8) * 8
        index = get_i64(place)
        put_i64(place, index + 1)
        put_i64(order + index * 8, task)


@inlined
def _prepare(block):
    if not _check_all(block):
        return
    tasks, groups, partial_rows = 0, 0, 0
    for seq in range(slot_value(block, P.A_NUM_SEQS)):
        _, q_len = query_span(block, seq)
        token = 0
        while token < q_len:
            tokens = min(slot_value(block, P.A_TILE_TOKENS), q_len - token)
            tasks, groups, partial_rows = _add_tile(block, seq, token, tokens, tasks, groups, partial_rows)
            token += tokens
    _order_tasks(block, tasks)
    put_slot(block, P.A_NUM_TASKS, tasks)
    put_slot(block, P.A_NUM_GROUPS, groups)


def attend_prepare(block):
    """Check values and build tasks. Reads lengths and tables, writes the task arrays and the error slots."""
    _prepare(block)


PREPARE = Kernel(attend_prepare)
