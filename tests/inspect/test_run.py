"""Recorded runs: they agree with what the ops were given, survive saving, and change nothing of the engine."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pagetile.contracts.errors import ArgumentError
from pagetile.engine.engine import Engine
from pagetile.engine.request import SamplingParams
from pagetile.engine.sizing import EngineConfig
from pagetile.inspect import chrome, derive
from pagetile.inspect.figures import all_figures, summary, summary_lines
from pagetile.inspect.poolmap import map_of_run
from pagetile.inspect.recorder import Recorder
from pagetile.inspect.run import Run, derived_slots
from tests.inspect.conftest import SHARED, record, tiny_llama

RUNS = ["crowded", "windowed", "forked"]


@pytest.fixture(params=RUNS)
def recorded(request: pytest.FixtureRequest) -> tuple[Engine, Run]:
    return request.getfixturevalue(request.param)


def test_rows_and_blocks_say_what_the_ops_were_given(recorded: tuple[Engine, Run]) -> None:
    """Slots and reads derived from the saved run equal those derived from the tracer's record, at every step."""
    _, run = recorded
    assert len(run.trace.steps) == len(run.steps)
    for state in run.states():
        traced = run.trace.steps[state.index]
        for g in run.groups:
            stores = [n for n, s in enumerate(run.trace.stores) if s.group == g.name]
            assert [run.trace.stores[n].layer for n in stores] == g.layers
            [write] = traced.find("write", stores[0])
            assert write.slots.tolist() == derived_slots(state, g.name, run.block_size).tolist()
            [attend] = traced.find("attend", stores[0])
            reads = derive.read_slots(attend, run.trace.stores[stores[0]])
            for seq, row in enumerate(state.step.rows):
                blocks = np.asarray(state.owned[g.name][row.request])
                first = 0 if g.window is None else max(0, row.first - g.window + 1)
                positions = np.arange(first, row.first + row.count)
                slots = blocks[positions // run.block_size] * run.block_size + positions % run.block_size
                assert reads[seq].tolist() == slots.tolist()
    assert not any(step.slots for step in run.steps)


def test_every_token_is_computed_once_or_again_after_a_preemption(crowded: tuple[Engine, Run]) -> None:
    engine, run = crowded
    assert engine.table.stats.preemptions == summary(run)["preemptions"] > 0
    assert summary(run)["prefix_hit_tokens"] > 0
    done: dict[int, int] = {}
    for step in run.steps:
        for kind, request, value in step.events:
            if kind == "preempt":
                done[request] = 0
            if kind == "admit":
                done[request] = value
        for row in step.rows:
            assert row.first == done[row.request]
            done[row.request] += row.count
    for number, request in enumerate(run.requests):
        assert done[number] == len(request.tokens) - 1, "the last token is chosen and never computed"
        assert request.finish_reason == "length"


def test_the_recorded_answers_are_those_without_a_recorder(crowded: tuple[Engine, Run]) -> None:
    _, run = crowded
    engine = Engine(tiny_llama(), None, EngineConfig(block_size=4, num_blocks=12, max_batch_tokens=16, max_num_seqs=4))
    engine.add_request(SHARED[:19], SamplingParams(max_tokens=8, ignore_eos=True))
    [tokens] = [d.output.outputs[0].token_ids for d in engine if d.output is not None]
    assert run.requests[0].tokens == SHARED[:19] + tokens


def test_the_engine_has_its_own_objects_back() -> None:
    engine = Engine(tiny_llama(), None, EngineConfig(block_size=4, num_blocks=8))
    scheduler, kernels = engine.scheduler, engine.runner.kernels
    with contextlib.suppress(KeyboardInterrupt), Recorder(engine):
        assert engine.scheduler is not scheduler
        raise KeyboardInterrupt
    assert engine.scheduler is scheduler
    assert engine.runner.kernels is kernels


def test_an_aborted_request_is_noted() -> None:
    engine = Engine(tiny_llama(), None, EngineConfig(block_size=4, num_blocks=8))
    with Recorder(engine) as recorder:
        name = engine.add_request(SHARED[:5], SamplingParams(max_tokens=9, ignore_eos=True))
        engine.step(), engine.step()
        engine.abort(name)
    assert [r.finish_reason for r in recorder.run.requests] == ["abort"]
    assert recorder.run.steps[-1].events == [("finish", 0, "abort")]


def test_saved_and_loaded(recorded: tuple[Engine, Run], tmp_path: Path) -> None:
    _, run = recorded
    for name in ("run.json", "run.json.gz"):
        run.save(tmp_path / name)
        again = Run.load(tmp_path / name)
        assert json.dumps(again.to_dict()) == json.dumps(run.to_dict())
        assert all_figures(again) == all_figures(run)


@pytest.mark.parametrize("content", ["", "[]", '{"pagetile_run": 0}', '{"other": 1}'])
def test_something_else_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ArgumentError):
        Run.load(tmp_path / "x.json")
    with pytest.raises(ArgumentError, match="not a file"):
        Run.load(tmp_path / "nothing.json")


