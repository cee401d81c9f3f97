"""Continuous batching: the host's cache of blocks, read through block tables.

The host keeps the blocks, the requests and the schedule. What is replaced is the class that it makes its cache of
(``continuous_api.PagedAttentionCache``), by a subclass of it: before a forward it notes which blocks the requests have
instead of listing every token's address, and in the forward it writes the new tokens and attends over the blocks.

Three generations of the host's contract are told apart by what is there, never by a version:

- a layer's keys: in ``key_cache`` (a tensor a layer of a group), or in one buffer with an allocator a kind of layer;
- ``update``: called by the attention (told by its parameter ``kwargs``), or by the model, which hands on ``kwargs``;
- the name under which a manager accepts a model: with ``paged|`` in front where ``update`` has no ``kwargs``.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagetile.contracts.errors import UnsupportedError
from pagetile.engine.attention import NAME
from pagetile.engine.probe import LayerSpec
from pagetile.integrations.transformers.pages import STORAGE, Pages, Settings, attend_ragged, check_call, rows_of
from pagetile.integrations.transformers.rings import Batch, Ring, ring_of, span_of

HANDLE = "pagetile_cache"
"""Keyword that ``update`` adds where the model calls it: tells the attention which cache it is."""

SCALE_BYTES = 4
"""A quantised row ends in its float32 scale, so that whatever moves the host's blocks moves the scales too."""

Lookup = Callable[[Any], tuple[tuple[LayerSpec, ...], Settings] | None]

_local = threading.local()
_managers: weakref.WeakKeyDictionary[Any, weakref.WeakSet] = weakref.WeakKeyDictionary()
_installed: tuple[Any, Any] | None = None


# The host ------------------------------------------------------------------------------------------------------------


def _api() -> Any:
    from transformers.generation.continuous_batching import continuous_api

    return continuous_api


def install(lookup: Lookup) -> None:
    """From now on, caches of continuous batching for the models that ``lookup`` knows (by their config) are ours.

    Raises:
        UnsupportedError: this version of Transformers has another continuous batching.
    """
    global _installed
    if _installed is not None:
        return
    api = _api()
    base = api.PagedAttentionCache
    for method in ("update", "extend_read_and_write_indices"):
        if not hasattr(base, method):
            raise UnsupportedError(f"this version of Transformers has no PagedAttentionCache.{method}")
    ours = _cache_class(base, lookup)

    def make(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[0] if args else None)
        return (base if lookup(config) is None else ours)(*args, **kwargs)

    _installed = api, base
    api.PagedAttentionCache = make


def uninstall() -> None:
    """Undo :func:`install`."""
    global _installed
    if _installed is not None:
        api, base = _installed
        api.PagedAttentionCache = base
        _installed = None


def _update_is_called_with_kwargs() -> bool:
    from transformers.generation.continuous_batching import PagedAttentionCache

    return "kwargs" in inspect.signature(getattr(PagedAttentionCache, "update")).parameters  # noqa: B009 (a decorator)


def name_for_managers() -> str:
    """A name under which the host makes a manager, and reserves no memory for masks and copies of heads.

    It looks for "flash"; the model goes by this name only while a manager or a cache is being made.
    """
    name = f"{NAME}_flash"
    return name if _update_is_called_with_kwargs() else f"paged|{name}"


def check_config(args: tuple, kwargs: dict) -> None:
    """Refuse what a manager over our cache cannot do, before it is made."""
    config = kwargs.get("continuous_batching_config", args[1] if len(args) > 1 else None)
    for name in ("use_cuda_graph", "use_async_batching", "varlen_compile_config", "decode_compile_config"):
        asked = getattr(config, name, None)
        if any(asked) if isinstance(asked, tuple) else asked:
            raise UnsupportedError(f"{name} is {asked!r}; continuous batching over pagetile has none, leave it out")
    width = getattr(config, "max_blocks_per_request", None)
    if width:
        raise UnsupportedError(
            f"max_blocks_per_request is {width}; it is the width of the host's own block tables, which are not used, "
            "leave it out"
        )


def remember(model: Any, manager: Any) -> None:
    """Know a model's managers, to see whether one is running."""
    _managers.setdefault(model, weakref.WeakSet()).add(manager)


def running(model: Any) -> bool:
    """Whether a manager of the model is running."""
    return any(manager.is_running() for manager in _managers.get(model, ()))


def in_a_batch() -> bool:
    """Whether this thread has begun a batch of continuous batching that is not through all layers yet."""
    return getattr(_local, "cache", None) is not None


