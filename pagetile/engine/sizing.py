"""How large an engine is: lengths, blocks, and the cache made of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagetile.cache.groups import CacheGeometry
from pagetile.cache.kv import PagedKVCache
from pagetile.cache.memory import budget
from pagetile.cache.offload import HostBlocks
from pagetile.cache.scales import CacheScales
from pagetile.cache.sequences import SequenceTable
from pagetile.contracts.dtypes import KV_CACHE_DTYPES, QUANTISED
from pagetile.contracts.errors import ArgumentError
from pagetile.contracts.geometry import blocks_for
from pagetile.engine.probe import ModelSpec
from pagetile.engine.runner import device_of, layer_groups
from pagetile.reference.quantise import STORED_AS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and switches of an engine.

    Attributes:
        block_size: tokens in a block, any integer of at least 1.
        num_blocks: blocks of every group of layers, or ``"auto"``: what fits in ``memory``, and no more than
            ``max_num_seqs`` sequences of the maximum length need.
        memory: for ``"auto"``: an int is bytes, a float in (0, 1] a share of the memory available on the device.
        max_batch_tokens: tokens that one step computes at most; longer prompts are computed in pieces.
        max_num_seqs: sequences that run at once at most.
        max_length: tokens of a prompt and its answer at most; None is what the model was made for.
        prefix_cache: whether full blocks of earlier prompts and answers are kept and shared.
        preemption: what becomes of a sequence that must give its blocks to an older one: ``"recompute"`` computes it
            again, ``"swap"`` keeps its blocks in host memory while it waits, as long as there is room.
        host_blocks: for ``"swap"``: blocks of every group in host memory; None is as many as the cache has.
        kv_cache_dtype: what the cache stores: ``"auto"`` (the dtype of the model's keys), ``"fp8"`` (= ``"fp8_e4m3"``),
            ``"fp8_e4m3"``, ``"fp8_e5m2"`` or ``"int8"``.
        kv_scales: of a quantised cache: scales from a calibration, the path of a file of them (or of its folder), or
            ``"token_head"``: each token and head gets its own. None is 1 everywhere for fp8, and ``"token_head"`` for
            int8, which with a scale of 1 would round most keys and values to 0.
        backend: of the ops, ``"auto"``, ``"cpu"``, ``"reference"``, ...
        batch_invariant: the attention of a row does not depend, bit for bit, on the rest of the batch. The model's
            matrix products are torch's and may still differ in the last bit.
    """

    block_size: int = 16
    num_blocks: int | Literal["auto"] = "auto"
    memory: int | float | None = None
    max_batch_tokens: int = 512
    max_num_seqs: int = 64
    max_length: int | None = None
    prefix_cache: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    host_blocks: int | None = None
    kv_cache_dtype: str = "auto"
    kv_scales: CacheScales | str | os.PathLike | None = None
    backend: str = "auto"
    batch_invariant: bool = False


def longest(spec: ModelSpec, config: EngineConfig) -> int:
    """Tokens that a prompt and its answer may have together.

    Raises:
        ArgumentError: longer than the model was made for, or nobody says.
    """
    asked, own = config.max_length, spec.max_length
    if asked is None:
        if own is None:
            raise ArgumentError("the model does not say how long its context is; pass max_length")
        return own
    if asked < 2 or (own is not None and asked > own):
        raise ArgumentError(
            f"max_length is {asked}; prompt and answer together may have 2 to {own or 'any number of'} tokens with "
            "this model"
        )
    return asked


def make_cache(model: PreTrainedModel, spec: ModelSpec, config: EngineConfig, max_length: int) -> PagedKVCache:
    """The cache of a model's layers, in the dtype of its keys and on its device.

    Raises:
        ArgumentError: sizes below 1, a memory that holds no block, or both ``num_blocks`` and ``memory``.
    """
    groups = layer_groups(spec.layers)
    device = device_of(model)
    dtype = STORED_AS.get("fp8_e4m3" if config.kv_cache_dtype == "fp8" else config.kv_cache_dtype, spec.layers[0].dtype)
    scales = cache_scales(config)
    num_blocks: int | dict[str, int]
    if config.num_blocks == "auto":
        geometry = CacheGeometry.of(
            groups,
            block_size=config.block_size,
            itemsize=dtype.itemsize,
            scale_bytes=8 if scales == "token_head" else 0,
        )
        fitting = geometry.plan(budget(config.memory, device))
        useful = config.max_num_seqs * blocks_for(max_length, config.block_size)
        num_blocks = {name: min(count, useful) for name, count in fitting.items()}
    elif config.memory is not None:
        raise ArgumentError(
            f"memory is {config.memory!r} and num_blocks is {config.num_blocks}; memory goes with num_blocks='auto'"
        )
    else:
        num_blocks = config.num_blocks
    return PagedKVCache(
        groups=groups,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        device=device,
        kv_cache_dtype=config.kv_cache_dtype,
        scales=scales,
    )


def cache_scales(config: EngineConfig) -> CacheScales | Literal["token_head"] | None:
    """The scales that a configuration names, read from their file where it is a path.

    Raises:
        ArgumentError: an unknown ``kv_cache_dtype``, scales without a quantised cache, or a file that is not there or
            is for another kind.
    """
    if config.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ArgumentError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}; it must be one of {', '.join(KV_CACHE_DTYPES)}"
        )
    kind = "fp8_e4m3" if config.kv_cache_dtype == "fp8" else config.kv_cache_dtype
    if config.kv_scales is None:
        return "token_head" if kind == "int8" else None
    if kind not in QUANTISED:
        raise ArgumentError(
            f"kv_scales are given, but kv_cache_dtype is {config.kv_cache_dtype!r}; scales go with one of "
            f"{', '.join(QUANTISED)}"
        )
    if config.kv_scales == "token_head":
        return "token_head"
    if isinstance(config.kv_scales, CacheScales):
        return config.kv_scales
    return CacheScales.load(config.kv_scales, kind)


def make_host(table: SequenceTable, cache: PagedKVCache, config: EngineConfig) -> HostBlocks | None:
    """Host blocks for preempted sequences, if the configuration asks for them.

    Raises:
        ArgumentError: an unknown policy, fewer than 1 host block, or host blocks that no policy uses.
    """
    if config.preemption not in ("recompute", "swap"):
        raise ArgumentError(f"preemption is {config.preemption!r}; it must be 'recompute' or 'swap'")
    if config.preemption == "swap":
        return HostBlocks(table, cache, cache.num_blocks if config.host_blocks is None else config.host_blocks)
    if config.host_blocks is not None:
        raise ArgumentError(f"host_blocks is {config.host_blocks}; it goes with preemption='swap'")
    return None


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """The model's own end tokens: of its generation config, else of its config."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        if isinstance(ids, int):
            return frozenset({ids})
        if ids is not None:
            return frozenset(ids)
    return frozenset()
