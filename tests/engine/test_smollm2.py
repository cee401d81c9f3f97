"""The main job on a real model: SmolLM2-135M-Instruct, 9 query heads over 3 key heads, 30 layers."""

from __future__ import annotations

import pytest
import torch
from tiny_models import run, tokens

from pagetile.engine import LLM, Engine, EngineConfig, SamplingParams
from pagetile.engine.loader import load

pytestmark = pytest.mark.model

TEXTS = [
    "What is the capital of France?",
    "Hi",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle, and tell it from the view of the "
    "bottle, with a beginning, a middle and an end.",
    "List the first ten prime numbers, then the first five square numbers.",
    "Translate to French: good morning, my friends.",
    " ".join(["The quick brown fox jumps over the lazy dog."] * 12) + " How often does the fox jump?",
    "Finish this line for me, and then go on for as long as you can: one, two, three, four,",
]
NEW = 64


@pytest.fixture(scope="module")
def smollm2():
    return load(None)


@pytest.fixture(scope="module")
def prompts(smollm2) -> list[list[int]]:
    template = smollm2.tokenizer.apply_chat_template
    return [
        template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)["input_ids"]
        for text in TEXTS
    ]


@pytest.fixture(scope="module")
def reference(smollm2, prompts) -> list[list[int]]:
    """Transformers' own answers, each prompt alone."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = smollm2.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(autouse=True)
def one_thread():
    """The real model is worth all threads: replaces the fixture for the tiny ones."""
    return


def test_greedy_tokens_equal_generate_with_a_cold_and_a_warm_cache(smollm2, prompts, reference) -> None:
    assert len({len(prompt) for prompt in prompts}) == len(prompts)
    engine = Engine(smollm2.model, smollm2.tokenizer, EngineConfig(num_blocks=128))
    params = SamplingParams(max_tokens=NEW)
    assert tokens(run(engine, prompts, params)) == reference
    assert tokens(run(engine, prompts, params)) == reference
    assert engine.stats.prefix_hit_tokens > sum(map(len, prompts)) * 0.7


def test_with_so_few_blocks_that_requests_are_preempted(smollm2, prompts, reference) -> None:
    engine = Engine(smollm2.model, smollm2.tokenizer, EngineConfig(num_blocks=20, block_size=24, max_batch_tokens=128))
    assert tokens(run(engine, prompts, SamplingParams(max_tokens=NEW))) == reference
    assert engine.stats.preemptions > 0


def test_text_in_and_text_out(smollm2) -> None:
    with LLM(smollm2.model, tokenizer=smollm2.tokenizer, num_blocks=128) as llm:
        chats = [[{"role": "user", "content": text}] for text in TEXTS[:3]]
        params = SamplingParams(max_tokens=24)
        outputs = llm.generate(chats, params)
        assert outputs[0].outputs[0].text == "The capital of France is Paris."
        assert outputs[0].outputs[0].finish_reason == "stop"
        streamed = ["", "", ""]
        for number, delta in llm.stream(chats, params):
            streamed[number] += delta.text
        assert streamed == [output.outputs[0].text for output in outputs]
        [raw] = llm.generate("The capital of France is", SamplingParams(max_tokens=12, stop=["."]))
        assert raw.outputs[0].text.strip().startswith("Paris")
        assert "." not in raw.outputs[0].text
