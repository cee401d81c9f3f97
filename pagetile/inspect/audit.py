"""What is wrong with a pool, or with a recorded run: a list of findings, empty when nothing is.

Kinds of findings:

=================  ====================================================================================================
``double_owner``   a block is in more rows than it has references: somebody holds it who should not
``leak``           a block has more references than holders: nobody will give it back
``freed``          a row names a block that nobody keeps: it may be handed out while it is still read
``outside``        a row or a copy names a block that the pool does not have
``nan``            a slot that is stored and live holds a value that is not finite
``duplicate_slot`` two rows of one write go to the same slot
``shared_write``   a step writes a block that several requests hold
``stray_write``    a step writes a block that no request of its holds
``dead_read``      an attention reads a slot that nothing wrote since its block was handed out
``invariant``      the table's own ``check()`` fails
=================  ====================================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagetile.contracts.geometry import blocks_held
from pagetile.contracts.visibility import normalize_window, visible_range, window_from_sliding
from pagetile.inspect.poolstate import PoolState
from pagetile.inspect.run import Run, RunGroup, State
from pagetile.inspect.saved import RELEASED

if TYPE_CHECKING:
    from pagetile.cache.kv import PagedKVCache
    from pagetile.cache.sequences import SequenceTable

MAX_NAMED = 8
"""Slots or blocks that one finding names; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. ``step`` is None for the state of a pool; ``blocks`` are those concerned."""

    kind: str
    group: str
    message: str
    step: int | None = None
    blocks: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f"group {self.group!r}" + ("" if self.step is None else f", step {self.step}")
        return f"{self.kind}: {where}: {self.message}"


def audit(table: SequenceTable, cache: PagedKVCache | None = None) -> list[Finding]:
    """Look through a live pool: who holds what, and with a cache whether what is stored is finite."""
    found = audit_pool(PoolState.of(table, cache))
    if found:
        return found  # they say more than the first broken invariant would
    try:
        table.check()
    except AssertionError as error:
        return [Finding("invariant", "*", str(error))]
    return []


def audit_pool(state: PoolState) -> list[Finding]:
    """Look through a pool that was taken down, perhaps in another process."""
    found = []
    for g in state.groups:
        rows = Counter(block for blocks in g.rows.values() for block in blocks if block != RELEASED)
        for block in sorted(set(rows) | {b for b, refs in enumerate(g.refs) if refs}):
            owners = [name for name, blocks in g.rows.items() if block in blocks]
            names = ", ".join(map(str, owners)) or "none"
            if block >= len(g.refs):
                message = f"block {block} is in the rows of sequences {names}; {blocks_held(len(g.refs))}"
                found.append(Finding("outside", g.name, message, None, (block,)))
                continue
            refs, held = g.refs[block], rows[block] + g.holds.get(block, 0)
            rows_of = f"block {block} is in {_count(rows[block], 'row')} (sequences: {names})"
            who = f"{rows_of}, has {_count(refs, 'reference')}"
            if refs == 0:
                found.append(Finding("freed", g.name, f"{who}: it is free while it is held", None, (block,)))
            elif held > refs:
                found.append(Finding("double_owner", g.name, f"{who}: {held - refs} too many hold it", None, (block,)))
            elif held < refs:
                found.append(Finding("leak", g.name, f"{who}: {refs - held} will never be given back", None, (block,)))
        for bad in g.not_finite:
            found.append(Finding("nan", g.name, str(bad), None, (bad.block,)))
    return found


def audit_run(run: Run) -> list[Finding]:
    """Play a recorded run back and hold every step's writes and reads to what was owned and written."""
    return list(_audit_run(run))


def _audit_run(run: Run) -> Iterator[Finding]:
    written = {g.name: np.zeros(_reach(run, g) * run.block_size, dtype=bool) for g in run.groups}
    known: dict[str, set[int]] = {g.name: set(run.warm.get(g.name, ())) for g in run.groups}
    for g in run.groups:
        cells = _blocks(written[g.name], run.block_size)
        cells[_inside(known[g.name], cells)] = True
        if outside := sorted(b for b in known[g.name] if b >= g.num_blocks):
            yield _outside(
                g, f"{_named('block', outside)} said to hold prefixes when the recording began", None, outside
            )
    for state in run.states():
        for g in run.groups:
            owners, cells = state.owners(g.name), _blocks(written[g.name], run.block_size)
            yield from _strangers(g, state, owners)
            for group, source, target in state.step.copies:
                if group == g.name and len(_inside((source, target), cells)) == 2:
                    cells[target] = cells[source]
            copied = {target for group, _, target in state.step.copies if group == g.name}
            fresh = [b for b in owners if b not in known[g.name] and b not in copied]
            cells[_inside(fresh, cells)] = False  # whatever they hold is somebody else's past
            known[g.name] = set(owners) | state.cached[g.name]
            yield from _writes(run, state, g.name, owners, written[g.name])
            yield from _reads(run, state, g.name, g.window, written[g.name])


