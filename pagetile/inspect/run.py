"""A recorded run of the engine, as plain values: who owned which block when, and what each step wrote and read.

A :class:`Run` is what ``pagetile trace`` saves and what the audit, the map, the Chrome trace and the page are made
from. Steps hold changes only; :meth:`Run.states` plays them back.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from pagetile.contracts.errors import ArgumentError
from pagetile.contracts.geometry import PAD_SLOT
from pagetile.inspect import saved
from pagetile.inspect.saved import RELEASED

VERSION = 1
_APART = ("groups", "requests", "steps", "trace", "zero")


@dataclass(slots=True)
class RunGroup:
    """Layers that share block ids. Strides ``(block, token, head)`` in elements."""

    name: str
    layers: list[int]
    window: int | None
    num_blocks: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    k_strides: list[int]
    v_strides: list[int]


@dataclass(slots=True)
class RunRequest:
    """One answer: its tokens (ids and texts, prompt first) and its times in seconds since the run began."""

    id: str
    sample: int
    prompt_tokens: int
    tokens: list[int]
    texts: list[str] = field(default_factory=list)
    arrived: float = 0.0
    finished: float | None = None
    finish_reason: str | None = None

    @property
    def label(self) -> str:
        """Its id, with its number among several answers to one prompt from the second on."""
        return f"{self.id}.{self.sample}" if self.sample else self.id


@dataclass(slots=True)
class RunRow:
    """A request's part of a step: ``count`` new tokens from position ``first``; the first ``skip`` are not stored."""

    request: int
    first: int
    count: int
    skip: int = 0


@dataclass(slots=True)
class BlockChange:
    """A request's row of blocks becomes ``old[:first] + blocks + old[first + len(blocks):length]``, cut to length."""

    request: int
    first: int
    blocks: list[int]
    length: int


@dataclass(slots=True)
class RunStep:
    """One step. Times in seconds since the run began.

    Attributes:
        rows: in the order of the packed batch.
        blocks: for each group the rows that changed before the forward.
        cached: for each group the blocks that became cached, and those that no longer are.
        copies: ``[group, source, destination]``, before the forward.
        events: ``[kind, request, value]``: ``admit`` (tokens found in the prefix cache), ``preempt``, ``finish``
            (reason), ``fork`` (the request forked from).
        slots: for each group the slot mapping that the ops got; None where it is what rows and blocks say.
        write_ms, attend_ms: time in the ops, all layers.
    """

    began: float
    ended: float = 0.0
    rows: list[RunRow] = field(default_factory=list)
    blocks: dict[str, list[BlockChange]] = field(default_factory=dict)
    cached: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    copies: list[tuple[str, int, int]] = field(default_factory=list)
    events: list[tuple[str, int, Any]] = field(default_factory=list)
    slots: dict[str, list[int]] = field(default_factory=dict)
    write_ms: float = 0.0
    attend_ms: float = 0.0

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return sum(row.count for row in self.rows)


@dataclass(slots=True)
class State:
    """What held during a step's forward.

    Attributes:
        owned: for each group, request -> its blocks (:data:`RELEASED` where one was given back).
        cached: for each group the blocks nobody holds that still serve prefix hits.
    """

    index: int
    step: RunStep
    owned: dict[str, dict[int, list[int]]]
    cached: dict[str, set[int]]

    def owners(self, group: str) -> dict[int, list[int]]:
        """Block -> the requests that hold it, in order."""
        found: dict[int, list[int]] = {}
        for request, blocks in self.owned[group].items():
            for block in blocks:
                if block != RELEASED:
                    found.setdefault(block, []).append(request)
        return found


