"""Files that are cut off, edited or somebody else's: refused by the entry that cannot be, or reported by the audit."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagetile.cache import PagedKVCache, SequenceTable
from pagetile.contracts.errors import ArgumentError
from pagetile.inspect import chrome, poolmap, saved
from pagetile.inspect.audit import audit_pool, audit_run
from pagetile.inspect.figures import all_figures
from pagetile.inspect.poolmap import map_of_run
from pagetile.inspect.poolstate import PoolState
from pagetile.inspect.run import Run
from pagetile.inspect.view import page, write_page


def put(value: Any, *way: Any) -> Callable[[dict], None]:
    """Sets an entry of a document."""

    def change(data: dict) -> None:
        for name in way[:-1]:
            data = data[name]
        data[way[-1]] = value

    return change


@pytest.fixture
def document(crowded) -> dict[str, Any]:
    return json.loads(json.dumps(crowded[1].to_dict()))


@pytest.fixture
def pool() -> dict[str, Any]:
    cache = PagedKVCache(num_layers=1, num_blocks=8, block_size=4, num_kv_heads=2, head_size=8)
    table = SequenceTable.for_cache(cache)
    seq = table.add([1, 2, 3, 4, 5])
    table.reserve(seq, 5), table.commit(seq, 5)
    cache.key(0)[seq.blocks["full"][0], 1] = float("nan")
    state = PoolState.of(table, cache)
    return {"pagetile_pool": 1, **json.loads(json.dumps({"block_size": 4, "groups": [_plain(state)]}))}


def _plain(state: PoolState) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(state.groups[0])


RUN_CHANGES = {
    "steps": put(None, "steps"),
    "steps[0]": put(5, "steps", 0),
    "title": put(5, "title"),
    "foo": put(1, "foo"),
    "block_size": put(0, "block_size"),
    "block_size is True": put(True, "block_size"),
    "tile": put(0, "tile"),
    "groups": put([], "groups"),
    "groups[0].num_blocks": put(10**12, "groups", 0, "num_blocks"),
    "groups[0].k_strides": put([1], "groups", 0, "k_strides"),
    "groups[0].window": put(0, "groups", 0, "window"),
    "requests[0].id": put(7, "requests", 0, "id"),
    "requests[0].texts": put(["x"], "requests", 0, "texts"),
    "requests[1]": put(None, "requests", 1),
    "steps[0].t": put([1, 2], "steps", 0, "t"),
    "steps[0].t[0]": put(float("nan"), "steps", 0, "t", 0),
    "steps[0].rows[0][0]": put(99, "steps", 0, "rows", 0, 0),
    "steps[0].rows[0][1]": put(-5, "steps", 0, "rows", 0, 1),
    "steps[0].rows[0][2]": put(10**12, "steps", 0, "rows", 0, 2),
    "steps[0].rows[0][3]": put(-1, "steps", 0, "rows", 0, 3),
    "steps[0].rows[0] has 1": put([1], "steps", 0, "rows", 0),
    "steps[1].blocks names group 'nope'": put({"nope": []}, "steps", 1, "blocks"),
    "steps[1].blocks['full'][0][2][0]": put({"full": [[0, 0, [1.5], 1]]}, "steps", 1, "blocks"),
    "steps[1].blocks['full'][0][0]": put({"full": [[77, 0, [1], 1]]}, "steps", 1, "blocks"),
    "steps[1].cached['full']": put({"full": [[1]]}, "steps", 1, "cached"),
    "steps[1].copies[0]": put([["x", 1, 2]], "steps", 1, "copies"),
    "steps[1].events[0] is 'boom'": put([["boom", 0, 0]], "steps", 1, "events"),
    "steps[1].events[0][2]": put([["fork", 0, 77]], "steps", 1, "events"),
    "steps[1].slots['full'][0]": put({"full": [10**30]}, "steps", 1, "slots"),
    "warm": put([1], "warm"),
    "version 2": put(2, "pagetile_run"),
}


@pytest.mark.parametrize("says", RUN_CHANGES)
def test_an_entry_of_a_run_that_cannot_be(says: str, document: dict[str, Any], tmp_path: Path) -> None:
    RUN_CHANGES[says](document)
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(ArgumentError) as error:
        Run.load(tmp_path / "run.json")
    assert says in str(error.value)
    assert str(tmp_path / "run.json") in str(error.value)
    assert "\n" not in str(error.value)


POOL_CHANGES = {
    "groups": put("ab", "groups"),
    "block_size": put(None, "block_size"),
    "groups[0].refs[0]": put([-1], "groups", 0, "refs"),
    "groups[0].rows has an entry 'a'": put({"a": [1]}, "groups", 0, "rows"),
    "groups[0].rows[0][0]": put({"0": [-5]}, "groups", 0, "rows"),
    "groups[0].holds[1]": put({"1": "x"}, "groups", 0, "holds"),
    "groups[0].prefixes[0]": put([77], "groups", 0, "prefixes"),
    "groups[0].not_finite[0] has no": put([{"a": 1}], "groups", 0, "not_finite"),
    "version 9": put(9, "pagetile_pool"),
}


@pytest.mark.parametrize("says", POOL_CHANGES)
def test_an_entry_of_a_pool_that_cannot_be(says: str, pool: dict[str, Any]) -> None:
    PoolState.from_dict(copy.deepcopy(pool))
    POOL_CHANGES[says](pool)
    with pytest.raises(ArgumentError) as error:
        PoolState.from_dict(pool)
    assert says in str(error.value)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "not JSON": lambda raw: raw[: len(raw) // 2],
    "damaged gzip": lambda raw: gzip.compress(raw)[:200],
    "damaged gzip ": lambda raw: bytes(b ^ 255 if at == 40 else b for at, b in enumerate(gzip.compress(raw))),
    "not JSON ": lambda _: b"\xff\xfe{}",
    "not JSON  ": lambda _: b"[" * 100_000,
    "holds a list": lambda _: b"[1]",
    "a Chrome trace": lambda _: b'{"traceEvents": []}',
    "something else": lambda _: b"{}",
}


@pytest.mark.parametrize("says", DAMAGES)
def test_damaged_and_foreign_files(says: str, document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DAMAGES[says](json.dumps(document).encode()))
    with pytest.raises(ArgumentError, match=says.strip()):
        Run.load(tmp_path / "x")


def test_a_saved_pool_is_told_from_a_run(pool: dict[str, Any], document: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="but a saved pool"):
        Run.from_dict(pool)
    with pytest.raises(ArgumentError, match="but a recorded run"):
        PoolState.from_dict(document)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put({"full": [[0, 0, [99], 1]]}, "steps", 1, "blocks"), "block 99 is in the rows of requests"),
        (put([["full", 1, 99]], "steps", 1, "copies"), "block 99 is copied from or to"),
        (put({"full": [[98, 99], []]}, "steps", 1, "cached"), "blocks 98, 99 are said to be cached"),
        (put({"full": [99]}, "warm"), "block 99 is said to hold prefixes"),
    ],
)
def test_blocks_outside_the_pool_are_found_and_everything_else_still_draws(
    change: Callable[[dict], None], says: str, document: dict[str, Any]
) -> None:
    change(document)
    run = Run.from_dict(document)
    found = [f for f in audit_run(run) if f.kind == "outside"]
    assert any(says in f.message and "ids 0 to 11" in f.message for f in found)
    for state in run.states():
        assert len(map_of_run(run, state, "full").cells) == 12
    assert all_figures(run)
    assert chrome.chrome_trace(run)["traceEvents"]
    assert "<!doctype html>" in page(run)


def test_a_pool_with_a_row_outside_of_it(pool: dict[str, Any]) -> None:
    pool["groups"][0]["rows"]["0"].append(99)
    found = audit_pool(PoolState.from_dict(pool))
    assert ("outside", (99,)) in [(f.kind, f.blocks) for f in found]


def test_a_huge_pool_is_counted_and_not_drawn(document: dict[str, Any]) -> None:
    document["groups"][0]["num_blocks"] = 2**29
    run = Run.from_dict(document)
    assert audit_run(run) == []
    drawn = map_of_run(run, next(run.states()), "full")
    assert len(drawn.cells) == poolmap.MOST_CELLS
    held = sum(len(set(row)) for row in next(run.states()).owned["full"].values())
    assert ("." + f"  free: {2**29 - held}") in ["  ".join(pair) for pair in drawn.legend]


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    saved.write(path, "before")
    path.chmod(0o600)

    def fails(self, target):  # noqa: ARG001
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        with pytest.raises(OSError, match="full"):
            saved.write(path, "after")
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    saved.write(path, "after")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", 0o600)


def test_half_a_surrogate_in_a_name_is_written_as_a_question_mark(document: dict[str, Any], tmp_path: Path) -> None:
    run = Run.from_dict(document)
    run.requests[0].id = "a\ud800b"
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json").requests[0].id == "a?b"
    chrome.save(run, tmp_path / "trace.json"), write_page(run, tmp_path / "page.html")
    assert "a?b" in (tmp_path / "page.html").read_text(encoding="utf-8")
