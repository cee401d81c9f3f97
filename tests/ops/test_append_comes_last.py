"""Whatever is wrong with a call of ``flash_attn_with_kvcache``, the cache is as it was: the append is the last step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import flash_attn_with_kvcache
from pagetile.backends import registry

INT32 = torch.int32


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def arguments(batch: Any, **change: Any) -> dict[str, Any]:
    return {
        "q": torch.ones(3, 2, 4, 8),
        "k_cache": batch.key_cache,
        "v_cache": batch.value_cache,
        "k": torch.full((3, 1, 2, 8), 5.0),
        "v": torch.full((3, 1, 2, 16), 6.0),
        "cache_seqlens": torch.tensor([8, 3, 2], dtype=INT32),
        "block_table": batch.block_table,
        **change,
    }


FAULTS = {
    "a small workspace": ({"workspace": torch.zeros(8, dtype=torch.uint8)}, "workspace has 8 bytes"),
    "a workspace with gaps": ({"workspace": torch.zeros(1 << 21, dtype=torch.uint8)[::2]}, "not contiguous"),
    "a NaN sink": ({"s_aux": torch.tensor([0.0, 0.0, torch.nan, 0.0])}, r"s_aux\[2\] is nan"),
    "an infinite slope": ({"alibi_slopes": torch.tensor([0.0, torch.inf, 0.0, 0.0])}, r"alibi_slopes\[1\] is inf"),
    "a scale that is NaN": ({"softmax_scale": torch.nan}, "softmax_scale is nan"),
    "a window of floats": ({"window_size": (1.5, 0)}, "window_size left is 1.5"),
    "splits that are none": ({"num_splits": "many"}, "num_splits is 'many'"),
    "slopes of another shape": ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes"),
    "sinks of another shape": ({"s_aux": torch.zeros(3)}, "s_aux"),
    "a scale of a cache without": ({"v_descale": 2.0}, "v_descale is 2.0"),
    "a scale tensor of a cache without": ({"k_descale": torch.tensor(2.0)}, "k_descale is 2.0"),
    "a block past the cache": (
        {"block_table": torch.tensor([[7, 2, 12], [4, 1, 1], [0, 0, 0]])},
        r"block_table\[0, 2\]",
    ),
    "no room": ({"cache_seqlens": torch.tensor([12, 3, 2], dtype=INT32)}, r"cache_seqlens\[0\] is 12"),
    "a negative length": ({"cache_seqlens": torch.tensor([1, -3, 2], dtype=INT32)}, r"cache_seqlens\[1\] is -3"),
    "negative padding": ({"cache_leftpad": torch.tensor([0, 0, -1], dtype=INT32)}, r"cache_leftpad\[2\] is -1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_written(batch: Any, fault: str) -> None:
    change, message = FAULTS[fault]
    before = batch.key_cache.clone(), batch.value_cache.clone()
    with pytest.raises(pagetile.PagetileError, match=message):
        flash_attn_with_kvcache(**arguments(batch, **change), backend="cpu")
    assert torch.equal(batch.key_cache, before[0])
    assert torch.equal(batch.value_cache, before[1])


@pytest.mark.parametrize(
    "fault", ["a small workspace", "a NaN sink", "an infinite slope", "a block past the cache", "no room"]
)
def test_a_graph_writes_nothing_either(batch: Any, fault: str) -> None:
    change, message = FAULTS[fault]
    before = batch.key_cache.clone(), batch.value_cache.clone()
    tensors = arguments(batch, **change)

    def program(tensors: dict[str, Any]) -> Tensor:
        return flash_attn_with_kvcache(**tensors, backend="cpu")

    with torch.no_grad(), pytest.raises(pagetile.PagetileError, match=message):
        torch.compile(program, fullgraph=True, backend="aot_eager")(tensors)
    assert torch.equal(batch.key_cache, before[0])
    assert torch.equal(batch.value_cache, before[1])


def test_a_graph_with_all_of_it_is_right(batch: Any) -> None:
    tensors = arguments(batch, s_aux=torch.ones(4), workspace=torch.zeros(1 << 20, dtype=torch.uint8))
    caches = batch.key_cache.clone(), batch.value_cache.clone()

    def program(tensors: dict[str, Any]) -> Tensor:
        return flash_attn_with_kvcache(**tensors, causal=True)

    with torch.no_grad():
        got = torch.compile(program, fullgraph=True, backend="aot_eager")(tensors)
        expected = program({**tensors, "k_cache": caches[0], "v_cache": caches[1]})
    torch.testing.assert_close(got, expected)
    assert torch.equal(batch.key_cache, caches[0])
    assert (batch.key_cache[9, 0] == 5).all()


@pytest.mark.parametrize("num_splits", [1, 12, 1000, 2**31, 2**63, 2**70])
def test_any_number_of_splits_is_fine(batch: Any, backend: str, num_splits: int) -> None:
    caches = batch.key_cache.clone(), batch.value_cache.clone()
    expected = flash_attn_with_kvcache(**arguments(batch), backend=backend)
    again = arguments(batch, k_cache=caches[0], v_cache=caches[1], num_splits=num_splits)
    torch.testing.assert_close(flash_attn_with_kvcache(**again, backend=backend), expected)
    assert torch.equal(caches[0], batch.key_cache)


def test_a_workspace_of_the_size_asked_for_will_do(batch: Any) -> None:
    with pytest.raises(pagetile.ArgumentError) as caught:
        flash_attn_with_kvcache(**arguments(batch, workspace=torch.zeros(1, dtype=torch.uint8)), backend="cpu")
    needed = int(str(caught.value).split("needs ")[1].split()[0])
    exact = torch.zeros(needed, dtype=torch.uint8)
    with pytest.raises(pagetile.ArgumentError, match=f"workspace has {needed - 1} bytes"):
        flash_attn_with_kvcache(**arguments(batch, workspace=exact[1:]), backend="cpu")
    out = flash_attn_with_kvcache(**arguments(batch, workspace=exact), backend="cpu")
    torch.testing.assert_close(out, flash_attn_with_kvcache(**arguments(batch), backend="cpu"))


@pytest.mark.parametrize("appending", [False, True])
@pytest.mark.parametrize(("sequences", "queries"), [(0, 2), (3, 0), (0, 0)])
def test_no_query_or_no_sequence_with_lse(
    batch: Any, backend: str, sequences: int, queries: int, appending: bool
) -> None:
    given = arguments(batch, q=torch.ones(sequences, queries, 4, 8))
    for name in ("k", "v", "cache_seqlens", "block_table"):
        given[name] = given[name][:sequences]
    if not appending:
        del given["k"], given["v"]
    out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True, backend=backend)
    assert out.shape == (sequences, queries, 4, 16)
    assert lse.shape == (sequences, 4, queries)
    assert bool((batch.key_cache[9, 0] == 5).all()) == (appending and sequences > 0)


def test_a_backend_that_refuses_the_attention_alone(batch: Any) -> None:
    class NoAttention:
        name = "no attention"

        def __init__(self) -> None:
            self.real = registry.load("reference")

        def why_not(self, problem: Any) -> list[str]:
            return ["only writes"] if hasattr(problem, "max_q_len") else []

        def write(self, call: Any) -> None:
            self.real.write(call)

    before = batch.key_cache.clone()
    with pytest.raises(pagetile.BackendError, match="only writes"):
        flash_attn_with_kvcache(**arguments(batch), backend=NoAttention())
    assert torch.equal(batch.key_cache, before)
