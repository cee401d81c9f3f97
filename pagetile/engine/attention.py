"""The adapter: how a Transformers model comes to attend over a paged cache.

Transformers lets a model's attention be named. Under the name ``pagetile`` this file registers one attention function
and one mask function. Both ask the calling context (a :class:`contextvars.ContextVar`, so each thread has its own)
what to do: inside a step of the engine the packed batch is written to the cache and attended over it; while a model is
loaded its layers are asked what they are (:mod:`pagetile.engine.probe`). Anywhere else they go to whoever has taken
that up (:func:`outside_steps`), and without such raise, because attention without a cache and without a mask would be
bidirectional and quietly wrong.

No module of the model is replaced. A model object that the caller owns is switched to the name for the time of a step
only (:func:`engaged`), so its ordinary ``forward`` and ``generate`` keep working between steps.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "pagetile"
"""Under which both functions are registered. (A name with "flash" in it makes Transformers look for a package.)"""


class Attending(Protocol):
    """What stands behind the registered functions for the time of one forward."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict, /) -> Tensor:
        """``query`` ``[1, Hq, T, D]``, ``key`` ``[1, Hkv, T, D]``, ``value`` ``[1, Hkv, T, Dv]`` of the packed batch,
        rotated; returns ``[1, T, Hq, Dv]``."""
        ...

    def mask(self, mask_function: Callable | None, options: dict, /) -> Any:
        """What the layers get as their ``attention_mask``."""
        ...


class Outside(Protocol):
    """What the registered functions do outside of every :func:`attending`."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict, /
    ) -> tuple[Tensor, Any]:
        """The result of an attention function of Transformers: ``[B, S, Hq, Dv]``, and weights or None."""
        ...

    def mask(self, mask_function: Callable | None, options: dict, /) -> Any:
        """What the layers get as their ``attention_mask``."""
        ...


_current: ContextVar[Attending | None] = ContextVar("pagetile_attending", default=None)
_outside: Outside | None = None


def outside_steps(target: Outside | None) -> None:
    """Route what is no step of an engine to ``target``, or have it raise again (None)."""
    global _outside
    _outside = target


@contextlib.contextmanager
def attending(target: Attending) -> Iterator[None]:
    """Route the attention of the models that this context calls to ``target``."""
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)


def register(name: str = NAME) -> None:
    """Make the name known to Transformers: attention and mask. Doing it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, paged_attention_forward)
    AttentionMaskInterface.register(name, paged_attention_mask)


def paged_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Any]:
    """The attention function of Transformers' ``AttentionInterface``.

    Raises:
        RuntimeError: called outside a step of the engine, and nobody has taken that up.
    """
    if _outside is not None and _current.get() is None:
        return _outside.attend(module, query, key, value, attention_mask, options)
    return _require_context().attend(module, query, key, value, attention_mask, options), None


def paged_attention_mask(*, mask_function: Callable | None = None, **options: Any) -> Any:
    """The mask function of Transformers' ``AttentionMaskInterface``: the paged kernels need no mask tensor.

    Raises:
        RuntimeError: called outside a step of the engine, and nobody has taken that up.
    """
    if _outside is not None and _current.get() is None:
        return _outside.mask(mask_function, options)
    return _require_context().mask(mask_function, options)


def _require_context() -> Attending:
    target = _current.get()
    if target is None:
        raise RuntimeError(
            f"attention implementation {NAME!r} was called without a paged cache: it runs inside a step of "
            "pagetile.LLM or pagetile.Engine only. For an ordinary forward, call "
            "model.set_attn_implementation('sdpa') first"
        )
    return target


class _Switch:
    """Who has switched a model to our name, and what to put back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.previous: list[tuple[Any, Any]] = []


_switches: weakref.WeakKeyDictionary[Any, _Switch] = weakref.WeakKeyDictionary()
_switches_lock = threading.Lock()


@contextlib.contextmanager
def engaged(model: PreTrainedModel) -> Iterator[None]:
    """The model's attention is ours inside, and what it was before outside; counted, for engines that share a model."""
    with _switches_lock:
        switch = _switches.setdefault(model, _Switch())
    with switch.lock:
        if switch.users == 0:
            switch.previous = [(config, config._attn_implementation) for config in _configs(model)]
            for config, _ in switch.previous:
                config._attn_implementation = NAME
        switch.users += 1
    try:
        yield
    finally:
        with switch.lock:
            switch.users -= 1
            if switch.users == 0:
                for config, implementation in switch.previous:
                    config._attn_implementation = implementation
                switch.previous = []


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configs that the model's modules read: its own and those nested in it, each once, outer before inner."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if config is None or id(config) in found:
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", None) or ():
            visit(getattr(config, name, None))

    visit(model.config)
    return list(found.values())
