"""Values that live on the device: what is skipped, hidden, reported, refused; slots from the block table."""

from __future__ import annotations

import pytest
import torch

from pagetile.contracts.errors import BlockTableError, SlotError
from pagetile.contracts.metadata import slots_on_device
from pagetile.testing.build import build_attend, build_write
from pagetile.testing.cases import AttendCase, WriteCase


@pytest.mark.parametrize("cache", ["nhd", "hnd"])
def test_slot_past_the_cache_is_skipped_and_reported(cache: str, backend, kernel_device: str) -> None:
    built = build_write(WriteCase(num_tokens=6, cache=cache), kernel_device)
    call = built.call
    limit = call.key_cache.shape[0] * call.key_cache.shape[1]
    slot = int(call.slot_mapping[2])
    call.slot_mapping[2] = limit
    before = [b.clone() for b in built.buffers]
    with pytest.raises(SlotError, match=rf"slot_mapping\[2\] is {limit}, .* Nothing was written"):
        backend.check(call)
    assert all(
        torch.equal(b.view(torch.uint8), a.view(torch.uint8)) for b, a in zip(built.buffers, before, strict=True)
    )
    backend.write(call)
    with pytest.raises(SlotError, match=rf"slot_mapping\[2\] is {limit}, but the cache has slots 0 to {limit - 1}"):
        backend.raise_deferred()
    backend.raise_deferred()  # reported once
    block, offset = divmod(slot, call.key_cache.shape[1])
    assert not call.key_cache[block, offset].isfinite().any()  # still poison
    call.slot_mapping[2] = slot
    backend.check(call)
    backend.write(call)
    for buffer, expected in zip(built.buffers, built.expected, strict=True):
        assert torch.equal(buffer.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("bad", [-1, 2**31 - 1])
def test_bad_block_hides_its_keys(q_len: int, bad: int, backend, kernel_device: str) -> None:
    case = AttendCase(seqs=((q_len, 60), (1, 20)), block_size=16, tokens="uniform", num_q_heads=2, causal=False)
    call = build_attend(case, kernel_device).call
    call.block_table[0, 1] = bad
    with pytest.raises(BlockTableError, match=rf"block_table\[0, 1\] is {bad}"):
        backend.check(call)
    backend.attend(call)
    seen = [*range(16), *range(32, 60)]
    assert torch.allclose(call.out[:q_len], torch.tensor(sum(seen) / len(seen), device=kernel_device))
    with pytest.raises(BlockTableError, match=rf"block_table\[0, 1\] is {bad}"):
        backend.raise_deferred()


def test_sequence_longer_than_its_row(backend, kernel_device: str) -> None:
    call = build_attend(AttendCase(seqs=((1, 40),), tokens="uniform"), kernel_device).call
    call.block_table = call.block_table[:, :2].contiguous()
    with pytest.raises(BlockTableError, match=r"seq_lens\[0\] is 40, but block_table\[0\] has 2 columns"):
        backend.check(call)
    backend.attend(call)
    assert torch.allclose(call.out, torch.tensor(31 / 2, device=kernel_device))
    with pytest.raises(BlockTableError, match=r"block_table\[0, 2\]"):
        backend.raise_deferred()


def test_good_values_leave_no_error(backend, kernel_device: str) -> None:
    built = build_attend(AttendCase(seqs=((5, 37), (1, 64))), kernel_device)
    backend.check(built.call)
    backend.attend(built.call)
    backend.raise_deferred()


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_slots_agree_with_the_plain_twin(block_size: int, backend, kernel_device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, 1000, (5, 40), dtype=torch.int32, generator=generator)
    table[2, 4] = -1
    lens = torch.tensor([7, 40, 25, 0, 33], dtype=torch.int32)
    starts = torch.tensor([0, 3, 3, 20, 20, 21], dtype=torch.int32)  # 17 new tokens of 25, row 23 on is padding
    args = [t.to(kernel_device) for t in (table, lens, starts)]
    positions = torch.empty(29, dtype=torch.int64, device=kernel_device)
    ours = backend.slots_on_device(*args, block_size, 29, positions=positions)
    assert torch.equal(ours, slots_on_device(*args, block_size, 29))
    assert (ours[21:] == -1).all()
    assert positions[:3].tolist() == [4, 5, 6]


def test_slots_of_the_worked_example(backend, kernel_device: str) -> None:
    table = torch.tensor([[7, 2, 9]], dtype=torch.int32, device=kernel_device)
    lens = torch.tensor([21], dtype=torch.int32, device=kernel_device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=kernel_device)
    assert backend.slots_on_device(table, lens, starts, 16, 1).tolist() == [36]
