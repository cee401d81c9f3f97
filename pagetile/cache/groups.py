"""Which layers share block ids, and what a block of theirs costs.

Layers that see the same keys can share one block table: all full-attention layers form a group, all layers of one
sliding window another. Each group has its own block ids and its own pool, so that a window's old blocks can be
released while full attention keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pagetile.contracts.errors import ArgumentError, UnsupportedError
from pagetile.contracts.geometry import blocks_for


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one window, hence one block table.

    Attributes:
        name: the key of the group wherever groups are told apart.
        layers: indices of the model's layers.
        window: W tokens a query sees, its own included (a model's ``sliding_window``); None is full attention.
        num_kv_heads, head_size, head_size_v: where the group's layers differ from the rest of the cache; None takes
            the cache's own.
        block_size: must equal the cache's (or be None). One block size for all groups, because prefix hits are counted
            in blocks and a boundary must be one in every group.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    head_size_v: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(int(i) for i in self.layers))
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise ArgumentError(
                f"group {self.name!r} has layers {self.layers}; give each layer's index once, from 0, at least one"
            )
        if self.window is not None and self.window < 1:
            raise ArgumentError(
                f"group {self.name!r} has window {self.window}; it counts tokens, the query's own included, so "
                "it is at least 1 (None is full attention)"
            )

    def first_visible(self, position: int) -> int:
        """The first position that a query at ``position`` sees.

        >>> LayerGroup("local", (0,), window=4).first_visible(9)
        6
        """
        return 0 if self.window is None else max(0, position - self.window + 1)

    def blocks_behind(self, position: int, block_size: int) -> int:
        """Leading blocks that no query at ``position`` or later sees: they can be released.

        >>> LayerGroup("local", (0,), window=4).blocks_behind(9, block_size=2)     # sees 6 to 9, so blocks 0, 1, 2
        3
        """
        return self.first_visible(position) // block_size


def group_layers(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Groups from each layer's window, in order of first appearance.

    >>> [(g.name, g.layers, g.window) for g in group_layers([512, 512, None, 512])]
    [('window_512', (0, 1, 3), 512), ('full', (2,), None)]
    """
    found: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        found.setdefault(window, []).append(layer)
    return tuple(
        LayerGroup("full" if window is None else f"window_{window}", tuple(layers), window)
        for window, layers in found.items()
    )


