"""Quantised caches as rooms: what they are made of, their scales on disk, other scales for pages in use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pagetile
from pagetile import PagedKVCache, SequenceTable
from pagetile.cache import CacheScales, HostBlocks, KVMaxima, LayerGroup, maxima_of, rescale
from pagetile.cache.scales import SCALES_FILE, used_blocks
from pagetile.reference.quantise import LARGEST, bits_of, dequantise, head_scale, quantise

KINDS = ("fp8_e4m3", "fp8_e5m2", "int8")
SIZES = {"num_layers": 2, "num_blocks": 6, "block_size": 4, "num_kv_heads": 3, "head_size": 8}


def scales_for(kind: str, granularity: str, seed: int = 0) -> CacheScales:
    rng = torch.Generator().manual_seed(seed)
    maxima = KVMaxima()
    for layer in range(2):
        maxima.observe(layer, *(torch.randn(20, 3, 8, generator=rng) * (layer + 1) for _ in "kv"))
    return maxima.scales(kind, granularity)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_cache_is_stored_in_bytes(kind: str) -> None:
    cache = PagedKVCache(**SIZES, kv_cache_dtype=kind)
    assert cache.kind == kind
    assert cache.key(0).element_size() == 1
    assert cache.bytes_per_token == 2 * 3 * 16
    assert cache.scales(1) == (None, None)
    assert PagedKVCache(**SIZES, dtype=cache.dtype).kind == kind


def test_tokens_with_scales_of_their_own() -> None:
    cache = PagedKVCache(**SIZES, kv_cache_dtype="int8", scales="token_head", layout="HND")
    k_scale, v_scale = cache.scales(1)
    assert k_scale is not None
    assert v_scale is not None
    assert tuple(k_scale.shape) == (6, 4, 3)
    assert cache.bytes_per_token == 2 * 3 * (16 + 8)
    k_scale[2], v_scale[2] = 3.0, 5.0
    cache.key(1)[2] = 7
    cache.copy_blocks("full", [(2, 4)])
    assert (k_scale[4] == 3).all()
    assert (v_scale[4] == 5).all()
    assert (cache.key(1)[4] == 7).all()
    host = cache.on_host(3)
    assert host.block_tensors("full").keys() == cache.block_tensors("full").keys()
    assert host.own_scales


def test_what_cannot_be_is_refused() -> None:
    scales = scales_for("fp8_e4m3", "head")
    with pytest.raises(pagetile.ArgumentError, match="the cache holds float32, which has none"):
        PagedKVCache(**SIZES, scales=scales)
    with pytest.raises(pagetile.ArgumentError, match="the scales are for fp8_e4m3, but the cache holds int8"):
        PagedKVCache(**SIZES, kv_cache_dtype="int8", scales=scales)
    with pytest.raises(pagetile.DTypeError, match="does not fit a cache of float32"):
        PagedKVCache(**SIZES, dtype=torch.float32, kv_cache_dtype="int8")
    with pytest.raises(pagetile.ArgumentError, match=r"no entry for layers \[2\]"):
        PagedKVCache(**{**SIZES, "num_layers": 3}, kv_cache_dtype="fp8", scales=scales)
    with pytest.raises(pagetile.ShapeError, match="has 3 heads, but the cache has Hkv = 1"):
        PagedKVCache(**{**SIZES, "num_kv_heads": 1}, kv_cache_dtype="fp8", scales=scales)
    with pytest.raises(pagetile.ArgumentError, match="scale of v of layer 0 is"):
        CacheScales("int8", {0: torch.ones(3)}, {0: torch.tensor([1.0, 0.0, 1.0])})
    with pytest.raises(pagetile.ArgumentError, match=r"layers \[1\] have only one of K and V"):
        CacheScales("int8", {0: torch.ones(3), 1: torch.ones(3)}, {0: torch.ones(3)})


def test_maxima_pass_over_what_is_not_finite() -> None:
    maxima = KVMaxima()
    x = torch.tensor([[[1.0, -3.0], [torch.inf, 2.0]], [[torch.nan, 0.5], [-torch.inf, -1.0]]])
    maxima.observe(0, x, torch.zeros_like(x))
    maxima.observe(0, x[:0], x[:0])
    assert maxima.keys[0].tolist() == [3.0, 2.0]
    scales = maxima.scales("int8", margin=2.0)
    assert scales.keys[0].tolist() == pytest.approx([6 / 127, 4 / 127])
    assert scales.values[0].tolist() == [1.0, 1.0]
    assert float(maxima.scales("fp8_e4m3", "tensor").keys[0]) == pytest.approx(3 / 448)
    with pytest.raises(pagetile.ArgumentError, match="granularity is 'token'"):
        maxima.scales("int8", "token")  # type: ignore[arg-type]
    with pytest.raises(pagetile.ArgumentError, match="0 layers were observed"):
        KVMaxima().scales("int8")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_maxima_of_a_cache_are_those_of_its_blocks(layout: str) -> None:
    groups = [LayerGroup("full", (0, 2)), LayerGroup("near", (1,), window=4)]
    cache = PagedKVCache(
        groups=groups, num_blocks={"full": 6, "near": 3}, block_size=4, num_kv_heads=2, head_size=8, head_size_v=4,
        layout=layout,
    )  # fmt: skip
    for layer in range(3):
        cache.key(layer).normal_().mul_(layer + 1)
        cache.value(layer).normal_()
    cache.key(0)[5] = 1e4
    found = maxima_of(cache, {"full": [1, 3], "near": [0]})
    assert torch.equal(found.keys[0], cache.key(0)[[1, 3]].abs().amax((0, 1, 3)))
    assert torch.equal(found.values[1], cache.value(1)[[0]].abs().amax((0, 1, 3)))
    assert float(maxima_of(cache).keys[0].max()) == 1e4
    with pytest.raises(pagetile.ArgumentError, match="not quantised"):
        maxima_of(PagedKVCache(**SIZES, kv_cache_dtype="int8"))


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_scales_survive_a_file(granularity: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    scales = scales_for("fp8_e5m2", granularity)
    scales.save(tmp_path / SCALES_FILE)
    for path in (tmp_path, tmp_path / SCALES_FILE):
        again = CacheScales.load(path)
        assert again.identity() == scales.identity()
        assert again.kind == "fp8_e5m2"
    assert scales_for("fp8_e5m2", granularity, seed=1).identity() != scales.identity()
    with pytest.raises(pagetile.ArgumentError, match="are for fp8_e5m2, not for int8"):
        CacheScales.load(tmp_path, "int8")
    with pytest.raises(pagetile.ArgumentError, match="there is no file of scales"):
        CacheScales.load(tmp_path / "nothing")


def test_scales_of_a_checkpoint(tmp_path: Path) -> None:
    torch_file = pytest.importorskip("safetensors.torch")
    tensors = {f"model.layers.{i}.self_attn.{n}_scale": torch.tensor([0.5 + i]) for i in range(2) for n in "kv"}
    torch_file.save_file(
        {**tensors, "model.layers.0.self_attn.k_proj.weight": torch.ones(2)}, tmp_path / "m.safetensors"
    )
    with pytest.raises(pagetile.ArgumentError, match="pass kind="):
        CacheScales.load(tmp_path / "m.safetensors")
    scales = CacheScales.load(tmp_path / "m.safetensors", "fp8_e4m3")
    assert [float(scales.values[i]) for i in range(2)] == [0.5, 1.5]
    assert scales.keys[0].dim() == 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_in_use_take_other_scales(kind: str, layout: str) -> None:
    """Each number is read with the old scale and rounded once more with the new; other blocks keep their bytes."""
    first, second = scales_for(kind, "head"), scales_for(kind, "tensor", seed=5)
    cache = PagedKVCache(**SIZES, kv_cache_dtype=kind, scales=first, layout=layout)  # type: ignore[arg-type]
    numbers = torch.randn(6, 4, 3, 8)
    for layer in range(2):
        for stored, scale in zip((cache.key(layer), cache.value(layer)), cache.scales(layer), strict=True):
            bits_of(stored).copy_(bits_of(quantise(numbers, kind, head_scale(scale, cache.device))))
    before = {name: bits_of(tensor).clone() for name, tensor in cache.block_tensors("full").items()}
    meant = {
        name: dequantise(tensor, kind, head_scale(cache.scales(int(name[0]))[name.endswith("value")], cache.device))
        for name, tensor in cache.block_tensors("full").items()
    }
    rescale(cache, second, {"full": [0, 2, 5]})
    for name, tensor in cache.block_tensors("full").items():
        part = second.values if name.endswith("value") else second.keys
        right = quantise(meant[name], kind, part[int(name[0])])
        assert torch.equal(bits_of(tensor)[[0, 2, 5]], bits_of(right)[[0, 2, 5]])
        assert torch.equal(bits_of(tensor)[[1, 3, 4]], before[name][[1, 3, 4]])
    assert torch.equal(cache.scales(1)[0], second.keys[1])
    assert cache.identity != PagedKVCache(**SIZES, kv_cache_dtype=kind, scales=first).identity


def test_a_refused_rescale_changes_nothing() -> None:
    first = scales_for("int8", "head")
    cache = PagedKVCache(**SIZES, kv_cache_dtype="int8", scales=first)
    cache.key(0).fill_(9)
    for wrong in (scales_for("fp8_e4m3", "head"), CacheScales("int8", {0: torch.ones(3)}, {0: torch.ones(3)})):
        with pytest.raises(pagetile.ArgumentError):
            rescale(cache, wrong)
    assert (cache.key(0) == 9).all()
    assert cache.scales(0)[0] is not None
    assert torch.equal(cache.scales(0)[0], first.keys[0])
    for other in (PagedKVCache(**SIZES), PagedKVCache(**SIZES, kv_cache_dtype="int8", scales="token_head")):
        with pytest.raises(pagetile.ArgumentError, match="there is nothing to rescale"):
            rescale(other, first)


def test_used_blocks_are_those_of_sequences_and_of_prefixes() -> None:
    cache = PagedKVCache(**SIZES, kv_cache_dtype="int8")
    table = SequenceTable.for_cache(cache)
    one, two = table.add(list(range(9))), table.add([7] * 3)
    for seq, count in ((one, 9), (two, 3)):
        table.reserve(seq, count)
        table.commit(seq, count)
    held = set(one.blocks["full"]) | set(two.blocks["full"])
    full = list(one.blocks["full"])[:2]
    assert set(used_blocks(table.pools["full"])) == held
    table.free(one)
    assert set(used_blocks(table.pools["full"])) == set(full) | set(two.blocks["full"])
    assert LARGEST["int8"] == 127
    assert HostBlocks(table, cache, 2).cache.kind == "int8"
