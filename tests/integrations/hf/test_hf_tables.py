"""Page tables and rings without a model: whatever happens to the sequences, the blocks hold their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetile.contracts.errors import ShapeError, UnsupportedError
from pagetile.integrations.transformers.rings import Batch, ring_of, span_of
from pagetile.integrations.transformers.tables import PageTable

CPU = torch.device("cpu")


class Simulated:
    """A table, the slots that it hands out, and each sequence's tokens as they should be found."""

    def __init__(self, block_size: int, window: int | None) -> None:
        self.table = PageTable(block_size, window)
        self.slots: dict[int, int] = {}
        self.tokens: list[list[int]] = []
        self.rows: list[list[bool]] = []
        self.next = 0

    def forward(self, count: int, pads: list[int]) -> None:
        batch = len(pads)
        if not self.tokens:
            self.tokens, self.rows = [[] for _ in pads], [[] for _ in pads]
        for row, pad in zip(self.rows, pads, strict=True):
            row += [i >= pad for i in range(count)]
        mask = torch.tensor(self.rows) if any(not all(row) for row in self.rows) else None
        step = self.table.begin(batch, count, mask)
        for source, target in step.copies:
            size = self.table.block_size
            for offset in range(size):
                if source * size + offset in self.slots:
                    self.slots[target * size + offset] = self.slots[source * size + offset]
        slots = iter(step.span.slots.tolist())
        for tokens, pad in zip(self.tokens, pads, strict=True):
            for i in range(count):
                if step.rows is not None and i < pad:
                    continue
                slot = next(slots)
                assert (slot < 0) == (i < pad)
                if slot >= 0:
                    self.slots[slot] = self.next
                    tokens.append(self.next)
                    self.next += 1
        self.look(step.span)

    def look(self, span) -> None:
        """Every token that a query sees is where the table says."""
        self.table.check()
        size, window = self.table.block_size, self.table.window
        assert span.seq_lens.tolist() == [len(tokens) for tokens in self.tokens]
        for row, tokens in enumerate(self.tokens):
            first = 0 if window is None else max(0, len(tokens) - window)
            for position in range(first, len(tokens)):
                block = int(span.block_table[row, position // size])
                assert self.slots[block * size + position % size] == tokens[position]

    def take_rows(self, rows: list[int]) -> None:
        self.table.take_rows(np.array(rows))
        self.tokens = [list(self.tokens[row]) for row in rows]
        self.rows = [list(self.rows[row]) for row in rows]
        self.table.check()

    def crop(self, count: int) -> None:
        self.table.check_crop(count)
        self.table.crop(count)
        for tokens, row in zip(self.tokens, self.rows, strict=True):
            real = sum(row[len(row) - count :])
            del row[len(row) - count :], tokens[len(tokens) - real :]
        self.table.check()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_happens_tokens_are_where_the_table_says(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from([None, 1, 5, 9]))
    simulated = Simulated(data.draw(st.sampled_from([1, 3, 4])), window)
    recording = data.draw(st.booleans())
    simulated.table.recording = recording
    batch, longest = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    simulated.forward(longest, [data.draw(st.integers(0, longest - 1)) for _ in range(batch)])
    for _ in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["one", "several", "rows", "crop"]))
        size = len(simulated.tokens)
        if what == "rows":
            simulated.take_rows(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4)))
        elif what == "crop" and window is None:
            simulated.crop(data.draw(st.integers(0, min(2, min(map(len, simulated.tokens)) - 1))))
        else:
            count = 1 if what == "one" else 3
            simulated.forward(count, [0] * size)
            if recording:  # a record reaches back to the last crop
                simulated.crop(data.draw(st.integers(0, count)))


def test_padding_between_tokens_is_packed_away() -> None:
    simulated = Simulated(4, None)
    simulated.forward(5, [2, 0])
    simulated.forward(3, [1, 2])
    assert [len(tokens) for tokens in simulated.tokens] == [5, 6]


