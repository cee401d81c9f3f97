"""``generate_batch`` over the host's blocks: its tokens, without its masks and gathers."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from hf_kit import FAMILIES, answers, batched, batching, greedy, on_pages, padded, prompts_of, several, tiny
from transformers.generation.continuous_batching import input_outputs

from pagetile.contracts.errors import UnsupportedError
from pagetile.integrations.transformers import batching as ours
from pagetile.integrations.transformers import disable, enable

LENGTHS = (4, 10, 40, 39, 1)


@pytest.mark.parametrize("batch_tokens", [64, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_generate(family: str, batch_tokens: int) -> None:
    """Whole prompts, and prompts in pieces beside running requests, longer than the window."""
    model, prompts = tiny(family), prompts_of(LENGTHS)
    expected = answers(model, prompts)
    with on_pages(model):
        found = batched(model, prompts, batching(max_batch_tokens=batch_tokens))
    assert found == [[tokens] for tokens in expected]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_odd_page_sizes(family: str) -> None:
    model, prompts = tiny(family), prompts_of(LENGTHS)
    expected = answers(model, prompts)
    with on_pages(model):
        found = batched(model, prompts, batching(page_size=5, max_batch_tokens=24, num_blocks=128))
    assert found == [[tokens] for tokens in expected]


def test_no_mask_and_no_list_of_addresses_is_made() -> None:
    model, seen = tiny("gemma3"), []
    original = input_outputs.ContinuousBatchingIOs.get_model_kwargs

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        seen.append((found["attention_mask"], sum(t.numel() for t in found["read_index"])))
        return found

    with on_pages(model), mock.patch.object(input_outputs.ContinuousBatchingIOs, "get_model_kwargs", look):
        batched(model, prompts_of((10, 40)))
    assert len(seen) > 10
    assert {mask for mask, _ in seen} == {None}


def test_several_answers_share_and_copy_blocks() -> None:
    model, prompts = tiny("llama"), prompts_of((21, 5))
    expected = answers(model, prompts)
    with on_pages(model):
        found = batched(model, prompts, generation=several(3))
    assert found == [[tokens] * 3 for tokens in expected]


def test_a_prefix_is_computed_once() -> None:
    model, (prefix, *ends) = tiny("llama"), prompts_of((48, 3, 7, 16))
    prompts = [prefix + end for end in ends] + [prefix]
    expected = answers(model, prompts)
    with on_pages(model):
        found = batched(model, prompts, batching(max_batch_tokens=32))
    assert found == [[tokens] for tokens in expected]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_so_few_blocks_that_requests_wait(family: str) -> None:
    model, prompts = tiny(family), prompts_of((30, 40, 35, 20))
    expected = answers(model, prompts)
    with on_pages(model):
        found = batched(model, prompts, batching(num_blocks=8, max_batch_tokens=32))
    assert found == [[tokens] for tokens in expected]


@pytest.mark.parametrize("setting", ["use_cuda_graph", "use_async_batching", "max_blocks_per_request"])
def test_what_there_is_none_of_is_refused(setting: str) -> None:
    model = tiny("llama")
    with on_pages(model), pytest.raises(UnsupportedError, match=setting):
        model.init_continuous_batching(
            generation_config=greedy(), continuous_batching_config=batching(**{setting: True})
        )


def wait_for(manager: Any, count: int) -> list[Any]:
    """The answers of ``count`` requests."""
    found: list[Any] = []
    deadline = time.monotonic() + 120
    while len(found) < count:
        assert time.monotonic() < deadline
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            found.append(result)
    return found


def test_ordinary_forwards_while_a_manager_runs() -> None:
    model, prompts, inputs = tiny("gemma2"), prompts_of((10, 30)), padded(prompts_of())
    expected, alone = answers(model, prompts, 60), answers(model, prompts_of((12,)))
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    with on_pages(model):
        manager = model.init_continuous_batching(generation_config=greedy(60), continuous_batching_config=batching())
        manager.start()
        try:
            manager.add_requests(prompts, max_new_tokens=60)
            for _ in range(10):
                with torch.no_grad():
                    assert torch.equal(model(**inputs, use_cache=False).logits, logits)
            assert answers(model, prompts_of((12,))) == alone
            with pytest.raises(RuntimeError, match="is running"):
                disable(model)
            found = {tuple(r.prompt_ids): list(r.generated_tokens) for r in wait_for(manager, 2)}
        finally:
            manager.stop(block=True)
    assert [found[tuple(prompt)] for prompt in prompts] == expected


def test_a_kept_manager_goes_on_and_goes_with_disable() -> None:
    model, prompts = tiny("llama"), prompts_of((9, 17))
    expected = answers(model, prompts)
    with on_pages(model):
        for _ in range(2):
            out = model.generate_batch(
                prompts,
                generation_config=greedy(),
                continuous_batching_config=batching(),
                persistent_manager=True,
            )
            assert [list(entry.generated_tokens) for entry in out.values()] == expected
        assert hasattr(model, "_cached_continuous_batching_manager")
    assert not hasattr(model, "_cached_continuous_batching_manager")


def test_a_manager_from_before_is_noticed() -> None:
    model = tiny("llama")
    name = model.config._attn_implementation
    manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=batching())
    processor = manager._create_batch_processor()
    model.set_attn_implementation(name)  # some hosts' managers change it
    enable(model)
    try:
        with pytest.raises(RuntimeError, match="made before the model was enabled"):
            ours.cache_of({"cache": processor.cache, "read_index": []})
        with pytest.raises(RuntimeError, match="made before the model was enabled"):
            ours.cache_of({"read_index": []})  # where the model keeps the cache to itself
    finally:
        disable(model)
