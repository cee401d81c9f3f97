"""Tiny random models whose attention matters, and how to run one with and without pagetile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from pagetile.integrations.transformers import PagedCache, disable, enable

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
WINDOW = 8
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
HEAD = {"head_dim": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", HEAD),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", HEAD | MIXED | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", HEAD | MIXED | {"query_pre_attn_scalar": 16}),
    "gpt_oss": (
        "GptOssConfig",
        HEAD | MIXED | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None},
    ),
}
"""Softcap: gemma2. Windows: mistral in every layer, the last three in every second one. Sinks: gpt_oss."""

FAMILIES = tuple(CONFIGS)
LENGTHS = (4, 10, 40)
NEW = 20


@lru_cache
def tiny(name: str, seed: int = 0) -> Any:
    """A model whose random weights are large enough for its attention to be far from uniform; the same each time."""
    torch.manual_seed(seed)
    config_class, settings = CONFIGS[name]
    config = getattr(transformers, config_class)(**{**SIZES, **settings})
    own = {"attn_implementation": "eager"} if name == "gemma2" else {}  # some hosts' sdpa forgets the softcap
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **own).eval()
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if "norm" not in parameter:
                weight.normal_(0.0, 1.0 if "sinks" in parameter else 0.15)
    return model


def prompts_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    """Random token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


def padded(prompts: list[list[int]], side: str = "left") -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of a padded batch."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        at = slice(longest - len(prompt), longest) if side == "left" else slice(len(prompt))
        ids[row, at], mask[row, at] = torch.tensor(prompt), 1
    return {"input_ids": ids, "attention_mask": mask}


def answers(model: Any, prompts: list[list[int]], new_tokens: int = NEW) -> list[list[int]]:
    """What ``generate`` answers greedily, each prompt alone."""
    found = []
    for prompt in prompts:
        out = model.generate(**padded([prompt]), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


@contextmanager
def on_pages(model: Any, **settings: Any) -> Iterator[Any]:
    """The model enabled, and disabled again whatever happens."""
    enable(model, **settings)
    try:
        yield model
    finally:
        disable(model)


def cache_in(output: Any) -> PagedCache:
    """The cache of an output, under the name that this version has for it."""
    found = output.get("cache") if output.get("cache") is not None else output.get("past_key_values")
    assert isinstance(found, PagedCache)
    return found


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """A cache as keyword of the model's ``forward`` and ``generate``."""
    import inspect

    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def batching(page_size: int = 16, **settings: Any) -> ContinuousBatchingConfig:
    """Settings of continuous batching, whatever this version calls the size of a page."""
    fields = ContinuousBatchingConfig.__dataclass_fields__
    name = "page_size" if "page_size" in fields else "block_size"
    return ContinuousBatchingConfig(**{name: page_size, "num_blocks": 64, "max_batch_tokens": 64, **settings})


def greedy(new_tokens: int = NEW, **settings: Any) -> GenerationConfig:
    """Greedy tokens, as many as asked for."""
    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, **settings)


def several(count: int, new_tokens: int = NEW) -> GenerationConfig:
    """``count`` answers a prompt, each of them the greedy one."""
    return GenerationConfig(
        max_new_tokens=new_tokens, do_sample=True, top_k=1, num_return_sequences=count, eos_token_id=-1, pad_token_id=0
    )


def batched(model: Any, prompts: list[list[int]], config: Any = None, generation: Any = None) -> list[list[list[int]]]:
    """What ``generate_batch`` answers, for each prompt all of its answers."""
    out = model.generate_batch(
        prompts, generation_config=generation or greedy(), continuous_batching_config=config or batching()
    )
    assert [entry.error for entry in out.values() if entry.error] == []
    by_prompt: dict[tuple[int, ...], list[list[int]]] = {}
    for entry in out.values():
        by_prompt.setdefault(tuple(entry.prompt_ids), []).append(list(entry.generated_tokens))
    return [by_prompt[tuple(prompt)] for prompt in prompts]
