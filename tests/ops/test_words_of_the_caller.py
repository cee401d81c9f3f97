"""A message speaks of the arguments that the caller passed, whichever backend found the fault."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import pagetile
from pagetile import flash_attn_varlen_func, flash_attn_with_kvcache

INSIDE = ("query_start_loc", "seq_lens", "key_start_loc", "key_starts", "max_q_len", "max_k_len")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def message_of(function: Any, arguments: dict[str, Any], error: type[Exception] = pagetile.PagetileError) -> str:
    with pytest.raises(error) as caught:
        function(**arguments)
    message = str(caught.value)
    for word in INSIDE:
        assert not re.search(rf"\b{word}\b", message), message
    return message


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seqused_k": int32(9, -4, 2)}, pagetile.ArgumentError, r"^seqused_k\[1\] is -4"),
        ({"seqused_k": int32(9, 13, 2)}, pagetile.PagetileError, r"max_seqlen_k is 12|^seqused_k\[1\] is 13"),
        ({"seqused_k": int32(9, 13, 2), "max_seqlen_k": 99}, pagetile.BlockTableError, r"^seqused_k\[1\] is 13.*3 col"),
        ({"max_seqlen_k": 8}, pagetile.ArgumentError, r"sequence 0 has 9 keys, but max_seqlen_k is 8"),
        ({"max_seqlen_q": 2}, pagetile.ArgumentError, r"sequence 0 has 3 queries.*but max_seqlen_q is 2"),
        ({"cu_seqlens_q": int32(1, 3, 3, 5)}, pagetile.ArgumentError, r"^cu_seqlens_q\[0\] is 1"),
        ({"cu_seqlens_q": int32(0, 3, 2, 5)}, pagetile.ArgumentError, r"^cu_seqlens_q decreases from 3"),
        ({"cu_seqlens_q": int32(0, 3, 3, 6)}, pagetile.ArgumentError, r"^cu_seqlens_q\[3\] is 6, but q has 5 rows"),
    ],
)
def test_paged_keys(batch: Any, backend: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {**batch.attend_arguments(), **change, "backend": backend}
    assert re.search(message, message_of(flash_attn_varlen_func, given, error))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_k": int32(1, 3, 4, 6)}, r"^cu_seqlens_k\[0\] is 1"),
        ({"cu_seqlens_k": int32(0, 3, 2, 6)}, r"^cu_seqlens_k decreases from 3"),
        ({"cu_seqlens_k": int32(0, 3, 4, 7)}, r"^cu_seqlens_k\[3\] is 7, but k has 6 rows"),
        ({"max_seqlen_k": 2}, r"sequence 0 has 3 keys, but max_seqlen_k is 2"),
    ],
)
def test_ragged_keys(batch: Any, backend: str, change: dict[str, Any], message: str) -> None:
    given = {
        "q": batch.q,
        "k": torch.zeros(6, 2, 8),
        "v": torch.zeros(6, 2, 16),
        "max_seqlen_q": 3,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "max_seqlen_k": 3,
        "cu_seqlens_k": int32(0, 3, 4, 6),
        "backend": backend,
        **change,
    }
    assert re.search(message, message_of(flash_attn_varlen_func, given))


def test_a_registered_operator_speaks_likewise(batch: Any) -> None:
    given = {**batch.attend_arguments(), "seqused_k": int32(9, -4, 2)}
    with torch.no_grad(), pytest.raises(pagetile.ArgumentError, match=r"^seqused_k\[1\] is -4"):
        torch.compile(lambda: flash_attn_varlen_func(**given), backend="aot_eager")()


def paged(batch: Any, **change: Any) -> dict[str, Any]:
    return {
        "q": torch.ones(3, 2, 4, 8),
        "k_cache": batch.key_cache,
        "v_cache": batch.value_cache,
        "cache_seqlens": int32(8, 3, 2),
        "block_table": batch.block_table,
        **change,
    }


def rows(**change: Any) -> dict[str, Any]:
    return {
        "q": torch.ones(3, 2, 4, 8),
        "k_cache": torch.zeros(5, 6, 2, 8),
        "v_cache": torch.zeros(5, 6, 2, 16),
        "cache_seqlens": int32(2, 3, 4),
        "cache_batch_idx": torch.tensor([4, 0, 2]),
        **change,
    }


NEW = {"k": torch.ones(3, 1, 2, 8), "v": torch.ones(3, 1, 2, 16)}
ROTARY = {"rotary_cos": torch.ones(16, 3), "rotary_sin": torch.ones(16, 3)}


@pytest.mark.parametrize("new", [{}, NEW], ids=["read", "append"])
def test_a_cache_with_a_block_table(batch: Any, backend: str, new: dict[str, Any]) -> None:
    def said(**change: Any) -> str:
        return message_of(flash_attn_with_kvcache, paged(batch, **new, **change, backend=backend))

    assert said(cache_seqlens=int32(8, -3, 2)).startswith("cache_seqlens[1] is -3")
    assert re.match(r"cache_seqlens\[1\] is 13.*3 blocks of 4", said(cache_seqlens=int32(8, 13, 2)))
    assert said(cache_leftpad=int32(0, 0, -2)).startswith("cache_leftpad[2] is -2")
    assert said(block_table=int32(*range(4, 13)).reshape(3, 3), cache_seqlens=int32(1, 1, 9)).startswith(
        "block_table[2, 2] is 12, but the cache has 12 blocks, so ids 0 to 11"
    )


@pytest.mark.parametrize("new", [{}, NEW], ids=["read", "append"])
def test_a_cache_with_a_row_a_sequence(backend: str, new: dict[str, Any]) -> None:
    def said(**change: Any) -> str:
        message = message_of(flash_attn_with_kvcache, rows(**{**new, **change}, backend=backend))
        assert "block_table" not in message
        return message

    for bad in (5, -1):
        index = torch.tensor([4, bad, 2])
        assert said(cache_batch_idx=index).startswith(f"cache_batch_idx[1] is {bad}, but k_cache has 5 rows")
    for given in ({}, {"cache_batch_idx": None}):
        assert said(cache_seqlens=int32(2, -3, 4), **given).startswith("cache_seqlens[1] is -3")
        assert re.match(r"cache_seqlens\[1\] is 9.*room for 6", said(cache_seqlens=int32(2, 9, 4), **given))
        assert re.match(r"cache_seqlens is 7, .*room for 6", said(cache_seqlens=7, **given))


def test_rows_in_a_graph() -> None:
    given = rows(cache_batch_idx=torch.tensor([4, 7, 2]))
    with torch.no_grad(), pytest.raises(pagetile.BlockTableError, match=r"^cache_batch_idx\[1\] is 7, .*5 rows"):
        torch.compile(lambda: flash_attn_with_kvcache(**given), backend="aot_eager")()
    torch._dynamo.reset()


def test_the_tensors_of_the_append_have_the_names_of_the_call(batch: Any) -> None:
    def said(**change: Any) -> str:
        message = message_of(flash_attn_with_kvcache, paged(batch, **{**NEW, **change}))
        assert not re.search(r"\b(key_cache|value_cache|slot_mapping|k_scale|v_scale)\b", message), message
        return message

    assert said(k_cache=torch.zeros(1, 4, 2, 8).expand(12, 4, 2, 8)).startswith(
        "k_cache: axis 0 has 12 elements at one"
    )
    assert said(v_cache=torch.zeros(1, 4, 2, 16).expand(12, 4, 2, 16)).startswith("v_cache: axis 0 has 12 elements")
    assert re.match(r"k_descale is 2\.0, but the cache holds float32", said(k_descale=torch.tensor(2.0)))
    assert said(k_cache=batch.key_cache.half(), v_cache=batch.value_cache.half()).startswith(
        "q is float32, but k_cache"
    )
    assert said(v_cache=batch.value_cache.half()).startswith("v_cache is float16, but k_cache is float32")
    both = torch.zeros(12, 4, 2, 16)
    assert said(k_cache=both[..., :8], v_cache=both).startswith("k_cache and v_cache share memory")
    inside = batch.key_cache[:3, :1]
    assert said(k=inside).startswith("k and k_cache share memory")


@pytest.mark.parametrize("name", ["k", "v", "rotary_cos", "rotary_sin", "k_descale"])
def test_what_requires_grad_is_named(batch: Any, name: str) -> None:
    given = paged(batch, **NEW, **ROTARY, k_descale=torch.ones(1))
    given[name] = given[name].clone().requires_grad_()
    assert message_of(flash_attn_with_kvcache, given, pagetile.UnsupportedError).startswith(f"{name} requires grad")


def test_padding_longer_than_the_sequence_under_rotary(batch: Any) -> None:
    given = paged(batch, **NEW, **ROTARY, cache_leftpad=int32(0, 4, 0))
    assert message_of(flash_attn_with_kvcache, given).startswith("cache_leftpad[1] is 4, but cache_seqlens[1] is 3")
    short = paged(batch, **NEW, rotary_cos=torch.ones(8, 3), rotary_sin=torch.ones(8, 3))
    assert message_of(flash_attn_with_kvcache, short).startswith("rotary_cos: axis 0 is 8, but sequence 0 rotates")


def test_renaming_touches_whole_words_only() -> None:
    error = pagetile.ArgumentError("k, kk and max_k_len: k_len is 3")
    error.rename({"k": "keys", "max_k_len": "max_seqlen_k"})
    assert str(error) == "keys, kk and max_seqlen_k: k_len is 3"
