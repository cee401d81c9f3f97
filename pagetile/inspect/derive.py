"""From a record to every access: (operation, tensor, block, offset, head, bytes), on demand.

The arithmetic is :mod:`pagetile.contracts.geometry` and :mod:`pagetile.contracts.visibility`, over the metadata that a
:class:`pagetile.inspect.tracer.Tracer` wrote down. An access is what the operation needs, once; a kernel may load more
than that (a whole tile) or the same bytes again from a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pagetile.contracts.geometry import CacheStrides, join_slot, split_position
from pagetile.contracts.visibility import visible_range
from pagetile.inspect.record import Call, Store, Trace

Tensor = Literal["slot_mapping", "block_table", "key_cache", "value_cache"]


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of one head of one token in one cache; or one entry of a metadata tensor.

    Attributes:
        op: ``write``, ``attend``, ``gather``, or the two sides of a copy, ``copy_from`` and ``copy_to``.
        tensor: which one.
        row: packed row (write, gather), sequence (attend) or pair (copy) that needs it.
        position: of the sequence, for an attention's reads of a cache; the first of the block, for a block table
            entry; None if the operation does not know it.
        block, offset: where; ``offset`` is the column for a block table entry.
        head: KV head; None for metadata.
        address: bytes from the tensor's base.
        bytes: how many.
    """

    op: str
    tensor: Tensor
    row: int
    position: int | None
    block: int
    offset: int
    head: int | None
    address: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Range:
    """Positions ``[first, last)`` that the queries of a sequence see, all of them together."""

    seq: int
    first: int
    last: int


def accesses(trace: Trace, step: int, store: int, op: str | None = None) -> Iterator[Access]:
    """Every access of one step to one layer's caches, in the order of the calls.

    Args:
        trace: of a tracer.
        step: index of the step; negative counts from the end.
        store: index into ``trace.stores``.
        op: only ``write``, ``attend``, ``gather`` or ``copy``.
    """
    derivations = {"write": writes, "attend": reads, "gather": gathers, "copy": copies}
    where = trace.stores[store]
    for call in trace.steps[step].calls:
        if store in call.stores and op in (None, call.op):
            yield from derivations[call.op](call, where)


def writes(call: Call, store: Store) -> Iterator[Access]:
    """What a write looks up and stores. A slot outside the cache is looked up, and nothing is stored."""
    assert call.slots is not None
    itemsize = call.slots.itemsize
    for row, slot in enumerate(call.slots.tolist()):
        block, offset = divmod(slot, store.block_size) if slot >= 0 else (-1, -1)
        at = row * call.slot_stride * itemsize
        yield Access("write", "slot_mapping", row, None, block, offset, None, at, itemsize)
        yield from _stored("write", row, slot, store)


def gathers(call: Call, store: Store) -> Iterator[Access]:
    """What a gather loads from the caches. Its table was looked up before the backend was asked."""
    assert call.slots is not None
    for row, slot in enumerate(call.slots.tolist()):
        yield from _stored("gather", row, slot, store)


def _stored(op: str, row: int, slot: int, store: Store) -> Iterator[Access]:
    if 0 <= slot < store.num_blocks * store.block_size:
        yield from _token(op, store, row, None, slot)


def reads(call: Call, store: Store) -> Iterator[Access]:
    """What an attention looks up and loads: each sequence's table entries, then its keys and values.

    A block id outside the cache is looked up, and nothing is loaded: on a GPU its keys count as not visible.
    """
    rows, size = call.table.rows(), store.block_size
    for seen in visible(call):
        row = rows[seen.seq]
        last = min(seen.last, len(row) * size)  # a load past the end of the row never happens
        for column in range(seen.first // size, -(-last // size)):
            at = (seen.seq * call.table_stride + column) * row.itemsize
            yield Access(
                "attend", "block_table", seen.seq, column * size, int(row[column]), column, None, at, row.itemsize
            )
        for position in range(seen.first, last):
            column, offset = split_position(position, size)
            if 0 <= row[column] < store.num_blocks:
                slot = join_slot(int(row[column]), offset, size)
                yield from _token("attend", store, seen.seq, position, slot)


def copies(call: Call, store: Store) -> Iterator[Access]:
    """What a copy of blocks loads and stores, token by token, pair after pair."""
    assert call.pairs is not None
    for number, (source, target) in enumerate(call.pairs.tolist()):
        for op, block in (("copy_from", source), ("copy_to", target)):
            if block < store.num_blocks:  # a spare block, which a cycle goes through, is in no cache
                for offset in range(store.block_size):
                    yield from _token(op, store, number, None, join_slot(block, offset, store.block_size))


def visible(call: Call) -> list[Range]:
    """The positions that each sequence of an attention needs; sequences that need none are left out."""
    assert call.query_start_loc is not None
    assert call.seq_lens is not None
    found = []
    q_lens = np.diff(call.query_start_loc).tolist()
    starts = [0] * len(q_lens) if call.key_starts is None else call.key_starts.tolist()
    for seq, (q_len, seq_len, start) in enumerate(zip(q_lens, call.seq_lens.tolist(), starts, strict=True)):
        ranges = [visible_range(i, q_len, seq_len, call.window, start) for i in (0, q_len - 1) if 0 <= i < q_len]
        if not ranges:
            continue
        # The range's ends move with the query, so the first one's beginning and the last one's end bound them all.
        first, last = max(0, ranges[0][0]), ranges[-1][1]
        if first < last:
            found.append(Range(seq, first, last))
    return found


def written_slots(call: Call, store: Store) -> np.ndarray:
    """Slots that a write stored to, int64, in the order of its rows."""
    assert call.slots is not None
    slots = call.slots.astype(np.int64)
    return slots[(slots >= 0) & (slots < store.num_blocks * store.block_size)]


def read_slots(call: Call, store: Store) -> dict[int, np.ndarray]:
    """Slots that each sequence of an attention reads, int64, in the order of positions."""
    rows, size = call.table.rows(), store.block_size
    found = {}
    for seen in visible(call):
        row = rows[seen.seq].astype(np.int64)
        positions = np.arange(seen.first, min(seen.last, len(row) * size), dtype=np.int64)
        homes = row[positions // size]
        inside = (homes >= 0) & (homes < store.num_blocks)
        found[seen.seq] = (homes * size + positions % size)[inside]
    return found


def _token(op: str, store: Store, row: int, position: int | None, slot: int) -> Iterator[Access]:
    """K, then V, of every head at a slot."""
    block, offset = divmod(slot, store.block_size)
    pairs: tuple[tuple[Tensor, CacheStrides, int], ...] = (
        ("key_cache", store.k_strides, store.head_size),
        ("value_cache", store.v_strides, store.head_size_v),
    )
    for tensor, strides, size in pairs:
        for head in range(store.num_kv_heads):
            address = strides.element(slot, head, store.block_size) * store.itemsize
            yield Access(op, tensor, row, position, block, offset, head, address, size * store.itemsize)
