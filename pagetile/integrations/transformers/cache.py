"""The cache of ordinary ``generate``: Transformers' ``Cache`` over blocks.

A layer's ``update`` stores nothing: it marks the new keys as belonging to the layer and hands them back. The attention
that gets them next (:mod:`pagetile.integrations.transformers.switch`) knows the mask as well, writes the tokens that
are no padding into blocks, and attends over the blocks. So nothing is concatenated, gathered or repeated, beams share
the blocks of what they have in common, and padding takes no memory.

Layers with the same window share a :class:`~pagetile.integrations.transformers.tables.PageTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from pagetile.cache.memory import lazy_zeros
from pagetile.contracts.errors import ArgumentError, UnsupportedError
from pagetile.engine.probe import LayerSpec
from pagetile.integrations.transformers.pages import STORAGE, Pages, check_call, rows_of
from pagetile.integrations.transformers.tables import PageTable, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWNER = "_pagetile_layer"
"""Attribute of a key tensor on its way from ``update`` to the attention: the layer whose pages it goes to."""


class Length(int):
    """A length that remembers which cache it is the length of: it reaches the mask function with the call."""

    cache: PagedCache

    @classmethod
    def of(cls, length: int, cache: PagedCache) -> Length:
        """``length``, marked."""
        marked = cls(length)
        marked.cache = cache
        return marked


class PagedLayer(CacheLayerMixin):
    """One layer of a :class:`PagedCache`."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, spec: LayerSpec, table: PageTable) -> None:
        super().__init__()
        self.cache = cache
        self.spec = spec
        self.table = table
        self.is_sliding = spec.sliding_window is not None
        self.pages: Pages | None = None
        self.length = 0

    # What the host calls ---------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Announce new keys and values, ``[B, Hkv, S, D]`` and ``[B, Hkv, S, Dv]``; the attention stores them.

        Raises:
            RuntimeError: the previous layer's attention did not come to pagetile.
        """
        waiting = self.cache.waiting
        if waiting is not None:
            raise RuntimeError(
                f"{waiting.spec.name} took keys for a PagedCache, but its attention did not run through pagetile: call "
                "pagetile.integrations.transformers.enable(model) first. (After a forward that failed, call reset() or "
                "crop() on the cache.)"
            )
        self.lazy_initialization(key_states, value_states)
        setattr(key_states, OWNER, self)
        self.cache.waiting = self
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002 (the host's names)
        """Nothing is allocated before it is known how much: see :meth:`attend`."""
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(length after the forward, 0)``; the length says whose it is."""
        return Length.of(self.length + query_length, self.cache), 0

    def get_seq_length(self) -> int:
        """Rows seen, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """-1: no maximum of a sequence alone."""
        return -1

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self) -> int:
        """Sequences; -1 before the first forward."""
        return self.table.batch_size or -1

    def _whole(self, *_args: Any, **_kwargs: Any) -> Any:
        raise UnsupportedError("the layers of a PagedCache share their blocks; call this on the cache, not on a layer")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = offload = prefetch = _whole

    # What the attention calls ----------------------------------------------------------------------------------------

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict
    ) -> Tensor:
        """Store new keys and values, and attend over all of them.

        Args:
            query: ``[B, Hq, S, D]``.
            key, value: ``[B, Hkv, S, D]`` and ``[B, Hkv, S, Dv]``, rotated.
            mask: ``[B, length + S]``, false for padding, or None.

        Returns:
            ``[B, S, Hq, Dv]``; 0 where the query is padding.
        """
        check_call(module, self.spec, options)
        if options.get("cu_seq_lens_q") is not None:
            raise UnsupportedError(f"{self.spec.name} is given packed sequences; a PagedCache takes a batch of rows")
        batch, _, count, _ = key.shape
        step = self._step(batch, count, mask)
        pages = self._room(key, value)
        span, rows = step.on(key.device)
        q, k, v = rows_of(query), rows_of(key), rows_of(value)
        if rows is not None:
            q, k, v = q[rows], k[rows], v[rows]
        settings = self.cache.settings
        pages.write(k, v, span.slots, settings)
        out = pages.attend(q, span, self.spec, options, settings)
        self.length += count
        if rows is not None:
            packed, out = out, out.new_zeros(batch * count, *out.shape[1:])
            out[rows] = packed
        return out.view(batch, count, *out.shape[1:])

    def _step(self, batch: int, count: int, mask: Tensor | None) -> Step:
        """The table's current forward, or a new one when this is the first layer to ask."""
        table, last = self.table, self.cache.paged[-1]
        if self is self.cache.paged[0] and self.length != last.length:
            raise RuntimeError(
                f"{self.spec.name} has seen {self.length} rows, but {last.spec.name} {last.length}: a forward did not "
                "finish. Call crop() with the rows it had, or reset(), on the cache"
            )
        if self.length == table.length:
            step = table.begin(batch, count, mask)
            if step.copies:
                self.cache.copy_blocks(table, step.copies)
            return step
        step = table.step
        if step is None or self.length + count != table.length or step.count != count:
            raise RuntimeError(
                f"{self.spec.name} has seen {self.length} rows and gets {count}, but other layers are at "
                f"{table.length}: a forward did not finish. Call crop() with the rows it had, or reset(), on the cache"
            )
        return step

    def _room(self, key: Tensor, value: Tensor) -> Pages:
        """The pages, large enough for the blocks that the table hands out."""
        pages, needed = self.pages, self.table.num_blocks
        if pages is None or pages.key.shape[0] < needed:
            self.pages = pages = self._allocate(key, value, needed)
        return pages

    def _allocate(self, key: Tensor, value: Tensor, num_blocks: int) -> Pages:
        settings, old = self.cache.settings, self.pages
        kind = settings.kind
        dtype = key.dtype if kind is None else STORAGE[kind]

        def grown(before: Tensor | None, size: tuple[int, ...], of: torch.dtype) -> Tensor:
            fresh = lazy_zeros((num_blocks, self.table.block_size, *size), of, key.device)
            if before is not None:
                raw, source = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (fresh, before))
                raw[: len(source)].copy_(source)
            return fresh

        heads, size, size_v = key.shape[1], key.shape[3], value.shape[3]
        keys = grown(old and old.key, (heads, size), dtype)
        values = grown(old and old.value, (heads, size_v), dtype)
        if kind is None:
            return Pages(keys, values)
        key_scale = grown(old and old.key_scale, (heads,), torch.float32)
        return Pages(keys, values, key_scale, grown(old and old.value_scale, (heads,), torch.float32), kind)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, keys and values, before they are written."""
        pages = self.pages
        if pages is None:
            return
        if pages.key.shape[0] < self.table.num_blocks:
            heads = pages.key.shape[2]
            shaped = [t.new_empty((1, heads, 0, t.shape[3])) for t in (pages.key, pages.value)]
            self.pages = pages = self._allocate(shaped[0], shaped[1], self.table.num_blocks)
        device = pages.key.device
        sources, targets = (torch.tensor(side, device=device) for side in zip(*pairs, strict=True))
        for tensor in (pages.key, pages.value, pages.key_scale, pages.value_scale):
            if tensor is not None:
                raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
                raw.index_copy_(0, targets, raw.index_select(0, sources))

    def __repr__(self) -> str:
        return f"PagedLayer({self.spec.index}, {self.length} tokens of {self.table.batch_size} sequences)"


class PagedCache(Cache):
    """A ``Cache`` for ``generate`` and ``forward`` whose keys and values lie in blocks.

    After :func:`pagetile.integrations.transformers.enable`, ``model.generate(...)`` makes one by itself; make one to
    keep it between calls, or to bound it::

        cache = PagedCache(model, num_blocks=256)
        model.generate(**inputs, past_key_values=cache)     # named cache=... from Transformers 5.24 on

    Args:
        model: an enabled model.
        num_blocks: blocks of each group of layers with the same window, and no more; None grows as needed.
        expected_len: tokens that a sequence will have at most, where that is known; saves growing.

    Raises:
        ArgumentError: the model is not enabled, or ``num_blocks`` is below 1.
    """

    def __init__(
        self, model: PreTrainedModel, *, num_blocks: int | None = None, expected_len: int | None = None
    ) -> None:
        from pagetile.integrations.transformers.switch import settings_of

        if num_blocks is not None and num_blocks < 1:
            raise ArgumentError(f"num_blocks is {num_blocks}; a cache has at least 1 block")
        specs, self.settings = settings_of(model)
        self.tables = {
            window: PageTable(self.settings.block_size, window, num_blocks, expected_len)
            for window in dict.fromkeys(spec.sliding_window for spec in specs)
        }
        self.waiting: PagedLayer | None = None
        self.paged = [PagedLayer(self, spec, self.tables[spec.sliding_window]) for spec in specs]
        super().__init__(layers=list(self.paged))

    def copy_blocks(self, table: PageTable, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in every layer of a table."""
        for layer in self.paged:
            if layer.table is table:
                layer.copy_blocks(pairs)

    def reset(self) -> None:
        """Forget all sequences; the memory is kept."""
        self.waiting = None
        for table in self.tables.values():
            table.reset()
        for layer in self.paged:
            layer.length = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam i goes on from what beam ``beam_idx[i]`` was: blocks are shared, and copied when first written."""
        self._take_rows(beam_idx.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times; blocks are shared."""
        self._take_rows(np.repeat(np.arange(self.num_sequences), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the named sequences (indices, or a boolean for each)."""
        chosen = indices.cpu().numpy()
        self._take_rows(np.flatnonzero(chosen) if chosen.dtype == bool else chosen)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` rows.

        Raises:
            ArgumentError: the number is positive (once the meaning was another) or larger than the cache.
            UnsupportedError: the window would need tokens whose blocks were given back.
        """
        tokens_to_remove = int(tokens_to_remove)  # some hosts pass a tensor
        if tokens_to_remove > 0:
            raise ArgumentError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
        # After a forward that failed, the first layers and their tables are ahead of the others.
        left = self.get_seq_length() + tokens_to_remove
        if left < 0:
            raise ArgumentError(f"crop({tokens_to_remove}): the cache has {self.get_seq_length()} tokens")
        counts = [(table, max(0, table.length - left)) for table in self.tables.values()]
        for table, count in counts:
            table.check_crop(count)
        for table, count in counts:
            table.crop(count)
        self.waiting = None
        for layer in self.paged:
            layer.length = layer.table.length

    def activate_past_recording(self) -> None:
        """Keep blocks behind a window until the next :meth:`crop`, so that it may take tokens back."""
        for table in self.tables.values():
            table.recording = True

    @property
    def num_sequences(self) -> int:
        """Sequences; 0 before the first forward."""
        return max(table.batch_size for table in self.tables.values())

    def check(self) -> None:
        """Prove the invariants of every table and pool; AssertionError names the first that does not hold."""
        for table in self.tables.values():
            table.check()

    def _take_rows(self, rows: np.ndarray) -> None:
        for table in self.tables.values():
            table.take_rows(rows)

    def __repr__(self) -> str:
        groups = ", ".join(
            f"{'full' if window is None else f'window {window}'}: {table.num_blocks} blocks of {table.block_size}"
            for window, table in self.tables.items()
        )
        return f"PagedCache({len(self.layers)} layers, {self.num_sequences} sequences; {groups})"