def _reach(run: Run, g: RunGroup) -> int:
    """Blocks from 0 to the last one that the run names, as far as the pool has them."""
    named = [*run.warm.get(g.name, ())]
    for step in run.steps:
        named += [block for c in step.blocks.get(g.name, ()) for block in c.blocks]
        named += [block for blocks in step.cached.get(g.name, ()) for block in blocks]
        named += [block for group, *pair in step.copies if group == g.name for block in pair]
        named += [slot // run.block_size for slot in step.slots.get(g.name, ())]
    return min(g.num_blocks, max(named, default=0) + 1)


def _inside(blocks: Iterable[int], cells: np.ndarray) -> list[int]:
    return [block for block in blocks if 0 <= block < len(cells)]


def _strangers(g: RunGroup, state: State, owners: dict[int, list[int]]) -> Iterator[Finding]:
    """Blocks that the pool does not have."""
    if held := sorted(b for b in owners if b >= g.num_blocks):
        yield _outside(g, f"{_named('block', held)} in the rows of requests", state.index, held)
    copied = {b for group, *pair in state.step.copies if group == g.name for b in pair}
    if pairs := sorted(b for b in copied if not 0 <= b < g.num_blocks):
        yield _outside(g, f"{_named('block', pairs)} copied from or to", state.index, pairs)
    if cached := sorted(b for b in state.step.cached.get(g.name, ((), ()))[0] if b >= g.num_blocks):
        yield _outside(g, f"{_named('block', cached)} said to be cached", state.index, cached)


def _outside(g: RunGroup, what: str, step: int | None, blocks: list[int]) -> Finding:
    return Finding("outside", g.name, f"{what}; {blocks_held(g.num_blocks)}", step, tuple(blocks))


def _blocks(written: np.ndarray, block_size: int) -> np.ndarray:
    return written.reshape(-1, block_size)


def _writes(run: Run, state: State, group: str, owners: dict[int, list[int]], written: np.ndarray) -> Iterator[Finding]:
    slots = run.slots(state, group)
    slots = slots[slots >= 0]
    values, counts = np.unique(slots, return_counts=True)
    if (twice := values[counts > 1]).size:
        message = f"{_count(twice.size, 'slot')} written more than once in one step: {_some(twice)}"
        yield Finding("duplicate_slot", group, message, state.index, _ids(twice // run.block_size))
    touched = np.unique(slots // run.block_size).tolist()
    shared = [b for b in touched if len(owners.get(b, ())) > 1]
    if shared:
        message = (
            f"{_named('block', shared)} written while several requests hold {'it' if len(shared) == 1 else 'them'}"
        )
        yield Finding("shared_write", group, message, state.index, tuple(shared))
    stray = [b for b in touched if b not in owners]
    if stray:
        message = f"{_named('block', stray)} written and held by no request"
        yield Finding("stray_write", group, message, state.index, tuple(stray))
    written[slots[slots < written.size]] = True


def _reads(run: Run, state: State, group: str, window: int | None, written: np.ndarray) -> Iterator[Finding]:
    size = run.block_size
    limits = normalize_window(window_from_sliding(window), causal=True)
    for row in state.step.rows:
        blocks = np.asarray(state.owned[group].get(row.request, ()), dtype=np.int64)
        length = row.first + row.count
        first, _ = visible_range(0, row.count, length, limits)
        positions = np.arange(first, length, dtype=np.int64)
        who = run.requests[row.request].label
        if length > len(blocks) * size:
            message = f"{who} attends to {length} tokens and holds {len(blocks)} blocks of {size}"
            yield Finding("dead_read", group, message, state.index)
            continue
        homes = blocks[positions // size]
        slots = homes * size + positions % size
        inside = (homes >= 0) & (slots < written.size)
        alive = inside & written[np.where(inside, slots, 0)]
        if (dead := positions[~alive]).size:
            message = f"{who} reads {_count(dead.size, 'position')} that nothing wrote: {_some(dead)}"
            yield Finding("dead_read", group, message, state.index, _ids(homes[~alive]))


def _ids(blocks: np.ndarray) -> tuple[int, ...]:
    return tuple(np.unique(blocks).tolist())


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _named(what: str, values: list[int]) -> str:
    """``block 3 is``, ``blocks 3, 4 are``."""
    return f"{what}{'' if len(values) == 1 else 's'} {_some(values)} {'is' if len(values) == 1 else 'are'}"


def _some(values: np.ndarray | list[int]) -> str:
    named = [str(v) for v in list(values)[:MAX_NAMED]]
    return ", ".join(named) + (f" and {len(values) - MAX_NAMED} more" if len(values) > MAX_NAMED else "")
