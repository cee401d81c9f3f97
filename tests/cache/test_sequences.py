"""The sequence table, one behaviour at a time. Random histories are in ``test_sequences_machine.py``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from simulated import SimulatedCache, prefix_tokens, snapshot

from pagetile.cache.groups import LayerGroup
from pagetile.cache.kv import PagedKVCache
from pagetile.cache.reservation import BlockCopy
from pagetile.cache.sequences import SequenceTable
from pagetile.contracts.errors import ArgumentError, DTypeError, OutOfBlocksError, UnsupportedError

FULL = (LayerGroup("full", (0,)),)


def window_and_full(window: int) -> tuple[LayerGroup, ...]:
    return LayerGroup("local", (0,), window), LayerGroup("full", (1,))


def make(num_blocks=16, block_size: int = 4, groups=FULL, **options) -> tuple[SequenceTable, SimulatedCache]:
    table = SequenceTable(groups, num_blocks, block_size, **options)
    return table, SimulatedCache(table)


def test_a_step_from_prompt_to_hit() -> None:
    table, cache = make()
    a = table.add(range(10))
    assert (a.num_computed, a.num_uncomputed, len(a)) == (0, 10, 10)
    cache.run(a)
    table.append(a, 10)
    cache.run(a)
    b = table.add([*range(8), 99])
    assert b.num_computed == b.num_hit == 8
    assert list(b.blocks["full"]) == list(a.blocks["full"])[:2]
    cache.run(b)
    assert (table.stats.queried_tokens, table.stats.hit_tokens) == (19, 8)
    assert table.usage()["full"].hits == 2


def test_batch_packs_ids_positions_and_last_rows() -> None:
    table, _ = make(groups=window_and_full(4))
    a, b, c = table.add([5, 6, 7, 8, 9]), table.add([1]), table.add([3, 4])
    table.reserve([(a, 5), (b, 1), (c, 2)])
    table.commit(a, 3)
    batch = table.batch([(a, 2), (b, 0), (c, 2)], pad_tokens=6, pad_seqs=4, table_width=3)
    assert batch.token_ids.tolist() == [8, 9, 3, 4, 0, 0]
    assert batch.positions.tolist() == [3, 4, 0, 1, 0, 0]
    assert batch.last_rows.tolist() == [1, 0, 3, 0]
    assert set(batch.metadata) == {"local", "full"}
    for name, meta in batch.metadata.items():
        assert meta.query_start_loc.tolist() == [0, 2, 2, 4, 4]
        assert meta.seq_lens.tolist() == [5, 0, 2, 0]
        assert meta.block_table.shape == (4, 3)
        one = table.metadata([(a, 2), (b, 0), (c, 2)], name, pad_tokens=6, pad_seqs=4, table_width=3)
        assert torch.equal(one.slot_mapping, meta.slot_mapping)
    with pytest.raises(ArgumentError, match="group is None; it must be one of"):
        table.metadata([(a, 2)])
    table.reserve(a, 9)  # room ahead of the tokens is fine, a batch of tokens that are not there is not
    with pytest.raises(ArgumentError, match="sequence 0 has 2 to compute"):
        table.batch([(a, 3)])


def test_a_prompt_found_in_full_is_recomputed_but_not_written() -> None:
    """GeeeekExplorer/nano-vllm#114, #144, #199: a query of length 0, and a crash."""
    table, cache = make(num_blocks=4)
    first = table.add(range(8))
    cache.run(first)
    again = table.add(range(8))
    assert (again.num_computed, again.num_stored, again.num_uncomputed) == (7, 8, 1)
    assert table.reserve(again, 1) == []
    meta = table.metadata([(again, 1)])
    assert meta.slot_mapping.tolist() == [-1]
    assert (meta.seq_lens.tolist(), meta.max_query_len) == ([8], 1)
    held = dict(cache.slots["full"])
    cache.forward([(again, 1)])
    assert cache.slots["full"] == held
    table.commit(again, 1)
    table.append(again, 50)  # the next token starts a block of its own
    cache.run(again)
    assert list(again.blocks["full"])[:2] == list(first.blocks["full"])
    assert list(first.blocks["full"]) == [0, 1]


