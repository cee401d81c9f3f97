"""What may be asked: prompts, parameters, ids; and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import generated, prompts_of, run, tiny, tokens

from pagetile.contracts.errors import ArgumentError
from pagetile.engine import LLM, SamplingParams

PROMPTS = prompts_of((4, 10))


@pytest.fixture
def llm():
    with LLM(tiny("llama"), num_blocks=64, max_batch_tokens=32) as model:
        yield model
        model.engine.table.check()
        assert not model.engine.table.sequences


def test_one_prompt_or_several(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12)
    assert tokens(llm.generate(PROMPTS[0], params)) == generated("llama", PROMPTS[:1])
    assert tokens(llm.generate(PROMPTS, params)) == generated("llama", PROMPTS)
    as_arrays = [np.array(PROMPTS[0]), torch.tensor(PROMPTS[1])]
    assert tokens(llm.generate(as_arrays, params)) == generated("llama", PROMPTS)
    assert llm.generate([], params) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    short, long = llm.generate(PROMPTS, [SamplingParams(max_tokens=3), SamplingParams(max_tokens=12)])
    assert short.outputs[0].token_ids == generated("llama", PROMPTS)[0][:3]
    assert long.outputs[0].token_ids == generated("llama", PROMPTS)[1]
    with pytest.raises(ArgumentError, match="1 entries for 2 prompts"):
        llm.generate(PROMPTS, [SamplingParams()])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "is empty"),
        ("text", "no tokenizer"),
        ([5, 128], r"token 1 .* is 128.*vocabulary has 128"),
        ([-1], "is -1"),
        ([3] * 256, "256 tokens.*256 together"),
        ([{"role": "user", "content": "hi"}], "no chat template"),
    ],
)
def test_prompts_that_are_refused(prompt, message: str, llm: LLM) -> None:
    with pytest.raises(ArgumentError, match=message):
        llm.generate([PROMPTS[0], prompt])
    assert not llm.engine.has_unfinished(), "the prompts before the bad one must not stay queued"


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 4, "max_tokens": 3},
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
        {"seed": 2**64},
        {"n": 0},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
    ],
)
def test_parameters_that_are_refused(bad: dict) -> None:
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_request_ids(make_engine) -> None:
    engine = make_engine(tiny("llama"))
    engine.add_request(PROMPTS[0], request_id="mine")
    with pytest.raises(ArgumentError, match="'mine' is in use"):
        engine.add_request(PROMPTS[0], request_id="mine")
    engine.add_request(PROMPTS[0])
    engine.abort("mine")
    engine.add_request(PROMPTS[0], request_id="mine")
    assert {d.output.request_id for d in engine if d.output} == {"mine", "request-0"}


def test_max_tokens_is_cut_to_the_context(make_engine) -> None:
    engine = make_engine(tiny("llama"), max_length=16)
    [output] = run(engine, [PROMPTS[1]], SamplingParams(max_tokens=100))
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].token_ids == generated("llama", PROMPTS)[1][:6]
    with pytest.raises(ArgumentError, match="max_length is 1000"):
        make_engine(tiny("llama"), max_length=1000)


def test_end_tokens(make_engine, monkeypatch) -> None:
    """The model's own end tokens end an answer and belong to it; a stop id does too; ignore_eos goes on."""
    answer = generated("llama", PROMPTS)[1]
    model = tiny("llama")
    end = answer[4]
    assert end not in answer[:4]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end, 1])
    engine = make_engine(model)
    [own] = run(engine, [PROMPTS[1]])
    assert own.outputs[0].token_ids == answer[:5]
    assert (own.outputs[0].finish_reason, own.outputs[0].stop_reason) == ("stop", end)
    [ignored] = run(engine, [PROMPTS[1]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert ignored.outputs[0].token_ids == answer
    [stopped] = run(engine, [PROMPTS[1]], SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[answer[2]]))
    assert stopped.outputs[0].token_ids == answer[:3]
    [late] = run(engine, [PROMPTS[1]], SamplingParams(max_tokens=12, min_tokens=8))
    assert end not in late.outputs[0].token_ids[:8]
    assert len(late.outputs[0].token_ids) >= 8


def test_the_cache_has_the_model_s_dtype_whatever_the_default_is(make_engine) -> None:
    """TransformerLensOrg/TransformerLens#1260: a cache made with the global default dtype."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert make_engine(tiny("llama")).cache.dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_num_blocks_auto_states_a_number_on_a_cpu(make_engine) -> None:
    """huggingface/transformers#42869: on a CPU the available memory was None and the start failed."""
    engine = make_engine(tiny("llama"), num_blocks="auto", memory=10**6)
    per_block = engine.cache.geometry.bytes_per_block
    assert engine.cache.num_blocks == {"full": 10**6 // per_block}
    everything = make_engine(tiny("llama"), num_blocks="auto", max_num_seqs=2)
    assert everything.cache.num_blocks == {"full": 2 * 256 // 16}
