"""The reference at its edges: no query heads, bounds beyond int32, a cache without blocks."""

from __future__ import annotations

import pytest
import torch

from pagetile import reference
from pagetile.contracts.errors import ArgumentError, BlockTableError, SlotError
from pagetile.reference.checks import check_bound


def test_no_query_heads() -> None:
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    for extras in ({}, {"sinks": torch.zeros(0), "alibi_slopes": torch.zeros(0), "softcap": 1.0}):
        state = reference.attend(
            torch.zeros(3, 0, 8),
            torch.zeros(5, 2, 8),
            torch.zeros(5, 2, 4),
            starts,
            scale=1.0,
            layout="ragged",
            key_start_loc=torch.tensor([0, 5, 5], dtype=torch.int32),
            **extras,
        )
        assert state.out.shape == (3, 0, 4)
        assert state.lse.shape == (0, 3)


@pytest.mark.parametrize("bound", [7, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63, 2**70])
def test_a_bound_of_any_size(bound: int) -> None:
    check_bound("keys", torch.tensor([3, 7], dtype=torch.int32), "max_k_len", bound)


def test_a_bound_that_does_not_hold() -> None:
    with pytest.raises(ArgumentError, match="sequence 1 has 7 keys, but max_k_len is 6"):
        check_bound("keys", torch.tensor([3, 7], dtype=torch.int32), "max_k_len", 6)


def test_a_cache_without_blocks() -> None:
    cache, x = torch.zeros(0, 4, 1, 8), torch.zeros(1, 1, 8)
    with pytest.raises(SlotError, match=r"slot_mapping\[0\] is 0, but the cache has no blocks"):
        reference.write(x, x, cache, cache.clone(), torch.tensor([0]))
    lens, table = torch.tensor([1], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(BlockTableError, match=r"block_table\[0, 0\] is 0, but the cache has no blocks"):
        reference.attend(x, cache, cache, starts, scale=1.0, seq_lens=lens, block_table=table)