def test_fork_shares_and_the_first_write_copies() -> None:
    table, cache = make()
    a = table.add(range(6))
    cache.run(a)
    b, c = table.fork(a), table.fork(a)
    assert table.usage()["full"].live == 2
    for seq, token in ((a, 60), (b, 61), (c, 62)):
        table.append(seq, token)
    copies = table.reserve([(a, 1), (b, 1), (c, 1)])
    assert copies == [BlockCopy("full", 1, 2), BlockCopy("full", 1, 3)]  # the last owner writes in place
    cache.copy(copies)
    cache.forward([(a, 1), (b, 1), (c, 1)])
    for seq in (a, b, c):
        table.commit(seq, 1)
    cache.check()
    assert [list(s.blocks["full"]) for s in (a, b, c)] == [[0, 2], [0, 3], [0, 1]]
    assert table.stats.copies == 2


def test_a_block_that_a_copy_reads_has_no_second_owner() -> None:
    """Reserved one by one, as a scheduler does: the last owner writes in place although the copy is still to run."""
    table, cache = make()
    a = table.add(range(6))
    cache.run(a)
    b = table.fork(a)
    table.append(a, 60)
    table.append(b, 61)
    copies = table.reserve(a, 1)
    assert copies == [BlockCopy("full", 1, 2)]
    assert table.reserve(b, 1) == []
    cache.copy(copies)
    cache.forward([(a, 1), (b, 1)])
    table.commit(a, 1)
    table.commit(b, 1)
    cache.check()
    assert list(b.blocks["full"]) == [0, 1]


def test_fork_on_a_block_boundary_copies_nothing() -> None:
    table, cache = make()
    a = table.add(range(8))
    cache.run(a)
    b = table.fork(a)
    table.append(a, 1)
    table.append(b, 2)
    assert table.reserve([(a, 1), (b, 1)]) == []


def test_a_fork_must_reserve_for_itself() -> None:
    """The room in a shared partial block was reserved by the parent; the child's first write there is a copy."""
    table, _ = make()
    a = table.add(range(6))
    table.reserve(a, 8)
    table.commit(a, 6)
    b = table.fork(a)
    table.append(b, 7)
    with pytest.raises(ArgumentError, match="positions below 6 are reserved; call reserve first"):
        table.metadata([(b, 1)])
    with pytest.raises(ArgumentError, match="call reserve first"):
        table.commit(b, 1)
    assert len(table.reserve(b, 1)) == 1


def test_the_source_of_a_copy_is_kept_until_the_copy_has_run() -> None:
    """NVIDIA/TensorRT-LLM#15018: blocks that were still being read went to other requests."""
    table, cache = make(num_blocks=4)
    a = table.add(range(6))
    cache.run(a)
    b = table.fork(a)
    table.append(b, 61)
    (copy,) = table.reserve(b, 1)
    table.free(a)  # the other owner leaves before the copy ran
    assert table.pools["full"].ref(copy.src) == 1
    table.check()
    taken = table.add(range(100, 104))
    table.reserve(taken, 4)
    assert copy.src not in taken.blocks["full"]
    cache.copy([copy])
    cache.forward([(b, 1), (taken, 4)])
    table.commit(b, 1)
    assert table.pools["full"].ref(copy.src) == 0
    cache.check()


def test_reserve_is_all_or_nothing_over_the_list_and_the_groups() -> None:
    table, _ = make(num_blocks={"local": 3, "full": 6}, groups=window_and_full(4))
    a, b = table.add(range(8)), table.add(range(50, 58))
    before = snapshot(table)
    with pytest.raises(OutOfBlocksError, match=r"group 'local': 4 blocks asked for 2 sequences .* 3 available of 3"):
        table.reserve([(a, 8), (b, 8)])
    assert snapshot(table) == before
    assert table.reserve([(a, 8), (b, 4)]) == []
    with pytest.raises(OutOfBlocksError):
        table.reserve(b, 8)
    table.commit(a, 8)  # releases the first block of the window
    assert table.reserve(b, 8) == []
    table.commit(b, 8)
    table.check()


def test_a_copy_counts_as_a_block() -> None:
    table, cache = make(num_blocks=2)
    a = table.add(range(6))
    cache.run(a)
    b = table.fork(a)
    table.append(b, 1)
    before = snapshot(table)
    with pytest.raises(OutOfBlocksError, match="1 of them to copy shared blocks"):
        table.reserve(b, 1)
    assert snapshot(table) == before
    table.free(a)
    assert table.reserve(b, 1) == []  # alone now: in place