def check_groups(groups: Sequence[LayerGroup], block_size: int) -> tuple[LayerGroup, ...]:
    """The groups as a tuple, after checking that they can live together.

    Raises:
        ArgumentError: no group, a name or a layer that occurs twice, a block size below 1.
        UnsupportedError: a group with a block size of its own.
    """
    groups = tuple(groups)
    if block_size < 1:
        raise ArgumentError(f"block_size is {block_size}; a block holds at least 1 slot")
    if not groups:
        raise ArgumentError("groups is empty; give at least one LayerGroup")
    names = [g.name for g in groups]
    if len(set(names)) != len(names):
        raise ArgumentError(f"two groups have the same name among {names}")
    layers = [layer for g in groups for layer in g.layers]
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice:
        raise ArgumentError(f"layers {twice} are in two groups; a layer has one block table")
    for g in groups:
        if g.block_size not in (None, block_size):
            raise UnsupportedError(
                f"group {g.name!r} has block_size {g.block_size}, the cache has {block_size}; all groups share "
                "one block size, since a prefix hit must end on a block boundary of every group"
            )
    return groups


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Sizes of a cache before it exists: what a token and a block cost, and how many blocks fit.

    All figures are bytes, K and V together, over all layers of a group (or of all groups).

    >>> g = CacheGeometry.of([LayerGroup("full", tuple(range(30)))], block_size=16, num_kv_heads=3, head_size=64,
    ...                      itemsize=2)
    >>> g.bytes_per_token, g.bytes_per_block, g.blocks_that_fit(2**30)      # 30 layers * 2 * 3 heads * 64 * 2 bytes
    (23040, 368640, 2912)
    """

    groups: tuple[LayerGroup, ...]
    block_size: int
    itemsize: int
    scale_bytes: int = 0

    @classmethod
    def of(
        cls,
        groups: Sequence[LayerGroup],
        *,
        block_size: int,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        head_size_v: int | None = None,
        itemsize: int,
        scale_bytes: int = 0,
    ) -> CacheGeometry:
        """Fill the sizes that the groups leave open; ``head_size_v`` defaults to the group's ``head_size``.

        ``scale_bytes``: what the scales of a token and head take, K and V together, beside the elements.
        """
        resolved = []
        for g in check_groups(groups, block_size):
            heads = g.num_kv_heads if g.num_kv_heads is not None else num_kv_heads
            size = g.head_size if g.head_size is not None else head_size
            own_v = g.head_size_v if g.head_size_v is not None else (g.head_size or head_size_v)
            size_v = own_v if own_v is not None else size
            for name, value in (("num_kv_heads", heads), ("head_size", size), ("head_size_v", size_v)):
                if value is None or value < 1:
                    raise ArgumentError(
                        f"{name} of group {g.name!r} is {value}; give it for the cache or for the group"
                    )
            resolved.append(replace(g, num_kv_heads=heads, head_size=size, head_size_v=size_v, block_size=block_size))
        return cls(tuple(resolved), block_size, itemsize, scale_bytes)

    def group_bytes_per_token(self, name: str) -> int:
        """Bytes one token takes in all layers of one group, K and V."""
        g = next((g for g in self.groups if g.name == name), None)
        if g is None:
            raise ArgumentError(f"no group {name!r}; the groups are {[g.name for g in self.groups]}")
        row = (g.head_size + g.head_size_v) * self.itemsize + self.scale_bytes  # type: ignore[operator]
        return len(g.layers) * g.num_kv_heads * row  # type: ignore[operator]

    def group_bytes_per_block(self, name: str) -> int:
        """Bytes one block takes in all layers of one group, K and V."""
        return self.group_bytes_per_token(name) * self.block_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers of all groups, K and V."""
        return sum(self.group_bytes_per_token(g.name) for g in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in every group, K and V."""
        return self.bytes_per_token * self.block_size

    def blocks_that_fit(self, num_bytes: int) -> int:
        """The largest n such that n blocks in every group take at most ``num_bytes``."""
        return max(0, int(num_bytes)) // self.bytes_per_block

    def plan(self, num_bytes: int, expected_len: int | None = None) -> dict[str, int]:
        """Blocks of each group within ``num_bytes``, at least 1 each.

        Without ``expected_len`` every group gets the same number, which is never too few for a sliding group. With it,
        groups share in proportion to the blocks that one decoding sequence of that many tokens holds at most: a window
        of 512 tokens then takes no more than its part of a context of 8192. (While a prompt is computed, a window also
        needs room for the chunk; a chunk that does not fit is refused, so leave the pool several windows.)

        >>> g = CacheGeometry.of(group_layers([512, None]), block_size=16, num_kv_heads=1, head_size=8, itemsize=2)
        >>> g.plan(g.bytes_per_block * 100), g.plan(g.bytes_per_block * 100, expected_len=8192)
        ({'window_512': 100, 'full': 100}, {'window_512': 12, 'full': 187})

        Raises:
            ArgumentError: not even one block of each group fits.
        """
        weights = {g.name: 1 if expected_len is None else self._held(g, expected_len) for g in self.groups}
        unit = sum(weights[g.name] * self.group_bytes_per_block(g.name) for g in self.groups)
        blocks = {name: int(num_bytes) * weight // unit for name, weight in weights.items()}
        if min(blocks.values()) < 1:
            raise ArgumentError(
                f"{num_bytes} bytes hold {blocks} blocks; one block of every group takes {self.bytes_per_block} bytes: "
                "give more memory, or a smaller block_size"
            )
        return blocks

    def _held(self, group: LayerGroup, length: int) -> int:
        """The most blocks a sequence of up to ``length`` tokens holds in a group while it decodes."""
        blocks = max(1, blocks_for(length, self.block_size))
        if group.window is None:
            return blocks
        return min(blocks, blocks_for(group.window - 1, self.block_size) + 1)  # the window rarely starts on a boundary


def per_group(name: str, value: int | Mapping[str, int], groups: Sequence[LayerGroup]) -> dict[str, int]:
    """One number for each group, from one number for all or a mapping by name.

    Raises:
        ArgumentError: a group without a number, a name that is no group, or a number below 1.
    """
    names = [g.name for g in groups]
    found = dict(value) if isinstance(value, Mapping) else dict.fromkeys(names, value)
    if set(found) != set(names):
        raise ArgumentError(f"{name} names the groups {sorted(found)}, the cache has {sorted(names)}")
    for group, count in found.items():
        if isinstance(count, bool) or int(count) != count or count < 1:
            raise ArgumentError(f"{name} of group {group!r} is {count!r}; give an integer of at least 1")
    return {group: int(found[group]) for group in names}
