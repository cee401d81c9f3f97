"""The Triton kernels' addresses are the geometry's: NHD, HND, interleaved K and V, odd block sizes, far blocks."""

from __future__ import annotations

import pytest
import torch

from pagetile.contracts.geometry import CacheStrides, slot_of

HEADS, SIZE, LENGTH = 3, 8, 37
BLOCK_SIZES = [1, 3, 16, 24]


def layouts(block_size: int) -> dict[str, CacheStrides]:
    """Strides of one head size in the storages that engines have."""
    page = block_size * HEADS * SIZE
    return {
        "NHD": CacheStrides.nhd(block_size, HEADS, SIZE),
        "HND": CacheStrides.hnd(block_size, HEADS, SIZE),
        "interleaved": CacheStrides(2 * page, HEADS * SIZE, SIZE),
        "halves": CacheStrides(2 * page, 2 * SIZE, 2 * SIZE * block_size),
        "far": CacheStrides(2**31 + 24, HEADS * SIZE, SIZE),  # an offset no 32-bit integer holds
    }


def log2(block_size: int) -> int:
    return block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1


@pytest.mark.parametrize("layout", list(layouts(1)))
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("trusted", [False, True], ids=["checked", "trusted"])
def test_reads(kernel_device: str, layout: str, block_size: int, trusted: bool) -> None:
    from tests.backends.triton.probe import probe_reads

    strides = layouts(block_size)[layout]
    needed = -(-LENGTH // block_size)
    row = [7, 2, 9, *range(10, 50)][:needed]
    table = torch.tensor([row + [2**31 - 1] * 3], dtype=torch.int32, device=kernel_device)
    out = torch.full((LENGTH, HEADS), -7, dtype=torch.int64, device=kernel_device)
    args = (table.shape[1], 64, block_size, LENGTH, strides.block, strides.token, strides.head)
    probe_reads[(-(-LENGTH // 16),)](
        out, table, *args, HEADS=HEADS, KEYS=16, LOG2_BLOCK=log2(block_size), TRUSTED=trusted
    )
    expected = [
        [strides.element(slot_of(row, position, block_size), head, block_size) for head in range(HEADS)]
        for position in range(LENGTH)
    ]
    assert out.tolist() == expected


def test_a_bad_entry_is_not_dereferenced(kernel_device: str) -> None:
    from tests.backends.triton.probe import probe_reads

    table = torch.tensor([[7, 99, -1]], dtype=torch.int32, device=kernel_device)
    out = torch.zeros((50, 1), dtype=torch.int64, device=kernel_device)
    probe_reads[(4,)](out, table, 3, 64, 16, 50, 128, 8, 8, HEADS=1, KEYS=16, LOG2_BLOCK=4, TRUSTED=False)
    found = out.flatten().tolist()
    assert found[:16] == [7 * 128 + 8 * i for i in range(16)]
    assert found[16:] == [-1] * 34, "two bad ids, and a position past the row"


@pytest.mark.parametrize("layout", list(layouts(1)))
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("narrow", [False, True])
def test_writes(kernel_device: str, layout: str, block_size: int, narrow: bool) -> None:
    from tests.backends.triton.probe import probe_writes

    strides = layouts(block_size)[layout]
    num_slots = 64 * block_size
    slots = [36 % num_slots, -1, 0, num_slots - 1, num_slots, 5, -7, num_slots // 2 + 1]
    out = torch.full((len(slots), HEADS), -7, dtype=torch.int64, device=kernel_device)
    error = torch.zeros(5, dtype=torch.int64, device=kernel_device)
    args = (len(slots), num_slots, block_size, strides.block, strides.token, strides.head)
    probe_writes[(2,)](
        out,
        torch.tensor(slots, device=kernel_device),
        error,
        *args,
        HEADS=HEADS,
        ROWS=4,
        LOG2_BLOCK=log2(block_size),
        NARROW=narrow,
    )
    for slot, found in zip(slots, out.tolist(), strict=True):
        inside = 0 <= slot < num_slots
        assert found == [strides.element(slot, head, block_size) if inside else -1 for head in range(HEADS)]
    assert error[1].item() == slots.index(num_slots), "the slot past the end is reported"
