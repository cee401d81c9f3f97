"""The scales of a quantised cache: from absolute maxima to numbers, to a file beside a model, and to pages in use.

A scale is the largest magnitude that was seen over the largest that the kind stores, so that what was seen just fits::

    maxima = maxima_of(cache)                           # of a cache that is not quantised, after a run
    scales = maxima.scales("fp8_e4m3", "head")
    scales.save("model/kv_cache_scales.safetensors")
    ...
    cache = PagedKVCache(..., kv_cache_dtype="fp8_e4m3", scales=CacheScales.load("model/kv_cache_scales.safetensors"))

Source: static KV-cache scales as vLLM and compressed-tensors have them, a ``k_scale`` and a ``v_scale`` a layer.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pagetile.contracts.dtypes import QUANTISED
from pagetile.contracts.errors import ArgumentError, ShapeError
from pagetile.reference.quantise import LARGEST, bits_of, dequantise, head_scale, quantise

if TYPE_CHECKING:
    from pagetile.cache.kv import PagedKVCache
    from pagetile.cache.pool import BlockPool

SCALES_FILE = "kv_cache_scales.safetensors"
"""What the file is called in a model's folder."""

_NAME = re.compile(r"layers\.(\d+)\.(?:[\w.]+\.)?([kv])_scale$")
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class CacheScales:
    """One scale of K and one of V a layer, or one for each of its KV heads.

    Attributes:
        kind: what they were made for: ``fp8_e4m3``, ``fp8_e5m2`` or ``int8``.
        keys, values: layer -> float32 ``[]`` or ``[Hkv]``, finite and above 0.
    """

    kind: str
    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]

    def __post_init__(self) -> None:
        if self.kind not in QUANTISED:
            raise ArgumentError(f"kind is {self.kind!r}; scales are for one of {', '.join(QUANTISED)}")
        if set(self.keys) != set(self.values):
            raise ArgumentError(f"layers {sorted(set(self.keys) ^ set(self.values))} have only one of K and V")
        for name, layer, scale in self.items():
            if scale.dim() > 1 or scale.dtype != torch.float32:
                raise ArgumentError(
                    f"the scale of {name} of layer {layer} is {scale.dtype} {list(scale.shape)}; "
                    "pass float32 [] or [Hkv]"
                )
            if not bool(((scale > 0) & scale.isfinite()).all()):
                raise ArgumentError(f"the scale of {name} of layer {layer} is {scale.tolist()}; it must be above 0")

    def items(self) -> Iterable[tuple[str, int, Tensor]]:
        """``("k" or "v", layer, scale)`` of each, by layer."""
        for layer in sorted(self.keys):
            yield "k", layer, self.keys[layer]
            yield "v", layer, self.values[layer]

    def to(self, device: torch.device | str) -> CacheScales:
        """The same on a device."""
        keys, values = ({layer: s.to(device) for layer, s in part.items()} for part in (self.keys, self.values))
        return CacheScales(self.kind, keys, values)

    def identity(self) -> str:
        """A digest of kind and values: bytes stored under other scales mean other numbers."""
        found = hashlib.sha256(self.kind.encode())
        for name, layer, scale in self.items():
            found.update(f"{name}{layer} of {scale.numel()}".encode() + scale.cpu().numpy().tobytes())
        return found.hexdigest()[:16]

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file: ``layers.0.k_scale``, ..., and the kind in its metadata.

        Raises:
            ImportError: safetensors is not installed.
        """
        tensors = {f"layers.{layer}.{name}_scale": scale.cpu().contiguous() for name, layer, scale in self.items()}
        _safetensors().save_file(tensors, path, metadata={"format": "pt", "kind": self.kind})

    @classmethod
    def load(cls, path: str | os.PathLike, kind: str = "") -> CacheScales:
        """Read such a file, or a checkpoint's ``...layers.0.self_attn.k_scale``; other tensors are passed over.

        Args:
            path: the file, or a folder that holds :data:`SCALES_FILE`.
            kind: needed where the file does not say.

        Raises:
            ArgumentError: there is no such file, no scale in it, its kind is unknown, or another one.
            ImportError: safetensors is not installed.
        """
        path = os.path.join(path, SCALES_FILE) if os.path.isdir(path) else os.fspath(path)
        if not os.path.isfile(path):
            raise ArgumentError(f"there is no file of scales {path}; make one with CacheScales.save")
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        with _safetensors_open(path) as file:
            own = (file.metadata() or {}).get("kind", "")
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if found := _NAME.search(name):
                    scale = file.get_tensor(name).to(torch.float32)
                    into = keys if found[2] == "k" else values
                    into[int(found[1])] = scale.reshape(()) if scale.numel() == 1 else scale
        if kind and own and kind != own:
            raise ArgumentError(f"the scales in {path} are for {own}, not for {kind}; calibrate for {kind}")
        if not keys or not (kind or own):
            raise ArgumentError(
                f"{path} has {len(keys)} scales and says kind {own!r}; pass kind= where it does not say"
            )
        return cls(kind or own, keys, values)


@dataclass
class KVMaxima:
    """The largest finite magnitude of K and of V for each KV head of each layer, over all that was observed.

    Attributes:
        keys, values: layer -> float32 ``[Hkv]`` on the CPU.
    """

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def observe(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take in the keys and values of a layer, ``[..., Hkv, D]`` each, of any floating dtype."""
        for part, x in ((self.keys, key), (self.values, value)):
            magnitude = x.detach().flatten(0, -3).float().abs()
            largest = magnitude.where(magnitude.isfinite(), 0.0).amax((0, 2)).cpu() if x.numel() else None
            if largest is not None:
                part[layer] = torch.maximum(part[layer], largest) if layer in part else largest

    def scales(self, kind: str, granularity: Literal["tensor", "head"] = "head", margin: float = 1.0) -> CacheScales:
        """Scales with which everything observed, times ``margin``, just fits; 1 where all was 0.

        Raises:
            ArgumentError: an unknown kind or granularity, a margin that is not above 0, or nothing was observed.
        """
        if granularity not in ("tensor", "head"):
            raise ArgumentError(f"granularity is {granularity!r}; it must be 'tensor' or 'head'")
        if kind not in LARGEST or not margin > 0 or not self.keys:
            raise ArgumentError(f"kind is {kind!r}, margin {margin} and {len(self.keys)} layers were observed")

        def scale(most: Tensor) -> Tensor:
            most = most.amax() if granularity == "tensor" else most
            found = most * margin / torch.full((), LARGEST[kind])
            return found.where(found > 0, 1.0)

        keys, values = ({layer: scale(most) for layer, most in part.items()} for part in (self.keys, self.values))
        return CacheScales(kind, keys, values)


