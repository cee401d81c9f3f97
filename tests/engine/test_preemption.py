"""Losing blocks and getting them back: preemption, abort, failure, refusal."""

from __future__ import annotations

import pytest
import torch
from tiny_models import NEW_TOKENS, generated, live_blocks, prompts_of, run, tiny, tokens

from pagetile.contracts.errors import ArgumentError
from pagetile.engine import Engine, SamplingParams
from pagetile.engine.scheduler import StepPlan

PROMPTS = prompts_of((19, 7, 30), seed=4)


def finish(engine: Engine) -> dict[str, list[int]]:
    answers = {}
    while engine.has_unfinished():
        for delta in engine.step():
            if delta.output is not None:
                answers[delta.request_id] = delta.output.outputs[0].token_ids
        engine.table.check()
    return answers


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_at_every_step(name: str, prefix_cache: bool, make_engine) -> None:
    """vllm-project/vllm#16832: output was incomplete after recompute preemption."""
    [prompt] = prompts_of((19,))
    expected = generated(name, [prompt], 20)[0]
    engine = make_engine(tiny(name), block_size=4, max_batch_tokens=8, prefix_cache=prefix_cache)
    for at in range(20):
        request = engine.add_request(prompt, SamplingParams(max_tokens=20))
        for _ in range(at):
            engine.step()
        for sample in list(engine.scheduler.running):
            engine.scheduler.preempt(sample)
        assert live_blocks(engine) == 0
        assert finish(engine)[request] == expected, f"preempted after {at} steps"


def swap_out(engine: Engine) -> None:
    """Preempt whoever runs, to the host, as a step does whose older samples need the blocks."""
    plan = StepPlan()
    for sample in list(engine.scheduler.running):
        engine.scheduler.preempt(sample, plan)
    engine.host.send(plan.sends)
    engine.scheduler.settle()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_swapped_at_every_step(name: str, prefix_cache: bool, make_engine) -> None:
    """What waited on the host is what was there: nothing is computed twice, and the answer is the undisturbed one."""
    [prompt] = prompts_of((19,))
    expected = generated(name, [prompt], 20)[0]
    sizes = {"block_size": 4, "max_batch_tokens": 8, "prefix_cache": prefix_cache}
    engine = make_engine(tiny(name), preemption="swap", **sizes)
    for at in range(20):
        request = engine.add_request(prompt, SamplingParams(max_tokens=20))
        rows = engine.stats.prefill_tokens + engine.stats.decode_tokens
        for _ in range(at):
            engine.step()
        swap_out(engine)
        assert live_blocks(engine) == 0
        for cache in (engine.cache.block_tensors(g.name) for g in engine.cache.groups):
            for tensor in cache.values():
                tensor.fill_(float("nan"))  # and nothing of it was left on the device
        engine.table.reset_prefix_cache()
        assert finish(engine)[request] == expected, f"swapped after {at} steps"
        if not prefix_cache:
            assert engine.stats.prefill_tokens + engine.stats.decode_tokens - rows == 19 + 20 - 1
        engine.host.check()
        assert not engine.host.parked


@pytest.mark.parametrize("host_blocks", [1, 12, 100])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_swapping_under_pressure(name: str, host_blocks: int, make_engine) -> None:
    """Few blocks: some swap, some find no room on the host and are computed again; every answer is the undisturbed."""
    engine = make_engine(
        tiny(name), block_size=4, num_blocks=17, max_batch_tokens=16, preemption="swap", host_blocks=host_blocks
    )
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=30)) for prompt in PROMPTS]
    answers = {}
    while engine.has_unfinished():
        for delta in engine.step():
            if delta.output is not None:
                answers[delta.request_id] = delta.output.outputs[0].token_ids
        engine.table.check()
        engine.host.check()
    assert [answers[i] for i in ids] == generated(name, PROMPTS, 30)
    assert engine.stats.preemptions > 0
    assert host_blocks == 1 or engine.stats.swaps > 0
    assert not engine.host.parked


def test_a_failed_step_keeps_what_is_parked(make_engine, monkeypatch) -> None:
    """A step that brings a sample back and fails: it is parked as before, and comes back with the next."""
    [prompt] = prompts_of((19,))
    expected = generated("llama", [prompt], 20)[0]
    engine = make_engine(tiny("llama"), block_size=4, max_batch_tokens=32, preemption="swap")
    request = engine.add_request(prompt, SamplingParams(max_tokens=20))
    for _ in range(3):
        engine.step()
    swap_out(engine)

    def fail(*_args):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            engine.step()
    assert len(engine.host.parked) == 1
    assert live_blocks(engine) == 0
    engine.host.check()
    assert finish(engine)[request] == expected
    assert engine.stats.swaps == 1


@pytest.mark.parametrize("when", ["parked", "back"])
def test_an_aborted_request_leaves_the_host(when: str, make_engine) -> None:
    engine = make_engine(tiny("llama"), block_size=4, preemption="swap")
    request = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=20))
    for _ in range(3):
        engine.step()
    swap_out(engine)
    if when == "back":
        engine.step()
    engine.abort(request)
    engine.host.check()
    assert not engine.host.parked
    assert live_blocks(engine) == 0


