"""Runs to look at: tiny random models, recorded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagetile.engine.engine import Engine
from pagetile.engine.request import SamplingParams
from pagetile.engine.sizing import EngineConfig
from pagetile.inspect.recorder import Recorder
from pagetile.inspect.run import Run

SHARED = list(range(3, 22))
"""A prompt that others begin with."""


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
    ).eval()


def tiny_windowed() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            max_position_embeddings=256,
        )
    ).eval()


def record(model: Any, prompts: list[list[int]], max_tokens: int, n: int = 1, **config: Any) -> tuple[Engine, Run]:
    """Run prompts to their end under a recorder."""
    engine = Engine(model, None, EngineConfig(**config))
    params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True, temperature=1.0 if n > 1 else 0.0, seed=1)
    with Recorder(engine, title="A test", model="tiny") as recorder:
        for prompt in prompts:
            engine.add_request(prompt, params)
        for _ in engine:
            pass
    return engine, recorder.run


@pytest.fixture(scope="session")
def crowded() -> tuple[Engine, Run]:
    """Five requests in ten blocks of 4: prefix hits, preemptions, chunked prompts."""
    prompts = [SHARED[:19], [*SHARED[:12], 40, 41], [50, 51, 52], SHARED[:9], [60, 61, 62, 1, 2, 3, 4]]
    return record(tiny_llama(), prompts, 8, block_size=4, num_blocks=12, max_batch_tokens=16, max_num_seqs=4)


@pytest.fixture(scope="session")
def windowed() -> tuple[Engine, Run]:
    """A model with a full and a sliding layer, so two pools; the sliding one gives blocks back."""
    prompts = [SHARED[:19], [50, 51, 52, 53, 54]]
    return record(tiny_windowed(), prompts, 10, block_size=4, num_blocks=24, max_batch_tokens=12)


@pytest.fixture(scope="session")
def forked() -> tuple[Engine, Run]:
    """Two answers to one prompt that ends inside a block: a fork, and a copy on the first write."""
    return record(tiny_llama(), [SHARED[:6]], 5, n=2, block_size=4, num_blocks=16)
