"""Greedy tokens equal those of Transformers' own generate, token by token, whatever the blocks are."""

from __future__ import annotations

import pytest
from tiny_models import CONFIGS, generated, prompts_of, run, tiny, tokens

PROMPTS = prompts_of((4, 10, 40, 23))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_answers_say_something(name: str) -> None:
    """The prompts and the weights are such that a wrong attention could not pass unseen."""
    answers = generated(name, PROMPTS)
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    assert all(len(set(answer)) > 3 for answer in answers)


@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("name", CONFIGS)
def test_cold_and_warm(name: str, block_size: int, make_engine) -> None:
    engine = make_engine(tiny(name), block_size=block_size, num_blocks=1024 // block_size)
    cold = run(engine, PROMPTS)
    assert tokens(cold) == generated(name, PROMPTS)
    assert all(output.metrics.prefix_hit_tokens == 0 for output in cold)
    warm = run(engine, PROMPTS)
    assert tokens(warm) == generated(name, PROMPTS)
    assert engine.stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(
    ("block_size", "lengths", "num_blocks"),
    [(1, (30, 29, 28, 27), 64), (16, (30, 29, 28, 27), 5), (24, (22, 21, 20), 3)],
)
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_with_so_few_blocks_that_requests_are_preempted(
    name: str, prefix_cache: bool, block_size: int, lengths: tuple[int, ...], num_blocks: int, make_engine
) -> None:
    """Two sequences fit beside each other when they are admitted, and not when both have grown."""
    prompts = prompts_of(lengths, seed=2)
    engine = make_engine(tiny(name), block_size=block_size, num_blocks=num_blocks, prefix_cache=prefix_cache)
    assert tokens(run(engine, prompts)) == generated(name, prompts)
    if any(group.window is None for group in engine.table.groups):
        assert engine.stats.preemptions > 0, "the pool was not small enough to show anything"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_reference_backend_drives_the_engine_too(name: str, make_engine) -> None:
    engine = make_engine(tiny(name), backend="reference")
    assert tokens(run(engine, PROMPTS)) == generated(name, PROMPTS)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_batch_invariant(name: str, make_engine) -> None:
    engine = make_engine(tiny(name), batch_invariant=True)
    assert tokens(run(engine, PROMPTS)) == generated(name, PROMPTS)


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_any_budget_of_tokens(budget: int, make_engine) -> None:
    engine = make_engine(tiny("gemma3"), max_batch_tokens=budget)
    assert tokens(run(engine, PROMPTS)) == generated("gemma3", PROMPTS)