def test_swap_settings_that_say_nothing(make_engine) -> None:
    with pytest.raises(ArgumentError, match="preemption is 'swop'"):
        make_engine(tiny("llama"), preemption="swop")
    with pytest.raises(ArgumentError, match="host_blocks is 4; it goes with preemption='swap'"):
        make_engine(tiny("llama"), host_blocks=4)
    with pytest.raises(ArgumentError, match="num_blocks of the host"):
        make_engine(tiny("llama"), preemption="swap", host_blocks=0)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_abort_gives_everything_back(after: int, make_engine) -> None:
    """vllm-project/vllm#46283, vllm-project/vllm-ascend#16662: an aborted request kept its blocks."""
    engine = make_engine(tiny("gemma3"), block_size=4, max_batch_tokens=16)
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
    for _ in range(after):
        engine.step()
    aborted = engine.abort(ids[0])
    assert aborted is not None
    assert aborted.outputs[0].finish_reason == "abort"
    expected = generated("gemma3", PROMPTS)
    assert aborted.outputs[0].token_ids == expected[0][: len(aborted.outputs[0].token_ids)]
    assert engine.abort(ids[0]) is None
    engine.table.check()
    answers = finish(engine)
    assert [answers[i] for i in ids[1:]] == expected[1:]
    assert live_blocks(engine) == 0


def test_a_failed_step_leaves_no_trace(make_engine, monkeypatch) -> None:
    """neuralmagic/vllm#92: a request that could not be run kept its blocks, and a later invariant broke."""
    engine = make_engine(tiny("llama"), block_size=4, max_batch_tokens=16)
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=NEW_TOKENS)) for prompt in PROMPTS]
    for _ in range(4):
        engine.step()
    forward, failures = engine.runner.forward, iter([True, True, False])

    def fail(*args):
        logits = forward(*args)
        if next(failures, False):
            raise RuntimeError("out of luck")
        return logits

    monkeypatch.setattr(engine.runner, "forward", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            engine.step()
        engine.table.check()
        assert live_blocks(engine) == 0
    answers = finish(engine)
    assert [answers[i] for i in ids] == generated("llama", PROMPTS)


@pytest.mark.parametrize("n", [1, 3])
def test_a_failure_while_sampling_leaves_no_trace(n: int, make_engine, monkeypatch) -> None:
    """After the commit and the forks, before any token is taken."""
    from pagetile.engine import engine as module

    engine = make_engine(tiny("llama"), block_size=4)
    choose, failures = module.choose, iter([False, True, True])

    def fail(*args):
        if next(failures, False):
            raise KeyboardInterrupt
        return choose(*args)

    ids = [engine.add_request(prompt, SamplingParams(max_tokens=NEW_TOKENS, n=n)) for prompt in PROMPTS[:2]]
    monkeypatch.setattr(module, "choose", fail)
    outputs = {}
    interrupted = 0
    while engine.has_unfinished():
        try:
            outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output}
        except KeyboardInterrupt:
            interrupted += 1
            assert live_blocks(engine) == 0
        engine.table.check()
    assert interrupted == 2
    for request, expected in zip(ids, generated("llama", PROMPTS[:2]), strict=True):
        assert [answer.token_ids for answer in outputs[request].outputs] == [expected] * n


def test_nan_logits_are_an_error_and_not_a_token(make_engine, monkeypatch) -> None:
    engine = make_engine(tiny("llama"))
    engine.add_request(PROMPTS[0], request_id="poor")
    forward = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda *args: torch.full_like(forward(*args), float("nan")))
    with pytest.raises(RuntimeError, match=r"'poor'.*not finite"):
        engine.step()
    assert live_blocks(engine) == 0


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_request_that_can_never_fit_is_refused_with_both_numbers(block_size: int, make_engine) -> None:
    """vllm-project/vllm#546: a request without enough blocks stalled for ever."""
    engine = make_engine(tiny("llama"), block_size=block_size, num_blocks=32 // block_size)
    with pytest.raises(ArgumentError, match=rf"needs {-(-33 // block_size)} blocks.*has {32 // block_size}"):
        engine.add_request(PROMPTS[0], SamplingParams(max_tokens=15))
    assert not engine.has_unfinished()
    assert not engine.table.sequences
    fits = SamplingParams(max_tokens=14)  # 19 + 14 - 1 = 32 tokens are stored
    assert tokens(run(engine, [PROMPTS[0]], fits)) == generated("llama", [PROMPTS[0]], 14)


def test_a_window_lets_a_long_answer_fit_where_full_attention_would_not(make_engine) -> None:
    [prompt] = prompts_of((40,))
    engine = make_engine(tiny("mistral"), block_size=4, num_blocks=4)  # 16 slots; the window is 8
    assert tokens(run(engine, [prompt])) == generated("mistral", [prompt])
    with pytest.raises(ArgumentError, match="'full' has 4"):
        make_engine(tiny("llama"), block_size=4, num_blocks=4).add_request(prompt)


def test_more_answers_than_run_at_once_are_refused(make_engine) -> None:
    engine = make_engine(tiny("llama"), max_num_seqs=3)
    with pytest.raises(ArgumentError, match=r"n=4 answers.*at most 3"):
        engine.add_request(PROMPTS[0], SamplingParams(n=4))
    assert not engine.has_unfinished()


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_few_places(max_num_seqs: int, make_engine) -> None:
    engine = make_engine(tiny("llama"), max_num_seqs=max_num_seqs)
    assert tokens(run(engine, PROMPTS)) == generated("llama", PROMPTS)


def test_without_max_tokens_an_answer_ends_where_the_blocks_do(make_engine) -> None:
    engine = make_engine(tiny("llama"), block_size=4, num_blocks=8)
    [output] = run(engine, [PROMPTS[0]], SamplingParams(max_tokens=None))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 14


def test_a_closed_engine_says_so(make_engine) -> None:
    engine = make_engine(tiny("llama"))
    engine.add_request(PROMPTS[0])
    engine.close()
    engine.close()
    assert not engine.has_unfinished()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request(PROMPTS[0])