def test_full_blocks_are_known_only_after_the_forward() -> None:
    table, cache = make()
    a = table.add(range(8))
    table.reserve(a, 8)
    assert table.add(range(8)).num_computed == 0
    cache.forward([(a, 8)])
    assert table.add(range(8)).num_computed == 0
    table.commit(a, 4)
    assert table.add(range(8)).num_computed == 4
    table.commit(a, 4)
    assert table.add(range(8)).num_computed == 7


def test_windows_release_what_is_behind_and_keep_valid_ids() -> None:
    table, cache = make(num_blocks=8, block_size=2, groups=window_and_full(3))
    a = table.add(range(20, 31))
    for _ in range(11):
        cache.step([(a, 1)])
        assert table.usage()["local"].live <= 2  # 3 tokens, the query's own included, touch at most two blocks of 2
    assert list(a.blocks["local"])[:4] == [0, 0, 0, 0]
    assert a.released == {"local": 4, "full": 0}
    meta = table.metadata([(a, 0)], "local")
    assert meta.block_table.min() >= 0
    assert table.usage()["full"].live == 6


def test_the_step_at_which_the_length_reaches_the_window() -> None:
    """huggingface/transformers#37574: window 8, prompt 6, three steps: all 8 kept after step 2, first drop at step 3.

    With blocks of one token a block is a token, so "kept" can be counted. The next query counts itself among the 8:
    after a commit at length L it sees L - 7 and later.
    """
    table, cache = make(block_size=1, groups=(LayerGroup("local", (0,), 8),))
    a = table.add(range(6))
    cache.run(a)
    kept = []
    for token in (6, 7, 8):
        table.append(a, token)
        table.reserve(a, 1)
        meta = table.metadata([(a, 1)])
        cache.forward([(a, 1)])
        kept.append(int(meta.seq_lens[0]) - a.released["local"])  # readable in this step's forward
        table.commit(a, 1)
        cache.check()
    assert kept == [7, 8, 8]
    assert a.released["local"] == 2


