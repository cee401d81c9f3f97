"""Small inputs on which caches of this kind have failed for their users, each named after its kind and its thread."""

from __future__ import annotations

import pytest
import torch
from simulated import SimulatedCache, snapshot

from pagetile.cache.groups import LayerGroup
from pagetile.cache.kv import PagedKVCache
from pagetile.cache.sequences import SequenceTable
from pagetile.contracts.errors import OutOfBlocksError
from pagetile.contracts.visibility import window_from_sliding
from pagetile.reference.attend import attend
from pagetile.reference.write import write

FULL = (LayerGroup("full", (0,)),)
HYBRID = (LayerGroup("local", (0,), 6), LayerGroup("full", (1,)))


def make(num_blocks: int = 16, block_size: int = 4, groups=FULL, **options) -> tuple[SequenceTable, SimulatedCache]:
    table = SequenceTable(groups, num_blocks, block_size, **options)
    return table, SimulatedCache(table)


# Prefix cache: stale or wrong reuse


def test_stale_hash_of_a_reused_block() -> None:
    """GeeeekExplorer/nano-vllm#163: two blocks; X fills them and leaves, Y takes them, X is asked for again."""
    table, cache = make(num_blocks=2)
    for tokens in (range(8), range(100, 108), range(8)):
        seq = table.add(tokens)
        assert seq.num_computed == 0
        cache.run(seq)
        table.free(seq)


@pytest.mark.parametrize("groups", [FULL, HYBRID])
def test_whole_prompt_cached(groups) -> None:
    """GeeeekExplorer/nano-vllm#114, #144, #199: a prompt of exactly two blocks, twice: query length 0, and a crash."""
    table, cache = make(groups=groups)
    for round in range(4):
        seq = table.add(range(8))
        assert seq.num_computed == (7 if round else 0)
        cache.run(seq)
        table.append(seq, round)
        cache.run(seq)
        table.free(seq)


def test_hash_collision() -> None:
    """vllm-project/vllm#8229, #12621: another prompt's block was reused; here every digest is the same."""
    table, cache = make(num_blocks=32, hasher=lambda _parent, _content: b"")
    prompts = [[a, 1, 2, 3, b, 5, 6, 7, 8] for a in (0, 9) for b in (0, 9)]
    for _ in range(2):
        for prompt in prompts:
            seq = table.add(prompt)
            cache.run(seq)
            table.free(seq)
    assert table.stats.hit_tokens == 2 * 4 + 4 * 8  # the shared first block, then all of each
    salted = table.add(prompts[0], salt="x")
    assert salted.num_computed == 0


def test_truncated_token_ids() -> None:
    """waybarrios/vllm-mlx#444: token ids cut to 8 bits, so [65]*BS was [321]*BS."""
    table, cache = make()
    ids = [65, 321, 65 + 2**16, 65 + 2**32, 65 - 256]
    for token in ids:
        seq = table.add([token] * 8)
        assert seq.num_computed == 0, token
        cache.run(seq)
        table.free(seq)
    assert len({p.digest(b) for p in table.pools.values() for b in range(16) if p.digest(b)}) == 2 * len(ids)


def test_third_repeat_of_one_prompt_with_groups() -> None:
    """ovg-project/kvcached#446, #451: the third repeat changed. One block size for all groups; four equal repeats."""
    table, cache = make(num_blocks=24, block_size=2, groups=(*HYBRID, LayerGroup("narrow", (2,), 3)))
    computed = []
    for _ in range(4):
        seq = table.add(range(13))
        computed.append(seq.num_computed)
        cache.run(seq)
        table.append(seq, 1)
        cache.run(seq)
        table.free(seq)
    assert computed == [0, 12, 12, 12]


def test_reuse_before_a_copy_has_run() -> None:
    """NVIDIA/TensorRT-LLM#15018, #8813: blocks still being transferred were recycled into other requests."""
    table, cache = make(num_blocks=5)
    a = table.add(range(6))
    cache.run(a)
    forks = [table.fork(a) for _ in range(2)]
    for i, seq in enumerate(forks):
        table.append(seq, 50 + i)
    copies = table.reserve([(seq, 1) for seq in forks])
    table.free(a)
    late = table.add(range(90, 94))
    copies += table.reserve(late, 4)  # the last free block; the source of the copies is none of its blocks
    assert not {c.src for c in copies} & set(late.blocks["full"])
    cache.copy(copies)
    work = [(forks[0], 1), (forks[1], 1), (late, 4)]
    cache.forward(work)
    for seq, n in work:
        table.commit(seq, n)
    cache.check()


