"""What a tracer writes down: plain records, from which every address can be derived.

A :class:`Trace` has the caches that were seen and the steps that were run. Layers that are asked the same thing share
one :class:`Call`; of a block table only the rows that changed are kept, since the step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagetile.contracts.geometry import CacheStrides


@dataclass(frozen=True, slots=True)
class Store:
    """One layer's K and V caches. Strides in elements, ``itemsize`` in bytes; ``layer``, ``group`` None if unknown."""

    layer: int | None
    group: str | None
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    itemsize: int
    k_strides: CacheStrides
    v_strides: CacheStrides
    device: str = "cpu"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token."""
        return self.num_kv_heads * (self.head_size + self.head_size_v) * self.itemsize


@dataclass(slots=True, eq=False)
class Table:
    """A block table, as the changes since the one before.

    Attributes:
        before: the table that the changes are made to; None is an empty one.
        lengths: used entries of each row; the rest of a row is nobody's and is not kept.
        changes: ``(row, first column, entries from there to the row's length)``.
        dtype: of the tensor, int32 or int64.
        depth: tables before it in the chain.
    """

    before: Table | None
    lengths: np.ndarray
    changes: list[tuple[int, int, np.ndarray]]
    dtype: np.dtype
    depth: int = 0

    @classmethod
    def after(cls, before: Table | None, raw: np.ndarray, seq_lens: np.ndarray, block_size: int) -> Table:
        """The record of a table ``[B, width]`` that serves sequences of the given lengths."""
        lengths = np.minimum(-(-seq_lens.astype(np.int64) // block_size), raw.shape[1])
        old = before.rows() if before is not None else []
        changes = []
        for row, length in enumerate(lengths.tolist()):
            new = raw[row, :length]
            same = _common(old[row], new) if row < len(old) else 0
            if same < length:
                changes.append((row, same, new[same:].copy()))
        return cls(before, lengths, changes, raw.dtype, 0 if before is None else before.depth + 1)

    def rows(self) -> list[np.ndarray]:
        """Used entries of every row."""
        chain: list[Table] = []
        table: Table | None = self
        while table is not None:
            chain.append(table)
            table = table.before
        rows: list[np.ndarray] = []
        for table in reversed(chain):
            rows = [
                rows[r][:n] if r < len(rows) else np.zeros(0, np.int64) for r, n in enumerate(table.lengths.tolist())
            ]
            for row, first, entries in table.changes:
                rows[row] = np.concatenate([rows[row][:first], entries])
        return [row.astype(self.dtype, copy=False) for row in rows]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Entries that both begin with."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


@dataclass(slots=True, eq=False)
class Call:
    """One question, asked of one layer or of several.

    Attributes:
        op: ``write`` (a fused one too), ``attend``, ``merge``, ``gather`` or ``copy``.
        stores: indices of the caches it was asked of, in order; empty where there is no paged cache.
        slots: of a write or a gather, int64 or int32 ``[T']``.
        slot_stride, table_stride: elements between two slots, and between two rows of the block table.
        pairs: of a copy, int64 ``[n, 2]``, (source, destination) blocks in an order that may be run one by one.
        query_start_loc, seq_lens, table, key_starts, window, num_q_heads: of an attention.
    """

    op: str
    stores: list[int] = field(default_factory=list)
    slots: np.ndarray | None = None
    query_start_loc: np.ndarray | None = None
    seq_lens: np.ndarray | None = None
    table: Any = None  # a Table once folded
    key_starts: np.ndarray | None = None
    window: tuple[int, int] = (-1, -1)
    num_q_heads: int = 0
    slot_stride: int = 1
    table_stride: int = 0
    pairs: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """When one call ran, ``perf_counter_ns`` on the host. ``call`` is an index into its step; ``store`` -1 is none."""

    call: int
    store: int
    began: int
    ended: int


@dataclass(slots=True, eq=False)
class Step:
    """The calls of one step, and each layer's turn in order."""

    calls: list[Call] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)

    def find(self, op: str, store: int | None = None) -> list[Call]:
        """Calls of an op (on one store)."""
        return [call for call in self.calls if call.op == op and (store is None or store in call.stores)]


@dataclass(slots=True, eq=False)
class Trace:
    """Everything a tracer has seen."""

    stores: list[Store] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    _folded: int = 0

    def new_step(self) -> Step:
        """Begin a step."""
        self.steps.append(Step())
        return self.steps[-1]

    def unfolded(self) -> Iterator[Step]:
        """Steps not yet brought to the host, the last one again each time (it may still grow)."""
        while self._folded < len(self.steps):
            yield self.steps[self._folded]
            if self._folded == len(self.steps) - 1:
                return
            self._folded += 1