@dataclass(slots=True)
class Run:
    """A recorded run.

    Attributes:
        title: of the page.
        model, backend, dtype, layout: names.
        itemsize: bytes of a stored element.
        tile: keys of a tile, as the CPU backend's plan has them.
        warm: for each group the blocks that held prefixes when the recording began.
        trace: what the tracer wrote down; not part of a saved run.
        zero: ``perf_counter`` when the run began; the trace's clock is that one too. Not part of a saved run.
    """

    title: str
    model: str
    backend: str
    block_size: int
    dtype: str
    itemsize: int
    layout: str
    num_q_heads: int
    tile: int
    groups: list[RunGroup] = field(default_factory=list)
    requests: list[RunRequest] = field(default_factory=list)
    steps: list[RunStep] = field(default_factory=list)
    warm: dict[str, list[int]] = field(default_factory=dict)
    trace: Any = None
    zero: float = 0.0

    def group(self, name: str | None = None) -> RunGroup:
        """A group by name; the first by default."""
        for g in self.groups:
            if name in (None, g.name):
                return g
        raise ArgumentError(f"no group {name!r}; the run has {[g.name for g in self.groups]}")

    def states(self) -> Iterator[State]:
        """The run again, step by step. Each state is valid until the next one is asked for."""
        owned: dict[str, dict[int, list[int]]] = {g.name: {} for g in self.groups}
        cached: dict[str, set[int]] = {g.name: set() for g in self.groups}
        for index, step in enumerate(self.steps):
            for group, changes in step.blocks.items():
                for c in changes:
                    old = owned[group].get(c.request, [])
                    row = (old[: c.first] + c.blocks + old[c.first + len(c.blocks) :])[: c.length]
                    if row:
                        owned[group][c.request] = row
                    else:
                        owned[group].pop(c.request, None)
            for group, (came, went) in step.cached.items():
                cached[group] |= set(came)
                cached[group] -= set(went)
            yield State(index, step, owned, cached)

    def slots(self, state: State, group: str) -> np.ndarray:
        """The slot mapping of a step, int64 ``[T]``: what the ops got, or what rows and blocks say."""
        given = state.step.slots.get(group)
        if given is not None:
            return np.asarray(given, dtype=np.int64)
        return derived_slots(state, group, self.block_size)

    # JSON -----------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values: rows and changes as short lists, in the order of their fields."""
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _APART}
        return {
            "pagetile_run": VERSION,
            **head,
            "groups": [asdict(g) for g in self.groups],
            "requests": [asdict(r) for r in self.requests],
            "steps": [_step_out(s) for s in self.steps],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Run:
        """The inverse of :meth:`to_dict`.

        Raises:
            ArgumentError: something else, a run of another version, or an entry that cannot be.
        """
        saved.require_version(data, "pagetile_run", VERSION, "recorded run")
        saved.check_run(data)
        data = {k: v for k, v in data.items() if k != "pagetile_run"}
        return cls(
            **{
                **data,
                "groups": [RunGroup(**g) for g in data["groups"]],
                "requests": [RunRequest(**r) for r in data["requests"]],
                "steps": [_step_in(s) for s in data["steps"]],
            }
        )

    def save(self, path: Path) -> None:
        """Write it as JSON; compressed when the name ends in ``.gz``. Whole, or not at all."""
        text = json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
        saved.write(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read what :meth:`save` wrote.

        Raises:
            ArgumentError: no such file, a damaged one, or not a recorded run.
        """
        return cls.read(path, saved.read(path))

    @classmethod
    def read(cls, path: Path, data: dict[str, Any]) -> Run:
        """:meth:`from_dict` of a file's document, whose errors name the file.

        Raises:
            ArgumentError: not a recorded run.
        """
        try:
            return cls.from_dict(data)
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from None


def derived_slots(state: State, group: str, block_size: int) -> np.ndarray:
    """Slots of a step's packed rows from its block rows, int64 ``[T]``."""
    parts = []
    for row in state.step.rows:
        blocks = np.asarray(state.owned[group].get(row.request, ()), dtype=np.int64)
        positions = np.arange(row.first, row.first + row.count, dtype=np.int64)
        logical = positions // block_size
        slots = np.full(row.count, PAD_SLOT, dtype=np.int64)
        there = logical < len(blocks)  # a damaged run may have rows without blocks; the audit says so
        slots[there] = blocks[logical[there]] * block_size + positions[there] % block_size
        slots[: row.skip] = PAD_SLOT
        parts.append(slots)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def change(request: int, old: list[int], new: list[int]) -> BlockChange | None:
    """What turns a row of blocks into another; None when nothing does.

    >>> change(3, [7, 2], [7, 2, 9])
    BlockChange(request=3, first=2, blocks=[9], length=3)
    """
    if old == new:
        return None
    n = min(len(old), len(new))
    first = next((i for i in range(n) if old[i] != new[i]), n)
    last = len(new)
    if len(new) == len(old):
        while last > first and old[last - 1] == new[last - 1]:
            last -= 1
    return BlockChange(request, first, new[first:last], len(new))


def _step_out(s: RunStep) -> dict[str, Any]:
    out: dict[str, Any] = {
        "t": [round(s.began, 6), round(s.ended, 6), round(s.write_ms, 4), round(s.attend_ms, 4)],
        "rows": [[r.request, r.first, r.count, r.skip] for r in s.rows],
    }
    if s.blocks:
        out["blocks"] = {g: [[c.request, c.first, c.blocks, c.length] for c in cs] for g, cs in s.blocks.items()}
    for name in ("cached", "copies", "events", "slots"):
        if value := getattr(s, name):
            out[name] = value
    return out


def _step_in(s: dict[str, Any]) -> RunStep:
    began, ended, write_ms, attend_ms = s["t"]
    return RunStep(
        began,
        ended,
        rows=[RunRow(*r) for r in s["rows"]],
        blocks={g: [BlockChange(*c) for c in cs] for g, cs in s.get("blocks", {}).items()},
        cached={g: (list(a), list(b)) for g, (a, b) in s.get("cached", {}).items()},
        copies=[(g, a, b) for g, a, b in s.get("copies", [])],
        events=[(kind, request, value) for kind, request, value in s.get("events", [])],
        slots=s.get("slots", {}),
        write_ms=write_ms,
        attend_ms=attend_ms,
    )
