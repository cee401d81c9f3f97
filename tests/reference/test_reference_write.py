"""The truth's write and merge, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from pagetile import reference
from pagetile.contracts.errors import ArgumentError, ShapeError, SlotError


def test_the_example_used_everywhere() -> None:
    """block_table [7, 2, 9], block size 16, position 20: block 2, offset 4, slot 36."""
    key, value = torch.ones(1, 2, 3), torch.full((1, 2, 5), 2.0)
    k, v = torch.zeros(10, 16, 2, 3), torch.zeros(10, 16, 2, 5)
    reference.write(key, value, k, v, torch.tensor([36]))
    assert k.nonzero()[:, :2].unique(dim=0).tolist() == [[2, 4]]
    assert (v[2, 4] == 2).all()
    assert v.sum() == 20


def test_negative_slots_and_spare_rows() -> None:
    key = torch.arange(1.0, 5.0)[:, None, None]
    k, v = torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1)
    reference.write(key, key, k, v, torch.tensor([-1, 3, -(2**40)]))
    assert k.flatten().tolist() == [0, 0, 0, 2]


def test_errors_come_before_the_first_byte() -> None:
    key = torch.ones(2, 1, 1)
    k, v = torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1)
    with pytest.raises(SlotError, match=r"slot_mapping\[1\] is 4.*2 blocks of 2.*slots 0 to 3"):
        reference.write(key, key, k, v, torch.tensor([0, 4]))
    with pytest.raises(ShapeError, match="3 entries but key has 2 rows"):
        reference.write(key, key, k, v, torch.tensor([0, 1, 2]))
    with pytest.raises(ArgumentError, match="outputs"):
        reference.write(key, key, k, v, torch.tensor([0, 1]), kind="int8", fill_token_head_scales=True)
    assert not k.any()
    assert not v.any()


def test_xpacked_is_the_layout_of_paged_attention_v1() -> None:
    """Element ``x * i + e`` of a head of slot ``(block, offset)`` is at ``[block, head, i, offset, e]``."""
    key = torch.arange(16.0).view(1, 2, 8)
    k, v = torch.zeros(3, 2, 2, 5, 4), torch.zeros(3, 2, 8, 5)
    reference.write(key, key, k, v, torch.tensor([2 * 5 + 3]), layout="xpacked")
    assert k[2, 1, :, 3].flatten().tolist() == list(range(8, 16))
    assert v[2, 1, :, 3].tolist() == list(range(8, 16))
    assert k.count_nonzero() == v.count_nonzero() == 15


def test_merge_by_hand() -> None:
    a, b = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 3.0)
    state = reference.merge(a, torch.zeros(1, 1), b, torch.full((1, 1), math.log(3)))
    assert state.out.flatten().tolist() == pytest.approx([2.5, 2.5])
    assert float(state.lse) == pytest.approx(math.log(4))


@pytest.mark.parametrize("nothing", [-math.inf, math.inf])
def test_the_empty_state_is_the_identity(nothing: float) -> None:
    a, lse = torch.tensor([[[-0.0, 1e-45, 3.0]]]), torch.tensor([[1.25]])
    empty = torch.full_like(a, torch.nan), torch.tensor([[nothing]])
    for state in (reference.merge(a, lse, *empty), reference.merge(*empty, a, lse)):
        assert torch.equal(state.out.view(torch.int32), a.view(torch.int32))
        assert float(state.lse) == 1.25
    both = reference.merge(*empty, *empty)
    assert both.out.tolist() == [[[0, 0, 0]]]
    assert float(both.lse) == -math.inf