def test_figures_by_hand() -> None:
    """One request of 6 tokens in blocks of 4, two layers, 2 KV heads of 8, float32."""
    _, run = record(tiny_llama(), [SHARED[:6]], 3, block_size=4, num_blocks=4)
    token = 2 * 2 * (8 + 8) * 4
    found = [(f.written, f.looked_up, f.read, f.live, f.free) for f in all_figures(run)]
    assert found == [(6, 2, 6, 2, 2), (1, 2, 7, 2, 2), (1, 2, 8, 2, 2)]
    assert [f.written_bytes for f in all_figures(run)] == [6 * token, token, token]
    assert [f.read_bytes for f in all_figures(run)] == [6 * token, 7 * token, 8 * token]
    assert any("request-0" in line for line in summary_lines(run))


def test_the_windowed_group_reads_less_and_gives_back(windowed: tuple[Engine, Run]) -> None:
    _, run = windowed
    last = {f.group: f for f in all_figures(run)[-len(run.groups) :]}
    assert last["window_8"].read == 2 * 8
    assert last["window_8"].live < last["full"].live


def test_a_fork_copies_the_block_it_writes(forked: tuple[Engine, Run]) -> None:
    _, run = forked
    assert [(s.copies, [e[0] for e in s.events]) for s in run.steps[:2]] == [
        ([], ["admit"]),
        ([("full", 1, 2)], ["fork"]),
    ]
    assert [r.label for r in run.requests] == ["request-0", "request-0.1"]


def test_the_map_counts_what_the_pool_has(recorded: tuple[Engine, Run]) -> None:
    _, run = recorded
    for state in run.states():
        for g in run.groups:
            drawn = map_of_run(run, state, g.name)
            live = len(state.owners(g.name))
            assert len(drawn.cells) == g.num_blocks
            assert sum(o is not None for o in drawn.owner) == live
            assert drawn.cells.count("o") == len(state.cached[g.name])
            assert drawn.lines(10)[1].startswith(" 0  " if g.num_blocks > 10 else "0  ")


# Chrome trace


def test_chrome_trace_has_what_perfetto_reads(recorded: tuple[Engine, Run]) -> None:
    _, run = recorded
    document = json.loads(json.dumps(chrome.chrome_trace(run)))
    events = document["traceEvents"]
    assert {e["ph"] for e in events} <= {"M", "X", "i", "C"}
    for event in events:
        assert event["pid"] > 0
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == chrome.ENGINE]
    assert len(steps) == len(run.steps)
    kernels = [e for e in events if e["ph"] == "X" and e["pid"] == chrome.KERNELS]
    layers = sum(len(g.layers) for g in run.groups)
    assert len(kernels) == 2 * layers * len(run.steps)
    for event in kernels:  # both clocks are one: every op lies inside the step it belongs to
        assert any(s["ts"] - 1 <= event["ts"] and event["ts"] + event["dur"] <= s["ts"] + s["dur"] + 1 for s in steps)


def test_chrome_ownership_never_overlaps_and_covers_every_step(recorded: tuple[Engine, Run]) -> None:
    _, run = recorded
    events = chrome.chrome_trace(run)["traceEvents"]
    for at, g in enumerate(run.groups):
        spans: dict[int, list] = {}
        for e in events:
            if e["ph"] == "X" and e["pid"] == chrome.FIRST_POOL + at:
                spans.setdefault(e["args"]["block"], []).append((e["ts"], e["ts"] + e["dur"], e["name"]))
        for block, own in spans.items():
            own.sort()
            assert all(a[1] <= b[0] + 0.2 for a, b in pairwise(own)), f"block {block}"
        for state in run.states():
            now = round(state.step.began * 1e6, 1)
            held = {b for b, own in spans.items() if any(lo <= now + 0.05 and now < hi - 0.05 for lo, hi, _ in own)}
            assert held == set(state.owners(g.name))
