"""``flash_attn_varlen_func`` and ``reshape_and_cache_flash``: every argument is honoured or refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import flash_attn_varlen_func, reshape_and_cache_flash, window_from_sliding


def attend(batch: Any, **change: Any) -> Any:
    return flash_attn_varlen_func(**{**batch.attend_arguments(), **change})


def zero_query(length: int, block_size: int = 4) -> dict[str, Any]:
    """One query of zeros over keys whose value is their position: the output is the mean of the visible positions."""
    blocks = -(-length // block_size)
    table = torch.arange(blocks, dtype=torch.int32).flip(0).unsqueeze(0)
    k = torch.full((blocks, block_size, 1, 8), torch.nan)
    v = k.clone()
    for position in range(length):
        block, offset = int(table[0, position // block_size]), position % block_size
        k[block, offset], v[block, offset] = 0.5, float(position)
    return {
        "q": torch.zeros(1, 2, 8),
        "k": k,
        "v": v,
        "max_seqlen_q": 1,
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "max_seqlen_k": length,
        "seqused_k": torch.tensor([length], dtype=torch.int32),
        "block_table": table,
    }


@pytest.mark.parametrize(
    ("length", "options", "mean", "count"),
    [
        (10, {}, 4.5, 10),
        (10, {"causal": True}, 4.5, 10),
        (10, {"window_size": (3, 0)}, 7.5, 4),
        (10, {"window_size": [3, -1]}, 7.5, 4),
        (10, {"window_size": window_from_sliding(4)}, 7.5, 4),  # huggingface/transformers#39408
        (10, {"window_size": window_from_sliding(None)}, 4.5, 10),
        (10, {"window_size": (3, 5), "causal": True}, 7.5, 4),
        (10, {"window_size": None}, 4.5, 10),
        (10, {"softcap": 5.0, "num_splits": 3, "deterministic": True, "scheduler_metadata": object()}, 4.5, 10),
        (10, {"batch_invariant": True}, 4.5, 10),
    ],
)
def test_who_sees_whom(backend: str, length: int, options: dict[str, Any], mean: float, count: int) -> None:
    out, lse = flash_attn_varlen_func(**zero_query(length), return_softmax_lse=True, backend=backend, **options)
    torch.testing.assert_close(out, torch.full((1, 2, 8), mean))
    torch.testing.assert_close(lse, torch.full((2, 1), math.log(count)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_v": torch.zeros(5, 4, 16)}, pagetile.UnsupportedError, "q_v is given"),
        ({"dropout_p": 0.1}, pagetile.UnsupportedError, "dropout_p is 0.1.*pass 0.0"),
        ({"return_attn_probs": True}, pagetile.UnsupportedError, "return_attn_probs is True"),
        ({"q_descale": torch.ones(1)}, pagetile.UnsupportedError, "q_descale is given.*fp8 q"),
        ({"k": torch.zeros(12, 2, 2, 4, 4)}, pagetile.ShapeError, r"v: axis 1 \(Hkv\) is 4, but k has Hkv = 2"),
        ({"window_size": (-2, 0)}, pagetile.ArgumentError, "window_size left is -2"),
        ({"window_size": (1,)}, pagetile.ArgumentError, r"window_size is \(1,\); it must be \(left, right\)"),
        ({"softcap": -1.0}, pagetile.ArgumentError, "softcap is -1.0"),
        ({"softcap": float("nan")}, pagetile.ArgumentError, "softcap is nan"),
        ({"softmax_scale": torch.tensor(1.0)}, pagetile.ArgumentError, "softmax_scale is a tensor"),
        ({"softmax_scale": "big"}, pagetile.ArgumentError, "softmax_scale is 'big'"),
        ({"num_splits": -1}, pagetile.ArgumentError, "num_splits is -1"),
        ({"max_seqlen_q": torch.tensor(3)}, pagetile.ArgumentError, "max_seqlen_q is a tensor.*Python int"),
        ({"max_seqlen_k": 2.5}, pagetile.ArgumentError, "max_seqlen_k is 2.5"),
        ({"max_seqlen_k": -1}, pagetile.ArgumentError, "max_seqlen_k is -1"),
        ({"validate": "yes"}, pagetile.ArgumentError, "validate is 'yes'; it must be False, True or 'deferred'"),
        ({"backend": "gpu"}, pagetile.ArgumentError, "backend is 'gpu'"),
        ({"kv_cache_dtype": "fp4"}, pagetile.ArgumentError, "kv_cache_dtype is 'fp4'.*fp8_e4m3"),
        ({"kv_cache_dtype": "int8"}, pagetile.DTypeError, "kv_cache_dtype='int8' does not fit a cache of float32"),
        ({"seqused_k": None}, pagetile.ArgumentError, "block_table is given without seqused_k"),
        ({"block_table": None}, pagetile.ArgumentError, "seqused_k is given without block_table"),
        ({"block_table": None, "seqused_k": None}, pagetile.ArgumentError, "neither cu_seqlens_k nor block_table"),
        ({"cu_seqlens_k": torch.zeros(4, dtype=torch.int32)}, pagetile.ArgumentError, "block_table and cu_seqlens_k"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 3, 5])}, pagetile.DTypeError, "cu_seqlens_q is int64, but must be int32"),
        ({"seqused_k": torch.tensor([9, 4, 2])}, pagetile.DTypeError, "seqused_k is int64, but must be int32"),
        ({"s_aux": torch.ones(4, dtype=torch.int32)}, pagetile.DTypeError, "s_aux is int32"),
        ({"alibi_slopes": torch.ones(4).half()}, pagetile.DTypeError, "alibi_slopes is float16, but must be float32"),
        ({"workspace": 1024}, pagetile.DTypeError, "workspace is a int"),
    ],
)
def test_an_argument_is_refused_by_name(batch: Any, change: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        attend(batch, **change)


def test_the_default_scale_is_of_the_true_head_size(batch: Any, backend: str) -> None:
    given = attend(batch, softmax_scale=8**-0.5, backend=backend)
    assert torch.equal(attend(batch, backend=backend), given)
    assert not torch.equal(attend(batch, softmax_scale=1, backend=backend), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sinks_of_any_floating_dtype(batch: Any, backend: str, dtype: torch.dtype) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])  # exact in every dtype
    without, lse = attend(batch, return_softmax_lse=True, backend=backend)
    out, with_lse = attend(batch, s_aux=sinks.to(dtype), return_softmax_lse=True, backend=backend)
    torch.testing.assert_close(with_lse, torch.logaddexp(lse, sinks.unsqueeze(1)))
    torch.testing.assert_close(out, without * (lse - with_lse).exp().T.unsqueeze(-1))


@pytest.mark.parametrize("slopes", [torch.tensor([0.5, 0.25, 0.125, 1.0]), torch.rand(3, 4), torch.rand(4, 3).T])
def test_alibi_slopes_of_a_head_or_of_a_sequence_and_head(batch: Any, backend: str, slopes: Tensor) -> None:
    out = attend(batch, alibi_slopes=slopes, causal=True, backend=backend)
    rows = slopes if slopes.dim() == 2 else slopes.expand(3, 4)
    torch.testing.assert_close(out, attend(batch, alibi_slopes=rows, causal=True, backend="reference"))


def strides_of_out(name: str) -> Tensor:
    if name == "contiguous":
        return torch.full((5, 4, 16), 7.0)
    if name == "heads-first":
        return torch.full((4, 5, 16), 7.0).transpose(0, 1)
    if name == "part-of-a-row":
        return torch.full((5, 4, 40), 7.0)[..., 8:24]
    return torch.full((5, 16, 4), 7.0).transpose(1, 2)  # the last axis is not contiguous


@pytest.mark.parametrize("name", ["contiguous", "heads-first", "part-of-a-row", "channels-first"])
def test_out_of_any_strides_and_rows_past_the_end_stay(batch: Any, backend: str, name: str) -> None:
    batch.cu_seqlens_q = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    expected = attend(batch, backend="reference")
    out = strides_of_out(name)
    result, lse = attend(batch, out=out, return_softmax_lse=True, backend=backend)
    assert result is out
    assert lse.shape == (4, 5)
    torch.testing.assert_close(out[:3], expected[:3])
    assert torch.equal(out[3:], torch.full((2, 4, 16), 7.0))


def test_ragged_equals_paged(batch: Any, backend: str) -> None:
    lens = batch.seqused_k.tolist()
    slots = [[int(batch.block_table[b, j // 4]) * 4 + j % 4 for j in range(n)] for b, n in enumerate(lens)]
    flat = torch.tensor([slot for row in slots for slot in row])
    k, v = batch.key_cache.flatten(0, 1)[flat], batch.value_cache.flatten(0, 1)[flat]
    starts = torch.tensor([0, 9, 13, 15], dtype=torch.int32)
    ragged = flash_attn_varlen_func(
        batch.q,
        k,
        v,
        3,
        batch.cu_seqlens_q,
        9,
        starts,
        causal=True,
        window_size=(4, -1),
        return_softmax_lse=True,
        backend=backend,
    )
    paged = attend(batch, causal=True, window_size=(4, -1), return_softmax_lse=True, backend=backend)
    for a, b in zip(ragged, paged, strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_to_see(backend: str) -> None:
    """Dao-AILab/flash-attention#2470: an all-padding batch; and q_len > 0 with no key gives the empty state."""
    arguments = zero_query(4)
    arguments |= {"seqused_k": torch.zeros(1, dtype=torch.int32), "block_table": torch.tensor([[-1]])}
    out, lse = flash_attn_varlen_func(**arguments, return_softmax_lse=True, causal=True, backend=backend)
    assert torch.equal(out, torch.zeros(1, 2, 8))
    assert torch.equal(lse, torch.full((2, 1), -torch.inf))


