"""From logits to tokens: distributions, seeds, several answers, logarithms."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import generated, live_blocks, prompts_of, run, tiny, tokens

from pagetile.engine import SamplingParams
from pagetile.engine.sampling import draw_token, uniform

PROMPTS = prompts_of((4, 10, 23, 17), seed=6)
WARM = {"temperature": 1.0, "max_tokens": 12}


def shares(logits: torch.Tensor, params: SamplingParams, draws: int = 1000) -> torch.Tensor:
    """How often each token comes, with draws evenly spread over [0, 1): the distribution itself, without noise."""
    counts = torch.zeros(logits.numel())
    for i in range(draws):
        counts[draw_token(logits, params, (i + 0.5) / draws)] += 1
    return counts / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, float("-inf")])
    expected = torch.softmax(logits / temperature, -1)
    assert torch.allclose(shares(logits, SamplingParams(temperature=temperature)), expected, atol=2e-3)


def test_top_k_keeps_k_also_among_equals() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    got = shares(logits, SamplingParams(temperature=1.0, top_k=3))
    expected = torch.softmax(torch.tensor([-math.inf, 3.0, 2.0, 2.0, -math.inf, -math.inf]), -1)
    assert torch.allclose(got, expected, atol=2e-3)


def test_top_p_is_the_smallest_set_that_reaches_p() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.2, 0.25])
    got = shares(probabilities.log(), SamplingParams(temperature=1.0, top_p=0.7))
    assert torch.allclose(got, torch.tensor([0.0, 2 / 3, 0.0, 1 / 3]), atol=2e-3)
    only = shares(probabilities.log(), SamplingParams(temperature=1.0, top_p=0.01))
    assert only.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_top_k_and_top_p_together_in_this_order() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # After top-k 2 the shares are 4/7 and 3/7: p = 0.5 is reached by the first alone.
    got = shares(probabilities.log(), SamplingParams(temperature=1.0, top_k=2, top_p=0.5))
    assert got.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_top_p_over_a_vocabulary_whose_likeliest_few_do_not_reach_it() -> None:
    logits = torch.zeros(2000)  # each of 2000 tokens has 1/2000; p = 0.5 needs 1000 of them
    drawn = {draw_token(logits, SamplingParams(temperature=1.0, top_p=0.5), i / 500) for i in range(500)}
    assert len(drawn) == 500
    assert max(drawn) < 1000, "among equals the lower ids come first"


@pytest.mark.parametrize("draw", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_a_token_without_probability_is_never_drawn(draw: float) -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.999)):
        assert draw_token(logits, params, draw) in (1, 3)


def test_uniform_depends_on_its_arguments_and_nothing_else() -> None:
    values = [uniform(7, sample, position) for sample in range(4) for position in range(100)]
    assert values == [uniform(7, sample, position) for sample in range(4) for position in range(100)]
    assert len(set(values)) == 400
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / 400 - 0.5) < 0.06
    assert uniform(2**64 - 1, 0, 0) != uniform(2**64 - 2, 0, 0)


def test_a_seed_gives_the_same_tokens_whatever_else_runs(make_engine) -> None:
    model = tiny("llama")
    params = [SamplingParams(seed=seed, **WARM) for seed in range(len(PROMPTS))]
    alone = []
    for prompt, own in zip(PROMPTS, params, strict=True):
        alone += tokens(run(make_engine(model), [prompt], own))
    together = make_engine(model)
    ids = [together.add_request(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    batch = {d.request_id: d.output.outputs[0].token_ids for d in together if d.output}
    assert [batch[i] for i in ids] == alone
    tight = make_engine(model, block_size=4, num_blocks=14)
    ids = [tight.add_request(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    preempted = {d.request_id: d.output.outputs[0].token_ids for d in tight if d.output}
    assert tight.stats.preemptions > 0
    assert [preempted[i] for i in ids] == alone
    assert alone != generated("llama", PROMPTS), "sampling at temperature 1 is not greedy"


def test_without_a_seed_two_runs_differ_and_the_seed_is_told(make_engine) -> None:
    engine = make_engine(tiny("llama"))
    first, second = run(engine, [PROMPTS[0]] * 2, SamplingParams(**WARM))
    assert first.seed != second.seed
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    [again] = run(engine, [PROMPTS[0]], SamplingParams(seed=first.seed, **WARM))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_several_answers_share_the_prompt_and_differ(name: str, num_blocks: int, make_engine) -> None:
    """Each answer is what its own (seed, number) says: with room for all, and with so little that forks give way."""
    engine = make_engine(tiny(name), block_size=4, num_blocks=num_blocks)
    params = SamplingParams(n=4, seed=3, **WARM)
    [output] = run(engine, [PROMPTS[1]], params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 4
    ample = make_engine(tiny(name), num_blocks=256, block_size=1, prefix_cache=False)
    [reference] = run(ample, [PROMPTS[1]], params)
    assert [a.token_ids for a in output.outputs] == [a.token_ids for a in reference.outputs]
    [single] = run(make_engine(tiny(name)), [PROMPTS[1]], SamplingParams(seed=3, **WARM))
    assert single.outputs[0].token_ids == output.outputs[0].token_ids
    if num_blocks == 64:
        # 10 tokens of prompt in blocks of 4: two full blocks are shared by all, the third is copied on the first write.
        assert engine.table.stats.copies > 0
        assert engine.stats.prefill_tokens == 10
    else:
        assert output.metrics.preemptions > 0
    assert live_blocks(engine) == 0


def test_several_greedy_answers_are_the_same_answer(make_engine) -> None:
    engine = make_engine(tiny("llama"), max_num_seqs=3)
    outputs = run(engine, PROMPTS[:2], SamplingParams(n=3, max_tokens=12))
    for output, expected in zip(outputs, generated("llama", PROMPTS[:2]), strict=True):
        assert [answer.token_ids for answer in output.outputs] == [expected] * 3


def test_logprobs_are_those_of_the_model(make_engine) -> None:
    model = tiny("llama")
    prompt = PROMPTS[2]
    engine = make_engine(model, max_batch_tokens=7)
    [output] = run(engine, [prompt], SamplingParams(seed=1, logprobs=5, prompt_logprobs=2, **WARM))
    answer = output.outputs[0]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([prompt + answer.token_ids])).logits[0], -1)
    assert answer.logprobs is not None
    for i, entry in enumerate(answer.logprobs):
        row = logprobs[len(prompt) - 1 + i]
        assert entry.token_id == answer.token_ids[i]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert list(entry.top) == row.topk(5).indices.tolist()
        assert list(entry.top.values()) == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
    assert answer.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in answer.logprobs))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(logprobs[position - 1, prompt[position]]), abs=1e-4)
        assert len(entry.top) == 2


def test_prompt_logprobs_are_whole_although_the_prompt_is_known(make_engine) -> None:
    engine = make_engine(tiny("llama"), block_size=4)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    [cold] = run(engine, [PROMPTS[2]], params)
    [warm] = run(engine, [PROMPTS[2]], params)
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert None not in (warm.prompt_logprobs or [])[1:]


def test_all_logprobs_sum_to_one(make_engine) -> None:
    [output] = run(make_engine(tiny("llama")), [PROMPTS[0]], SamplingParams(max_tokens=3, logprobs=128))
    for entry in output.outputs[0].logprobs or []:
        assert sum(math.exp(value) for value in entry.top.values()) == pytest.approx(1.0, abs=1e-5)
        assert entry.top[entry.token_id] == entry.logprob == max(entry.top.values())


def test_logprobs_were_not_asked_for(make_engine) -> None:
    [output] = run(make_engine(tiny("llama")), [PROMPTS[0]])
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None
