"""What the layers of a model are, found out by running them once rather than by knowing their names.

The model forwards a few tokens with an attention that records each call: heads, head sizes, window, softcap, sinks,
and the mask that the model built for the layer. A layer is accepted when this attention can reproduce it: called once,
causal or sliding window, no argument that would be ignored. Everything else is refused with the layer's name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagetile.contracts.errors import UnsupportedError
from pagetile.contracts.visibility import normalize_window, visible_range, window_from_sliding
from pagetile.engine.attention import NAME, attending, engaged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_TOKENS = 3

HARMLESS_OPTIONS = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache", "is_causal"}
    | {"output_attentions", "output_hidden_states", "return_dict", "cache_position", "position_embeddings"}
)
"""Keywords of attention calls that are obeyed, or that do not change the result. Others, when set, are refused."""

FOLLOWED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Values of ``config.layer_types`` that can be driven; the others are named in the refusal before anything runs."""

BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies follow the longest position of the batch."""


class UnsupportedModelError(UnsupportedError):
    """The model has a layer that the engine cannot drive; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, as its call showed it.

    Attributes:
        index: the module's ``layer_idx``.
        name: of the module inside the model.
        sliding_window: tokens a query sees, itself included; None is all.
        softcap: 0 is off.
        sinks: whether the layer has attention sinks.
        dtype: of queries, keys and values.
    """

    index: int
    name: str
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    sliding_window: int | None
    softcap: float
    sinks: bool
    dtype: torch.dtype

    @property
    def window(self) -> tuple[int, int]:
        """``window_size`` of the attention ops."""
        return window_from_sliding(self.sliding_window)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine knows of a model.

    Attributes:
        layers: by ``layer_idx``, ascending.
        vocab_size: logits a row.
        max_length: positions the model was made for; None if its config does not say.
        keeps_rows: the model computes logits for given rows only (``logits_to_keep`` takes indices).
    """

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_length: int | None
    keeps_rows: bool


def inspect_model(model: PreTrainedModel) -> ModelSpec:
    """Run the model once on three tokens and describe its layers.

    Raises:
        UnsupportedModelError: something in it cannot be driven over a paged cache, with the layer's name.
    """
    config = model.config.get_text_config(decoder=True)
    _refuse_by_config(model, config)
    names = {id(module): name for name, module in model.named_modules()}
    probe = _Probe(names, type(model).__name__)
    keeps_rows = "logits_to_keep" in _forward_parameters(model)
    try:
        logits = _forward(model, probe, keeps_rows)
    except (TypeError, IndexError, ValueError):
        if not keeps_rows or probe.layers:
            raise
        keeps_rows = False
        logits = _forward(model, probe, keeps_rows)
    if keeps_rows and logits.shape[1] != 1:  # the argument exists and is not obeyed
        keeps_rows = False
    _refuse_silent_layers(model, config, probe)
    _refuse_mixing(model, logits[:, -1], _forward(model, _Probe(names, probe.model_name), keeps_rows, first=7)[:, -1])
    layers = tuple(probe.layers[index] for index in sorted(probe.layers))
    max_length = getattr(config, "max_position_embeddings", None)
    _refuse_rope(model)
    return ModelSpec(layers, logits.shape[-1], max_length, keeps_rows)


def _forward_parameters(model: PreTrainedModel) -> Any:
    import inspect

    return inspect.signature(model.forward).parameters


@torch.inference_mode()
def _forward(model: PreTrainedModel, probe: _Probe, keeps_rows: bool, first: int = 1) -> Tensor:
    device = next(model.parameters()).device
    positions = torch.arange(PROBE_TOKENS, device=device)[None]
    ids = positions + 1
    ids[0, 0] = first
    extra = {"logits_to_keep": torch.tensor([PROBE_TOKENS - 1], device=device)} if keeps_rows else {}
    with engaged(model), attending(probe):
        return model(input_ids=ids, position_ids=positions, use_cache=False, **extra).logits


