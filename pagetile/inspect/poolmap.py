"""The pool as a picture of characters: one block a character, a letter for who holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagetile.inspect.poolstate import GroupState
from pagetile.inspect.run import Run, State
from pagetile.inspect.saved import RELEASED

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
SHARED, CACHED, FREE = "+", "o", "."
MOST_CELLS = 16384
"""Blocks that are drawn; the rest is counted."""


@dataclass(frozen=True, slots=True)
class PoolMap:
    """What is drawn.

    Attributes:
        title: one line.
        cells: one character a block, in order of ids, of the first :data:`MOST_CELLS`.
        legend: letter -> what it stands for, with the number of blocks.
        owner: for each cell the number of its owner, -1 for several, None for nobody; for colours.
    """

    title: str
    cells: str
    legend: tuple[tuple[str, str], ...]
    owner: tuple[int | None, ...]

    def lines(self, width: int = 64) -> list[str]:
        """The picture: the first block of each line on its left."""
        digits = len(str(max(0, len(self.cells) - 1)))
        rows = [f"{at:>{digits}}  {self.cells[at : at + width]}" for at in range(0, len(self.cells), width)]
        return [self.title, *rows, *(f"{letter}  {what}" for letter, what in self.legend)]


def draw(title: str, num_blocks: int, rows: Mapping[str, Sequence[int]], cached: set[int]) -> PoolMap:
    """A pool of ``num_blocks`` in which ``rows`` (name -> blocks) are held and ``cached`` serve prefix hits.

    >>> print(*draw("pool", 10, {"a": [7, 2, 9], "b": [7, 4]}, {0, 1}).lines(), sep="\\n")
    pool
    0  ooA.B..+.A
    A  a: 3 blocks
    B  b: 2 blocks
    +  held by several: 1
    o  cached: 2
    .  free: 4
    """
    holders: dict[int, list[int]] = {}
    names = list(rows)
    for number, name in enumerate(names):
        for block in rows[name]:
            if 0 <= block < num_blocks:
                holders.setdefault(block, []).append(number)
    idle = {b for b in cached if 0 <= b < num_blocks and b not in holders}
    cells, owner = [], []
    for block in range(min(num_blocks, MOST_CELLS)):
        own = holders.get(block, [])
        cells.append(SHARED if len(own) > 1 else LETTERS[own[0] % len(LETTERS)] if own else FREE)
        owner.append(-1 if len(own) > 1 else own[0] if own else None)
        if block in idle:
            cells[-1] = CACHED
    legend = [
        (LETTERS[number % len(LETTERS)], f"{name}: {_some(sum(b != RELEASED for b in rows[name]), 'block')}")
        for number, name in enumerate(names)
        if len(rows[name])
    ]
    shared = sum(len(own) > 1 for own in holders.values())
    free = num_blocks - len(holders) - len(idle)
    for sign, what, count in ((SHARED, "held by several", shared), (CACHED, "cached", len(idle)), (FREE, "free", free)):
        if count:
            legend.append((sign, f"{what}: {count}"))
    if num_blocks > len(cells):
        legend.append((" ", f"blocks {len(cells)} to {num_blocks - 1} are counted and not drawn"))
    strangers = sorted({b for row in rows.values() for b in row if b >= num_blocks})
    if strangers:
        legend.append(("!", f"outside the pool: {_some(len(strangers), 'block')}; pagetile audit says whose"))
    return PoolMap(title, "".join(cells), tuple(legend), tuple(owner))


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def map_of_pool(state: GroupState, block_size: int) -> PoolMap:
    """A pool that was taken down."""
    cached = {b for b in state.prefixes if not state.refs[b]}
    rows = {f"sequence {number}": row for number, row in state.rows.items()}
    return draw(f"group {state.name}: {len(state.refs)} blocks of {block_size}", len(state.refs), rows, cached)


def map_of_run(run: Run, state: State, group: str) -> PoolMap:
    """A recorded run at one step."""
    g = run.group(group)
    # Every request keeps its letter through the run, so the ones that hold nothing are in the list too.
    rows = {
        f"{number} {request.label}": state.owned[group].get(number, []) for number, request in enumerate(run.requests)
    }
    title = (
        f"group {group}: {g.num_blocks} blocks of {run.block_size}, step {state.index} of {len(run.steps) - 1}, "
        f"{_some(state.step.num_tokens, 'new token')} in {_some(len(state.step.rows), 'sequence')}"
    )
    return draw(title, g.num_blocks, rows, state.cached[group])
