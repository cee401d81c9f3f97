"""The tensors that hold keys and values: one K and one V a layer, cut into blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from pagetile import ops
from pagetile.cache.groups import CacheGeometry, LayerGroup, per_group
from pagetile.cache.memory import budget, lazy_zeros
from pagetile.cache.scales import CacheScales, check_scales
from pagetile.contracts import figure
from pagetile.contracts.dtypes import QUANTISED, dtype_name, storage_kind
from pagetile.contracts.errors import ArgumentError, BlockTableError, DTypeError
from pagetile.reference.quantise import STORED_AS

CACHE_DTYPES = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8}
)


class PagedKVCache:
    """Keys and values of all layers.

    ``cache.key(layer)`` is ``[NB, BS, Hkv, D]`` and ``cache.value(layer)`` is ``[NB, BS, Hkv, Dv]`` whatever the
    layout: NHD and HND are strides, not shapes. Every layer has a K and a V tensor of its own (they share no storage,
    so a compiled graph that writes one does not copy another); layers of one group share block ids. The memory starts
    zeroed, which on a CPU costs nothing until a block is first used.

    >>> cache = PagedKVCache(num_layers=2, num_blocks=8, block_size=16, num_kv_heads=3, head_size=64)
    >>> tuple(cache.key(1).shape), cache.bytes_per_token, cache.num_blocks
    ((8, 16, 3, 64), 3072, {'full': 8})

    Args:
        num_layers: that many layers in one full-attention group named ``"full"``; or give ``groups``.
        groups: see :class:`~pagetile.cache.groups.LayerGroup`; each may have its own head sizes.
        num_blocks: blocks of every group, a mapping by group name, or ``"auto"``: what fits in ``memory``.
        memory: with ``"auto"``: an int is bytes, a float in (0, 1] a share of the memory available on the device.
        expected_len: with ``"auto"`` and several groups: see :meth:`CacheGeometry.plan`.
        block_size: slots in a block, the same for all groups; any integer of at least 1.
        num_kv_heads, head_size, head_size_v: of every layer whose group does not say otherwise; ``head_size_v``
            defaults to ``head_size``.
        dtype: of the stored elements, exactly this one (the global default dtype plays no part); None is float32, or
            what ``kv_cache_dtype`` is stored as.
        layout: ``"NHD"`` stores a block as ``[token, head, element]``, ``"HND"`` as ``[head, token, element]``.
        pin_memory: on a CPU: page-locked, so that a GPU can copy to and from it without waiting.
        kv_cache_dtype: what the elements mean: ``auto`` (by ``dtype``), ``fp8`` (= ``fp8_e4m3``), ``fp8_e4m3``,
            ``fp8_e5m2``, ``int8``.
        scales: of a quantised cache: None (1 everywhere), :class:`~pagetile.cache.scales.CacheScales`, or
            ``"token_head"``: each token and head has its own, stored beside its block.

    Raises:
        ArgumentError: sizes that are missing, below 1 or contradict each other, or a memory that holds no block.
        UnsupportedError: groups with different block sizes.
        DTypeError: a dtype no cache can have.
    """

    def __init__(
        self,
        *,
        num_layers: int | None = None,
        groups: Sequence[LayerGroup] | None = None,
        num_blocks: int | Mapping[str, int] | Literal["auto"],
        block_size: int = 16,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        head_size_v: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        layout: Literal["NHD", "HND"] = "NHD",
        memory: int | float | None = None,
        expected_len: int | None = None,
        pin_memory: bool = False,
        kv_cache_dtype: str = "auto",
        scales: CacheScales | Literal["token_head"] | None = None,
    ) -> None:
        if dtype is None:
            dtype = STORED_AS.get("fp8_e4m3" if kv_cache_dtype == "fp8" else kv_cache_dtype, torch.float32)
        if dtype not in CACHE_DTYPES:
            raise DTypeError(f"dtype is {dtype}; a cache holds one of {sorted(str(d) for d in CACHE_DTYPES)}")
        if layout not in ("NHD", "HND"):
            raise ArgumentError(f"layout is {layout!r}; it must be 'NHD' or 'HND' (it is never guessed from shapes)")
        # A uint8 cache may leave it to the ops to say what its bytes mean.
        unsaid = dtype == torch.uint8 and kv_cache_dtype == "auto"
        self.kind = "uint8" if unsaid else storage_kind(dtype_name(dtype), kv_cache_dtype)
        self.own_scales = scales == "token_head"
        if scales is not None and self.kind not in QUANTISED:
            raise ArgumentError(f"scales are given, but the cache holds {self.kind}, which has none; pass scales=None")
        self.geometry = CacheGeometry.of(
            _groups(num_layers, groups),
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            head_size_v=head_size_v,
            itemsize=dtype.itemsize,
            scale_bytes=8 if self.own_scales else 0,
        )
        self.groups = self.geometry.groups
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.layout: Literal["NHD", "HND"] = layout
        self.pin_memory = pin_memory
        if num_blocks == "auto":
            self.num_blocks = self.geometry.plan(budget(memory, self.device), expected_len)
        elif memory is not None or isinstance(num_blocks, str):
            raise ArgumentError(
                f"num_blocks is {num_blocks!r} and memory is {memory!r}; memory goes with num_blocks='auto'"
            )
        else:
            self.num_blocks = per_group("num_blocks", num_blocks, self.groups)
        self._group_of = {layer: g for g in self.groups for layer in g.layers}
        self._keys = {layer: self._allocate(g, g.head_size) for layer, g in self._group_of.items()}
        self._values = {layer: self._allocate(g, g.head_size_v) for layer, g in self._group_of.items()}
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}
        self.all_scales: CacheScales | None = None
        if self.own_scales:
            self._scales = {layer: self._allocate_scales(g) for layer, g in self._group_of.items()}
        elif isinstance(scales, CacheScales):
            check_scales(self, scales)
            self.use_scales(scales)

    def key(self, layer: int) -> Tensor:
        """K of a layer, ``[NB, BS, Hkv, D]``."""
        return self._keys[self._known(layer)]

    def value(self, layer: int) -> Tensor:
        """V of a layer, ``[NB, BS, Hkv, Dv]``."""
        return self._values[self._known(layer)]

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """The scales of K and V of a layer: None, float32 ``[]`` or ``[Hkv]``, or the tokens' own ``[NB, BS, Hkv]``."""
        return self._scales.get(self._known(layer), (None, None))

    def use_scales(self, scales: CacheScales) -> None:
        """Take other scales for what is written from now on; what is stored keeps its bytes, and so changes in meaning.

        See :func:`pagetile.cache.scales.rescale`, which changes both.
        """
        self.all_scales = scales.to(self.device)
        self._scales = {layer: (self.all_scales.keys[layer], self.all_scales.values[layer]) for layer in self._group_of}

    @property
    def identity(self) -> str:
        """What stored bytes mean, for files that outlive this object: the kind, and a digest of the scales."""
        own = "token_head" if self.own_scales else self.all_scales.identity() if self.all_scales else "1"
        return f"{self.kind} scales {own}"

    def group_of(self, layer: int) -> LayerGroup:
        """The group a layer belongs to, its sizes filled in."""
        return self._group_of[self._known(layer)]

    def group(self, name: str) -> LayerGroup:
        """A group by its name."""
        for g in self.groups:
            if g.name == name:
                return g
        raise ArgumentError(f"no group {name!r}; the groups are {[g.name for g in self.groups]}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers of all groups, K and V."""
        return self.geometry.bytes_per_token

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in every group, K and V."""
        return self.geometry.bytes_per_block

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(self.num_blocks[g.name] * self.geometry.group_bytes_per_block(g.name) for g in self.groups)

    def blocks_that_fit(self, num_bytes: int) -> int:
        """The largest n such that n blocks in every group take at most ``num_bytes``."""
        return self.geometry.blocks_that_fit(num_bytes)

    def copy_blocks(self, group: str, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, K and V of every layer of a group, as if pair after pair in the order given.

        Args:
            group: name of the group.
            pairs: ``(source, destination)`` block ids, host integers. Chains (``(0, 1), (1, 2)``) and swaps through a
                spare block behave as the order says.

        Raises:
            BlockTableError: an id outside the group's blocks, or a destination named twice. Nothing has moved then.
        """
        check_copies(pairs, self.num_blocks[self.group(group).name], group)
        ops.copy_blocks(list(self.block_tensors(group).values()), [], pairs)

    def block_tensors(self, group: str) -> dict[str, Tensor]:
        """Everything that belongs to the blocks of a group, by name; axis 0 of each is the block id."""
        found = {}
        for layer in self.group(group).layers:
            found[f"{layer}.key"], found[f"{layer}.value"] = self._keys[layer], self._values[layer]
            if self.own_scales:
                found[f"{layer}.key_scale"], found[f"{layer}.value_scale"] = self._scales[layer]
        return found

    def on_host(self, num_blocks: int | Mapping[str, int]) -> PagedKVCache:
        """A cache of the same groups, dtype and layout in host memory, page-locked when this one is on a GPU."""
        return PagedKVCache(
            groups=self.groups,
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=self.dtype,
            layout=self.layout,
            pin_memory=self.device.type == "cuda",
            kv_cache_dtype=self.kind if self.kind in QUANTISED else "auto",
            scales="token_head" if self.own_scales else self.all_scales,
        )

    def run_copies(self, copies: Iterable[tuple[str, int, int]]) -> None:
        """Run what :meth:`SequenceTable.reserve` returned, ``(group, src, dst)`` each, before the next write."""
        by_group: dict[str, list[tuple[int, int]]] = {}
        for group, src, dst in copies:
            by_group.setdefault(group, []).append((src, dst))
        for group, pairs in by_group.items():  # every index is checked before the first block moves
            check_copies(pairs, self.num_blocks[self.group(group).name], group)
        for group, pairs in by_group.items():
            self.copy_blocks(group, pairs)

    def _allocate(self, g: LayerGroup, size: int | None) -> Tensor:
        blocks, heads = self.num_blocks[g.name], g.num_kv_heads
        nhd = self.layout == "NHD"
        shape = (blocks, self.block_size, heads, size) if nhd else (blocks, heads, self.block_size, size)
        if self.pin_memory:
            tensor = torch.zeros(shape, dtype=self.dtype, pin_memory=True)  # type: ignore[arg-type]
        else:
            tensor = lazy_zeros(shape, self.dtype, self.device)  # type: ignore[arg-type]
        return tensor if nhd else tensor.transpose(1, 2)

    def _allocate_scales(self, g: LayerGroup) -> tuple[Tensor, Tensor]:
        """Scales of tokens and heads, ``[NB, BS, Hkv]`` float32 for K and for V."""
        assert g.num_kv_heads is not None
        shape = (self.num_blocks[g.name], self.block_size, g.num_kv_heads)
        if self.pin_memory:
            return tuple(torch.zeros(shape, pin_memory=True) for _ in "kv")  # type: ignore[return-value]
        return tuple(lazy_zeros(shape, torch.float32, self.device) for _ in "kv")  # type: ignore[return-value]

    def _known(self, layer: int) -> int:
        if layer not in self._group_of:
            raise ArgumentError(f"layer {layer} is in no group; the layers are {sorted(self._group_of)}")
        return layer

    def _repr_html_(self) -> str:
        """A row a group of layers, for notebooks."""
        columns = ("group", "layers", "window", "blocks", "K", "K strides", "V", "bytes a block")
        rows = []
        for g in self.groups:
            k, v = self._keys[g.layers[0]], self._values[g.layers[0]]
            shapes = (tuple(k.shape), k.stride(), tuple(v.shape))
            size = self.geometry.group_bytes_per_block(g.name)
            rows.append((g.name, len(g.layers), g.window or "-", self.num_blocks[g.name], *shapes, size))
        return figure.table(repr(self), columns, rows)

    def __repr__(self) -> str:
        blocks = ", ".join(f"{name} {count}" for name, count in self.num_blocks.items())
        return (
            f"PagedKVCache({len(self._group_of)} layers, blocks of {self.block_size}: {blocks}, {self.dtype}, "
            f"{self.layout}, {self.device}, {self.num_bytes} bytes)"
        )


def raw_elements(tensor: Tensor) -> Tensor:
    """The same memory as a dtype that every indexing operation of torch knows (float8 is not)."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def check_copies(pairs: Sequence[tuple[int, int]], num_blocks: int, group: str) -> None:
    """Refuse pairs that no table asks for.

    Raises:
        BlockTableError: an id outside ``[0, num_blocks)``, or a destination named twice.
    """
    seen: set[int] = set()
    for at, (src, dst) in enumerate(pairs):
        for what, block in (("source", src), ("destination", dst)):
            if not 0 <= block < num_blocks:
                raise BlockTableError(
                    f"pair {at} has {what} block {block}, but group {group!r} has blocks 0 to {num_blocks - 1}"
                )
        if dst in seen:
            raise BlockTableError(f"pair {at} writes block {dst} of group {group!r} a second time")
        seen.add(dst)


def _groups(num_layers: int | None, groups: Sequence[LayerGroup] | None) -> Sequence[LayerGroup]:
    if (num_layers is None) == (groups is None):
        raise ArgumentError("give either num_layers or groups")
    if groups is not None:
        return groups
    if num_layers is None or num_layers < 1:
        raise ArgumentError(f"num_layers is {num_layers}; a cache has at least 1 layer")
    return (LayerGroup("full", tuple(range(num_layers))),)
