"""A real model: SmolLM2-135M-Instruct, 9 query heads over 3 key heads, 30 layers, as GGUF in a package."""

from __future__ import annotations

import pytest
import torch
from hf_kit import batched, batching, greedy, on_pages, padded

from pagetile.engine.loader import load

pytestmark = pytest.mark.model

TEXTS = ["What is the capital of France?", "Hi", "Explain in two sentences why the sky is blue."]


def test_generate_and_generate_batch_answer_as_without() -> None:
    loaded = load(None)
    model, template = loaded.model, loaded.tokenizer.apply_chat_template
    prompts = [
        template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)["input_ids"]
        for text in TEXTS
    ]
    torch.set_num_threads(2)
    inputs = padded(prompts)
    asked = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**inputs, **asked)[:, inputs["input_ids"].shape[1] :].tolist()
    beams = model.generate(**padded(prompts[:1]), **asked, num_beams=3)
    with on_pages(model):
        assert model.generate(**inputs, **asked)[:, inputs["input_ids"].shape[1] :].tolist() == expected
        assert torch.equal(model.generate(**padded(prompts[:1]), **asked, num_beams=3), beams)
        assert batched(model, prompts, batching(num_blocks=32), greedy(24)) == [[answer] for answer in expected]
    assert "Paris" in loaded.tokenizer.decode(expected[0])
