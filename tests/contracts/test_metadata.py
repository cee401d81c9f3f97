"""The metadata builder against the address arithmetic, position by position, and its device twin against it."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetile.contracts.errors import ArgumentError, BlockTableError, ShapeError
from pagetile.contracts.geometry import blocks_for, slot_of
from pagetile.contracts.metadata import AttentionMetadata, build_metadata, slots_on_device


@st.composite
def batches(draw: st.DrawFn):
    """Block lists (longer than needed, with gaps and any order), lengths, query lengths, a block size."""
    block_size = draw(st.sampled_from([1, 3, 4, 16, 24]))
    lens = draw(st.lists(st.integers(0, 60), max_size=6))
    new = [draw(st.integers(0, n)) for n in lens]
    lists = [
        draw(st.lists(st.integers(0, 5000), min_size=(k := blocks_for(n, block_size)), max_size=k + 2)) for n in lens
    ]
    return lists, lens, new, block_size


def expected_slots(lists, lens, new, block_size) -> list[int]:
    return [
        slot_of(blocks, position, block_size)
        for blocks, length, q in zip(lists, lens, new, strict=True)
        for position in range(length - q, length)
    ]


@given(batches(), st.integers(0, 5), st.integers(0, 3), st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_agrees_with_the_address_arithmetic(batch, more_tokens: int, more_seqs: int, more_columns: int) -> None:
    lists, lens, new, block_size = batch
    total, width = sum(new), max([1, *(blocks_for(n, block_size) for n in lens)])
    m = build_metadata(
        lists,
        lens,
        new,
        block_size,
        pad_tokens=total + more_tokens,
        pad_seqs=len(lens) + more_seqs,
        table_width=width + more_columns,
    )
    assert m.slot_mapping.tolist() == expected_slots(lists, lens, new, block_size) + [-1] * more_tokens
    assert m.seq_lens.tolist() == lens + [0] * more_seqs
    assert m.query_start_loc.tolist() == np.cumsum([0, *new, *[0] * more_seqs]).tolist()
    table = [blocks[: blocks_for(n, block_size)] for blocks, n in zip(lists, lens, strict=True)] + [[]] * more_seqs
    assert m.block_table.tolist() == [row + [0] * (width + more_columns - len(row)) for row in table]
    assert (m.max_query_len, m.max_seq_len) == (max(new, default=0), max(lens, default=0))
    assert (m.num_tokens, m.num_seqs, m.block_size) == (total + more_tokens, len(lens) + more_seqs, block_size)

    on_device = slots_on_device(m.block_table, m.seq_lens, m.query_start_loc, block_size, m.num_tokens)
    assert on_device.dtype == torch.int64
    assert on_device.tolist() == m.slot_mapping.tolist()


def test_dtypes_are_those_of_the_contract() -> None:
    m = build_metadata([[7, 2, 9]], [37], [17], 16)
    found = [t.dtype for t in (m.block_table, m.slot_mapping, m.query_start_loc, m.seq_lens)]
    assert found == [torch.int32, torch.int64, torch.int32, torch.int32]
    assert isinstance(m, AttentionMetadata)


@pytest.mark.parametrize(
    "kind", [list, tuple, lambda x: array("i", x), lambda x: np.asarray(x, dtype=np.int64), torch.tensor]
)
def test_blocks_come_in_any_sequence(kind) -> None:
    m = build_metadata([kind([7, 2, 9])], [37], [3], 16)
    assert m.slot_mapping.tolist() == [146, 147, 148]


def test_slots_are_64_bit_from_the_block_id_on() -> None:
    """vllm-project/vllm#1486: 64 k blocks and more; a slot past 2**31 must not wrap."""
    block = 2**27 + 5
    m = build_metadata([[block]], [32], [1], 32)
    assert m.slot_mapping.tolist() == [block * 32 + 31]
    assert slots_on_device(m.block_table, m.seq_lens, m.query_start_loc, 32, 1).tolist() == [block * 32 + 31]


def test_skip_computes_without_writing() -> None:
    m = build_metadata([[7, 2, 9], [4]], [37, 5], [17, 3], 16, skip=[[(0, 22), (36, 99)], [(2, 3)]], pad_tokens=21)
    full = build_metadata([[7, 2, 9], [4]], [37, 5], [17, 3], 16, pad_tokens=21)
    kept = full.slot_mapping.tolist()
    kept[0] = kept[1] = kept[16] = kept[17] = -1  # positions 20, 21, 36 of the first, 2 of the second
    assert m.slot_mapping.tolist() == kept
    assert torch.equal(m.seq_lens, full.seq_lens)
    assert torch.equal(m.query_start_loc, full.query_start_loc)
    assert build_metadata([[4]], [5], [1], 16, skip=[None]).slot_mapping.tolist() == [68]