def test_padding_between_tokens_under_a_window_is_refused_and_changes_nothing() -> None:
    simulated = Simulated(4, 8)
    simulated.forward(5, [2, 0])
    before = simulated.table.blocks.copy(), simulated.table.stored.copy(), simulated.table.pool.num_live
    mask = torch.tensor([[False, False, True, True, True, False, True], [True] * 7])
    with pytest.raises(UnsupportedError, match="Pad on the left"):
        simulated.table.begin(2, 2, mask)
    with pytest.raises(ShapeError, match="axis 0 is 3"):
        simulated.table.begin(3, 1, None)
    with pytest.raises(ShapeError, match=r"shape \(2, 6\)"):
        simulated.table.begin(2, 1, mask)
    after = simulated.table.blocks, simulated.table.stored, simulated.table.pool.num_live
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


requests = st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, 1, 2, 7, 20])), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(requests=requests, size=st.sampled_from([1, 4, 5]), window=st.sampled_from([1, 4, 9, 64]))
def test_rings_and_spans_find_what_each_query_sees(requests: list[tuple[int, int]], size: int, window: int) -> None:
    """A ring is filled as the host fills it; then each row's keys are those of its window, and the ring is again."""
    past, new = [p for p, _ in requests], [n for _, n in requests]
    ids = iter(np.random.default_rng(0).permutation(400).tolist())
    wide = [[next(ids) for _ in range(-(-(p + n) // size))] for p, n in requests]
    ring_blocks = [[next(ids) for _ in range(-(-min(p + n, window) // size))] for p, n in requests]
    batch = Batch(past, new, [wide, ring_blocks])

    span = span_of(batch, 0, size, CPU)
    slots = iter(span.slots.tolist())
    for row, (p, n) in enumerate(requests):
        assert int(span.seq_lens[row]) == p + n
        for position in range(p, p + n):
            assert next(slots) == wide[row][position // size] * size + position % size
            assert int(span.block_table[row, position // size]) == wide[row][position // size]

    def slot(row: int, position: int) -> int:
        at = position % window
        return ring_blocks[row][at // size] * size + at % size

    stored = {slot(r, q): (r, q) for r, p in enumerate(past) for q in range(max(0, p - window), p)}
    ring = ring_of(batch, 1, size, window, CPU)
    rows = [(r, q) for r, (p, n) in enumerate(requests) for q in range(p, p + n)]
    kept = [stored[at] for at in ring.kept.tolist()]
    for at, row in zip(ring.slots.tolist(), rows, strict=True):
        if at >= 0:
            stored[at] = row
    for r, (p, n) in enumerate(requests):
        for q in range(max(0, p + n - window), p + n):
            assert stored[slot(r, q)] == (r, q)
    chosen = rows if ring.single_rows is None else [rows[i] for i in ring.single_rows.tolist()]
    if ring.singles is not None:
        for at, (r, q) in enumerate(chosen):
            length, table = int(ring.singles.seq_lens[at]), ring.singles.block_table[at].tolist()
            seen = {stored[table[i // size] * size + i % size] for i in range(length)}
            assert seen == {(r, key) for key in range(max(0, q - window + 1), q + 1)}
    if ring.pieces is not None:
        new_rows = rows if ring.piece_rows is None else [rows[i] for i in ring.piece_rows.tolist()]
        keys: list = [None] * (len(kept) + len(new_rows))
        for at, key in (
            *zip(ring.kept_at.tolist(), kept, strict=True),
            *zip(ring.new_at.tolist(), new_rows, strict=True),
        ):
            keys[at] = key
        many = [r for r, n in enumerate(new) if n > 1]
        starts = ring.piece_key_start_loc.tolist()
        for at, r in enumerate(many):
            first = max(0, past[r] - window + 1)
            assert keys[starts[at] : starts[at + 1]] == [(r, key) for key in range(first, past[r] + new[r])]