def test_a_sequence_without_queries_in_the_middle(backend: str) -> None:
    """Dao-AILab/flash-attention#1713, written small: the third sequence uses its own keys."""
    k, v = torch.randn(9, 1, 8), torch.arange(9.0).reshape(9, 1, 1).expand(9, 1, 8).contiguous()
    loc = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    starts = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    out = flash_attn_varlen_func(torch.zeros(4, 2, 8), k, v, 2, loc, 3, starts, backend=backend)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1.0, 1.0, 7.0, 7.0]))


def test_empty_sequences_between_single_queries(backend: str) -> None:
    """Dao-AILab/flash-attention#1537: max_seqlen_q = 1 and q lens [0, 1, 0, 1], 9 query heads over 3, D 64."""
    k, v = torch.randn(8, 4, 3, 64), torch.randn(8, 4, 3, 64)
    loc = torch.tensor([0, 0, 1, 1, 2], dtype=torch.int32)
    lens = torch.tensor([0, 3, 0, 5], dtype=torch.int32)
    table = torch.tensor([[-1, -1], [2, -1], [-1, -1], [7, 1]], dtype=torch.int32)
    q = torch.randn(2, 9, 64)
    out = flash_attn_varlen_func(q, k, v, 1, loc, 5, seqused_k=lens, block_table=table, backend=backend)
    expected = flash_attn_varlen_func(q, k, v, 1, loc, 5, seqused_k=lens, block_table=table, backend="reference")
    assert out.shape == (2, 9, 64)
    torch.testing.assert_close(out, expected)