def maxima_of(cache: PagedKVCache, blocks: Mapping[str, Iterable[int]] | None = None) -> KVMaxima:
    """The absolute maxima of what a cache that is not quantised holds.

    Args:
        blocks: ids of each group that count; None takes all (blocks that were never used hold 0).

    Raises:
        ArgumentError: the cache is quantised.
    """
    if cache.kind in QUANTISED:
        raise ArgumentError(f"the cache holds {cache.kind}; maxima are taken of one that is not quantised")
    found = KVMaxima()
    for group in cache.groups:
        for layer in group.layers:
            for ids in _pieces(cache, group.name, blocks):
                found.observe(layer, cache.key(layer)[ids], cache.value(layer)[ids])
    return found


def rescale(cache: PagedKVCache, scales: CacheScales, blocks: Mapping[str, Iterable[int]] | None = None) -> None:
    """Store what a quantised cache holds under other scales, in place, and have the cache use them from now on.

    Each element is read with its old scale and rounded once more with the new one. Blocks that are left out hold
    nonsense afterwards, so leave out only those that nobody uses.

    Args:
        blocks: ids of each group; None is every block.

    Raises:
        ArgumentError: scales of another kind or layers, or a cache whose tokens have scales of their own. Nothing has
            changed then.
    """
    if cache.kind not in QUANTISED or cache.own_scales:
        own = " with a scale for each token" if cache.own_scales else ""
        raise ArgumentError(f"the cache holds {cache.kind}{own}; there is nothing to rescale")
    check_scales(cache, scales)
    scales = scales.to(cache.device)
    for group in cache.groups:
        for layer in group.layers:
            parts = zip((cache.key(layer), cache.value(layer)), cache.scales(layer), _of(scales, layer), strict=True)
            for stored, old, new in parts:
                for ids in _pieces(cache, group.name, blocks):
                    bits = bits_of(stored)
                    numbers = dequantise(bits[ids].view(stored.dtype), cache.kind, head_scale(old, stored.device))
                    bits[ids] = bits_of(quantise(numbers, cache.kind, head_scale(new, stored.device)))
    cache.use_scales(scales)


def used_blocks(pool: BlockPool) -> list[int]:
    """Blocks whose content counts: those of sequences, and those that later prompts may hit."""
    return sorted({b for b in range(pool.num_blocks) if pool.ref(b)} | set(pool.registered_blocks()))


def check_scales(cache: PagedKVCache, scales: CacheScales) -> None:
    """Hold scales to the kind, layers and heads of a cache.

    Raises:
        ArgumentError: another kind, or layers without a scale.
        ShapeError: another number of heads.
    """
    if scales.kind != cache.kind:
        raise ArgumentError(f"the scales are for {scales.kind}, but the cache holds {cache.kind}; calibrate for that")
    for group in cache.groups:
        missing = sorted(set(group.layers) - set(scales.keys))
        if missing:
            raise ArgumentError(f"the scales have no entry for layers {missing}; they have {sorted(scales.keys)}")
        for layer in group.layers:
            for name, scale in zip("kv", _of(scales, layer), strict=True):
                if scale.dim() and scale.shape[0] != group.num_kv_heads:
                    raise ShapeError(
                        f"the scale of {name} of layer {layer} has {scale.shape[0]} heads, but the cache has Hkv = "
                        f"{group.num_kv_heads}"
                    )


def _of(scales: CacheScales, layer: int) -> tuple[Tensor, Tensor]:
    return scales.keys[layer], scales.values[layer]


def _pieces(cache: PagedKVCache, group: str, blocks: Mapping[str, Iterable[int]] | None) -> Iterable[Tensor]:
    """Block ids a few at a time, so that float32 copies stay small."""
    named = range(cache.num_blocks[group]) if blocks is None else blocks.get(group, ())
    ids = torch.tensor(list(named), dtype=torch.int64, device=cache.device)
    layer = cache.group(group).layers[0]
    each = max(1, _CHUNK_ELEMENTS // max(1, cache.key(layer)[:1].numel()))
    return ids.split(each) if len(ids) else ()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files of scales need safetensors: pip install 'pagetile[hf]'") from error
    return safetensors.torch


def _safetensors_open(path: str) -> Any:
    _safetensors()
    from safetensors import safe_open

    return safe_open(path, framework="pt")
