"""One request: its tokens, and the blocks they lie in."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from pagetile.cache.prefix import Prefix, Salt


class Sequence:
    """One request's tokens and where they are. Made and changed by a :class:`SequenceTable` only.

    Attributes:
        id: unique within its table.
        token_ids: ``array('q')``, prompt and generated tokens.
        salt: keeps its prefixes apart from other salts.
        num_computed: leading tokens that went through the model; the next query stands at this position.
        num_stored: leading tokens whose K and V the cache holds. At least ``num_computed``; greater by one after a
            prompt was found in full, when the last token is computed again but not written.
        num_hit: tokens found in the prefix cache when blocks were last taken.
        num_reserved: positions below it may be written.
        blocks: for each group the physical blocks, ``array('i')``, head first; released ones read 0.
        released: for each group the number of leading blocks given back because they are behind the window.
    """

    __slots__ = (
        "blocks",
        "holds",
        "id",
        "num_computed",
        "num_hit",
        "num_reserved",
        "num_stored",
        "prefixes",
        "released",
        "salt",
        "token_ids",
    )

    def __init__(self, id: int, token_ids: array, salt: Salt, groups: Iterable[str]) -> None:
        self.id = id
        self.token_ids = token_ids
        self.salt = salt
        self.num_computed = self.num_stored = self.num_hit = self.num_reserved = 0
        self.blocks: dict[str, array] = {g: array("i") for g in groups}
        self.released: dict[str, int] = dict.fromkeys(self.blocks, 0)
        self.prefixes: list[Prefix] = []  # of the stored full blocks
        self.holds: list[tuple[str, int]] = []  # blocks that copies still read from

    @property
    def num_uncomputed(self) -> int:
        """Tokens that have yet to go through the model."""
        return len(self.token_ids) - self.num_computed

    def token_bytes(self, start: int, end: int) -> bytes:
        """Token ids of positions ``[start, end)`` as little-endian int64, the content of a prefix."""
        ids = self.token_ids[start:end]
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        held = ", ".join(f"{g} {list(row)}" for g, row in self.blocks.items())
        return f"Sequence({self.id}: {len(self)} tokens, {self.num_computed} computed, blocks {held})"