class _Probe:
    """Records what each layer asks of its attention, and answers zeros."""

    def __init__(self, names: dict[int, str], model_name: str) -> None:
        self.names = names
        self.model_name = model_name
        self.layers: dict[int, LayerSpec] = {}
        self._masks: dict[int, tuple[Tensor, Callable | None]] = {}

    def mask(self, mask_function: Callable | None, options: dict) -> Tensor:
        """A stand-in tensor that the layer hands back, so that each layer's own mask rule can be looked up."""
        stand_in = torch.ones(1, 1, PROBE_TOKENS, PROBE_TOKENS, dtype=torch.bool, device=options.get("device"))
        self._masks[id(stand_in)] = stand_in, mask_function
        return stand_in

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict) -> Tensor:
        """Take down the call as a :class:`LayerSpec`, or refuse it."""
        name = self.names.get(id(module), type(module).__name__)
        index = getattr(module, "layer_idx", None)
        if index is None:
            self._refuse(name, module, "does not say which layer it is (no layer_idx)")
        if index in self.layers:
            self._refuse(name, module, f"attends a second time as layer {index}; a layer has one cache")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            self._refuse(name, module, "is not causal")
        if query.shape[2] != key.shape[2]:
            self._refuse(name, module, f"has {query.shape[2]} queries for {key.shape[2]} keys, so it attends elsewhere")
        if query.shape[1] % key.shape[1]:
            self._refuse(name, module, f"has {query.shape[1]} query heads for {key.shape[1]} key heads")
        dtypes = {query.dtype, key.dtype, value.dtype} | {layer.dtype for layer in self.layers.values()}
        if len(dtypes) > 1:
            named = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            self._refuse(name, module, f"mixes dtypes ({named}) in its queries, keys and values, or with other layers")
        ignored = [k for k, v in options.items() if k not in HARMLESS_OPTIONS and v is not None and v is not False]
        if ignored:
            self._refuse(name, module, f"passes {', '.join(ignored)} to its attention, which would be ignored")
        spec = LayerSpec(
            index=operator.index(index),  # type: ignore[arg-type]
            name=name,
            num_q_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            head_size_v=value.shape[3],
            sliding_window=options.get("sliding_window"),
            softcap=float(options.get("softcap") or 0.0),
            sinks=options.get("s_aux") is not None,
            dtype=key.dtype,
        )
        self._check_mask(spec, module, mask)
        self.layers[spec.index] = spec
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _check_mask(self, spec: LayerSpec, module: Any, mask: Any) -> None:
        if id(mask) not in self._masks:
            self._refuse(spec.name, module, "builds its own attention mask")
        rule = self._masks[id(mask)][1]
        if rule is None:
            return
        wrong = _first_difference(rule, spec.sliding_window)
        if wrong is not None:
            query, key, visible = wrong
            kind = "full causal" if spec.sliding_window is None else f"sliding window {spec.sliding_window}"
            seen = "sees" if visible else "does not see"
            why = f"has a mask that is not {kind} attention: position {query} {seen} position {key}"
            self._refuse(spec.name, module, why)

    def _refuse(self, name: str, module: Any, why: str) -> None:
        raise UnsupportedModelError(
            f"{self.model_name} cannot be run over a paged cache: {name} ({type(module).__name__}) {why}. "
            "Supported are decoders whose layers are full or sliding-window attention"
        )


def _first_difference(rule: Callable, sliding_window: int | None) -> tuple[int, int, bool] | None:
    """A (query, key) at which a mask rule and the window disagree, with what the rule says; None if none was found.

    A rule is a function of positions, so it is asked around the window's edges at any distance without running a
    long prompt: chunked, prefix and bidirectional masks all show there.
    """
    window = normalize_window(window_from_sliding(sliding_window), causal=True)
    reach = sliding_window or 64
    positions = sorted({0, 1, reach - 1, reach, reach + 1, 2 * reach, 3 * reach + 1, 8191, 16 * reach + 5})
    for query in positions:
        keys = {0, 1, query // 2, query - reach - 1, query - reach, query - reach + 1, query - 1, query, query + 1}
        for key in sorted(k for k in keys if k >= 0):
            at = [torch.tensor(i) for i in (0, 0, query, key)]
            visible = bool(rule(*at))
            low, high = visible_range(query, query + 2, query + 2, window)
            if visible != (low <= key < high):
                return query, key, visible
    return None


def _refuse_by_config(model: PreTrainedModel, config: Any) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} cannot be run over a paged cache: it is an encoder-decoder, whose decoder layers also attend to "
            "the encoder. Supported are decoders whose layers are full or sliding-window attention"
        )
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in FOLLOWED_LAYER_TYPES:
            raise UnsupportedModelError(
                f"{name} cannot be run over a paged cache: layer {index} is {kind!r}. Supported are decoders whose "
                "layers are full or sliding-window attention"
            )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} cannot be run over a paged cache: its attention does not go through Transformers' "
            f"AttentionInterface, so the implementation {NAME!r} cannot be given to its layers"
        )


def _refuse_silent_layers(model: PreTrainedModel, config: Any, probe: _Probe) -> None:
    """Layers that mixed tokens without asking our attention would see other requests of the packed batch."""
    expected = getattr(config, "num_hidden_layers", None) or 0
    missing = [index for index in range(expected) if index not in probe.layers]
    if not missing:
        return
    mixer = next(
        (
            f"{name} ({type(module).__name__})"
            for name, module in model.named_modules()
            if getattr(module, "layer_idx", None) == missing[0] and not name.endswith("layers." + str(missing[0]))
        ),
        f"layer {missing[0]}",
    )
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot be run over a paged cache: {mixer} did not attend through Transformers' "
        f"AttentionInterface ({len(missing)} of {expected} layers). Supported are decoders whose layers are full or "
        "sliding-window attention"
    )


def _refuse_mixing(model: PreTrainedModel, last: Tensor, last_with_other_first: Tensor) -> None:
    """With an attention that answers zeros, no token can know of another; if one does, something else mixes tokens
    (a convolution, a token shift) and would mix the requests of a packed batch."""
    tolerance = 0.01 * float(last.abs().max())
    difference = float((last - last_with_other_first).abs().max())
    if difference > tolerance:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be run in packed batches: something other than attention mixes its tokens "
            f"(another first token moves the last logits by {difference:.3g} with attention switched off)"
        )


def _refuse_rope(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        for one in kinds:
            if one in BATCH_DEPENDENT_ROPE:
                raise UnsupportedModelError(
                    f"{type(model).__name__} cannot be run in packed batches: the rotary embedding {name} is {one!r}, "
                    "whose frequencies follow the longest request of the batch"
                )