def test_padded_rows_of_a_fixed_shape(batch: Any, backend: str) -> None:
    """sgl-project/sglang#1469, xLLM-AI/xllm#1939: seq_len 0 or 1 in padding, and offsets that stay flat."""
    alone = attend(batch, backend=backend)
    batch.q = torch.cat((batch.q, torch.full((3, 4, 8), torch.nan)))
    batch.cu_seqlens_q = torch.tensor([0, 3, 3, 5, 5, 5], dtype=torch.int32)
    batch.seqused_k = torch.tensor([9, 4, 2, 0, 1], dtype=torch.int32)
    batch.block_table = torch.cat(
        (batch.block_table, torch.tensor([[-1, 2**31 - 1, 12], [0, 99, 99]], dtype=torch.int32))
    )
    assert torch.equal(attend(batch, backend=backend)[:5], alone)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_slots_and_tables_of_either_width(batch: Any, backend: str, index: torch.dtype) -> None:
    expected = attend(batch, backend="reference")
    torch.testing.assert_close(attend(batch, block_table=batch.block_table.to(index), backend=backend), expected)
    k, v = batch.key_cache.clone(), batch.value_cache.clone()
    slots = batch.slot_mapping.to(index)
    reshape_and_cache_flash(batch.key, batch.value, k, v, slots, backend=backend)
    assert torch.equal(k.flatten(0, 1)[[28, 9, 38, 47]], batch.key[[0, 1, 3, 4]])
    assert torch.equal(v.flatten(0, 1)[[28, 9, 38, 47]], batch.value[[0, 1, 3, 4]])


@pytest.mark.parametrize("negative", [-1, -2, -48, -(2**31)])
def test_a_negative_slot_touches_nothing(backend: str, negative: int) -> None:
    """vllm-project/vllm#43810: Python indexing with -1 overwrites the last slot."""
    k, v = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    slots = torch.tensor([0, negative, negative])
    reshape_and_cache_flash(torch.ones(3, 1, 8), torch.ones(3, 1, 8), k, v, slots, backend=backend)
    assert k[0, 0].eq(1).all()
    assert k.sum() == v.sum() == 8


