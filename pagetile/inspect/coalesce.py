"""What a warp's memory instruction costs: lanes, addresses, sectors.

The model: a warp of 32 lanes issues one instruction; the memory system moves whole sectors of 32 bytes, aligned to 32.
The cost of an instruction is the number of different sectors that its active lanes touch, however many lanes touch
them. Loads and stores are counted apart, since a conversion gives them different widths. There are no caches in it.

Source: NVIDIA, CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"; the pack rule is that of vLLM's
``vectorize_with_alignment``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pagetile.contracts.errors import ArgumentError

SECTOR = 32
"""Bytes that memory moves at once."""

WARP = 32
"""Lanes of an instruction."""

FARTHEST = 2**63 - 1
"""An address is 64 bits wide."""

PACK_BYTES = 16
"""Widest access of one lane."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One memory instruction of one warp.

    Attributes:
        side: ``load`` or ``store``.
        part: ``prefix``, ``body`` or ``tail`` of a span, or ``lanes`` when the addresses were given.
        width: bytes that each active lane moves.
        addresses: first byte of each active lane, in bytes from a 32-byte aligned base.
    """

    side: str
    part: str
    width: int
    addresses: tuple[int, ...]

    @property
    def sectors(self) -> tuple[int, ...]:
        """Numbers of the sectors touched, ascending."""
        return tuple(
            sorted({s for a in self.addresses for s in range(a // SECTOR, (a + self.width - 1) // SECTOR + 1)})
        )

    @property
    def useful(self) -> int:
        """Different bytes asked for."""
        if self._disjoint():
            return self.width * len(self.addresses)
        return len({a + i for a in self.addresses for i in range(self.width)})

    @property
    def moved(self) -> int:
        """Bytes that memory moves."""
        return SECTOR * len(self.sectors)

    @property
    def wasted(self) -> int:
        """Bytes moved that nobody asked for."""
        return self.moved - self.useful

    def bytes_in(self, sector: int) -> frozenset[int]:
        """Which of a sector's 32 bytes are asked for."""
        base = sector * SECTOR
        return frozenset(
            a + i - base for a in self.addresses for i in range(self.width) if base <= a + i < base + SECTOR
        )

    def lanes_in(self, sector: int) -> tuple[int, ...]:
        """Lanes that touch a sector."""
        lo, hi = sector * SECTOR, (sector + 1) * SECTOR
        return tuple(lane for lane, a in enumerate(self.addresses) if a < hi and a + self.width > lo)

    def _disjoint(self) -> bool:
        ordered = sorted(self.addresses)
        return all(b - a >= self.width for a, b in pairwise(ordered))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "side": self.side,
            "part": self.part,
            "width": self.width,
            "addresses": list(self.addresses),
            "sectors": list(self.sectors),
            "useful_bytes": self.useful,
            "moved_bytes": self.moved,
            "wasted_bytes": self.wasted,
        }


@dataclass(frozen=True, slots=True)
class Access:
    """All instructions of one warp that moves one span, loads and stores in order."""

    loads: tuple[Instruction, ...]
    stores: tuple[Instruction, ...]

    def side(self, name: str) -> tuple[Instruction, ...]:
        """``loads`` or ``stores`` by the name of the side."""
        return self.loads if name == "load" else self.stores

    def sectors(self, name: str) -> int:
        """Sectors moved on a side, summed over its instructions."""
        return sum(len(i.sectors) for i in self.side(name))

    def wasted(self, name: str) -> int:
        """Bytes moved on a side that nobody asked for."""
        return sum(i.wasted for i in self.side(name))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            side: {
                "instructions": [i.to_dict() for i in self.side(side)],
                "sectors": self.sectors(side),
                "wasted_bytes": self.wasted(side),
            }
            for side in ("load", "store")
        }


def scalar(
    count: int, load_bytes: int, store_bytes: int | None = None, *, load_at: int = 0, store_at: int = 0
) -> Access:
    """One element a lane, lane by lane through a span of ``count`` elements.

    >>> [len(i.sectors) for n in (1, 2, 4) for i in scalar(32, n).loads]       # 32 lanes of 1, 2, 4 bytes
    [1, 2, 4]
    >>> len(scalar(32, 2, load_at=2).loads[0].sectors)                         # misaligned: one more
    3
    >>> len(scalar(128, 2).loads), scalar(128, 2).loads[0].useful              # head 128, half: 4 rounds of 64 bytes
    (4, 64)

    Args:
        count: elements.
        load_bytes, store_bytes: bytes of an element on each side; a store as wide as the load by default.
        load_at, store_at: bytes from a 32-byte boundary to the span.
    """
    return _span(
        [("body", 1, 0, count)], load_bytes, load_bytes if store_bytes is None else store_bytes, load_at, store_at
    )