def cache_of(options: dict) -> Any | None:
    """The cache that a call of the attention belongs to; None when it is no batch of continuous batching.

    Raises:
        RuntimeError: it is the host's own cache: the manager is older than ``enable``.
    """
    cache = options.get(HANDLE, options.get("cache"))
    if cache is None and "read_index" not in options:
        return None
    if not getattr(cache, "over_pagetile", False):
        raise RuntimeError(
            "this manager of continuous batching was made before the model was enabled; stop it and make another "
            "(model.destroy_cached_continuous_batching_manager() if the model keeps it)"
        )
    return cache


# The cache -----------------------------------------------------------------------------------------------------------


def _cache_class(base: type, lookup: Lookup) -> type:
    """The host's cache, attended over in place."""

    class PagetileAttentionCache(base):  # type: ignore[misc, valid-type]
        over_pagetile = True

        def __init__(self, config: Any, continuous_batching_config: Any, *args: Any, **kwargs: Any) -> None:
            found = lookup(config)
            assert found is not None, "made for models that are enabled"
            self.specs, self.settings = found
            for name, off in (("use_cuda_graph", (False, False)), ("use_async_batching", False)):
                if hasattr(continuous_batching_config, name):  # chosen by the host, where it can
                    setattr(continuous_batching_config, name, off)
            continuous_batching_config.max_blocks_per_request = 0
            as_seen = copy.copy(config)
            as_seen._attn_implementation_internal = name_for_managers()
            if self.settings.kind is not None:
                self.row_bytes = _row_bytes(self.specs)
                as_seen.head_dim = self.row_bytes
                kwargs["dtype"] = STORAGE[self.settings.kind]
            super().__init__(as_seen, continuous_batching_config, *args, **kwargs)
            self.config = config
            self.paging = _Managers(self) if hasattr(self, "key_cache") else _Allocators(self)
            self.pages = {spec.index: self._pages(spec) for spec in self.specs}
            self.batch: Batch | None = None
            self.batch_key: Any = None
            self.plans: dict[int, Any] = {}
            self.layers_left = 0

        def _pages(self, spec: LayerSpec) -> Pages:
            key, value = self.paging.views(spec.index)
            kind = self.settings.kind
            if kind is None:
                return Pages(key, value)
            k_scale, v_scale = (_scales(side, self.row_bytes) for side in (key, value))
            return Pages(key[..., : spec.head_size], value[..., : spec.head_size_v], k_scale, v_scale, kind)

        # Before a forward: the host asks, request after request, for the address of every token.

        def extend_read_and_write_indices(
            self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any
        ) -> None:
            del read_index
            if self.batch_key is not write_index:  # the host makes new lists for each batch
                self.batch_key = write_index
                self.batch = Batch([], [], [[] for _ in self.paging.tables])
                self.plans = {}
                self.layers_left = len(self.specs)
                _local.cache = self
            assert self.batch is not None
            self.batch.past.append(past_length)
            self.batch.new.append(query_length)
            for blocks, table in zip(self.batch.blocks, self.paging.tables, strict=True):
                blocks.append(list(table[request_id]))

        # In a forward. Where the model calls update, it hands kwargs on to the attention.

        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            *_args: Any,
            kwargs: Any = None,
            **_rest: Any,
        ) -> tuple[Tensor, Tensor]:
            del layer_idx
            if kwargs is None:
                raise UnsupportedError("update() without kwargs: this attention is not pagetile's")
            kwargs[HANDLE] = self
            return key_states, value_states

        def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict) -> Tensor:
            """Store and attend: query ``[1, Hq, T, D]``, key and value ``[1, Hkv, T, D]``; ``[1, T, Hq, Dv]``."""
            spec = self.specs[module.layer_idx]
            check_call(module, spec, options)
            group = self.paging.group_of(spec.index)
            plan = self.plans.get(group)
            if plan is None:
                plan = self.plans[group] = self._plan(spec, group, query.device)
            self.layers_left -= 1
            if self.layers_left == 0:
                _local.cache = None
            rows = rows_of(query), rows_of(key), rows_of(value)
            if len(rows[0]) != len(plan.slots):
                raise UnsupportedError(
                    f"the batch has {len(plan.slots)} rows and the model {len(rows[0])}: batches that are padded for "
                    "compiled forwards are not implemented, leave compile_config out"
                )
            pages = self.pages[spec.index]
            if isinstance(plan, Ring):
                return _attend_ring(pages, *rows, plan, spec, options, self.settings)[None]
            pages.write(*rows[1:], plan.slots, self.settings)
            return pages.attend(rows[0], plan, spec, options, self.settings)[None]

        def _plan(self, spec: LayerSpec, group: int, device: torch.device) -> Any:
            if self.batch is None:
                raise RuntimeError("the forward of a batch that was not prepared")
            size = self.paging.page_size
            if spec.sliding_window is None:
                return span_of(self.batch, group, size, device)
            return ring_of(self.batch, group, size, spec.sliding_window, device)

    return PagetileAttentionCache


