"""The pool as a picture of characters: one block a character, a letter for who holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagetile.inspect.poolstate import GroupState
from pagetile.inspect.run import RELEASED, Run, State

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
SHARED, CACHED, FREE = "+", "o", "."


@dataclass(frozen=True, slots=True)
class PoolMap:
    """What is drawn.

    Attributes:
        title: one line.
        cells: one character a block, in order of ids.
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
            if block != RELEASED:
                holders.setdefault(block, []).append(number)
    cells, owner = [], []
    for block in range(num_blocks):
        own = holders.get(block, [])
        if len(own) > 1:
            cells.append(SHARED)
            owner.append(-1)
        elif own:
            cells.append(LETTERS[own[0] % len(LETTERS)])
            owner.append(own[0])
        else:
            cells.append(CACHED if block in cached else FREE)
            owner.append(None)
    legend = [
        (LETTERS[number % len(LETTERS)], f"{name}: {sum(b != RELEASED for b in rows[name])} blocks")
        for number, name in enumerate(names)
        if len(rows[name])
    ]
    text = "".join(cells)
    for sign, what in ((SHARED, "held by several"), (CACHED, "cached"), (FREE, "free")):
        if count := text.count(sign):
            legend.append((sign, f"{what}: {count}"))
    return PoolMap(title, text, tuple(legend), tuple(owner))


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
        f"group {group}: {g.num_blocks} blocks of {run.block_size}, step {state.index} of {len(run.steps)}, "
        f"{state.step.num_tokens} new tokens in {len(state.step.rows)} sequences"
    )
    return draw(title, g.num_blocks, rows, state.cached[group])
