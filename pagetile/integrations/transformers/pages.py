"""The blocks of one layer, and the two things done with them: write new tokens, attend over the old ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pagetile import ops
from pagetile.contracts.errors import ArgumentError, UnsupportedError
from pagetile.engine.probe import LayerSpec

QUANTISED = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "int8": "int8"}
"""``kv_cache_dtype`` -> what the blocks hold; each token and head gets a scale of its own."""

STORAGE = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Settings:
    """How :func:`pagetile.integrations.transformers.enable` was asked to run a model.

    Attributes:
        block_size: tokens in a block of ordinary ``generate``; continuous batching has its own ``page_size``.
        kv_cache_dtype: ``"auto"`` (the model's), ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"`` or ``"int8"``.
        backend: as in every op.
        batch_invariant: a row's bits do not depend on the rest of the batch.
    """

    block_size: int = 16
    kv_cache_dtype: str = "auto"
    backend: str = "auto"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ArgumentError(f"block_size is {self.block_size}; a block holds at least 1 token")
        if self.kv_cache_dtype != "auto" and self.kv_cache_dtype not in QUANTISED:
            raise ArgumentError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; it must be auto, {', '.join(QUANTISED)}")

    @property
    def kind(self) -> str | None:
        """What quantised blocks hold; None when they hold what the model computes."""
        return QUANTISED.get(self.kv_cache_dtype)


@dataclass(frozen=True, slots=True)
class Span:
    """Where the rows of a packed batch are, for one group of layers. T rows, B sequences.

    Attributes:
        slots: int64 ``[T]``, where each row's key and value go; -1 for a row that is not stored.
        query_start_loc: int32 ``[B + 1]``.
        seq_lens: int32 ``[B]``, keys of each sequence, the new ones included.
        block_table: int32 ``[B, width]``.
        max_query_len, max_seq_len: host bounds.
    """

    slots: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int

    def to(self, device: torch.device) -> Span:
        """The same on another device."""
        tensors = (self.slots, self.query_start_loc, self.seq_lens, self.block_table)
        slots, starts, lens, table = (tensor.to(device, non_blocking=True) for tensor in tensors)
        return Span(slots, starts, lens, table, self.max_query_len, self.max_seq_len)


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Keys and values of one layer.

    Attributes:
        key, value: ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``, any strides with a contiguous last axis.
        key_scale, value_scale: float32 ``[NB, BS, Hkv]`` of quantised pages, else None.
        kind: what quantised pages hold, else None.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    kind: str | None = None

    def write(self, key: Tensor, value: Tensor, slots: Tensor, settings: Settings) -> None:
        """Store rows ``[T, Hkv, D]`` and ``[T, Hkv, Dv]`` at their slots."""
        if self.kind is None:
            ops.reshape_and_cache_flash(key, value, self.key, self.value, slots, backend=settings.backend)
            return
        assert self.key_scale is not None
        assert self.value_scale is not None
        ops.reshape_and_cache_flash_per_token_head(
            key,
            value,
            self.key,
            self.value,
            slots,
            self.kind,
            self.key_scale,
            self.value_scale,
            backend=settings.backend,
        )

    def attend(
        self, query: Tensor, span: Span, layer: LayerSpec, options: dict, settings: Settings, *, ring: bool = False
    ) -> Tensor:
        """Attention of rows ``[T, Hq, D]`` over the pages, ``[T, Hq, Dv]``.

        ``ring``: the pages hold exactly the keys that each (single) query sees, in any order.
        """
        return _attend(
            query,
            self.key,
            self.value,
            span,
            layer,
            options,
            settings,
            causal=not ring,
            window_size=None if ring else layer.window,
            block_table=span.block_table,
            seqused_k=span.seq_lens,
            k_descale=self.key_scale,
            v_descale=self.value_scale,
            kv_cache_dtype=self.kind or "auto",
        )


def attend_ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: Span,
    key_start_loc: Tensor,
    layer: LayerSpec,
    options: dict,
    settings: Settings,
) -> Tensor:
    """Attention of rows ``[T, Hq, D]`` over ragged keys ``[total, Hkv, D]``, ``[T, Hq, Dv]``."""
    return _attend(
        query,
        key,
        value,
        span,
        layer,
        options,
        settings,
        causal=True,
        window_size=layer.window,
        cu_seqlens_k=key_start_loc,
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: Span,
    layer: LayerSpec,
    options: dict,
    settings: Settings,
    **how: Any,
) -> Tensor:
    sinks = options.get("s_aux")
    out = ops.flash_attn_varlen_func(
        query,
        key,
        value,
        max_seqlen_q=span.max_query_len,
        cu_seqlens_q=span.query_start_loc,
        max_seqlen_k=span.max_seq_len,
        softmax_scale=options.get("scaling"),
        softcap=layer.softcap,
        s_aux=None if sinks is None else sinks.detach().float(),
        backend=settings.backend,
        batch_invariant=settings.batch_invariant,
        **how,
    )
    return cast(Tensor, out)


def rows_of(packed: Tensor) -> Tensor:
    """``[B, H, S, D]`` -> ``[B * S, H, D]``, without a copy where the strides allow."""
    batch, heads, length, size = packed.shape
    rows = packed.transpose(1, 2).reshape(batch * length, heads, size)
    return rows if rows.stride(-1) == 1 or size == 1 else rows.contiguous()


def check_call(module: Any, layer: LayerSpec, options: dict) -> None:
    """Refuse what a call of the attention asks for and would not get.

    Raises:
        UnsupportedError: an option that changes the result and is not obeyed.
    """
    asked = options.get("sliding_window")
    if asked is not None and asked != layer.sliding_window:
        raise UnsupportedError(
            f"{layer.name} asks for a sliding window of {asked}; when it was enabled it had {layer.sliding_window}"
        )
    if options.get("is_causal") is False:
        raise UnsupportedError(f"{layer.name} asks for attention that is not causal; a cache is read causally")
    if options.get("output_attentions"):
        raise UnsupportedError(f"{layer.name} is asked for its attention weights, which paged attention does not form")
    if options.get("dropout") and module.training:
        raise UnsupportedError(f"{layer.name} asks for dropout; paged attention has no training path")
