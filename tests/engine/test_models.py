"""Which models can be driven, which are refused and why, and what happens to a model object that the caller owns."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, SIZES, generated, make_model, prompts_of, run, tiny, tokens

from pagetile.engine import Engine, UnsupportedModelError, attention
from pagetile.engine.probe import inspect_model
from pagetile.engine.runner import layer_groups

PROMPTS = prompts_of((4, 10, 23))


@pytest.fixture(autouse=True)
def _registered() -> None:
    attention.register()


@pytest.mark.parametrize(
    ("name", "windows", "softcap", "sinks"),
    [
        ("llama", [None, None], 0.0, False),
        ("qwen2", [None, None], 0.0, False),
        ("qwen3", [None, None], 0.0, False),
        ("mistral", [8, 8], 0.0, False),
        ("gemma2", [8, None], 5.0, False),
        ("gemma3", [8, None], 0.0, False),
        ("gpt_oss", [8, None], 0.0, True),
    ],
)
def test_what_the_layers_say(name: str, windows: list, softcap: float, sinks: bool) -> None:
    spec = inspect_model(tiny(name))
    assert [layer.sliding_window for layer in spec.layers] == windows
    assert {layer.softcap for layer in spec.layers} == {softcap}
    assert {layer.sinks for layer in spec.layers} == {sinks}
    assert {(layer.num_q_heads, layer.num_kv_heads, layer.head_size) for layer in spec.layers} == {(4, 2, 16)}
    assert spec.vocab_size == 128
    assert spec.max_length == 256
    assert spec.keeps_rows


def test_a_window_of_w_tokens_is_a_radius_of_w_minus_1() -> None:
    """huggingface/transformers#39408, vllm-project/vllm#3385: W + 1 tokens were seen."""
    assert [layer.window for layer in inspect_model(tiny("gemma3")).layers] == [(7, 0), (-1, -1)]


def test_layers_of_one_window_share_a_group_and_others_do_not() -> None:
    """vllm-project/vllm#51756: full-attention layers that shared a group with a window lost their old tokens."""
    model = make_model(
        "Gemma3TextConfig",
        **CONFIGS["gemma3"][1] | {"num_hidden_layers": 4, "layer_types": CONFIGS["gemma3"][1]["layer_types"] * 2},
    )
    groups = layer_groups(inspect_model(model).layers)
    assert [(g.name, g.layers, g.window) for g in groups] == [("window_8", (0, 2), 8), ("full", (1, 3), None)]


LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ("Qwen3NextConfig", LINEAR, "layer 0 is 'linear_attention'"),
        (
            "Llama4TextConfig",
            {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 16},
            "layer 0 is 'chunked_attention'",
        ),
        ("MambaConfig", {}, "layer 0 is 'linear_attention'"),
        ("BloomConfig", {"n_layer": 2, "n_head": 4}, "AttentionInterface"),
        ("DiffLlamaConfig", {}, "model.layers.0.self_attn .*attends a second time as layer 0"),
        ("BartConfig", {"d_model": 64}, "AttentionInterface|encoder"),
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "model.rotary_emb is 'dynamic'",
        ),
    ],
)
def test_refused_with_the_layer_s_name(config: str, settings: dict[str, Any], message: str) -> None:
    model = make_model(config, **settings)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=message):
        Engine(model)
    assert model.config._attn_implementation == before


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=128, d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=32)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        Engine(T5ForConditionalGeneration(config).eval())


def test_a_bidirectional_model_is_refused_by_its_own_mask() -> None:
    model = make_model("Gemma3TextConfig", **CONFIGS["gemma3"][1], use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModelError, match=r"model.layers.0.self_attn .*is not causal"):
        Engine(model)


def test_a_layer_whose_mask_is_not_what_it_says_is_refused(monkeypatch) -> None:
    """The layer passes no window to its attention, and the model's mask has one."""
    model = make_model("MistralConfig", sliding_window=8)
    monkeypatch.setattr(
        type(model.model.layers[0].self_attn), "forward", _without_window(type(model.model.layers[0].self_attn).forward)
    )
    with pytest.raises(
        UnsupportedModelError, match=r"layers.0.self_attn .*mask that is not full causal attention: position"
    ):
        Engine(model)


def _without_window(forward):
    def run(self, *args, **kwargs):
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config.sliding_window = window

    return run


def test_tokens_that_mix_outside_attention_are_refused(monkeypatch) -> None:
    """A token shift in the MLP would read another request's token in a packed batch."""
    model = make_model("LlamaConfig")
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda _, hidden: hidden + hidden.roll(1, dims=1))
    with pytest.raises(UnsupportedModelError, match="something other than attention mixes its tokens"):
        Engine(model)


def test_an_ordinary_call_without_a_paged_cache_raises() -> None:
    """huggingface/transformers#48296: paged attention without a cache ran bidirectionally, without a word."""
    model = make_model("LlamaConfig")
    model.set_attn_implementation(attention.NAME)
    with pytest.raises(RuntimeError, match="without a paged cache"):
        model(torch.tensor([[5, 6, 7]]))


def test_the_model_is_itself_between_steps(make_engine) -> None:
    """huggingface/transformers#48735: an ordinary forward broke for as long as the paged engine lived."""
    model = make_model("LlamaConfig")
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        before = model(ids).logits
    engine = make_engine(model)
    engine.add_request(PROMPTS[0])
    for _ in range(3):
        engine.step()
        with torch.no_grad():
            assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == "sdpa"


def test_two_engines_share_a_model_in_two_threads(make_engine) -> None:
    model = tiny("gemma3")
    engines = [make_engine(model, max_batch_tokens=budget) for budget in (5, 32)]
    results: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        results[index] = tokens(run(engines[index], PROMPTS * 2))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = generated("gemma3", PROMPTS * 2)
    assert results == {0: expected, 1: expected}
    assert model.config._attn_implementation == "sdpa"


def test_a_layer_that_leaves_the_paged_path_is_noticed(make_engine) -> None:
    model = make_model("LlamaConfig")
    engine = make_engine(model)
    engine.add_request(PROMPTS[0])
    handle = model.model.layers[0].register_forward_hook(
        lambda *_: setattr(model.config, "_attn_implementation", "sdpa")
    )
    with pytest.raises(RuntimeError, match="1 of 2 layers attended"):
        engine.step()
    handle.remove()


@pytest.mark.parametrize(
    "config", ["OPTConfig", "GPTNeoXConfig", "Phi3Config", "Olmo2Config", "MixtralConfig", "DeepseekV3Config"]
)
def test_other_architectures_come_for_free(config: str, make_engine) -> None:
    """Learned positions, parallel layers, fused projections, experts, latent attention with its own value size."""
    settings: dict[str, Any] = {
        "OPTConfig": {"ffn_dim": 64, "word_embed_proj_dim": 64},
        "MixtralConfig": {"num_local_experts": 2, "num_experts_per_tok": 1},
        "DeepseekV3Config": {
            "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
        },
    }.get(config, {})  # fmt: skip
    model = make_model(config, **settings)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    engine = make_engine(model)
    assert tokens(run(engine, PROMPTS)) == expected
    assert tokens(run(engine, PROMPTS)) == expected


def test_sixteen_bit_models_run_in_their_own_dtype(make_engine) -> None:
    model = make_model("LlamaConfig", **{**SIZES, "num_hidden_layers": 1}).to(torch.bfloat16)
    engine = make_engine(model)
    assert engine.cache.dtype == torch.bfloat16
    [output] = run(engine, [PROMPTS[1]])
    assert len(output.outputs[0].token_ids) == 12