def test_padding_to_a_captured_shape() -> None:
    """xLLM-AI/xllm#1939: 100 real rows in a graph of 112; the metadata must be that of 112."""
    lists = [[b] for b in range(100)]
    m = build_metadata(lists, [3] * 100, [1] * 100, 4, pad_tokens=112, pad_seqs=112, table_width=5)
    assert m.seq_lens.tolist() == [3] * 100 + [0] * 12
    assert m.query_start_loc.tolist() == [*range(101), *[100] * 12]
    assert m.slot_mapping.tolist() == [b * 4 + 2 for b in range(100)] + [-1] * 12
    assert m.block_table[100:].eq(0).all()
    assert m.block_table.shape == (112, 5)


def test_all_padding_and_empty_batches() -> None:
    m = build_metadata([], [], [], 16, pad_tokens=3, pad_seqs=2)
    assert m.slot_mapping.tolist() == [-1, -1, -1]
    assert m.query_start_loc.tolist() == [0, 0, 0]
    assert slots_on_device(m.block_table, m.seq_lens, m.query_start_loc, 16, 3).tolist() == [-1, -1, -1]
    nothing = build_metadata([], [], [], 16)
    assert (nothing.num_tokens, nothing.num_seqs, nothing.query_start_loc.tolist()) == (0, 0, [0])
    empty = slots_on_device(nothing.block_table, nothing.seq_lens, nothing.query_start_loc, 16, 2)
    assert empty.tolist() == [-1, -1]


def test_device_form_hides_what_it_cannot_refuse() -> None:
    """Padded rows of a captured graph hold anything; no row may point outside the cache, and none before it."""
    table = torch.tensor([[3, -7], [5, 6]], dtype=torch.int32)
    loc = torch.tensor([0, 3, 6], dtype=torch.int32)
    lens = torch.tensor([6, 2], dtype=torch.int32)  # the first reaches a negative id, the second starts before 0
    assert slots_on_device(table, lens, loc, 4, 8).tolist() == [15, -1, -1, -1, 20, 21, -1, -1]
    past = slots_on_device(table[:, :1], torch.tensor([9, 0], dtype=torch.int32), loc, 4, 3)
    assert past.tolist() == [-1, -1, -1]  # positions 6 to 8 are past a table of one column


def test_device_form_takes_int64_tables_and_strided_rows() -> None:
    wide = torch.arange(12, dtype=torch.int64).reshape(2, 6)
    lens, loc = torch.tensor([8, 3], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    assert slots_on_device(wide[:, :3], lens, loc, 4, 3).tolist() == [6, 7, 26]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query_lens": [5, 4]}, ArgumentError, r"query_lens\[1\] is 4 and seq_lens\[1\] is 3"),
        ({"query_lens": [-1, 1]}, ArgumentError, r"query_lens\[0\] is -1"),
        ({"seq_lens": [2**31, 3]}, ArgumentError, "2147483648"),
        ({"seq_lens": [9, 3]}, BlockTableError, r"block_lists\[0\] has 2 blocks, but seq_lens\[0\] needs 3"),
        ({"block_lists": [[1, -1], [2]]}, BlockTableError, r"block_lists\[0\]\[1\] is -1"),
        ({"block_lists": [[1, 2**31], [2]]}, BlockTableError, "2147483648"),
        ({"block_lists": [np.array([1, 2**32]), [2]]}, BlockTableError, "4294967296"),
        ({"block_lists": [[1, 2]]}, ShapeError, "block_lists has 1 sequences, seq_lens has 2"),
        ({"pad_tokens": 1}, ShapeError, "pad_tokens is 1, but the batch has 2 tokens"),
        ({"pad_seqs": 1}, ShapeError, "pad_seqs is 1, but the batch has 2 sequences"),
        ({"table_width": 1}, ShapeError, "table_width is 1, but the longest sequence needs 2 blocks"),
        ({"skip": [None]}, ShapeError, "skip has 1 entries for 2 sequences"),
        ({"block_size": 0}, ArgumentError, "block_size is 0"),
    ],
)
def test_refusals_name_both_values(change: dict, error: type[Exception], message: str) -> None:
    arguments = {"block_lists": [[1, 0], [2]], "seq_lens": [5, 3], "query_lens": [1, 1], "block_size": 4}
    with pytest.raises(error, match=message):
        build_metadata(**{**arguments, **change})