def test_rows_past_the_slots_are_not_read(batch: Any, backend: str) -> None:
    batch.key[3:] = torch.nan
    k, v = batch.key_cache.clone(), batch.value_cache.clone()
    reshape_and_cache_flash(batch.key, batch.value, k, v, batch.slot_mapping[:2], backend=backend)
    assert (k != batch.key_cache).any(-1).sum() == 4  # two tokens of two heads
    reshape_and_cache_flash(batch.key, batch.value, k, v, batch.slot_mapping[:0], backend=backend)


def storage(name: str, size: int) -> tuple[Tensor, Tensor]:
    """K and V caches ``[12, 4, 2, size]`` laid out as engines do."""
    if name == "unbind":
        return torch.zeros(12, 2, 4, 2, size).unbind(1)
    if name == "hnd-split":
        k, v = torch.zeros(12, 2, 4, 2 * size).transpose(1, 2).split(size, dim=-1)
        return k, v
    if name == "every-second-page":
        return torch.zeros(24, 4, 2, size)[::2], torch.zeros(36, 4, 2, size)[::3]
    return torch.zeros(12, 4, 2, size), torch.zeros(12, 2, 4, size).transpose(1, 2)  # K and V differ


@pytest.mark.parametrize("name", ["unbind", "hnd-split", "every-second-page", "nhd-and-hnd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides(make_batch: Any, backend: str, name: str, dtype: torch.dtype) -> None:
    """flashinfer-ai/flashinfer#4625, #3856, vllm-project/vllm-ascend#95: packed QKV rows in, any storage beneath."""
    batch = make_batch(value_size=8).to(dtype)
    plain_k, plain_v = batch.key_cache.clone(), batch.value_cache.clone()
    k, v = (cache.to(dtype) for cache in storage(name, 8))
    if dtype == torch.float32:
        assert not v.is_contiguous()
    k.copy_(plain_k)
    v.copy_(plain_v)
    packed = torch.cat((batch.q, batch.key, batch.value), dim=1).flatten(1)  # [T, (Hq + 2 Hkv) D]
    q, key, value = (part.unflatten(1, (-1, 8)) for part in packed.split([32, 16, 16], dim=1))
    assert not q.is_contiguous()
    reshape_and_cache_flash(key, value, k, v, batch.slot_mapping, backend=backend)
    reshape_and_cache_flash(batch.key, batch.value, plain_k, plain_v, batch.slot_mapping, backend="reference")
    assert torch.equal(k, plain_k)
    assert torch.equal(v, plain_v)
    out = attend(batch, q=q, k=k, v=v, causal=True, backend=backend)
    assert torch.equal(out, attend(batch, k=plain_k, v=plain_v, causal=True, backend=backend))


def test_one_token_one_head_may_carry_any_stride(backend: str) -> None:
    """A size of 1 is never stepped along, so its stride says nothing."""
    cache = torch.zeros(3, 1, 1, 8).as_strided((3, 1, 1, 8), (8, 999, 7, 1))
    other = torch.zeros(3, 1, 1, 8)
    key = torch.arange(8.0).as_strided((1, 1, 8), (3, 5, 1))
    reshape_and_cache_flash(key, key, cache, other, torch.tensor([2]), backend=backend)
    assert torch.equal(cache[2, 0, 0], torch.arange(8.0))
    assert cache[:2].sum() == 0


@pytest.mark.parametrize("validate", [False, True, "deferred"])
def test_validate_is_accepted_on_the_cpu(batch: Any, validate: bool | str) -> None:
    attend(batch, validate=validate)
    reshape_and_cache_flash(**batch.write_arguments(), validate=validate)
    with pytest.raises(pagetile.SlotError):
        reshape_and_cache_flash(**{**batch.write_arguments(), "slot_mapping": torch.tensor([48])}, validate=validate)


def test_a_query_and_a_cache_of_two_dtypes_are_both_named(batch: Any) -> None:
    """vllm-project/vllm#6884, #21177: the message has both dtypes and what would be allowed."""
    k, v = batch.key_cache.bfloat16(), batch.value_cache.bfloat16()
    with pytest.raises(pagetile.DTypeError, match=r"q is float32, but k is bfloat16.*quantised \(float8_e4m3fn"):
        attend(batch, k=k, v=v)
    with pytest.raises(pagetile.DTypeError, match="key is float32, but key_cache is bfloat16"):
        reshape_and_cache_flash(batch.key, batch.value, k, v, batch.slot_mapping)
    with pytest.raises(pagetile.DTypeError, match="v is float32, but k is bfloat16"):
        attend(batch.to(torch.bfloat16), v=batch.value_cache)
