"""Each kind of fault, made on purpose, is found; healthy pools and runs have none."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from pagetile.cache import PagedKVCache, SequenceTable
from pagetile.contracts.errors import ArgumentError
from pagetile.engine.engine import Engine
from pagetile.inspect.audit import audit, audit_pool, audit_run
from pagetile.inspect.poolmap import map_of_pool
from pagetile.inspect.poolstate import PoolState
from pagetile.inspect.run import BlockChange, Run

RUNS = ["crowded", "windowed", "forked"]


@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_and_its_pool(name: str, request: pytest.FixtureRequest) -> None:
    engine, run = request.getfixturevalue(name)
    assert audit_run(run) == []
    assert audit(engine.table, engine.cache) == []


def copied(run: Run) -> Run:
    return Run.from_dict(copy.deepcopy(run.to_dict()))


def kinds(run: Run) -> set[str]:
    return {f.kind for f in audit_run(run)}


def test_a_row_that_names_another_requests_block(crowded: tuple[Engine, Run]) -> None:
    """Request 2 is given request 0's last block in place of its own: it writes there, and both hold it."""
    run = copied(crowded[1])
    for step in run.steps:
        for change in step.blocks.get("full", []):
            if change.request == 2:
                change.blocks = [4, *change.blocks[1:]]
                found = audit_run(run)
                assert {f.kind for f in found} >= {"shared_write"}
                assert any(4 in f.blocks for f in found)
                return
    pytest.fail("request 2 never got blocks")


def test_a_slot_written_twice(crowded: tuple[Engine, Run]) -> None:
    run = copied(crowded[1])
    run.steps[0].slots["full"] = [0, 1, 2, 2, *range(4, 16)]
    found = audit_run(run)
    assert [f.message for f in found if f.kind == "duplicate_slot"] == ["1 slot written more than once in one step: 2"]
    assert any(f.kind == "dead_read" and "1 position " in f.message for f in found), "slot 3 was read and never written"


def test_a_write_outside_what_the_request_holds(crowded: tuple[Engine, Run]) -> None:
    run = copied(crowded[1])
    run.steps[0].slots["full"] = [*range(15), 11 * 4]
    assert kinds(run) >= {"stray_write", "dead_read"}


def test_a_block_that_is_recycled_without_being_written(crowded: tuple[Engine, Run]) -> None:
    """A hit on a block that is not cached any more reads what its last owner left."""
    run = copied(crowded[1])
    for step in run.steps:
        for row in step.rows:
            row.skip = 0
        step.cached.clear()  # as if nothing had been kept: later hits find blocks that were handed out anew
    assert "dead_read" in kinds(run)


def test_a_copy_that_did_not_run(forked: tuple[Engine, Run]) -> None:
    run = copied(forked[1])
    run.steps[1].copies = []
    assert "dead_read" in kinds(run)


def test_a_released_block_that_is_still_needed(windowed: tuple[Engine, Run]) -> None:
    run = copied(windowed[1])
    run.steps[3].blocks.setdefault("window_8", []).append(BlockChange(0, 4, [-1], len_of(run, 3, "window_8", 0)))
    assert "dead_read" in kinds(run)


def len_of(run: Run, step: int, group: str, request: int) -> int:
    return next(len(s.owned[group][request]) for s in run.states() if s.index == step)


def test_too_few_blocks_for_the_length(crowded: tuple[Engine, Run]) -> None:
    run = copied(crowded[1])
    run.steps[0].slots["full"] = list(range(12)) + [-1] * 4
    run.steps[0].blocks["full"] = [BlockChange(0, 0, [0, 1, 2], 3)]
    found = [f for f in audit_run(run) if f.step == 0]
    assert any("holds 3 blocks of 4" in f.message for f in found)


# Live pools


def live() -> tuple[SequenceTable, PagedKVCache]:
    cache = PagedKVCache(num_layers=2, num_blocks=8, block_size=4, num_kv_heads=2, head_size=8)
    table = SequenceTable.for_cache(cache)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]):
        seq = table.add(tokens)
        n = seq.num_uncomputed
        table.reserve(seq, n)
        table.commit(seq, n)
    assert audit(table, cache) == []
    return table, cache


def test_a_reference_too_many_is_a_leak() -> None:
    table, _ = live()
    table.pools["full"].share([1])
    [found] = audit(table)
    assert (found.kind, found.blocks) == ("leak", (1,))


def test_a_reference_too_few_is_a_double_owner() -> None:
    table, _ = live()
    table.pools["full"].free([0])  # both sequences hold block 0, and it has 2 references
    [found] = audit(table)
    assert (found.kind, found.blocks) == ("double_owner", (0,))


def test_a_block_freed_while_it_is_held() -> None:
    table, _ = live()
    table.pools["full"].free([1])
    [found] = audit(table)
    assert (found.kind, found.blocks) == ("freed", (1,))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_a_live_slot_only(value: float) -> None:
    table, cache = live()
    cache.value(1)[2, 1:] = value  # sequence 1 has one token in block 2: slots 1 to 3 are dead
    cache.key(0)[5] = value  # nobody's block
    assert audit(table, cache) == []
    cache.value(1)[2, 0, 1, 3] = value
    found = audit(table, cache)
    assert [f.kind for f in found] == ["nan"]
    assert "layer 1: value_cache of sequence 1, position 4 (block 2, offset 0)" in found[0].message
    assert found[0].message.endswith("heads 1")


def test_a_broken_invariant_is_reported() -> None:
    table, _ = live()
    table.sequences[0].num_computed = 99
    [found] = audit(table)
    assert found.kind == "invariant"


def test_saved_pool(tmp_path: Path) -> None:
    table, cache = live()
    cache.key(0)[1, 0, 0, 0] = float("nan")
    table.pools["full"].share([1])
    state = PoolState.of(table, cache)
    state.save(tmp_path / "pool.json")
    again = PoolState.load(tmp_path / "pool.json")
    assert again == state
    assert sorted(f.kind for f in audit_pool(again)) == ["leak", "nan"]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ArgumentError, match="no saved pool"):
        PoolState.load(tmp_path / "other.json")


def test_map_of_a_live_pool() -> None:
    table, _ = live()
    table.free(table.sequences[1])
    drawn = map_of_pool(PoolState.of(table).groups[0], 4)
    assert drawn.cells == "AA......"


def test_quantised_caches_are_looked_at_when_they_say_what_they_hold() -> None:
    cache = PagedKVCache(
        num_layers=1, num_blocks=4, block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float8_e4m3fn
    )
    table = SequenceTable.for_cache(cache)
    seq = table.add([1, 2, 3])
    table.reserve(seq, 3), table.commit(seq, 3)
    cache.key(0).view(torch.uint8)[seq.blocks["full"][0], 1, 0, 0] = 0x7F
    assert [f.kind for f in audit(table, cache)] == ["nan"]