def packed(
    count: int,
    load_bytes: int,
    store_bytes: int | None = None,
    *,
    load_at: int = 0,
    store_at: int = 0,
    pack: int | None = None,
) -> Access:
    """A pack of elements a lane: a scalar prefix up to the load's alignment, packs, a scalar tail.

    >>> a = packed(128, 2)                                     # head 128, half: one round of 16 lanes x 16 bytes
    >>> len(a.loads), len(a.loads[0].addresses), a.loads[0].width, len(a.loads[0].sectors)
    (1, 16, 16, 8)
    >>> a = packed(128, 2, 1)                                  # half to fp8: 16 bytes a lane in, 8 out
    >>> a.loads[0].width, a.stores[0].width
    (16, 8)
    >>> [(i.part, len(i.addresses)) for i in packed(128, 2, load_at=4).loads]
    [('prefix', 6), ('body', 15), ('tail', 2)]

    Args:
        pack: elements of a pack; None is as many as fill 16 bytes of the load.

    Raises:
        ArgumentError: a pack that is no power of two, or wider than 16 bytes on a side.
    """
    store_bytes = load_bytes if store_bytes is None else store_bytes
    pack = max(1, PACK_BYTES // load_bytes) if pack is None else pack
    if pack < 1 or pack & (pack - 1) or pack * max(load_bytes, store_bytes) > PACK_BYTES:
        raise ArgumentError(
            f"pack is {pack} elements of {load_bytes} and {store_bytes} bytes; it must be a power of two of at most "
            f"{PACK_BYTES} bytes on each side"
        )
    width = pack * load_bytes
    prefix = min(count, -load_at % width // load_bytes)
    if load_at % load_bytes:
        prefix = count  # no element is aligned, so no pack is
    packs, tail = divmod(count - prefix, pack)
    parts = [("prefix", 1, 0, prefix), ("body", pack, prefix, packs), ("tail", 1, count - tail, tail)]
    return _span(parts, load_bytes, store_bytes, load_at, store_at)


def scattered(
    addresses: Sequence[int], load_bytes: int, store_bytes: int | None = None, *, store_at: int = 0
) -> Access:
    """Lanes that load from given addresses and store side by side from ``store_at`` on, as a gather does.

    >>> scattered([0, 64, 128], 2).loads[0].sectors            # separate sectors
    (0, 2, 4)

    Raises:
        ArgumentError: no address, more than a warp has lanes, or one that is negative or wider than 64 bits.
    """
    if not 0 < len(addresses) <= WARP:
        raise ArgumentError(f"there are {len(addresses)} addresses; a warp has 1 to {WARP} lanes")
    if not 0 <= min(addresses) <= max(addresses) < FARTHEST or store_at < 0:
        raise ArgumentError(f"addresses are {list(addresses)}, stored from {store_at} on; give bytes of 0 to 2^63 - 1")
    store_bytes = load_bytes if store_bytes is None else store_bytes
    stores = tuple(store_at + lane * store_bytes for lane in range(len(addresses)))
    return Access(
        (Instruction("load", "lanes", load_bytes, tuple(addresses)),),
        (Instruction("store", "lanes", store_bytes, stores),),
    )


def _span(
    parts: Sequence[tuple[str, int, int, int]], load_bytes: int, store_bytes: int, load_at: int, store_at: int
) -> Access:
    """Instructions of ``(name, elements a lane, first element, lanes in all)``, a warp's worth at a time."""
    for name, value in (("load", load_bytes), ("store", store_bytes)):
        if value < 1:
            raise ArgumentError(f"an element of the {name} has {value} bytes; it has at least 1")
    if any(n < 0 for *_, n in parts):
        raise ArgumentError("a span has 0 elements or more")
    if min(load_at, store_at) < 0:
        raise ArgumentError(f"offsets are {load_at} and {store_at} bytes; a span starts at or after its base")
    loads, stores = [], []
    for name, pack, first, lanes in parts:
        for start in range(0, lanes, WARP):
            own = [first + (start + i) * pack for i in range(min(WARP, lanes - start))]
            loads.append(Instruction("load", name, pack * load_bytes, tuple(load_at + e * load_bytes for e in own)))
            stores.append(
                Instruction("store", name, pack * store_bytes, tuple(store_at + e * store_bytes for e in own))
            )
    return Access(tuple(loads), tuple(stores))


def picture(instruction: Instruction, limit: int = 16, signs: str = "█·") -> list[str]:
    """An instruction as lines of text: one line a sector, one character a byte (``█`` asked for, ``·`` moved in vain;
    ``signs`` has others for a terminal that lacks them).

    >>> print(*picture(scattered([4], 2).loads[0]), sep="\\n")
    load, lanes: 1 lane x 2 B = 2 B in 1 sector, 30 B wasted
      sector   0  ····██··························  lane 0
    """
    i = instruction
    lanes, count = len(i.addresses), len(i.sectors)
    lines = [
        f"{i.side}, {i.part}: {lanes} lane{'s' if lanes != 1 else ''} x {i.width} B = {i.useful} B in "
        f"{count} sector{'s' if count != 1 else ''}, {i.wasted} B wasted"
    ]
    for sector in i.sectors[:limit]:
        asked = i.bytes_in(sector)
        bar = "".join(signs[0] if byte in asked else signs[1] for byte in range(SECTOR))
        lines.append(f"  sector {sector:3}  {bar}  {_lanes(i.lanes_in(sector))}")
    if count > limit:
        lines.append(f"  ... and {count - limit} more sectors")
    return lines


def _lanes(lanes: tuple[int, ...]) -> str:
    if len(lanes) == 1:
        return f"lane {lanes[0]}"
    if lanes == tuple(range(lanes[0], lanes[-1] + 1)):
        return f"lanes {lanes[0]}-{lanes[-1]}"
    return "lanes " + ", ".join(map(str, lanes))
