"""One forward of the model over a packed batch, its attention reading and writing the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pagetile import ops
from pagetile.cache.batch import Batch
from pagetile.cache.groups import LayerGroup
from pagetile.cache.kv import PagedKVCache
from pagetile.contracts.metadata import AttentionMetadata
from pagetile.engine.attention import attending, engaged
from pagetile.engine.probe import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layer_groups(layers: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
    """Layers that can share block ids: the same window and the same sizes. In order of first appearance."""
    found: dict[tuple, list[LayerSpec]] = {}
    for layer in layers:
        key = (layer.sliding_window, layer.num_kv_heads, layer.head_size, layer.head_size_v)
        found.setdefault(key, []).append(layer)
    groups = []
    for (window, heads, size, size_v), members in found.items():
        name = "full" if window is None else f"window_{window}"
        if any(g.name == name for g in groups):
            name = f"{name}_{heads}x{size}"
        if any(g.name == name for g in groups):
            name = f"{name}_{size_v}"
        indices = tuple(layer.index for layer in members)
        groups.append(LayerGroup(name, indices, window, num_kv_heads=heads, head_size=size, head_size_v=size_v))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which ops attend, and how they are asked to.

    Attributes:
        backend: as in every op.
        batch_invariant: a row's bits do not depend on the rest of the batch.
    """

    backend: str = "auto"
    batch_invariant: bool = False


Watch = Callable[[int, Tensor, Tensor], None]
"""``(layer, keys, values)``."""


class PagedStep:
    """The attention of all layers for one step: store the new keys and values, attend over the blocks.

    Attributes:
        calls: layers that have attended so far.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerSpec],
        cache: PagedKVCache,
        metadata: Mapping[str, AttentionMetadata],
        kernels: Kernels,
        watch: Watch | None = None,
    ) -> None:
        self.layers = layers
        self.cache = cache
        self.metadata = metadata
        self.kernels = kernels
        self.watch = watch
        self.calls = 0

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, options: dict) -> Tensor:
        """See :class:`pagetile.engine.attention.Attending`."""
        index = module.layer_idx
        layer = self.layers[index]
        batch = self.metadata[self.cache.group_of(index).name]
        keys, values = self.cache.key(index), self.cache.value(index)
        k_scale, v_scale = self._store(index, _rows(key), _rows(value), batch.slot_mapping)
        sinks = options.get("s_aux")
        out = ops.flash_attn_varlen_func(
            _rows(query),
            keys,
            values,
            max_seqlen_q=batch.max_query_len,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_k=batch.max_seq_len,
            seqused_k=batch.seq_lens,
            softmax_scale=options.get("scaling"),
            causal=True,
            window_size=layer.window,
            softcap=layer.softcap,
            block_table=batch.block_table,
            k_descale=k_scale,
            v_descale=v_scale,
            s_aux=None if sinks is None else sinks.detach().float(),
            backend=self.kernels.backend,
            batch_invariant=self.kernels.batch_invariant,
        )
        self.calls += 1
        return cast(Tensor, out)[None]

    def _store(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Write the new tokens' keys and values; the scales to read them with."""
        if self.watch is not None:
            self.watch(layer, key, value)
        cache, backend = self.cache, self.kernels.backend
        k_scale, v_scale = cache.scales(layer)
        where = (key, value, cache.key(layer), cache.value(layer), slots)
        if cache.own_scales:
            assert k_scale is not None
            assert v_scale is not None
            ops.reshape_and_cache_flash_per_token_head(*where, cache.kind, k_scale, v_scale, backend=backend)
        else:
            ops.reshape_and_cache_flash(*where, "auto", k_scale, v_scale, backend=backend)
        return k_scale, v_scale

    def mask(self, _rule: Callable | None, _options: dict) -> None:
        """No mask tensor: the metadata says what is visible."""


def _rows(packed: Tensor) -> Tensor:
    """``[1, H, T, D]`` -> ``[T, H, D]``, a view unless the last dimension has a stride."""
    rows = packed[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model takes its token ids."""
    return cast(Tensor, model.get_input_embeddings().weight).device


class ModelRunner:
    """Runs a model over packed batches.

    Args:
        model: a Transformers decoder.
        spec: what :func:`pagetile.engine.probe.inspect_model` found.
        cache: keys and values of the model's layers.

    Attributes:
        watch: called with each layer's new keys and values ``[T, Hkv, D]`` before they are stored, or None.
    """

    def __init__(self, model: PreTrainedModel, spec: ModelSpec, cache: PagedKVCache, kernels: Kernels) -> None:
        self.model = model
        self.spec = spec
        self.cache = cache
        self.kernels = kernels
        self.layers = {layer.index: layer for layer in spec.layers}
        self.device = device_of(model)
        self.watch: Watch | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch, rows: Sequence[int]) -> Tensor:
        """Logits ``[len(rows), vocabulary]`` of the given rows of a packed batch; its K and V are in the cache then.

        Raises:
            RuntimeError: a layer did not attend over the cache, so the logits would be wrong.
        """
        wanted = torch.tensor(rows, dtype=torch.int64).to(self.device)
        step = PagedStep(self.layers, self.cache, batch.metadata, self.kernels, self.watch)
        extra = {"logits_to_keep": wanted} if self.spec.keeps_rows else {}
        with engaged(self.model), attending(step):
            output = self.model(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **extra
            )
        if step.calls != len(self.layers):
            raise RuntimeError(
                f"{step.calls} of {len(self.layers)} layers attended over the paged cache; the model's attention "
                "implementation was changed during the forward"
            )
        logits = output.logits[0]
        return logits if self.spec.keeps_rows else logits[wanted]
