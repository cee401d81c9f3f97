"""Switching a model's attention to pagetile and back, and what its attention then does.

A model that is enabled runs under the attention name ``pagetile``. Each call of its attention is looked at:

- inside a step of :mod:`pagetile.engine`, it belongs to the engine;
- its keys come from a :class:`~pagetile.integrations.transformers.cache.PagedCache`: it is attended over blocks;
- it comes from continuous batching: likewise (:mod:`pagetile.integrations.transformers.batching`);
- anything else (no cache, another kind of cache, training) goes to the attention that the model had before.

What is changed of the host, from :func:`enable` to :func:`disable`: the two registries of names (by registration); on
the model, the name in its configs and the methods named in :data:`METHODS`; and, while any model is enabled,
the class that continuous batching makes its cache of.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from pagetile.contracts.errors import ArgumentError, UnsupportedError
from pagetile.contracts.geometry import blocks_for
from pagetile.engine import attention as adapter
from pagetile.engine.probe import LayerSpec, inspect_model
from pagetile.integrations.transformers import batching
from pagetile.integrations.transformers.cache import OWNER, Length, PagedCache
from pagetile.integrations.transformers.pages import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHODS = ("_prepare_cache_for_generation", "init_continuous_batching")
"""Methods that an enabled model has an own version of: the one makes the cache of ``generate``, the other the manager
of continuous batching."""

CACHE_NAMES = ("cache", "past_key_values")
"""What a model calls its cache: the first from Transformers 5.24 on."""

_lock = threading.RLock()


@dataclass(slots=True, eq=False)
class Enabled:
    """A model whose attention is pagetile's.

    Attributes:
        specs: its layers, by ``layer_idx``.
        settings: what ``enable`` was asked for.
        configs: the configs whose name was changed, and what it was.
        end: forgets the configs, at ``disable`` or when the model is gone.
    """

    specs: tuple[LayerSpec, ...]
    settings: Settings
    configs: list[tuple[Any, str]]
    end: weakref.finalize | None = None


_enabled: weakref.WeakKeyDictionary[Any, Enabled] = weakref.WeakKeyDictionary()
_of_config: dict[int, Enabled] = {}


def enable(
    model: PreTrainedModel,
    *,
    block_size: int = 16,
    kv_cache_dtype: str = "auto",
    backend: str = "auto",
    batch_invariant: bool = False,
) -> PreTrainedModel:
    """Have ``model.generate`` and ``model.generate_batch`` keep keys and values in blocks and attend over them.

    Args:
        model: a decoder whose layers are full or sliding-window attention. It is run once, on three tokens.
        block_size: tokens in a block of ``generate`` (``generate_batch`` takes its ``page_size`` from the host).
        kv_cache_dtype: ``"auto"`` (the model's dtype), ``"fp8"`` (= ``"fp8_e4m3"``), ``"fp8_e5m2"`` or ``"int8"``,
            these with a scale for each token and head.
        backend: of the ops, ``"auto"``, ``"cpu"``, ``"reference"``, ...
        batch_invariant: the attention of a row does not depend, bit for bit, on the rest of the batch.

    Returns:
        The model. Enabling it again replaces the settings.

    Raises:
        UnsupportedModelError: a layer cannot be driven over blocks; the message names it.
        ArgumentError: a setting that cannot be.
        UnsupportedError: this version of Transformers lacks something that is needed; the message names it.
    """
    settings = Settings(block_size, kv_cache_dtype, backend, batch_invariant)
    with _lock:
        if model in _enabled:
            _enabled[model].settings = settings
            return model
        adapter.register()
        adapter.register(batching.name_for_managers())  # for forwards in other threads while a manager is being made
        for name in METHODS:
            if not hasattr(model, name):
                raise UnsupportedError(f"{type(model).__name__} has no {name}: it is not a model that generates")
        specs = inspect_model(model).layers
        if [spec.index for spec in specs] != list(range(len(specs))):
            raise UnsupportedError(f"{type(model).__name__} numbers its layers {[spec.index for spec in specs]}")
        configs = {id(c): c for c in (model.config, model.config.get_text_config(decoder=True))}.values()
        record = Enabled(specs, settings, [(config, _name_of(config)) for config in configs])
        batching.install(_settings_of_config)
        adapter.outside_steps(_Outside())
        for config, _ in record.configs:
            config._attn_implementation_internal = adapter.NAME
            _of_config[id(config)] = record
        model.__dict__["_prepare_cache_for_generation"] = types.MethodType(_prepare_cache_for_generation, model)
        model.__dict__["init_continuous_batching"] = types.MethodType(_init_continuous_batching, model)
        _enabled[model] = record
        record.end = weakref.finalize(model, _forget, [id(config) for config in configs])
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`enable`. A manager of continuous batching that the model keeps is destroyed.

    Returns:
        The model, whether it was enabled or not.

    Raises:
        RuntimeError: a manager of continuous batching is running; stop it first.
    """
    with _lock:
        record = _enabled.get(model)
        if record is None:
            return model
        kept = getattr(model, "_cached_continuous_batching_manager", None)
        if batching.running(model) or (kept is not None and kept.is_running()):
            raise RuntimeError("a continuous batching manager of the model is running; call its stop() first")
        if kept is not None:
            cast(Any, model).destroy_cached_continuous_batching_manager()
        for name in METHODS:
            model.__dict__.pop(name, None)
        for config, previous in record.configs:
            config._attn_implementation_internal = previous
        del _enabled[model]
        assert record.end is not None
        record.end()
    return model


def enabled(model: PreTrainedModel) -> bool:
    """Whether the model's attention is pagetile's."""
    return model in _enabled


def settings_of(model: PreTrainedModel) -> tuple[tuple[LayerSpec, ...], Settings]:
    """Layers and settings of an enabled model.

    Raises:
        ArgumentError: it is not enabled.
    """
    record = _enabled.get(model)
    if record is None:
        raise ArgumentError(
            f"{type(model).__name__} is not enabled; call pagetile.integrations.transformers.enable(model) first"
        )
    return record.specs, record.settings


def _name_of(config: Any) -> str:
    if not hasattr(config, "_attn_implementation_internal"):
        raise UnsupportedError("this version of Transformers keeps the name of a model's attention in another place")
    if config._attn_implementation == adapter.NAME:
        raise ArgumentError(
            "the model goes by pagetile's attention and is not enabled (a copy of an enabled model, perhaps): call "
            "model.set_attn_implementation('sdpa') first"
        )
    return config._attn_implementation


def _forget(config_ids: list[int]) -> None:
    with _lock:
        for config_id in config_ids:
            _of_config.pop(config_id, None)
        if not _of_config:
            batching.uninstall()
            adapter.outside_steps(None)


def _settings_of_config(config: Any) -> tuple[tuple[LayerSpec, ...], Settings] | None:
    record = _of_config.get(id(config))
    return None if record is None else (record.specs, record.settings)


class _Outside:
    """What the registered functions do outside a step of the engine."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict
    ) -> tuple[Tensor, Any]:
        """See :class:`pagetile.engine.attention.Outside`."""
        layer = getattr(key, OWNER, None)
        if layer is not None:
            delattr(key, OWNER)
            layer.cache.waiting = None
            return layer.attend(module, query, key, value, _padding_mask(mask), options), None
        cache = batching.cache_of(options)
        if cache is not None:
            return cache.attend(module, query, key, value, options), None
        return _previous_attention(module)(module, query, key, value, mask, **options)

    def mask(self, mask_function: Callable | None, options: dict) -> Any:
        """See :class:`pagetile.engine.attention.Outside`."""
        if batching.in_a_batch() and options.get("attention_mask") is None and options.get("batch_size") == 1:
            return None
        length = options.get("kv_length")
        if isinstance(length, Length):
            return _mask_for_pages(options)
        if mask_function is not None:
            options = {**options, "mask_function": mask_function}
        return _previous_mask(options.get("config"))(**options)


def _mask_for_pages(options: dict) -> Tensor | None:
    """The 2-D padding mask, or None when nothing is padding."""
    if options.get("use_vmap") or options.get("allow_is_causal_skip") is False:
        raise UnsupportedError(
            "the model asks for a mask that is more than causal or a sliding window (prefixes or images that see each "
            "other, say); attention over blocks has none. Call disable(model), or pass another cache"
        )
    mask = options.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask


def _padding_mask(mask: Any) -> Tensor | None:
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return mask
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedError(
        f"attention_mask is {shape}; attention over blocks takes the 2-D mask of padding, [batch, length], and forms "
        "no other. Call disable(model), or pass another cache"
    )


def _previous_name(config: Any) -> str:
    record = _of_config.get(id(config))
    if record is None:
        raise RuntimeError(
            f"{type(config).__name__} names the attention {adapter.NAME!r}, but no enabled model has this config (a "
            "copy of an enabled model, perhaps): call model.set_attn_implementation('sdpa')"
        )
    return next(previous for config_, previous in record.configs if config_ is config)


def _previous_attention(module: Any) -> Callable:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = _previous_name(module.config)
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if name != "eager" or eager is None:
        raise RuntimeError(f"the attention {name!r} that {type(module).__name__} had before is not known any more")
    return eager


def _previous_mask(config: Any) -> Callable:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = _previous_name(config)
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return lambda **options: options.get("attention_mask")
    return ALL_MASK_ATTENTION_FUNCTIONS[name]


# Methods of an enabled model -----------------------------------------------------------------------------------------


def _prepare_cache_for_generation(
    self: Any, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
) -> Any:
    """Let the host prepare its cache, and put one over blocks in its place where it is the plain growing one."""
    if generation_config.output_attentions:
        raise UnsupportedError("output_attentions: attention over blocks forms no weights; call disable(model) first")
    given = {name for name in CACHE_NAMES if model_kwargs.get(name) is not None}
    result = type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)
    for name in CACHE_NAMES:
        made = model_kwargs.get(name)
        if made is not None and name not in given:
            model_kwargs[name] = _over_pages(self, generation_config, made, args, kwargs)
    return result


def _over_pages(model: Any, generation_config: Any, made: Any, args: tuple, kwargs: dict) -> PagedCache:
    from transformers import DynamicCache, StaticCache

    if getattr(made, "offloading", False) or type(made) not in (DynamicCache, StaticCache):
        raise UnsupportedError(
            f"cache_implementation is {generation_config.cache_implementation!r}, which is not implemented over "
            "blocks; leave it out or use 'static' (with enable(kv_cache_dtype=...) for quantised blocks), or call "
            "disable(model)"
        )
    named = dict(zip(("generation_mode", "batch_size", "max_cache_length"), args, strict=False)) | kwargs
    longest, num_blocks = int(named["max_cache_length"]), None
    if isinstance(made, StaticCache):
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        # One more for each sequence: while a shared block is copied, both are held.
        num_blocks = int(named["batch_size"]) * copies * (blocks_for(longest, settings_of(model)[1].block_size) + 1)
    cache = PagedCache(model, num_blocks=num_blocks, expected_len=longest)
    if any(getattr(layer, "record_past", False) for layer in made.layers) or generation_config.is_assistant:
        cache.activate_past_recording()
    return cache


def _init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the host's manager while the model goes by a name that it accepts, and remember it."""
    batching.check_config(args, kwargs)
    with _called(self, batching.name_for_managers()):
        manager = type(self).init_continuous_batching(self, *args, **kwargs)
    batching.remember(self, manager)
    return manager


@contextmanager
def _called(model: Any, name: str) -> Iterator[None]:
    configs = [config for config, _ in _enabled[model].configs]
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, previous in zip(configs, before, strict=True):
            if config._attn_implementation == name:
                config._attn_implementation_internal = previous
