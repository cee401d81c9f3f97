"""Profiler spans: off by default, named by the problem, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pagetile import flash_attn_varlen_func, merge_attn_states, profile_spans, reshape_and_cache_flash
from pagetile.ops.plans import PLANS


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    PLANS.clear()
    yield
    profile_spans(False)


def spans(batch: Any) -> list[str]:
    states = [torch.zeros(4, 5) if i in (2, 4) else torch.zeros(5, 4, 8) for i in range(5)]
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(3):
            reshape_and_cache_flash(**batch.write_arguments(), backend="reference")
            flash_attn_varlen_func(**batch.attend_arguments(), backend="reference")
            merge_attn_states(*states, backend="reference")
    return [event.name for event in trace.events() if event.name.startswith("pagetile")]


def test_off_by_default(batch: Any) -> None:
    assert spans(batch) == []


def test_one_span_a_call_with_the_name_of_the_problem(batch: Any) -> None:
    profile_spans()
    found = spans(batch)
    assert len(found) == 9
    assert set(found) == {
        "pagetile: reference: write 5 tokens, 2 heads of 8/16, float32 into float32 paged blocks of 4 on cpu",
        "pagetile: reference: attend 5 queries of 3 sequences, up to 3 x 12, 4/2 heads of 8/16, "
        "float32 over paged float32 blocks of 4 on cpu",
        "pagetile: reference: merge 5 rows, 4 heads of 8, float32 on cpu",
    }
    out = flash_attn_varlen_func(**batch.attend_arguments())
    profile_spans(False)
    assert spans(batch) == []
    assert torch.equal(flash_attn_varlen_func(**batch.attend_arguments()), out)


def test_the_rest_of_the_backend_is_reached_through_a_span(batch: Any) -> None:
    profile_spans()
    with pytest.raises(ValueError, match="workspace has 1 bytes"):
        flash_attn_varlen_func(**batch.attend_arguments(), backend="cpu", workspace=torch.zeros(1, dtype=torch.uint8))
