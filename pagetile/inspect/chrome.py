"""A recorded run as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open.

Tracks: the engine's steps; each request's turns; each block's owners; the write and attend of each layer; and counters
of live and cached blocks. Times are microseconds since the run began.

Source: the Trace Event Format, as Perfetto's documentation of its legacy JSON importer describes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagetile.inspect import saved
from pagetile.inspect.run import Run, State
from pagetile.inspect.saved import RELEASED

ENGINE, REQUESTS, KERNELS, FIRST_POOL = 1, 2, 3, 4
"""Process ids of the tracks; each group of layers has a pool of its own, from the last on."""

Event = dict[str, Any]


def chrome_trace(run: Run) -> dict[str, Any]:
    """The whole document."""
    events = list(_names(run))
    for state in run.states():
        events += _step(run, state)
    events += _ownership(run)
    events += _kernels(run)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": run.title, "model": run.model, "block_size": run.block_size, "dtype": run.dtype},
    }


def save(run: Run, path: Path) -> None:
    """Write :func:`chrome_trace` to a file."""
    saved.write(path, json.dumps(chrome_trace(run), separators=(",", ":"), ensure_ascii=False))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _name(kind: str, pid: int, name: str, tid: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, began: float, ended: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": _us(began),
        "dur": max(0.0, round(_us(ended) - _us(began), 1)),
        "args": args,
    }


def _names(run: Run) -> Iterator[Event]:
    yield _name("process_name", ENGINE, "engine")
    yield _name("thread_name", ENGINE, "steps")
    yield _name("process_name", REQUESTS, "requests")
    for number in range(len(run.requests)):
        yield _name("thread_name", REQUESTS, run.requests[number].label, number)
    if run.trace is not None:
        yield _name("process_name", KERNELS, "ops")
        for number, store in enumerate(run.trace.stores):
            yield _name("thread_name", KERNELS, f"layer {number if store.layer is None else store.layer}", number)
    for at, g in enumerate(run.groups):
        yield _name("process_name", FIRST_POOL + at, f"pool {g.name}")


def _step(run: Run, state: State) -> Iterator[Event]:
    step = state.step
    decode = sum(row.count == 1 for row in step.rows)
    yield _slice(
        ENGINE,
        0,
        f"step {state.index}",
        step.began,
        step.ended,
        tokens=step.num_tokens,
        sequences=len(step.rows),
        one_token_rows=decode,
        write_ms=step.write_ms,
        attend_ms=step.attend_ms,
        copies=len(step.copies),
    )
    for row in step.rows:
        request = run.requests[row.request]
        what = "prefill" if row.first < request.prompt_tokens else "decode"
        yield _slice(
            REQUESTS,
            row.request,
            f"{what} {row.count}" if row.count > 1 else what,
            step.began,
            step.ended,
            first_position=row.first,
            new_tokens=row.count,
            not_stored=row.skip,
            step=state.index,
            blocks={g: blocks.get(row.request, []) for g, blocks in state.owned.items()},
        )
    for kind, request, value in step.events:
        yield {
            "ph": "i",
            "s": "t",
            "pid": REQUESTS,
            "tid": request,
            "name": _event_name(kind, value),
            "ts": _us(step.began),
            "args": {"value": value},
        }
    for at, g in enumerate(run.groups):
        live = len(state.owners(g.name))
        cached = len(state.cached[g.name])
        counts = {"live": live, "cached": cached, "free": g.num_blocks - live - cached}
        yield {"ph": "C", "pid": FIRST_POOL + at, "tid": 0, "name": "blocks", "ts": _us(step.began), "args": counts}


def _event_name(kind: str, value: Any) -> str:
    if kind == "admit":
        return f"prefix hit of {value} tokens" if value else "admitted"
    return {"preempt": "preempted", "finish": f"finished: {value}", "fork": "forked"}[kind]


def _ownership(run: Run) -> Iterator[Event]:
    """A slice for each time that a set of requests held a block."""
    since: dict[tuple[int, int], tuple[tuple[int, ...], float]] = {}
    end = run.steps[-1].ended if run.steps else 0.0

    def close(at: int, block: int, until: float) -> Event:
        owners, began = since.pop((at, block))
        name = " + ".join(run.requests[o].label for o in owners)
        return _slice(FIRST_POOL + at, block + 1, name, began, until, block=block)

    named: set[tuple[int, int]] = set()
    for state in run.states():
        for at, g in enumerate(run.groups):
            owners = {b: tuple(o) for b, o in state.owners(g.name).items() if b != RELEASED}
            for key in [k for k in since if k[0] == at and owners.get(k[1]) != since[k][0]]:
                yield close(at, key[1], state.step.began)
            for block, own in owners.items():
                if (at, block) not in named:
                    named.add((at, block))
                    yield _name("thread_name", FIRST_POOL + at, f"block {block}", block + 1)
                since.setdefault((at, block), (own, state.step.began))
    for at, block in list(since):
        yield close(at, block, end)


def _kernels(run: Run) -> Iterator[Event]:
    """Each layer's write and attend; only of a run that was just recorded, since a saved one has their sums."""
    if run.trace is None:
        return
    for step in run.trace.steps:
        for timing in step.timings:
            call = step.calls[timing.call]
            yield _slice(
                KERNELS, max(0, timing.store), call.op, timing.began / 1e9 - run.zero, timing.ended / 1e9 - run.zero
            )
