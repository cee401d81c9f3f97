"""A prefix cache that survives a restart, in the engine: the same answers, less computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import generated, make_model, prompts_of, run, tiny, tokens

from pagetile.contracts.errors import ArgumentError, CacheFileError
from pagetile.engine import Engine, SamplingParams
from pagetile.engine.identity import weights_identity

PROMPTS = prompts_of((30, 23), seed=6)


def answers(engine: Engine) -> list[list[int]]:
    return tokens(run(engine, PROMPTS, SamplingParams(max_tokens=6)))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_second_engine_hits_what_the_first_computed(name: str, make_engine, tmp_path: Path) -> None:
    expected = generated(name, PROMPTS, 6)
    first = make_engine(tiny(name), block_size=4)
    assert answers(first) == expected
    assert first.save_prefix_cache(tmp_path / "c") > 0
    second = make_engine(tiny(name), block_size=4)
    done = second.load_prefix_cache(tmp_path / "c")
    assert done.loaded > 0
    assert answers(second) == expected
    assert second.stats.prefix_hit_tokens >= 28 + 20
    assert second.stats.prefill_tokens < first.stats.prefill_tokens
    second.defragment()
    assert answers(second) == expected
    second.table.check()


def test_other_weights_are_another_identity(make_engine, tmp_path: Path) -> None:
    model, twin = make_model("LlamaConfig"), make_model("LlamaConfig")
    assert weights_identity(model) == weights_identity(twin)
    with torch.no_grad():
        next(twin.parameters()).view(-1)[0] += 1
    first, second = make_engine(model, block_size=4), make_engine(twin, block_size=4)
    answers(first)
    first.save_prefix_cache(tmp_path / "c")
    with pytest.raises(CacheFileError, match="identity"):
        second.load_prefix_cache(tmp_path / "c")


def test_without_a_prefix_cache(make_engine, tmp_path: Path) -> None:
    first = make_engine(tiny("llama"), block_size=4)
    first.save_prefix_cache(tmp_path / "c")
    with pytest.raises(ArgumentError, match="no prefix cache"):
        make_engine(tiny("llama"), block_size=4, prefix_cache=False).load_prefix_cache(tmp_path / "c")