def test_same_prompt_twice_in_one_batch() -> None:
    """Wenyueh/MinivLLM#98: 300 tokens twice in one batch; the second read nothing, or restarted at position 0."""
    table, cache = make(num_blocks=60, block_size=16)
    a, b = table.add(range(300)), table.add(range(300))
    table.reserve([(a, 300), (b, 300)])
    batch = table.batch([(a, 300), (b, 300)])
    assert batch.positions.tolist() == [*range(300), *range(300)]
    cache.forward([(a, 300), (b, 300)])
    for seq in (a, b):
        table.commit(seq, 300)
    cache.check()
    late = table.add(range(300))
    table.reserve(late, 12)
    assert table.batch([(late, 12)]).positions.tolist() == list(range(288, 300))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 15, 16, 17])
@pytest.mark.parametrize("groups", [FULL, HYBRID])
def test_hit_counter(length: int, groups) -> None:
    """vllm-project/vllm#11186, #51198: the hit rate fell to 0 in silence. n full blocks give n hits."""
    table, cache = make(groups=groups)
    for _ in range(3):
        seq = table.add(range(length))
        cache.run(seq)
        table.free(seq)
    full = length // 4
    assert table.pools["full"].stats.hits == 2 * full
    assert table.pools["full"].stats.queries == 3 * full
    assert table.stats.hit_tokens == 2 * min(4 * full, length - 1)


@pytest.mark.parametrize("groups", [FULL, HYBRID])
def test_cold_equals_warm_for_every_split(groups) -> None:
    """tenstorrent/vllm#415: the hit path was wrong and the miss path right. Every split point of 14 tokens."""
    for split in range(1, 15):
        table, cache = make(groups=groups)
        head = table.add(range(split))
        cache.run(head)
        table.free(head)
        warm = table.add(range(14))
        assert warm.num_computed == split // 4 * 4
        cache.run(warm)  # checks every key of every query
        table.append(warm, 14)
        cache.run(warm)


# Allocator accounting: leak or double free


@pytest.mark.parametrize("moment", ["added", "reserved", "copied", "computed"])
def test_abort_at_any_moment(moment: str) -> None:
    """vllm-project/vllm#46283, vllm-project/vllm-ascend#16662: an abort in mid-step leaked all its blocks."""
    table, cache = make()
    a = table.add(range(10))
    cache.run(a)
    b = table.fork(a)
    table.append(b, 1)
    if moment != "added":
        copies = table.reserve(b, 1)
        if moment != "reserved":
            cache.copy(copies)
    if moment == "computed":
        cache.forward([(b, 1)])
        table.commit(b, 1)
    table.free(b)
    cache.check()
    assert table.usage()["full"].live == 3
    table.free(a)
    usage = table.usage()["full"]
    assert (usage.live, usage.cached, usage.free) == (0, 2, 14)


def test_no_block_leaks_over_many_requests() -> None:
    """kekzl/imp#1115, #1120: a gauge that mixed live and cached looked like a leak of one block a request."""
    table, cache = make(groups=HYBRID)
    for request in range(60):
        seq = table.add([request, *range(request % 13)])
        cache.run(seq)
        table.free(seq)
        for usage in table.usage().values():
            assert usage.live == 0
            assert usage.cached + usage.free == usage.total
            assert 0.0 <= usage.utilization <= 1.0


# Preempt, recompute: lost or foreign data


@pytest.mark.parametrize("groups", [FULL, HYBRID])
@pytest.mark.parametrize("retake", [True, False])
def test_preempt_at_every_step(groups, retake: bool) -> None:
    """vllm-project/vllm#16832, #49250: output incomplete or wrong after recompute. Preempted at each of 20 steps."""
    for at in range(20):
        table, cache = make(groups=groups)
        seq, other = table.add([7, 7, 7]), table.add(range(50, 55))
        for step in range(20):
            if step == at:
                table.preempt(seq)
                assert table.usage()["full"].live == len(other.blocks["full"])
                cache.run(other)
                if retake:
                    table.take_hits(seq)
            cache.run(seq)
            table.append(seq, step)
        assert list(seq.token_ids) == [7, 7, 7, *range(20)]


def test_progress_or_error_when_blocks_run_out() -> None:
    """vllm-project/vllm#546: stalled for ever. Freeing the youngest always lets the oldest go on; alone, it errs."""
    table, cache = make(num_blocks=4)
    old, young = table.add(range(6)), table.add(range(20, 26))
    cache.run(old, young)
    for step in range(10):
        table.append(old, step)
        try:
            cache.run(old)
        except OutOfBlocksError:
            assert young.num_computed, "the oldest has all blocks and does not fit: that is an error, not a wait"
            table.preempt(young)
            cache.run(old)
    assert len(old) == 16
    table.append(old, 0)
    with pytest.raises(OutOfBlocksError, match=r"1 blocks asked for 1 sequences .* 0 available of 4"):
        table.reserve(old, 1)


