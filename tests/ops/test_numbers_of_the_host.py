"""Numbers that come from the host or that a result cannot survive: windows, bounds, scales, sinks, slopes, no heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import pagetile
from pagetile import flash_attn_varlen_func, flash_attn_with_kvcache, reshape_and_cache_flash, window_from_sliding
from pagetile.contracts.visibility import FARTHEST, normalize_window

HUGE = [2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63, 2**70]


def attend(batch: Any, **change: Any) -> Any:
    return flash_attn_varlen_func(**{**batch.attend_arguments(), **change})


@pytest.mark.parametrize(
    "window",
    [
        *[(1.7, 0), (0, 1.0), ("1", "0"), "10", 5, ("a", 1), (float("nan"), 0), (), (1, 2, 3), (True, 0), {1: 2}],
        *[object(), (torch.tensor(1), 0), torch.tensor([1, 0]), (-1.0, -1.5), (-2, 0), (0, -(2**70))],
    ],
    ids=repr,
)
def test_a_window_is_two_integers(batch: Any, window: Any) -> None:
    for causal in (False, True):
        with pytest.raises(pagetile.ArgumentError, match=r"^window_size "):
            attend(batch, window_size=window, causal=causal)
    with pytest.raises(pagetile.ArgumentError, match=r"^window_size "):
        flash_attn_with_kvcache(torch.ones(1, 1, 4, 8), batch.key_cache, batch.value_cache, window_size=window)


def test_windows_that_are_fine() -> None:
    assert normalize_window((None, 3), False) == (-1, 3)
    assert normalize_window([None, None], True) == (-1, 0)
    assert normalize_window((np.int64(4), np.int32(2)), False) == (4, 2)
    assert normalize_window((2**70, 2**31), False) == (FARTHEST, FARTHEST)


@pytest.mark.parametrize("value", [2.5, 2.0, "2", True, float("nan"), torch.tensor(2)], ids=repr)
def test_a_sliding_window_is_an_integer(value: Any) -> None:
    with pytest.raises(pagetile.ArgumentError, match=r"^sliding_window is "):
        window_from_sliding(value)
    assert window_from_sliding(np.int64(4)) == (3, 0)


@pytest.mark.parametrize("huge", HUGE)
def test_a_bound_may_be_any_integer(batch: Any, backend: str, huge: int) -> None:
    expected = attend(batch, backend=backend)
    assert torch.equal(attend(batch, max_seqlen_q=huge, backend=backend), expected)
    torch.testing.assert_close(attend(batch, max_seqlen_k=huge, backend=backend), expected)
    torch.testing.assert_close(attend(batch, num_splits=huge, backend=backend), expected)
    assert torch.equal(attend(batch, window_size=(huge, huge), backend=backend), expected)


def test_a_graph_takes_them_too(batch: Any) -> None:
    given = {**batch.attend_arguments(), "max_seqlen_q": 2**70, "num_splits": 2**70, "window_size": (2**70, 2**70)}
    with torch.no_grad():
        got = torch.compile(lambda: flash_attn_varlen_func(**given), fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(got, attend(batch))
    torch._dynamo.reset()


def test_a_length_beyond_the_cache_says_so_at_any_size() -> None:
    caches = torch.zeros(1, 6, 2, 8), torch.zeros(1, 6, 2, 8)
    for length in (7, *HUGE):
        with pytest.raises(pagetile.ArgumentError, match=f"cache_seqlens is {length}, but the cache has room for 6"):
            flash_attn_with_kvcache(torch.ones(1, 1, 4, 8), *caches, cache_seqlens=length)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "k_descale", "v_descale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400], ids=str)
def test_a_number_is_finite(batch: Any, name: str, value: Any) -> None:
    with pytest.raises(pagetile.ArgumentError, match=f"^{name} is "):
        attend(batch, **{name: value})


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_is_below_infinity(batch: Any, backend: str, value: float, dtype: torch.dtype) -> None:
    sinks = torch.tensor([0.0, -torch.inf, 0.0, value], dtype=dtype)
    out = torch.full((5, 4, 16), 7.0)
    with pytest.raises(pagetile.ArgumentError, match=rf"^s_aux\[3\] is {value}, the sink of query head 3"):
        attend(batch, s_aux=sinks, out=out, backend=backend)
    assert (out == 7).all()


def test_a_sink_of_minus_infinity_is_none(batch: Any, backend: str) -> None:
    none = attend(batch, return_softmax_lse=True, backend=backend)
    sunk = attend(batch, s_aux=torch.full((4,), -torch.inf), return_softmax_lse=True, backend=backend)
    for a, b in zip(none, sunk, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_slope_is_finite(batch: Any, backend: str, value: float) -> None:
    slopes = torch.zeros(3, 4)
    slopes[2, 1] = value
    with pytest.raises(pagetile.ArgumentError, match=r"^alibi_slopes\[2, 1\] is "):
        attend(batch, alibi_slopes=slopes, backend=backend)


def test_sinks_are_floats(batch: Any) -> None:
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(pagetile.DTypeError, match=r"^s_aux is "):
            attend(batch, s_aux=torch.ones(4).to(dtype))


def test_no_query_heads(batch: Any, backend: str) -> None:
    for extra in ({}, {"s_aux": torch.zeros(0), "alibi_slopes": torch.zeros(0), "softcap": 2.0}):
        out, lse = attend(batch, q=torch.zeros(5, 0, 8), return_softmax_lse=True, backend=backend, **extra)
        assert out.shape == (5, 0, 16)
        assert lse.shape == (0, 5)


def test_a_cache_without_blocks(batch: Any, backend: str) -> None:
    k_cache, v_cache = torch.zeros(0, 4, 2, 8), torch.zeros(0, 4, 2, 16)
    arguments = {**batch.write_arguments(), "key_cache": k_cache, "value_cache": v_cache, "backend": backend}
    with pytest.raises(pagetile.SlotError, match=r"slot_mapping\[0\] is 28, but the cache has no blocks"):
        reshape_and_cache_flash(**arguments)
    reshape_and_cache_flash(**{**arguments, "slot_mapping": torch.full((5,), -1)})
    with pytest.raises(pagetile.BlockTableError, match=r"block_table\[0, 0\] is 7, but the cache has no blocks"):
        attend(batch, k=k_cache, v=v_cache, backend=backend)