def test_a_window_belongs_to_the_group_and_groups_to_layers() -> None:
    """vllm-project/vllm#51756: full-attention layers in a windowed group lost their old tokens."""
    table, cache = make(num_blocks=16, block_size=4, groups=window_and_full(8))
    a = table.add(range(64))
    for _ in range(8):
        cache.step([(a, 8)])
    assert a.released == {"local": 14, "full": 0}
    assert len(set(a.blocks["full"])) == 16


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 8, 9, 13])
@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_a_hit_needs_only_what_the_next_query_sees(window: int, length: int) -> None:
    table, cache = make(num_blocks=12, block_size=4, groups=window_and_full(window))
    prompt = list(range(length))
    first = table.add(prompt)
    cache.run(first)
    table.free(first)
    local = table.pools["local"]
    again = table.add(prompt)
    expected = min(length // 4 * 4, length - 1)
    assert again.num_computed == expected
    held = [i for i in range(length // 4) if i >= again.released["local"]]
    assert held == [i for i in range(length // 4) if any(expected - p < window for p in range(4 * i, 4 * i + 4))]
    cache.run(again)
    table.free(again)

    if held:  # without one of these blocks, the hit must end where the window can still be served
        prefixes = [local.prefix(b) for b in range(12) if local.prefix(b) and local.prefix(b).num_blocks == held[0] + 1]
        local.forget(next(b for b in range(12) if local.prefix(b) is prefixes[0]))
        shorter = table.add(prompt)
        assert shorter.num_computed < expected
        cache.run(shorter)
    cache.check()


@pytest.mark.parametrize("groups", [window_and_full(4), (LayerGroup("local", (0,), 4),)])
def test_heads_that_left_a_window_do_not_stand_in_the_way(groups) -> None:
    """The first blocks of a windowed group are evicted early; a hit at the far end needs none of them."""
    counts = {"local": 4, "full": 16}
    table, cache = make(num_blocks={g.name: counts[g.name] for g in groups}, groups=groups)
    prompt = list(range(16))
    first = table.add(prompt)
    for _ in range(4):
        cache.step([(first, 4)])
    table.free(first)
    other = table.add(range(50, 60))
    cache.run(other)  # three blocks: what the window released first is gone
    left = [p for b in range(4) if (p := table.pools["local"].prefix(b)) is not None]
    assert (0, 1, 2, 3) not in [prefix_tokens(p) for p in left]
    again = table.add(prompt)
    assert again.num_computed == 15
    table.free(other)
    cache.run(again)


def test_preempt_and_take_hits_again() -> None:
    table, cache = make()
    a = table.add(range(9))
    cache.run(a)
    table.append(a, 9)
    table.preempt(a)
    assert (a.num_computed, list(a.blocks["full"])) == (0, [])
    assert table.usage()["full"].live == 0
    assert table.stats.preemptions == 1
    assert table.take_hits(a) == 8
    with pytest.raises(ArgumentError, match="holds blocks already"):
        table.take_hits(a)
    cache.run(a)
    waiting = table.add(range(9), take_hits=False)
    table.preempt(waiting)  # nothing computed, nothing lost
    assert table.stats.preemptions == 1


def test_rejected_drafts() -> None:
    table, cache = make(block_size=2)
    a = table.add([1, 2, 3])
    cache.run(a)
    table.extend(a, [4, 5, 6, 7])
    table.reserve(a, 4)
    cache.forward([(a, 4)])
    table.commit(a, 2)  # 4 and 5 were right
    table.truncate(a, 5)
    assert (a.num_computed, len(a), len(a.blocks["full"])) == (5, 5, 3)
    cache.check()
    table.append(a, 8)
    cache.run(a)
    assert table.add([1, 2, 3, 4, 5, 6]).num_computed == 4  # the rejected 6 is nobody's prefix


def test_truncate_into_a_known_block() -> None:
    """A full block is known to the cache; writing its tail anew must not change what others find there."""
    table, cache = make(num_blocks=8, block_size=4)
    a = table.add(range(8))
    cache.run(a)
    assert table.truncate(a, 6) == 6
    assert table.add(range(8)).num_computed == 7  # still there, still right
    table.append(a, 66)
    copies = table.reserve(a, 1)
    assert len(copies) == 1  # two others hold it now
    cache.copy(copies)
    cache.forward([(a, 1)])
    table.commit(a, 1)
    cache.check()

    table, cache = make(num_blocks=8, block_size=4)
    a = table.add(range(8))
    cache.run(a)
    table.truncate(a, 6)
    table.append(a, 66)
    cache.run(a)  # nobody else holds it: written in place, and no longer found
    assert list(a.blocks["full"]) == [0, 1]
    assert table.add(range(8)).num_computed == 4


def test_truncate_past_a_window_starts_again() -> None:
    table, cache = make(block_size=2, groups=window_and_full(4))
    a = table.add(range(12))
    cache.run(a)
    assert a.released["local"] == 4  # the next query, at 12, sees 9 and later
    assert table.truncate(a, 11) == 11  # a query at 11 sees 8 and later: block 4, which is there
    assert table.truncate(a, 10) == 0  # a query at 10 would see 7
    assert (a.num_computed, len(a), list(a.blocks["local"])) == (0, 10, [])
    cache.run(a)


def test_reset_forgets_prefixes_and_keeps_sequences() -> None:
    table, cache = make(groups=window_and_full(6))
    a = table.add(range(8))
    cache.run(a)
    table.reset_prefix_cache()
    assert table.add(range(8)).num_computed == 0
    table.extend(a, range(8, 12))
    cache.run(a)
    table.free(a)
    assert {u.cached for u in table.usage().values()} == {1}  # the third block, written after the reset


def test_salts_keep_apart() -> None:
    table, cache = make()
    a = table.add(range(8), salt="tenant a")
    cache.run(a)
    assert table.add(range(8)).num_computed == 0
    assert table.add(range(8), salt="tenant b").num_computed == 0
    assert table.add(range(8), salt="tenant a").num_computed == 7


def test_counters_and_bytes() -> None:
    kv = PagedKVCache(num_layers=3, num_blocks=10, block_size=4, num_kv_heads=2, head_size=8, dtype=torch.float16)
    table = SequenceTable.for_cache(kv)
    a, b = table.add(range(6)), table.add(range(40, 49))
    table.reserve([(a, 6), (b, 9)])
    block = 4 * 3 * 2 * 2 * 8 * 2
    assert table.live_bytes() == 5 * block
    table.commit(a, 6)
    table.commit(b, 9)
    usage = table.usage()["full"]
    assert (usage.live, usage.cached, usage.free, usage.total, usage.utilization) == (5, 0, 5, 10, 0.5)
    table.append(a, 1)
    table.free(a)
    table.free(b)
    usage = table.usage()["full"]
    assert (usage.live, usage.cached, usage.free) == (0, 3, 7)
    figures = table.memory_figures(max_len=100)
    assert figures.num_sequences == 2
    assert figures.paged_bytes == 5 * block
    assert figures.contiguous_max_bytes == 2 * 100 * block // 4
    assert figures.contiguous_final_bytes == (7 + 9) * block // 4
    assert figures.saved_against_max == 1 - 20 / 200
    assert figures.saved_against_final == 1 - 20 / 16
    empty = SequenceTable.for_cache(kv).memory_figures(10)
    assert (empty.paged_bytes, empty.saved_against_max) == (0, 0.0)
    with pytest.raises(ArgumentError, match="no geometry"):
        make()[0].memory_figures(10)


def test_shared_blocks_count_once() -> None:
    kv = PagedKVCache(num_layers=1, num_blocks=10, block_size=4, num_kv_heads=1, head_size=8)
    table = SequenceTable.for_cache(kv)
    a = table.add(range(8))
    table.reserve(a, 8)
    table.commit(a, 8)
    for _ in range(3):
        table.fork(a)
    table.append(a, 8)
    table.reserve(a, 1)
    assert table.live_bytes() == 3 * 4 * kv.bytes_per_token
    assert table.memory_figures(9).contiguous_final_bytes == (9 + 3 * 8) * kv.bytes_per_token


@pytest.mark.parametrize("token", [1.0, "a", True, 2**63, None])
def test_only_token_ids_are_appended(token) -> None:
    table, _ = make()
    a = table.add([1])
    with pytest.raises((DTypeError, ArgumentError)):
        table.append(a, token)
    assert list(a.token_ids) == [1]
    table.append(a, np.int32(7))
    table.append(a, torch.tensor(9))
    assert list(a.token_ids) == [1, 7, 9]


def test_misuse_is_named() -> None:
    table, _ = make()
    other, _ = make()
    a = table.add([1, 2, 3])
    with pytest.raises(ArgumentError, match="not in this table"):
        other.reserve(a, 1)
    with pytest.raises(ArgumentError, match="named twice"):
        table.reserve([(a, 1), (a, 2)])
    with pytest.raises(ArgumentError, match="-1 new tokens"):
        table.reserve(a, -1)
    with pytest.raises(ArgumentError, match="either a sequence and its number"):
        table.reserve(a)
    with pytest.raises(ArgumentError, match="either a sequence and its number"):
        table.reserve([(a, 1)], 1)
    with pytest.raises(ArgumentError, match="call reserve first"):
        table.metadata([(a, 1)])
    table.reserve(a, 5)
    with pytest.raises(ArgumentError, match="commit of 4 tokens, but sequence 0 has 3 tokens"):
        table.commit(a, 4)
    with pytest.raises(ArgumentError, match="truncate to 4 tokens, but sequence 0 has 3"):
        table.truncate(a, 4)
    with pytest.raises(DTypeError, match="salt"):
        table.add([1], salt=1.5)
    with pytest.raises(UnsupportedError, match="block_size 8"):
        SequenceTable([LayerGroup("a", (0,), block_size=8)], 4, 16)
    table.free(a)
    for call in (lambda: table.free(a), lambda: table.fork(a), lambda: table.append(a, 1), lambda: table.preempt(a)):
        with pytest.raises(ArgumentError, match="not in this table"):
            call()
    assert table.sequences == []
    table.check()


def test_the_empty_sequence() -> None:
    table, cache = make()
    a = table.add([])
    b = table.fork(a)
    cache.step([(a, 0), (b, 0)])
    table.append(a, 5)
    cache.run(a)
    assert list(a.blocks["full"]) == [0]


def test_check_finds_a_broken_table() -> None:
    breaks = {
        "computed 99": lambda _t, s: setattr(s, "num_computed", 99),
        "1 references, 0 in rows": lambda _t, s: s.blocks["full"].pop(),
        "stands for two logical blocks": lambda _t, s: s.blocks["full"].__setitem__(0, 1),
        "one prefix for every stored full block": lambda _t, s: s.prefixes.pop(),
        "the sequence's own tokens": lambda _t, s: s.token_ids.__setitem__(0, 77),
        "the holds of the sequences": lambda t, _s: t.holds["full"].update([0]),
        "at most one stored token": lambda _t, s: setattr(s, "num_computed", 2),
        "nothing that is seen is released": lambda _t, s: s.released.update(full=1),
    }
    for message, break_it in breaks.items():
        table, cache = make()
        a = table.add(range(4, 12))
        cache.run(a)
        table.reserve(a, 4)
        a.num_reserved = 8
        table.check()
        break_it(table, a)
        with pytest.raises(AssertionError, match=message):
            table.check()
