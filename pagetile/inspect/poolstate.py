"""A pool taken down as plain values: to be saved, audited or drawn, here or in another process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pagetile.contracts.errors import ArgumentError
from pagetile.contracts.geometry import blocks_for
from pagetile.inspect import saved
from pagetile.inspect.saved import RELEASED

if TYPE_CHECKING:
    from pagetile.cache.groups import LayerGroup
    from pagetile.cache.kv import PagedKVCache
    from pagetile.cache.sequences import SequenceTable

VERSION = 1


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Values of a live slot that are NaN or Inf."""

    layer: int
    tensor: str
    sequence: int
    position: int
    block: int
    offset: int
    heads: tuple[int, ...]

    def __str__(self) -> str:
        heads = ", ".join(map(str, self.heads))
        return (
            f"layer {self.layer}: {self.tensor} of sequence {self.sequence}, position {self.position} (block "
            f"{self.block}, offset {self.offset}) is not finite in heads {heads}"
        )


@dataclass(slots=True)
class GroupState:
    """One group's blocks.

    Attributes:
        refs: references of each block.
        prefixes: blocks registered in the prefix cache.
        rows: sequence -> its blocks, :data:`RELEASED` where one was given back behind the window.
        stored: sequence -> tokens whose K and V are stored.
        holds: block -> references kept for copies that still read it.
        not_finite: bad values in live slots; empty when no cache was looked at.
    """

    name: str
    refs: list[int]
    prefixes: list[int]
    rows: dict[int, list[int]]
    stored: dict[int, int]
    holds: dict[int, int] = field(default_factory=dict)
    not_finite: list[NotFinite] = field(default_factory=list)

    def kind(self, block: int) -> str:
        """``live``, ``cached`` or ``free``."""
        return "live" if self.refs[block] else "cached" if block in set(self.prefixes) else "free"


@dataclass(slots=True)
class PoolState:
    """All groups of a table."""

    block_size: int
    groups: list[GroupState]

    @classmethod
    def of(cls, table: SequenceTable, cache: PagedKVCache | None = None) -> PoolState:
        """Take down a live table; with its cache, the values of live slots are looked at too."""
        groups = []
        for g in table.groups:
            pool = table.pools[g.name]
            state = GroupState(
                name=g.name,
                refs=[pool.ref(b) for b in range(pool.num_blocks)],
                prefixes=[b for b in range(pool.num_blocks) if pool.prefix(b) is not None],
                rows={s.id: _row(s, g) for s in table.sequences if len(s.blocks[g.name])},
                stored={s.id: s.num_stored for s in table.sequences if len(s.blocks[g.name])},
                holds=dict(table.holds[g.name]),
            )
            if cache is not None:
                state.not_finite = _not_finite(state, g, cache)
            groups.append(state)
        return cls(table.block_size, groups)

    def save(self, path: Path) -> None:
        """Write it as JSON; whole, or not at all."""
        saved.write(path, json.dumps({"pagetile_pool": VERSION, **asdict(self)}, separators=(",", ":")))

    @classmethod
    def load(cls, path: Path) -> PoolState:
        """Read what :meth:`save` wrote.

        Raises:
            ArgumentError: no such file, a damaged one, or not a saved pool.
        """
        return cls.read(path, saved.read(path))

    @classmethod
    def read(cls, path: Path, data: dict[str, Any]) -> PoolState:
        """:meth:`from_dict` of a file's document, whose errors name the file.

        Raises:
            ArgumentError: not a saved pool.
        """
        try:
            return cls.from_dict(data)
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PoolState:
        """The inverse of what is saved.

        Raises:
            ArgumentError: something else, a pool of another version, or an entry that cannot be.
        """
        saved.require_version(data, "pagetile_pool", VERSION, "saved pool")
        saved.check_pool(data)
        groups = []
        for g in data["groups"]:
            numbered = {name: {int(k): v for k, v in g[name].items()} for name in ("rows", "stored", "holds")}
            bad = [NotFinite(**{**one, "heads": tuple(one["heads"])}) for one in g["not_finite"]]
            groups.append(GroupState(**{**g, **numbered, "not_finite": bad}))
        return cls(data["block_size"], groups)


def _row(sequence: Any, g: LayerGroup) -> list[int]:
    released = sequence.released[g.name]
    return [RELEASED] * released + list(sequence.blocks[g.name][released:])


def _not_finite(state: GroupState, g: LayerGroup, cache: PagedKVCache) -> list[NotFinite]:
    """Bad values among the stored tokens of every sequence, in every layer of the group.

    A ``uint8`` cache does not say what its bytes mean, and ``int8`` has no such values: neither is looked at.
    """
    if cache.dtype in (torch.uint8, torch.int8):
        return []
    found = []
    size = cache.block_size
    for layer in g.layers:
        for name, tensor in (("key_cache", cache.key(layer)), ("value_cache", cache.value(layer))):
            for sequence, row in state.rows.items():
                stored = state.stored[sequence]
                for logical in range(blocks_for(stored, size)):
                    block = row[logical]
                    if block == RELEASED:
                        continue
                    live = tensor[block, : min(size, stored - logical * size)].float()  # [tokens, heads, size]
                    bad = ~torch.isfinite(live).all(-1)
                    for offset in torch.nonzero(bad.any(-1)).flatten().tolist():
                        heads = tuple(torch.nonzero(bad[offset]).flatten().tolist())
                        found.append(NotFinite(layer, name, sequence, logical * size + offset, block, offset, heads))
    return found
