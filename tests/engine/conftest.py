"""Engines that are proven clean after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the engine drives Transformers models: pip install 'pagetile[hf]'")

from tiny_models import live_blocks

from pagetile.engine import Engine, EngineConfig


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines; after the test none of them may hold a block or break an invariant."""
    engines: list[Engine] = []

    def make(model: Any, tokenizer: Any = None, **config: Any) -> Engine:
        defaults = {"block_size": 16, "num_blocks": 64, "max_batch_tokens": 32}
        engine = Engine(model, tokenizer, EngineConfig(**{**defaults, **config}))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
        engine.table.check()
        assert live_blocks(engine) == 0
        assert not engine.table.sequences


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
