"""A small paged batch with strides worth testing, and every backend that can be loaded here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagetile.backends import registry


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    found = registry.load(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return request.param


@dataclass
class Batch:
    """Three sequences (one with no query) over a cache of 12 blocks of 4; 5 query rows, 4/2 heads of 8/16."""

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    q: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor
    block_table: Tensor
    max_seqlen_q: int = 3
    max_seqlen_k: int = 12
    options: dict[str, Any] = field(default_factory=dict)

    def write_arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("key", "value", "key_cache", "value_cache", "slot_mapping")}

    def attend_arguments(self) -> dict[str, Any]:
        return {
            "q": self.q,
            "k": self.key_cache,
            "v": self.value_cache,
            "max_seqlen_q": self.max_seqlen_q,
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_k": self.max_seqlen_k,
            "seqused_k": self.seqused_k,
            "block_table": self.block_table,
            **self.options,
        }

    def to(self, dtype: torch.dtype) -> Batch:
        names = ("key", "value", "key_cache", "value_cache", "q")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    def make(seed: int = 0, value_size: int = 16) -> Batch:
        g = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        return Batch(
            key=randn(5, 2, 8),
            value=randn(5, 2, value_size),
            key_cache=randn(12, 4, 2, 8),
            value_cache=randn(12, 4, 2, value_size),
            slot_mapping=torch.tensor([28, 9, -1, 38, 47]),
            q=randn(5, 4, 8),
            cu_seqlens_q=torch.tensor([0, 3, 3, 5], dtype=torch.int32),
            seqused_k=torch.tensor([9, 4, 2], dtype=torch.int32),
            block_table=torch.tensor([[7, 2, 9], [4, -1, 99], [11, 0, -5]], dtype=torch.int32),
        )

    return make


@pytest.fixture
def batch(make_batch: Callable[..., Batch]) -> Batch:
    return make_batch()
