"""Which copies of blocks may run at once, and which runs of elements a block consists of. Plain integers.

A list of copies means what it would mean one after the other. So what a block holds at the end is what some block held
at the beginning; those moves are then ordered so that nothing is overwritten before it has been read.

>>> plan_moves([(0, 1), (1, 2)], num_blocks=4)          # one after the other: 2 becomes what 0 was
Moves(levels=(((0, 1), (0, 2)),), spares=0)
>>> plan_moves([(1, 2), (0, 1)], num_blocks=4)          # 1 is read, then overwritten
Moves(levels=(((1, 2),), ((0, 1),)), spares=0)
>>> plan_moves([(0, 3), (1, 0), (3, 1)], num_blocks=4)  # 0 and 1 change places by way of 3; block 4 is a spare
Moves(levels=(((0, 3),), ((0, 4),), ((1, 0),), ((4, 1),)), spares=1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
"""(source, destination)."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies by dependency level.

    Attributes:
        levels: within one, no destination is a source and none comes twice. Ids from the number of blocks on are
            spares.
        spares: how many of those there are: one for each cycle.
    """

    levels: tuple[tuple[Pair, ...], ...]
    spares: int


def plan_moves(pairs: Iterable[Pair], num_blocks: int) -> Moves:
    """Order copies ``(source, destination)`` inside one cache that are meant one after the other."""
    came_from: dict[int, int] = {}
    for source, destination in pairs:
        came_from[destination] = came_from.get(source, source)
    came_from = {block: source for block, source in came_from.items() if block != source}

    readers = dict.fromkeys(came_from, 0)  # moves that still have to read what a block holds now
    for source in came_from.values():
        if source in readers:
            readers[source] += 1
    level_of = dict.fromkeys(came_from, 0)
    _release([block for block, count in readers.items() if not count], came_from, readers, level_of)

    moves = [(level_of[block], source, block) for block, source in came_from.items() if not readers[block]]
    spares = 0
    for block in came_from:
        if readers[block]:
            moves += _break_cycle(block, num_blocks + spares, came_from, readers, level_of)
            spares += 1
    levels: list[list[Pair]] = [[] for _ in range(1 + max((level for level, _, _ in moves), default=-1))]
    for level, source, block in moves:
        levels[level].append((source, block))
    return Moves(tuple(tuple(level) for level in levels), spares)


def _release(free: list[int], came_from: dict[int, int], readers: dict[int, int], level_of: dict[int, int]) -> None:
    """Give levels to all moves that wait for no cycle, beginning with blocks that nobody reads."""
    while free:
        block = free.pop()
        source = came_from[block]
        if source not in readers:
            continue
        level_of[source] = max(level_of[source], level_of[block] + 1)
        readers[source] -= 1
        if not readers[source]:
            free.append(source)


def _break_cycle(
    first: int, spare: int, came_from: dict[int, int], readers: dict[int, int], level_of: dict[int, int]
) -> list[tuple[int, int, int]]:
    """The moves of a cycle, each one level after the one that reads what it overwrites; ``first`` is saved before."""
    level = level_of[first]
    moves = [(level, first, spare)]
    block = first
    while True:
        source = came_from[block]
        level = max(level_of[block], level + 1)
        readers[block] = 0
        if source == first:
            return [*moves, (level, spare, block)]
        moves.append((level, source, block))
        block = source


def last_of_each(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Copies from one cache to another that are meant one after the other: the last into each destination."""
    return tuple((source, destination) for destination, source in {d: s for s, d in pairs}.items())


def runs_of(sizes: Sequence[int], source: Sequence[int], target: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """A block of these sizes as runs that are contiguous on both sides.

    Args:
        sizes, source, target: of each axis its size, and its stride on either side, in elements.

    Returns:
        ``(length of a run, where each begins in the source, where in the target)``, in elements.

    >>> runs_of((16, 8, 128), (1024, 128, 1), (1024, 128, 1))     # dense on both sides
    (16384, [0], [0])
    >>> runs_of((2, 3), (3, 1), (8, 1))                           # the target has gaps
    (3, [0, 3], [0, 8])
    """
    axes = sorted((a, b, n) for n, a, b in zip(sizes, source, target, strict=True) if n != 1)
    run = 1
    while axes and axes[0][0] == axes[0][1] == run:
        run *= axes.pop(0)[2]
    from_, to = [0], [0]
    for a, b, n in reversed(axes):
        from_ = [base + i * a for base in from_ for i in range(n)]
        to = [base + i * b for base in to for i in range(n)]
    return run, from_, to
