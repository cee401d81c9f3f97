"""Every number about paged caches and coalescing that the teaching texts state and that can be computed.

Each test names the section it belongs to: the worked example, the write path, the memory model, pack assignment, the
read path.
"""

from __future__ import annotations

import pytest
import torch

from pagetile.contracts.geometry import CacheStrides
from pagetile.contracts.metadata import build_metadata
from pagetile.inspect import coalesce as model
from pagetile.inspect.explain import CacheShape, explain_position, explain_slot
from pagetile.inspect.softmax import walk
from pagetile.inspect.splits import splits

# The worked example: block_table = [7, 2, 9], blocks of 16, position 20.


def test_worked_example_position_to_slot() -> None:
    found = explain_position([7, 2, 9], 20)
    assert (found.logical, found.offset, found.block, found.slot) == (1, 4, 2, 36)


def test_worked_example_slot_to_position() -> None:
    found = explain_slot(36, [7, 2, 9])
    assert (found.block, found.offset, found.logical, found.position) == (2, 4, 1, 20)


def test_worked_example_batch() -> None:
    meta = build_metadata([[7, 2, 9]], seq_lens=[37], query_lens=[37], block_size=16)
    slots = meta.slot_mapping.tolist()
    assert slots[0] == 7 * 16
    assert slots[20] == 36
    assert slots[15:17] == [127, 32]  # from the end of block 7 to the beginning of block 2
    assert slots[32] == 9 * 16


# Write path: block * block_stride + offset * token_stride + head * head_stride, times the element size.


@pytest.mark.parametrize(
    ("layout", "strides", "element"),
    [
        ("NHD", CacheStrides(16384, 1024, 128), 2 * 16384 + 4 * 1024 + 3 * 128),
        ("HND", CacheStrides(16384, 128, 2048), 2 * 16384 + 4 * 128 + 3 * 2048),
    ],
)
def test_write_path_addresses(layout: str, strides: CacheStrides, element: int) -> None:
    assert CacheShape().strides(layout) == strides
    found = explain_position([7, 2, 9], 20, heads=[3]).addresses[layout][0]
    assert (found.first, found.last) == (element * 2, element * 2 + 255)


def test_write_path_splits() -> None:
    """8 heads of 128 side by side are one sweep of 1024 elements; apart, each warp takes heads of 128."""
    found = {(s.who, s.layout): (s.spans, s.elements) for s in splits(CacheShape(), 1)}
    assert found["vLLM", "NHD"] == (1, 1024)
    assert found["vLLM", "HND"] == (8, 128)
    assert found["cpu", "NHD"] == (1, 1024)
    assert found["cpu", "HND"] == (8, 128)


def test_write_path_a_scale_a_head_takes_heads_apart() -> None:
    found = {(s.who, s.layout): s.spans for s in splits(CacheShape(dtype="fp8"), 1, scale="head")}
    assert found["vLLM", "NHD"] == 8
    assert {(s.who, s.layout): s.spans for s in splits(CacheShape(dtype="fp8"), 1, scale="tensor")}["vLLM", "NHD"] == 1


# Memory model: a warp of 32 lanes, sectors of 32 bytes.


@pytest.mark.parametrize(("itemsize", "sectors"), [(1, 1), (2, 2), (4, 4)])
def test_memory_model_aligned(itemsize: int, sectors: int) -> None:
    access = model.scalar(32, itemsize)
    assert [len(i.sectors) for i in access.loads] == [sectors]
    assert access.wasted("load") == 0


@pytest.mark.parametrize(("itemsize", "sectors"), [(1, 1), (2, 2), (4, 4)])
def test_memory_model_one_more_when_misaligned(itemsize: int, sectors: int) -> None:
    for at in range(itemsize, 32, itemsize):
        access = model.scalar(32, itemsize, load_at=at)
        assert [len(i.sectors) for i in access.loads] == [sectors + 1]
        assert access.wasted("load") == 32


def test_memory_model_strided_lanes_touch_separate_sectors() -> None:
    load = model.scattered([0, 64, 128], 2).loads[0]
    assert load.sectors == (0, 2, 4)
    assert (load.useful, load.moved, load.wasted) == (6, 96, 90)


def test_memory_model_a_full_warp_at_stride_64() -> None:
    load = model.scattered([64 * lane for lane in range(32)], 2).loads[0]
    assert len(load.sectors) == 32
    assert load.useful / load.moved == 64 / 1024


# Pack assignment: head size 128 in half precision.


def test_pack_assignment_scalar_takes_four_rounds() -> None:
    access = model.scalar(128, 2)
    assert len(access.loads) == 4
    assert [(len(i.addresses), i.useful, len(i.sectors)) for i in access.loads] == [(32, 64, 2)] * 4


def test_pack_assignment_packs_take_one_round() -> None:
    access = model.packed(128, 2)
    assert len(access.loads) == 1
    load = access.loads[0]
    assert (len(load.addresses), load.width, load.useful, len(load.sectors)) == (16, 16, 256, 8)
    assert load.addresses == tuple(range(0, 256, 16))


def test_pack_assignment_same_sectors_either_way() -> None:
    """Packs save instructions, not bytes: both move 256 bytes in 8 sectors."""
    assert model.scalar(128, 2).sectors("load") == model.packed(128, 2).sectors("load") == 8


def test_pack_assignment_conversion_has_two_widths() -> None:
    access = model.packed(128, 2, 1)
    assert (access.loads[0].width, access.stores[0].width) == (16, 8)
    assert (access.sectors("load"), access.sectors("store")) == (8, 4)


def test_pack_assignment_unaligned_row() -> None:
    """A row 4 bytes past a boundary: 6 elements until the next 16 bytes, 15 packs, 2 elements left."""
    parts = [(i.part, len(i.addresses), i.width) for i in model.packed(128, 2, load_at=4).loads]
    assert parts == [("prefix", 6, 2), ("body", 15, 16), ("tail", 2, 2)]


# Read path: the softmax of one row, tile by tile.


def test_read_path_tiles_walk_the_block_table() -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=make) for s in ((64,), (37, 64), (37, 64)))
    walked = walk(q, k, v, tile=16)
    assert [(s.first, s.last) for s in walked.steps] == [(0, 16), (16, 32), (32, 37)]
    assert walked.error < 1e-12
    assert walked.lse_error < 1e-12


def test_read_path_uniform_scores_give_the_mean() -> None:
    """A query of zeros over 37 keys: the mean of the values, and the logarithm of 37."""
    walked = walk(torch.zeros(8), torch.randn(37, 8), torch.arange(37.0)[:, None], tile=16, splits=2)
    assert walked.merged.out.item() == pytest.approx(18.0, abs=1e-12)
    assert walked.merged.lse == pytest.approx(3.6109179126, abs=1e-9)
