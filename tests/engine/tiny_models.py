"""Tiny random models whose attention matters, and how to run an engine over them."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from pagetile.engine import Engine, RequestOutput, SamplingParams

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
HEAD = {"head_dim": 16}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", HEAD),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", HEAD | MIXED | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", HEAD | MIXED | {"query_pre_attn_scalar": 16}),
    "gpt_oss": (
        "GptOssConfig",
        HEAD | MIXED | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None},
    ),
}
"""Softcap: gemma2. Windows: mistral in every layer, the last three in every second one. Sinks: gpt_oss. QK norm:
qwen3, gemma3. Biases: qwen2."""

NEW_TOKENS = 12


def make_model(config_class: str, **settings: Any) -> Any:
    """A model with random weights that are large enough for its attention to be far from uniform."""
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0.0, 1.0 if "sinks" in name else 0.15)
    return model


@lru_cache
def tiny(name: str) -> Any:
    """One of :data:`CONFIGS`; the same object each time."""
    config_class, settings = CONFIGS[name]
    return make_model(config_class, **settings)


def prompts_of(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Random token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


@lru_cache
def _generated(name: str, prompt: tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    out = tiny(name).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


def generated(name: str, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """What Transformers' own ``generate`` answers, greedily, each prompt alone."""
    return [list(_generated(name, tuple(prompt), new_tokens)) for prompt in prompts]


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams | None = None) -> list[RequestOutput]:
    """Run prompts to their end, checking every invariant of the table after each step."""
    params = params or SamplingParams(max_tokens=NEW_TOKENS)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = {}
    while engine.has_unfinished():
        for delta in engine.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.table.check()
    return [outputs[request_id] for request_id in ids]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    """The first answer of each."""
    return [output.outputs[0].token_ids for output in outputs]


def live_blocks(engine: Engine) -> int:
    """Blocks that a sequence holds."""
    return sum(pool.num_live for pool in engine.table.pools.values())
