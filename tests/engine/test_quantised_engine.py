"""An engine over quantised caches: the same answers where bytes are enough, scales from a run, pages in use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import make_model

import pagetile
from pagetile import LLM, SamplingParams
from pagetile.cache import CacheScales
from pagetile.engine import calibrate

PROMPTS = [list(range(3, 40)), list(range(3, 30)), [5, 9, 2] * 5]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return make_model("LlamaConfig")


def engine(model, **options) -> LLM:
    return LLM(model, block_size=4, num_blocks=64, max_batch_tokens=24, **options)


def logprobs(llm: LLM) -> torch.Tensor:
    """Of every prompt token but the first, in order."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = llm.generate(PROMPTS, params)
    found = [entry for output in outputs for entry in output.prompt_logprobs[1:]]
    return torch.tensor([entry.logprob for entry in found])


def next_logprobs(llm: LLM) -> torch.Tensor:
    """Of the first token of each answer."""
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=1, temperature=0, logprobs=0, ignore_eos=True))
    return torch.tensor([output.outputs[0].logprobs[0].logprob for output in outputs])


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "token_head", None])
def test_it_stays_near_the_cache_that_is_not_quantised(model, kind: str, granularity: str | None) -> None:
    plain = engine(model)
    right = logprobs(plain)
    scales = granularity
    if granularity in ("tensor", "head"):
        scales = calibrate(plain, PROMPTS, GREEDY).scales(kind, granularity)
    llm = engine(model, kv_cache_dtype=kind, kv_scales=scales)
    assert llm.engine.cache.kind == kind
    assert llm.engine.cache.own_scales == (granularity == "token_head" or (granularity is None and kind == "int8"))
    error = float((logprobs(llm) - right).abs().mean())
    # Of logarithms of order 6. In int8, K's scales for V's are off by 0.10, a scale that is dropped by 1.1.
    assert 0 < error < {"fp8_e4m3": 0.15, "fp8_e5m2": 0.3, "int8": 0.05}[kind], error


def test_calibration_sees_what_is_computed(model) -> None:
    llm = engine(model)
    llm.generate(PROMPTS, GREEDY)
    maxima = calibrate(llm, PROMPTS, GREEDY)
    blocks = range(llm.engine.cache.num_blocks["full"])
    for layer in maxima.keys:
        cache = llm.engine.cache
        assert torch.equal(maxima.keys[layer], cache.key(layer)[blocks].abs().amax((0, 1, 3)))
        assert torch.equal(maxima.values[layer], cache.value(layer)[blocks].abs().amax((0, 1, 3)))
    assert llm.engine.runner.watch is None
    llm.engine.add_request(PROMPTS[0])
    with pytest.raises(pagetile.ArgumentError, match="unfinished requests"):
        calibrate(llm, PROMPTS)


def test_scales_beside_the_model(model, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    scales = calibrate(engine(model), PROMPTS, GREEDY).scales("int8")
    scales.save(tmp_path / "kv_cache_scales.safetensors")
    expected = engine(model, kv_cache_dtype="int8", kv_scales=scales).generate(PROMPTS, GREEDY)
    found = engine(model, kv_cache_dtype="int8", kv_scales=tmp_path).generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    with pytest.raises(pagetile.ArgumentError, match="are for int8, not for fp8_e4m3"):
        engine(model, kv_cache_dtype="fp8", kv_scales=tmp_path)
    with pytest.raises(pagetile.ArgumentError, match="kv_scales are given, but kv_cache_dtype is 'auto'"):
        engine(model, kv_scales=scales)
    with pytest.raises(pagetile.ArgumentError, match="kv_cache_dtype is 'fp4'"):
        engine(model, kv_cache_dtype="fp4")


@pytest.mark.parametrize("granularity", ["head", "token_head"])
def test_prefixes_forks_and_preemption_change_no_token(model, granularity: str) -> None:
    """Shared, copied and recomputed blocks hold the bytes (and scales) that an engine with room for all computes."""
    scales = granularity if granularity == "token_head" else calibrate(engine(model), PROMPTS, GREEDY).scales("int8")
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, n=3, ignore_eos=True)
    options = {"kv_cache_dtype": "int8", "kv_scales": scales}

    def tokens(llm: LLM, times: int = 1) -> list:
        outputs = [llm.generate(PROMPTS, params) for _ in range(times)][-1]
        return [[answer.token_ids for answer in output.outputs] for output in outputs]

    expected = tokens(engine(model, prefix_cache=False, **options))
    shared = engine(model, **options)
    assert tokens(shared, times=2) == expected
    assert shared.stats.prefix_hit_tokens > 0
    tight = LLM(model, block_size=4, num_blocks=36, max_batch_tokens=24, **options)
    assert tokens(tight) == expected
    swapped = LLM(model, block_size=4, num_blocks=36, max_batch_tokens=24, preemption="swap", **options)
    assert tokens(swapped) == expected


def test_pages_in_use_take_other_scales(model) -> None:
    """Cached prefixes included: prompts that hit them are read as before, up to one more rounding."""
    maxima = calibrate(engine(model), PROMPTS, GREEDY)
    first, second = (maxima.scales("int8", margin=margin) for margin in (1.0, 2.0))
    errors = {}
    for how in ("rescaled", "only named anew"):
        llm = engine(model, kv_cache_dtype="int8", kv_scales=first)
        right = next_logprobs(llm)
        if how == "rescaled":
            llm.engine.rescale(second)
        else:
            llm.engine.cache.use_scales(second)
        hits = llm.stats.prefix_hit_tokens
        errors[how] = float((next_logprobs(llm) - right).abs().mean())
        assert llm.stats.prefix_hit_tokens > hits
    assert errors["rescaled"] < 0.1 < errors["only named anew"]
    with pytest.raises(pagetile.ArgumentError, match="calibrate for that"):
        llm.engine.rescale(maxima.scales("fp8_e4m3"))


def test_saved_prefixes_are_bound_to_their_scales(model, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    maxima = calibrate(engine(model), PROMPTS, GREEDY)
    one, other = (maxima.scales("int8", margin=m) for m in (1.0, 2.0))
    llm = engine(model, kv_cache_dtype="int8", kv_scales=one)
    llm.generate(PROMPTS, GREEDY)
    assert llm.save_prefix_cache(tmp_path / "prefixes") > 0
    assert engine(model, kv_cache_dtype="int8", kv_scales=one).load_prefix_cache(tmp_path / "prefixes")
    with pytest.raises(pagetile.PagetileError):
        engine(model, kv_cache_dtype="int8", kv_scales=other).load_prefix_cache(tmp_path / "prefixes")
    assert isinstance(one, CacheScales)
