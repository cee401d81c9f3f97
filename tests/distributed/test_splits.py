"""The arithmetic of splits, against plain counting; no process group needed."""

from __future__ import annotations

import itertools

import pytest
import torch

from pagetile.contracts.errors import ArgumentError, BlockTableError, ShapeError, UnsupportedError
from pagetile.contracts.geometry import slot_of
from pagetile.distributed import ContextParallel, HeadSplit, RankGrid, TokenSplit, build_local_batch
from pagetile.distributed.heads import shares
from pagetile.distributed.model import Machine, Work, estimate, sent_bytes

SPLITS = [(1, 1), (2, 1), (3, 1), (2, 4), (3, 5), (7, 16)]


@pytest.mark.parametrize(("size", "interleave"), SPLITS)
def test_every_position_is_on_one_rank_in_order(size: int, interleave: int) -> None:
    splits = [TokenSplit(size, rank, interleave) for rank in range(size)]
    lengths = torch.arange(0, 120, dtype=torch.int32)
    for split in splits:
        mine = [p for p in range(120) if (p // interleave) % size == split.rank]
        assert [p for p in range(120) if split.owner(p) == split.rank] == mine
        assert [split.local_index(p) for p in mine] == list(range(len(mine)))
        assert [split.position(i) for i in range(len(mine))] == mine
        counted = [sum(p < n for p in mine) for n in lengths.tolist()]
        assert [split.local_len(n) for n in lengths.tolist()] == counted
        on_device = split.local_lens(lengths)
        assert (on_device.tolist(), on_device.dtype) == (counted, torch.int32)
        assert split.owns(lengths - 1).tolist() == [n - 1 in mine for n in lengths.tolist()]
    assert sum(split.local_len(97) for split in splits) == 97


def test_lengths_at_the_end_of_int32() -> None:
    split = TokenSplit(4096, 4095, 16)
    far = torch.tensor([2**31 - 1, 0, -1, -(2**31)], dtype=torch.int32)
    assert split.local_lens(far).tolist() == [split.local_len(2**31 - 1), 0, 0, 0]


@pytest.mark.parametrize(("size", "interleave"), SPLITS)
@pytest.mark.parametrize("block_size", [1, 4, 6])
def test_slots_are_those_of_the_address_room(size: int, interleave: int, block_size: int) -> None:
    for rank in range(size):
        split = TokenSplit(size, rank, interleave)
        table = torch.tensor([[9, 3, 7, 1, -1], [5, 8, 2, 6, 4]], dtype=torch.int32)
        positions = torch.arange(-1, 40)
        for row in range(2):
            slots = split.local_slots(positions, torch.full_like(positions, row), table, block_size)
            for p, slot in zip(positions.tolist(), slots.tolist(), strict=True):
                if p < 0 or split.owner(p) != rank:
                    assert slot == -1
                    continue
                try:
                    right = slot_of(table[row].tolist(), split.local_index(p), block_size)
                except BlockTableError:
                    right = -1
                assert slot == (right if right >= 0 else -1)
    assert TokenSplit(2, 0).local_slots(positions, positions, table[:, :0], 4).unique().tolist() == [-1]


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 0), (0, 2), (5, -1), (2**31 - 1, 2**31 - 1)])
def test_what_each_query_sees_here(window: tuple[int, int]) -> None:
    seq_lens, query_lens = [10, 0, 7, 23], [3, 0, 7, 1]
    for rank in range(3):
        split = TokenSplit(3, rank, 2)
        batch = build_local_batch(
            [[0, 1], [], [2], [3, 4]], seq_lens, query_lens, 4, split, pad_tokens=13, pad_seqs=6, table_width=3
        )
        lens, starts = batch.row_bounds(window)
        row = 0
        for b, (n, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
            assert batch.context_lens[b] == split.local_len(n - new)
            for p in range(n - new, n):
                lo = 0 if window[0] < 0 else max(0, p - window[0])
                hi = n if window[1] < 0 else min(n, p + window[1] + 1)
                mine = [j for j in range(lo, hi) if split.owner(j) == rank]
                begin = 0 if starts is None else int(starts[row])
                assert [split.position(i) for i in range(begin, int(lens[row]))] == mine
                assert batch.positions[row] == p
                row += 1
        assert batch.positions[row:].tolist() == [-1, -1]
        assert lens[row:].tolist() == [0, 0]
        assert batch.slot_mapping[row:].tolist() == [-1, -1]
        assert (lens.dtype, batch.context_lens.tolist()[4:]) == (torch.int32, [0, 0])


def test_batches_that_cannot_be() -> None:
    split = TokenSplit(2, 0)
    with pytest.raises(ArgumentError, match=r"query_lens\[0\] is 5 and seq_lens\[0\] is 4"):
        build_local_batch([[0]], [4], [5], 4, split)
    with pytest.raises(BlockTableError, match=r"block_lists\[0\] has 1 blocks"):
        build_local_batch([[0]], [9], [1], 4, split)  # five tokens here
    build_local_batch([[0]], [9], [1], 4, TokenSplit(2, 1))  # four
    with pytest.raises(ShapeError, match="pad_tokens is 2"):
        build_local_batch([[0]], [3], [3], 4, split, pad_tokens=2)
    with pytest.raises(ShapeError, match="2 sequences"):
        build_local_batch([[0]], [3, 1], [3], 4, split)
    assert build_local_batch([], [], [], 4, split).slot_mapping.shape == (0,)
    for wrong in ((2, 2, 1), (0, 0, 1), (2, 0, 0), (2, -1, 1), (2, 0, 2**30)):
        with pytest.raises(ArgumentError):
            TokenSplit(*wrong)
    with pytest.raises(ArgumentError, match="position 3 is rank 1's"):
        split.local_index(3)


@pytest.mark.parametrize(("num_q", "num_kv"), [(8, 8), (8, 2), (6, 3), (7, 1), (12, 4), (64, 8)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_every_query_head_is_computed_once_beside_its_kv_head(num_q: int, num_kv: int, size: int) -> None:
    splits = [HeadSplit(num_q, num_kv, size, rank) for rank in range(size)]
    assert list(itertools.chain(*(split.q_heads for split in splits))) == list(range(num_q))
    group = num_q // num_kv
    for split in splits:
        assert len(split.kv_heads) >= 1
        assert {h // group for h in split.q_heads} <= set(split.kv_heads)
        if size <= num_kv:
            assert {h // group for h in split.q_heads} == set(split.kv_heads), "a KV head that serves nobody"
    stored = sorted(itertools.chain(*(split.kv_heads for split in splits)))
    assert len(stored) == max(num_kv, size)
    assert set(stored) == set(range(num_kv))


def test_grids() -> None:
    for world, kv in itertools.product((1, 2, 3, 4, 8, 48), (1, 2, 8, 12)):
        grid = RankGrid.of(world, kv)
        assert grid.tp * grid.cp == world
        seen = {(grid.heads(r, 24, kv).rank, grid.tokens(r, 4).rank) for r in range(world)}
        assert len(seen) == world
        assert all(len(grid.heads(r, 24, kv).kv_heads) * grid.tp == kv for r in range(world)), "one KV head, one row"
    assert [list(part) for part in shares(2, 4)] == [[], [0], [], [1]]
    with pytest.raises(ArgumentError):
        HeadSplit(7, 2, 1, 0)
    with pytest.raises(ArgumentError):
        RankGrid(0, 1)


def test_a_single_rank_needs_no_group() -> None:
    cp = ContextParallel()
    lse = torch.tensor([[0.5]])
    out = torch.ones(1, 1, 4)
    assert torch.equal(cp.combine(out, lse)[0], out)
    assert cp.gather_heads(out, 1) is out
    batch = build_local_batch([[0]], [1], [1], 4, cp.split)
    cache = torch.ones(1, 4, 1, 4)
    got, _ = cp.attend(out, cache, cache, batch)
    assert torch.equal(got, out)
    with pytest.raises(UnsupportedError, match="alibi_slopes"):
        cp.attend(out, cache, cache, batch, alibi_slopes=torch.ones(1))
    with pytest.raises(ArgumentError, match="one of key and value"):
        cp.attend(out, cache, cache, batch, key=out)
    with pytest.raises(ArgumentError, match="batch was built for"):
        cp.attend(out, cache, cache, build_local_batch([[0]], [1], [1], 4, TokenSplit(2, 0)))
    with pytest.raises(UnsupportedError, match="k_descale"):
        cp.attend(out, cache, cache, batch, k_descale=torch.ones(1, 1))
    with pytest.raises(ArgumentError, match="mode is 'ring'"):
        ContextParallel(mode="ring")


def test_the_paper_model() -> None:
    """One read divided by the ranks, one exchange that is not: more ranks help until the exchange is the step."""
    work = Work(1, 1_000_000, 32, 8, 128, 128)
    machine = Machine(4000, 5, 8, 400, 12, 50, 30, 0.2)
    whole = estimate(work, RankGrid(1, 1), machine)
    assert whole.read_bytes == 1_000_000 * 8 * 256 * 2
    assert whole.sent_bytes == 0
    times = [estimate(work, RankGrid(1, cp), machine).total_us for cp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert estimate(work, RankGrid(1, 4096), machine).total_us > estimate(work, RankGrid(1, 64), machine).total_us
    by_head = estimate(work, RankGrid(8, 1), machine)
    assert by_head.read_bytes * 8 == whole.read_bytes
    assert by_head.exchange_us == 0
    assert sent_bytes(1, 32, 128, 2, 2, "all_to_all") == 16 * 4 + 16 * 128 * 2  # the other rank's sixteen heads
    with pytest.raises(ArgumentError, match="mode"):
        sent_bytes(1, 1, 1, 1, 2, "ring")
