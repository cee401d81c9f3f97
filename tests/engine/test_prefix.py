"""Prefix hits: what is found is right, and what is right is found."""

from __future__ import annotations

import pytest
from tiny_models import generated, live_blocks, prompts_of, run, tiny, tokens

from pagetile.engine import SamplingParams

FOUR = SamplingParams(max_tokens=4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_of_whole_blocks_found_in_full(name: str, make_engine) -> None:
    """GeeeekExplorer/nano-vllm#114, #144, #199: query length 0 when a prompt is an exact multiple of the block size.

    The last token is computed again, and no shared block changes by it.
    """
    [prompt] = prompts_of((8,))
    engine = make_engine(tiny(name), block_size=4)
    assert tokens(run(engine, [prompt], FOUR)) == generated(name, [prompt], 4)
    layers = [layer for group in engine.cache.groups for layer in group.layers]
    before = [engine.cache.key(layer).clone() for layer in layers]
    assert tokens(run(engine, [prompt], SamplingParams(max_tokens=1))) == generated(name, [prompt], 1)
    assert engine.stats.prefix_hit_tokens == 7
    assert all(engine.cache.key(layer).equal(old) for layer, old in zip(layers, before, strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_cold_and_warm_agree_at_every_split(name: str, make_engine) -> None:
    """tenstorrent/vllm#415: the miss path was right and the hit path was not."""
    [prompt] = prompts_of((13,), seed=3)
    for split in range(1, len(prompt) + 1):
        engine = make_engine(tiny(name), block_size=3, num_blocks=32)
        run(engine, [prompt[:split]], SamplingParams(max_tokens=1))
        [warm] = run(engine, [prompt], FOUR)
        assert warm.outputs[0].token_ids == generated(name, [prompt], 4)[0]
        full = (split // 3) * 3
        assert warm.metrics.prefix_hit_tokens == min(full, len(prompt) - 1)


def test_one_prompt_twice_in_one_batch(make_engine) -> None:
    """Wenyueh/MinivLLM#98: the second of two equal prompts read nothing and began at position 0."""
    [prompt] = prompts_of((50,))
    engine = make_engine(tiny("llama"), max_batch_tokens=256)
    assert tokens(run(engine, [prompt, prompt])) == generated("llama", [prompt, prompt])
    # The second waits while the first computes its three full blocks, and takes them.
    assert engine.stats.prefix_hit_tokens == 48
    staggered = make_engine(tiny("llama"), max_batch_tokens=20)
    assert tokens(run(staggered, [prompt, prompt])) == generated("llama", [prompt, prompt])


def test_waiting_for_a_prefix_in_flight_does_not_hold_others_up(make_engine) -> None:
    long, other = prompts_of((60, 9), seed=8)
    engine = make_engine(tiny("llama"), max_batch_tokens=80)
    prompts = [long, [*long, 7], other]
    ids = [engine.add_request(prompt) for prompt in prompts]
    engine.step()
    assert [sample.request.request_id for sample in engine.scheduler.running] == [ids[0], ids[2]]
    engine.step()
    assert [sample.request.request_id for sample in engine.scheduler.running] == [ids[0], ids[2], ids[1]]
    answers = {d.request_id: d.output for d in engine if d.output}
    assert [answers[i].metrics.prefix_hit_tokens for i in ids] == [0, 48, 0]
    assert [answers[i].outputs[0].token_ids[:12] for i in ids] == generated("llama", prompts)


def test_an_answer_is_a_prefix_of_the_next_turn(make_engine) -> None:
    [prompt] = prompts_of((14,))
    engine = make_engine(tiny("llama"), block_size=4)
    [first] = run(engine, [prompt])
    turn = prompt + first.outputs[0].token_ids + [9, 8, 7]
    [second] = run(engine, [turn])
    assert second.outputs[0].token_ids == generated("llama", [turn])[0]
    # 14 + 12 tokens, the last of which was never computed: 25 tokens are 6 full blocks.
    assert second.metrics.prefix_hit_tokens == 24


def test_repeats_are_equal_and_hit_all_their_blocks(make_engine) -> None:
    """ovg-project/kvcached#446 (the third repeat changed); vllm-project/vllm#11186, #51198 (silent loss of hits)."""
    [prompt] = prompts_of((50,))
    engine = make_engine(tiny("gemma3"), block_size=16)
    outputs = [run(engine, [prompt])[0] for _ in range(4)]
    assert tokens(outputs) == generated("gemma3", [prompt] * 4)
    assert [output.metrics.prefix_hit_tokens for output in outputs] == [0, 48, 48, 48]


def test_evicted_blocks_are_never_served(make_engine) -> None:
    """GeeeekExplorer/nano-vllm#163, ovg-project/kvcached#362: a reused block was still found under its old prefix."""
    first, second = prompts_of((16, 16), seed=5)
    engine = make_engine(tiny("llama"), block_size=4, num_blocks=5)
    for prompt in (first, second, first, second):
        assert tokens(run(engine, [prompt], FOUR)) == generated("llama", [prompt], 4)
    assert engine.table.usage()["full"].evictions > 0


def test_without_a_prefix_cache_nothing_is_found(make_engine) -> None:
    [prompt] = prompts_of((40,))
    engine = make_engine(tiny("llama"), prefix_cache=False)
    run(engine, [prompt, prompt])
    run(engine, [prompt])
    assert engine.stats.prefix_hit_tokens == 0
    assert engine.table.usage()["full"].cached == 0
    assert live_blocks(engine) == 0
