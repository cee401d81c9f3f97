"""What ``enable`` changes, what it leaves alone, and that ``disable`` puts everything back."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_kit import answers, cache_argument, greedy, on_pages, padded, prompts_of, tiny
from transformers import DynamicCache, StaticCache, T5Config, T5ForConditionalGeneration
from transformers.generation.continuous_batching import cache as host_cache
from transformers.generation.continuous_batching import continuous_api

from pagetile.contracts.errors import ArgumentError, UnsupportedError
from pagetile.engine import Engine, EngineConfig, SamplingParams
from pagetile.engine.probe import UnsupportedModelError
from pagetile.integrations.transformers import PagedCache, disable, enable, enabled, settings_of


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_an_ordinary_forward_stays_what_it_was(family: str) -> None:
    """Without a cache, with the host's own caches, padded or not: bit for bit."""
    model, inputs = tiny(family), padded(prompts_of())
    config = model.config

    def logits() -> list[torch.Tensor]:
        with torch.no_grad():
            own = DynamicCache(config=config)
            fixed = StaticCache(config=config, max_cache_len=64)
            return [
                model(**inputs, use_cache=False).logits,
                model(inputs["input_ids"][2:], use_cache=False).logits,
                model(**inputs, **cache_argument(model, own)).logits,
                model(
                    torch.tensor([[7], [8], [9]]),
                    attention_mask=torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1),
                    **cache_argument(model, own),
                ).logits,
                model(**inputs, **cache_argument(model, fixed)).logits,
            ]

    before = logits()
    with on_pages(model):
        during = logits()
    for a, b, c in zip(before, during, logits(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_training_stays_what_it_was() -> None:
    model, ids = tiny("llama"), torch.tensor(prompts_of((12,)))

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    before = gradient()
    with on_pages(model):
        assert torch.equal(gradient(), before)
    model.zero_grad()


def test_disable_puts_everything_back() -> None:
    model = tiny("gemma3")
    attributes, name = set(model.__dict__), model.config._attn_implementation
    assert not enabled(model)
    assert enable(model) is model
    assert enabled(model)
    assert model.config._attn_implementation == "pagetile"
    assert continuous_api.PagedAttentionCache is not host_cache.PagedAttentionCache
    assert set(model.__dict__) - attributes == {"_prepare_cache_for_generation", "init_continuous_batching"}
    disable(model)
    assert not enabled(model)
    assert set(model.__dict__) == attributes
    assert model.config._attn_implementation == name
    assert continuous_api.PagedAttentionCache is host_cache.PagedAttentionCache
    disable(model)


def test_enabling_again_replaces_the_settings() -> None:
    model = tiny("llama")
    with on_pages(model, block_size=4):
        enable(model, block_size=8)
        assert settings_of(model)[1].block_size == 8
    assert model.config._attn_implementation != "pagetile"


def test_two_models_one_enabled() -> None:
    ours, other = tiny("llama"), tiny("qwen3")
    expected = answers(other, prompts_of((9,)))
    with on_pages(ours):
        assert answers(other, prompts_of((9,))) == expected
        out = other.generate_batch(prompts_of((9,)), generation_config=greedy())
        assert [entry.generated_tokens for entry in out.values()] == expected


def test_a_copy_of_an_enabled_model_is_told_what_to_do() -> None:
    model = tiny("llama")
    with on_pages(model):
        twin = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match=r"a copy of an enabled model, perhaps\): call"):
            twin(torch.tensor([[3, 4]]))
        with pytest.raises(ArgumentError, match=r"set_attn_implementation\('sdpa'\) first"):
            enable(twin)
        twin.set_attn_implementation("sdpa")
        expected = answers(model, prompts_of((9,)))
        with on_pages(twin):
            assert answers(twin, prompts_of((9,))) == expected


def test_an_engine_drives_an_enabled_model() -> None:
    model, prompts = tiny("gemma2"), prompts_of((5, 30))
    expected = answers(model, prompts)
    with on_pages(model):
        engine = Engine(model, None, EngineConfig(num_blocks=32))
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_tokens=20))
        found = {}
        while engine.has_unfinished():
            found |= {d.request_id: d.output.outputs[0].token_ids for d in engine.step() if d.output is not None}
        assert list(found.values()) == expected
        assert answers(model, prompts) == expected


def test_what_cannot_be_driven_is_refused_with_the_reason() -> None:
    small = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        enable(T5ForConditionalGeneration(small))
    with pytest.raises(ArgumentError, match="kv_cache_dtype is 'int3'"):
        enable(tiny("llama"), kv_cache_dtype="int3")
    with pytest.raises(ArgumentError, match="block_size is 0"):
        enable(tiny("llama"), block_size=0)
    with pytest.raises(ArgumentError, match="is not enabled"):
        PagedCache(tiny("llama"))


@pytest.mark.parametrize("implementation", ["offloaded", "quantized"])
def test_caches_that_are_not_implemented_are_refused(implementation: str) -> None:
    model = tiny("llama")
    asked = {"cache_implementation": implementation}
    if implementation == "quantized":
        pytest.importorskip("optimum.quanto", reason="the host's quantised cache")
    with on_pages(model), pytest.raises(UnsupportedError, match=implementation):
        model.generate(**padded(prompts_of((5,))), max_new_tokens=2, pad_token_id=0, **asked)


def test_calls_that_would_be_wrong_are_refused() -> None:
    model, ids = tiny("llama"), torch.tensor(prompts_of((5,)))
    with on_pages(model), torch.no_grad():
        own_mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
        with pytest.raises(UnsupportedError, match="2-D mask of padding"):
            model(ids, attention_mask=own_mask, **cache_argument(model, PagedCache(model)))
        attention = model.model.layers[0].self_attn
        for options, match in (
            ({"sliding_window": 3}, "sliding window of 3"),
            ({"is_causal": False}, "not causal"),
            ({"output_attentions": True}, "attention weights"),
            ({"cu_seq_lens_q": torch.tensor([0, 5])}, "packed sequences"),
        ):
            handle = attention.register_forward_pre_hook(
                lambda _module, args, kwargs, more=options: (args, kwargs | more), with_kwargs=True
            )
            with pytest.raises(UnsupportedError, match=match):
                model(ids, **cache_argument(model, PagedCache(model)))
            handle.remove()
        with pytest.raises(UnsupportedError, match="forms no weights"):
            model.generate(ids, max_new_tokens=2, pad_token_id=0, output_attentions=True, return_dict_in_generate=True)


def test_a_paged_cache_outside_of_pagetile_is_noticed() -> None:
    model, ids = tiny("llama"), torch.tensor(prompts_of((5,)))
    with on_pages(model):
        cache = PagedCache(model)
    with pytest.raises(RuntimeError, match="its attention did not run through pagetile"), torch.no_grad():
        model(ids, **cache_argument(model, cache))
    with pytest.raises(UnsupportedError, match="on the cache, not on a layer"):
        cache.layers[0].crop(-1)