def test_a_failed_schedule_returns_everything() -> None:
    """neuralmagic/vllm#92: a request that could not be scheduled kept its blocks, and an invariant broke later."""
    table, cache = make(num_blocks=4)
    a = table.add(range(8))
    cache.run(a)
    table.free(a)
    waiting = table.add([*range(8), *range(30, 42)], take_hits=False)
    before = snapshot(table)
    assert table.take_hits(waiting) == 8
    with pytest.raises(OutOfBlocksError):
        table.reserve(waiting, 12)
    table.preempt(waiting)
    pools, _, holds = snapshot(table)
    assert (pools, holds) == (before[0], before[2])  # also the order of eviction
    table.check()


# Windows


def test_window_of_a_group_is_not_that_of_its_neighbours() -> None:
    """vllm-project/vllm#51756: q = 0 and v = position, so the output is the mean of the positions seen."""
    groups = (LayerGroup("local", (0,), 8), LayerGroup("full", (1,)))
    cache = PagedKVCache(groups=groups, num_blocks=16, block_size=4, num_kv_heads=1, head_size=4)
    table = SequenceTable.for_cache(cache)
    seq = table.add(range(64))
    outs = {}
    for _ in range(8):
        table.reserve(seq, 8)
        batch = table.batch([(seq, 8)])
        for layer, g in enumerate(groups):
            meta = batch.metadata[g.name]
            v = batch.positions[:, None, None].float().expand(8, 1, 4)
            write(torch.randn(8, 1, 4), v, cache.key(layer), cache.value(layer), meta.slot_mapping)
            outs[g.name] = attend(
                torch.zeros(8, 1, 4),
                cache.key(layer),
                cache.value(layer),
                meta.query_start_loc,
                scale=1.0,
                seq_lens=meta.seq_lens,
                block_table=meta.block_table,
                window=(window_from_sliding(g.window)[0], 0),
            ).out[-1, 0, 0]
        table.commit(seq, 8)
    assert outs["local"].item() == pytest.approx(59.5)
    assert outs["full"].item() == pytest.approx(31.5)
    assert table.usage()["local"].live == 2


# Tensors: the whole of it, with real copies and real attention


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_forks_windows_and_hits_over_real_tensors(layout: str) -> None:
    """Random histories over a cache full of NaN: attention through blocks equals attention over each own sequence."""
    generator = torch.Generator().manual_seed(7)
    cache = PagedKVCache(groups=HYBRID, num_blocks=24, block_size=4, num_kv_heads=2, head_size=8, layout=layout)
    table = SequenceTable.for_cache(cache)
    for layer in (0, 1):
        cache.key(layer).fill_(torch.nan)
        cache.value(layer).fill_(torch.nan)
    embedding = torch.randn(3, 50, 2, 8, generator=generator)

    def rows(which: int, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return embedding[which][ids] + 0.1 * positions[:, None, None]

    def step(work) -> None:
        cache.run_copies(table.reserve(work))
        batch = table.batch(work)
        ids, positions = batch.token_ids, batch.positions
        for layer, g in enumerate(HYBRID):
            meta, window = batch.metadata[g.name], (window_from_sliding(g.window)[0], 0)
            k, v = cache.key(layer), cache.value(layer)
            write(rows(0, ids, positions), rows(1, ids, positions), k, v, meta.slot_mapping)
            q = rows(2, ids, positions)
            paged = {"seq_lens": meta.seq_lens, "block_table": meta.block_table}
            got = attend(q, k, v, meta.query_start_loc, scale=0.3, window=window, **paged).out
            for b, (seq, n) in enumerate(work):
                own, at = torch.tensor(seq.token_ids[: seq.num_computed + n]), torch.arange(seq.num_computed + n)
                dense = {"key_start_loc": torch.tensor([0, len(own)]), "layout": "ragged"}
                start = int(meta.query_start_loc[b])
                want = attend(
                    q[start : start + n],
                    rows(0, own, at),
                    rows(1, own, at),
                    torch.tensor([0, n]),
                    scale=0.3,
                    window=window,
                    **dense,
                ).out
                torch.testing.assert_close(got[start : start + n], want)
        for seq, n in work:
            table.commit(seq, n)
        table.check()

    prompt = torch.randint(0, 50, (14,), generator=generator)
    a = table.add(prompt)
    step([(a, 9)])
    step([(a, 5)])
    family = [a, table.fork(a), table.fork(a)]
    for _ in range(3):
        for seq in family:
            table.append(seq, torch.randint(0, 50, (), generator=generator))
        step([(seq, 1) for seq in family])
    again = table.add(prompt)
    assert again.num_computed == 12
    table.free(family[0])
    step([(again, again.num_uncomputed), *((seq, 0) for seq in family[1:])])
    table.truncate(family[1], 16)
    table.append(family[1], 3)
    step([(family[1], family[1].num_uncomputed)])