class _Allocators:
    """Blocks where one buffer holds the pages of all layers, and an allocator serves each kind of layer."""

    def __init__(self, cache: Any) -> None:
        allocators = list(cache.cache_allocators.values())
        self.cache = cache
        self.tables = [allocator.block_table for allocator in allocators]
        self.page_size = allocators[0].tokens_per_page
        self._groups = {allocator.index: at for at, allocator in enumerate(allocators)}

    def group_of(self, layer: int) -> int:
        """Index of a layer's table."""
        return self._groups[self.cache.layer_to_allocator[layer].index]

    def views(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, ``[blocks, page_size, Hkv, D]``: its page of every block."""
        allocator = self.cache.layer_to_allocator[layer]
        return tuple(_pages_of_blocks(rows, allocator) for rows in allocator._kv_token_views[layer])  # type: ignore[return-value]


class _Managers:
    """Blocks where each layer of a group has tensors of its own, and a manager serves each group."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.tables = [manager.block_table for manager in cache.group_cache_managers]
        self.page_size = cache.block_size

    def group_of(self, layer: int) -> int:
        """Index of a layer's table."""
        return self.cache.layer_index_to_group_indices[layer][0]

    def views(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, ``[blocks, page_size, Hkv, D]``."""
        at = self.cache.layer_index_to_group_indices[layer][1]
        key, value = self.cache.key_cache[at], self.cache.value_cache[at]
        return key.unflatten(0, (-1, self.page_size)), value.unflatten(0, (-1, self.page_size))


def _pages_of_blocks(rows: Tensor, allocator: Any) -> Tensor:
    """Rows ``[n, Hkv, D]`` from a layer's first row on -> ``[blocks, page_size, Hkv, D]``, a view."""
    size, step = allocator.tokens_per_page, allocator.block_physical_stride
    blocks = (rows.shape[0] - size) // step + 1
    row, head, element = rows.stride()
    return rows.as_strided((blocks, size, *rows.shape[1:]), (step * row, row, head, element))


def _row_bytes(specs: tuple[LayerSpec, ...]) -> int:
    """Bytes of a quantised row and its scale, the scale aligned."""
    sizes = {size for spec in specs for size in (spec.head_size, spec.head_size_v)}
    return -(-max(sizes) // SCALE_BYTES) * SCALE_BYTES + SCALE_BYTES


def _scales(rows: Tensor, row_bytes: int) -> Tensor:
    """The float32 at the end of each row of ``[pages, page_size, Hkv, row_bytes]``."""
    return rows.view(torch.uint8)[..., row_bytes - SCALE_BYTES :].view(torch.float32)[..., 0]


def _attend_ring(
    pages: Pages,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ring: Ring,
    layer: LayerSpec,
    options: dict,
    settings: Settings,
) -> Tensor:
    """Rows ``[T, Hq, D]`` over rings; stores the new keys and values when the old have been read."""
    kept = None
    if ring.kept.numel():
        kept = (
            _kept_rows(pages.key, pages.key_scale, ring, key),
            _kept_rows(pages.value, pages.value_scale, ring, value),
        )
    pages.write(key, value, ring.slots, settings)
    outs = []
    if ring.singles is not None:
        rows = query if ring.single_rows is None else query[ring.single_rows]
        outs.append((ring.single_rows, pages.attend(rows, ring.singles, layer, options, settings, ring=True)))
    if ring.pieces is not None:
        q, k, v = (side if ring.piece_rows is None else side[ring.piece_rows] for side in (query, key, value))
        if kept is not None:
            for old, rows in zip(kept, (k, v), strict=True):
                old[ring.new_at] = rows
            k, v = kept
        outs.append(
            (
                ring.piece_rows,
                attend_ragged(q, k, v, ring.pieces, ring.piece_key_start_loc, layer, options, settings),
            )
        )
    if len(outs) == 1:
        return outs[0][1]
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    for rows, part in outs:
        out[rows] = part
    return out


def _kept_rows(pages: Tensor, scales: Tensor | None, ring: Ring, new: Tensor) -> Tensor:
    """The keys (or values) of the pieces, those that come from the ring filled in."""
    total = len(ring.kept_at) + len(ring.new_at)
    rows = new.new_empty(total, *new.shape[1:])
    block, offset = ring.kept // pages.shape[1], ring.kept % pages.shape[1]
    raw = (
        pages.view(torch.uint8)[block, offset].view(pages.dtype) if pages.element_size() == 1 else pages[block, offset]
    )
    old = raw.to(new.dtype)
    rows[ring.kept_at] = old if scales is None else (old.float() * scales[block, offset][..., None]).to(new.dtype)
    return rows
