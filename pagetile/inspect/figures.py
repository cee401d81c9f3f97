"""What each step of a recorded run wrote, looked up and read, counted; and the whole run in a few lines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pagetile.contracts.geometry import blocks_for
from pagetile.contracts.visibility import normalize_window, visible_range, window_from_sliding
from pagetile.inspect.run import Run, RunGroup, State


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step of one group of layers; bytes over all its layers, K and V.

    Attributes:
        written: tokens stored. looked_up: block table entries followed. read: tokens attended to, each sequence's
            own, once.
        written_bytes, read_bytes: what that is in the caches.
        live, cached, free: blocks during the forward.
    """

    step: int
    group: str
    written: int
    looked_up: int
    read: int
    written_bytes: int
    read_bytes: int
    live: int
    cached: int
    free: int


def token_bytes(run: Run, g: RunGroup) -> int:
    """Bytes of one token's K and V in all layers of a group."""
    return len(g.layers) * g.num_kv_heads * (g.head_size + g.head_size_v) * run.itemsize


def step_figures(run: Run, state: State, g: RunGroup) -> StepFigures:
    """Count one step."""
    limits = normalize_window(window_from_sliding(g.window), causal=True)
    read = looked_up = 0
    for row in state.step.rows:
        length = row.first + row.count
        first, _ = visible_range(0, row.count, length, limits)
        read += length - first
        looked_up += blocks_for(length, run.block_size) - first // run.block_size
    written = int((run.slots(state, g.name) >= 0).sum())
    live, cached = len(state.owners(g.name)), len(state.cached[g.name])
    size = token_bytes(run, g)
    return StepFigures(
        state.index,
        g.name,
        written,
        looked_up,
        read,
        written * size,
        read * size,
        live,
        cached,
        g.num_blocks - live - cached,
    )


def all_figures(run: Run) -> list[StepFigures]:
    """Every step of every group, in order."""
    return [step_figures(run, state, g) for state in run.states() for g in run.groups]


def summary(run: Run) -> dict[str, Any]:
    """The run in numbers: totals, and a line for each request."""
    found = all_figures(run)
    events = [(kind, request, value) for step in run.steps for kind, request, value in step.events]
    hits: dict[int, int] = {}
    for kind, request, value in events:
        if kind == "admit":
            hits.setdefault(request, value)  # of the first admission
    requests = []
    for number, r in enumerate(run.requests):
        requests.append(
            {
                "label": r.label,
                "prompt_tokens": r.prompt_tokens,
                "new_tokens": len(r.tokens) - r.prompt_tokens,
                "prefix_hit_tokens": hits.get(number, 0),
                "preemptions": sum(k == "preempt" and q == number for k, q, _ in events),
                "steps": sum(any(row.request == number for row in s.rows) for s in run.steps),
                "finish": r.finish_reason,
            }
        )
    return {
        "model": run.model,
        "backend": run.backend,
        "steps": len(run.steps),
        "seconds": run.steps[-1].ended if run.steps else 0.0,
        "new_tokens_computed": sum(s.num_tokens for s in run.steps),
        "written_bytes": sum(f.written_bytes for f in found),
        "read_bytes": sum(f.read_bytes for f in found),
        "peak_live_blocks": {g.name: max((f.live for f in found if f.group == g.name), default=0) for g in run.groups},
        "total_blocks": {g.name: g.num_blocks for g in run.groups},
        "preemptions": sum(kind == "preempt" for kind, *_ in events),
        "prefix_hit_tokens": sum(hits.values()),
        "copies": sum(len(s.copies) for s in run.steps),
        "requests": requests,
        "figures": [asdict(f) for f in found],
    }


def summary_lines(run: Run) -> list[str]:
    """:func:`summary` as text."""
    s = summary(run)
    blocks = ", ".join(f"{name} {s['peak_live_blocks'][name]} of {total}" for name, total in s["total_blocks"].items())
    lines = [
        f"{s['model']}, {s['steps']} steps in {s['seconds']:.2f} s, {s['new_tokens_computed']} tokens computed",
        f"blocks at the fullest step: {blocks}; written {size(s['written_bytes'])}, read {size(s['read_bytes'])}",
        f"prefix hits {s['prefix_hit_tokens']} tokens, preemptions {s['preemptions']}, block copies {s['copies']}",
        "",
        f"{'request':<14} {'prompt':>6} {'hit':>5} {'new':>5} {'steps':>6} {'preempted':>9}  finish",
    ]
    for r in s["requests"]:
        lines.append(
            f"{r['label']:<14} {r['prompt_tokens']:>6} {r['prefix_hit_tokens']:>5} {r['new_tokens']:>5} "
            f"{r['steps']:>6} {r['preemptions']:>9}  {r['finish'] or '-'}"
        )
    return lines


def size(count: float) -> str:
    """Bytes for people.

    >>> size(900), size(3_400_000)
    ('900 B', '3.4 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
