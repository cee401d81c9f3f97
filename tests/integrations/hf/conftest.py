"""Models that are proven to be as they were after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers", reason="drives Transformers models: pip install 'pagetile[hf]'")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_stays_enabled() -> Iterator[None]:
    """A test that leaves a model enabled would change the next one's host."""
    from transformers.generation.continuous_batching import cache, continuous_api

    from pagetile.integrations.transformers import switch

    yield
    left = [type(model).__name__ for model in switch._enabled]
    assert left == []
    assert continuous_api.PagedAttentionCache is cache.PagedAttentionCache
