"""Memory that two tensors share, or that does not hold what a tensor means: an error, never a wrong result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import flash_attn_varlen_func, flash_attn_with_kvcache, merge_attn_states, reshape_and_cache_flash
from pagetile.ops.overlap import Apart, shares_memory, span
from pagetile.ops.plans import PLANS


def states() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "output": torch.zeros(4, 3, 8),
        "prefix_output": torch.randn(4, 3, 8, generator=g),
        "prefix_lse": torch.randn(3, 4, generator=g),
        "suffix_output": torch.randn(4, 3, 8, generator=g),
        "suffix_lse": torch.randn(3, 4, generator=g),
        "output_lse": torch.zeros(3, 4),
    }


def attend_arguments(batch: Any) -> dict[str, Any]:
    return {
        **batch.attend_arguments(),
        "out": torch.zeros(5, 4, 16),
        "s_aux": torch.zeros(4),
        "alibi_slopes": torch.zeros(4),
        "workspace": torch.zeros(1 << 20, dtype=torch.uint8),
    }


def kvcache_arguments(batch: Any) -> dict[str, Any]:
    return {
        "q": torch.ones(3, 2, 4, 8),
        "k_cache": batch.key_cache,
        "v_cache": batch.value_cache,
        "k": torch.ones(3, 1, 2, 8),
        "v": torch.ones(3, 1, 2, 16),
        "rotary_cos": torch.ones(16, 3),
        "rotary_sin": torch.ones(16, 3),
        "cache_seqlens": torch.tensor([8, 3, 2], dtype=torch.int32),
        "cache_leftpad": torch.zeros(3, dtype=torch.int32),
        "block_table": batch.block_table,
        "s_aux": torch.zeros(4),
    }


OPS: dict[Callable[..., Any], Callable[[Any], dict[str, Any]]] = {
    reshape_and_cache_flash: lambda batch: {**batch.write_arguments(), "k_scale": torch.ones(1)},
    flash_attn_varlen_func: lambda batch: {**attend_arguments(batch), "k_descale": torch.ones(1)},
    flash_attn_with_kvcache: kvcache_arguments,
    merge_attn_states: lambda _: states(),
}
EVERY = [
    *[(reshape_and_cache_flash, n) for n in ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale")],
    *[(flash_attn_varlen_func, n) for n in ("q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table", "out", "s_aux")],
    *[(flash_attn_varlen_func, n) for n in ("alibi_slopes", "k_descale", "workspace")],
    *[(flash_attn_with_kvcache, n) for n in ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "s_aux")],
    *[(flash_attn_with_kvcache, n) for n in ("cache_seqlens", "cache_leftpad", "block_table")],
    *[(merge_attn_states, n) for n in states()],
]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("op", "name"), EVERY, ids=lambda x: getattr(x, "__name__", x))
def test_the_negative_bit_and_sparse_layouts_are_refused(batch: Any, op: Any, name: str, warm: bool) -> None:
    """``warm``: the same call has been seen with ordinary tensors, and its plan is there."""
    PLANS.clear()
    given = OPS[op](batch)
    if warm:
        op(**given)
    before = {n: t.clone() for n, t in given.items() if isinstance(t, Tensor)}
    with pytest.raises(pagetile.ArgumentError, match=rf"^{name} has its negative bit set.*{name}\.resolve_neg\(\)"):
        op(**{**given, name: torch._neg_view(given[name])})
    with pytest.raises(pagetile.ArgumentError, match=rf"^{name} has the layout torch.sparse_coo.*to_dense"):
        op(**{**given, name: given[name].to_sparse()})
    for n, t in before.items():
        assert torch.equal(given[n], t), f"{n} changed"


def test_the_public_way_to_a_negative_bit(batch: Any) -> None:
    imaginary = torch.view_as_complex(torch.ones(5, 4, 8, 2)).conj().imag
    assert imaginary.is_neg()
    with pytest.raises(pagetile.ArgumentError, match="q has its negative bit"):
        flash_attn_varlen_func(**{**batch.attend_arguments(), "q": imaginary})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(batch: Any) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 4, 8), torch.zeros(2, 4, 8)])
    with pytest.raises(pagetile.ArgumentError, match="q is a nested tensor"):
        flash_attn_varlen_func(**{**batch.attend_arguments(), "q": nested})


# Merge --------------------------------------------------------------------------------------------------------------


def expected_merge() -> tuple[Tensor, Tensor]:
    given = states()
    merge_attn_states(**given, backend="reference")
    return given["output"], given["output_lse"]


@pytest.mark.parametrize("side", ["prefix", "suffix"])
def test_a_merge_in_place_is_right(backend: str, side: str) -> None:
    given = states()
    given |= {"output": given[f"{side}_output"], "output_lse": given[f"{side}_lse"]}
    merge_attn_states(**given, backend=backend)
    for got, expected in zip((given["output"], given["output_lse"]), expected_merge(), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("side", ["prefix", "suffix"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_merge_into_a_shifted_input_is_refused(backend: str, side: str, rows: int) -> None:
    given = states()
    buffer, lses = torch.zeros(8, 3, 8), torch.zeros(3, 8)
    buffer[:4], lses[:, :4] = given[f"{side}_output"], given[f"{side}_lse"]
    given |= {f"{side}_output": buffer[:4], f"{side}_lse": lses[:, :4], "backend": backend}
    before = buffer.clone(), lses.clone()
    with pytest.raises(pagetile.ArgumentError, match=f"^output and {side}_output share memory"):
        merge_attn_states(**{**given, "output": buffer[rows : rows + 4]})
    with pytest.raises(pagetile.ArgumentError, match=f"^output_lse and {side}_lse share memory"):
        merge_attn_states(**{**given, "output_lse": lses[:, rows : rows + 4]})
    assert torch.equal(buffer, before[0])
    assert torch.equal(lses, before[1])
    merge_attn_states(**{**given, "output": buffer[4:], "output_lse": lses[:, 4:]})  # next to it: apart
    torch.testing.assert_close(buffer[4:], expected_merge()[0])


def test_a_merge_into_a_transposed_input_is_refused(backend: str) -> None:
    square = torch.randn(3, 3, 8)
    lse = torch.zeros(3, 3)
    given = (square, lse, torch.randn(3, 3, 8), lse)
    with pytest.raises(pagetile.ArgumentError, match="output and prefix_output share memory"):
        merge_attn_states(square.transpose(0, 1), *given, backend=backend)


def test_interleaved_views_are_apart(backend: str) -> None:
    given = states()
    buffer = torch.zeros(4, 3, 16)
    buffer[..., :8] = given["prefix_output"]
    for _ in range(2):  # the second call finds the answer in the plan
        merge_attn_states(**{**given, "prefix_output": buffer[..., :8], "output": buffer[..., 8:]}, backend=backend)
        torch.testing.assert_close(buffer[..., 8:], expected_merge()[0])
    with pytest.raises(pagetile.ArgumentError, match="share memory"):  # one plan, another distance
        merge_attn_states(**{**given, "prefix_output": buffer[..., :8], "output": buffer[..., 7:15]}, backend=backend)


# Attention ----------------------------------------------------------------------------------------------------------


def test_out_may_be_q_itself(batch: Any, backend: str) -> None:
    v = batch.value_cache[..., :8].contiguous()
    expected = flash_attn_varlen_func(**{**batch.attend_arguments(), "v": v}, backend=backend)
    q = batch.q.clone()
    assert flash_attn_varlen_func(**{**batch.attend_arguments(), "v": v, "q": q}, out=q, backend=backend) is q
    torch.testing.assert_close(q, expected)


def test_out_over_part_of_q_is_refused(batch: Any, backend: str) -> None:
    v = batch.value_cache[..., :8].contiguous()
    buffer = torch.randn(6, 4, 8)
    before = buffer.clone()
    arguments = {**batch.attend_arguments(), "v": v, "q": buffer[:5]}
    with pytest.raises(pagetile.ArgumentError, match=r"^out and q share memory"):
        flash_attn_varlen_func(**arguments, out=buffer[1:], backend=backend)
    assert torch.equal(buffer, before)
    packed = torch.randn(5, 4, 24)  # q in the middle of a row, out at its end: apart
    q, out = packed[..., 8:16], packed[..., 16:]
    arguments = {**batch.attend_arguments(), "v": v, "q": q}
    torch.testing.assert_close(
        flash_attn_varlen_func(**arguments, out=out, backend=backend),
        flash_attn_varlen_func(**{**arguments, "q": q.clone()}, backend=backend),
    )


@pytest.mark.parametrize("name", ["k", "v"])
def test_out_over_keys_or_values_is_refused(batch: Any, backend: str, name: str) -> None:
    keys = {"k": torch.randn(5, 4, 8), "v": torch.randn(5, 4, 8)}
    given = {"q": batch.q, **keys, "max_seqlen_q": 3, "cu_seqlens_q": batch.cu_seqlens_q, "max_seqlen_k": 3}
    with pytest.raises(pagetile.ArgumentError, match=f"^out and {name} share memory"):
        flash_attn_varlen_func(**given, cu_seqlens_k=batch.cu_seqlens_q, out=keys[name], backend=backend)


# Write --------------------------------------------------------------------------------------------------------------


def test_one_cache_for_both_is_refused(batch: Any, backend: str) -> None:
    cache = torch.zeros(12, 4, 2, 8)
    given = {**batch.write_arguments(), "value": batch.value[..., :8]}
    for key_cache, value_cache in ((cache, cache), (cache[:11], cache[1:])):
        arguments = {**given, "key_cache": key_cache, "value_cache": value_cache, "backend": backend}
        with pytest.raises(pagetile.ArgumentError, match=r"^key_cache and value_cache share memory"):
            reshape_and_cache_flash(**arguments)
    assert not cache.any()


@pytest.mark.parametrize("name", ["key", "value"])
def test_a_source_inside_a_cache_is_refused(batch: Any, backend: str, name: str) -> None:
    caches = torch.randn(2, 12, 4, 2, 8).unbind(0)
    given = {**batch.write_arguments(), "value": batch.value[..., :8], "backend": backend}
    given |= {"key_cache": caches[0], "value_cache": caches[1]}
    for i, cache in enumerate(("key_cache", "value_cache")):
        before = caches[i].clone()
        with pytest.raises(pagetile.ArgumentError, match=f"^{name} and {cache} share memory"):
            reshape_and_cache_flash(**{**given, name: caches[i].flatten(0, 1)[3:8]})
        assert torch.equal(caches[i], before)


def layouts() -> dict[str, tuple[Tensor, Tensor]]:
    unbound = torch.zeros(12, 2, 4, 2, 8).unbind(1)
    split = torch.zeros(12, 2, 4, 16).transpose(1, 2).split(8, dim=-1)
    layers = torch.zeros(12, 3, 2, 2, 4, 8)  # the pages of three layers alternate, HND
    return {
        "unbind": (unbound[0], unbound[1]),
        "split": (split[0], split[1]),
        "layers": (layers[:, 1, 0].transpose(1, 2), layers[:, 1, 1].transpose(1, 2)),
        "halves": tuple(torch.zeros(2, 12, 4, 2, 8)),
    }


@pytest.mark.parametrize("layout", layouts())
def test_two_caches_in_one_buffer_are_fine(batch: Any, backend: str, layout: str) -> None:
    k_cache, v_cache = layouts()[layout]
    given = {**batch.write_arguments(), "value": batch.value[..., :8], "key_cache": k_cache, "value_cache": v_cache}
    for _ in range(2):
        reshape_and_cache_flash(**given, backend=backend)
    assert torch.equal(k_cache[7, 0], batch.key[0])
    assert torch.equal(v_cache[7, 0], batch.value[0, :, :8])


# The search itself --------------------------------------------------------------------------------------------------


def test_shared_elements_against_a_count_of_addresses() -> None:
    g = torch.Generator().manual_seed(1)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    buffer = torch.arange(4000)
    found = 0
    for _ in range(300):
        a, b = (
            buffer.as_strided(
                [number(0 if i == 0 else 1, 5) for i in range(3)], [number(1, 40) for _ in range(3)], number(0, 200)
            )
            for _ in range(2)
        )
        common = bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))
        assert shares_memory(a, b) == common
        ends = [int(x.max()) * 8 + 8 - x.storage_offset() * 8 if x.numel() else 0 for x in (a, b)]
        assert [span(a), span(b)] == ends
        apart = Apart((a, b), ((0, 1, False),))
        addresses = a.data_ptr(), b.data_ptr()
        if common:
            found += 1
            with pytest.raises(pagetile.ArgumentError, match="a and b share memory"):
                apart.check(addresses, (a, b), ("a", "b"))
        else:
            apart.check(addresses, (a, b), ("a", "b"))
    assert 50 < found < 250
