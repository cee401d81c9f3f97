"""Addresses past 2^31 and 2^32 elements: silent wrong data, or a crash, wherever an index is 32 bits wide.

The caches here are reserved, not filled: they cost the pages that a case touches.
"""

from __future__ import annotations

import pytest
import torch
from field_kit import attend, each_backend, fast_backends, ints, loc, only_on_cpu, randn, reserve
from torch import Tensor

from pagetile.ops import flash_attn_varlen_func, flash_attn_with_kvcache, reshape_and_cache_flash
from pagetile.testing import first_difference, same_bits
from pagetile.testing.machine import Subject

F16 = torch.float16


def equal(a: Tensor, b: Tensor) -> None:
    assert same_bits(a, b), first_difference(a, b)


def wrapped(element: int) -> list[int]:
    """Where an address of 32 bits, signed or not, in elements or in bytes of float16, would land instead."""
    spots = {element % 2**32, element % 2**31, (2 * element) % 2**32 // 2, (2 * element) % 2**31 // 2}
    return sorted(spots - {element})


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@each_backend()
def test_index_overflow_vllm_1486(subject: Subject, slot_dtype: torch.dtype) -> None:
    """64000 blocks of 16 x 32 x 128: a token at the very last slot, written and read back (vllm-project/vllm#1486)."""
    only_on_cpu(subject)
    k_cache, v_cache = (reserve(64000, 16, 32, 128) for _ in "kv")
    slot = 64000 * 16 - 1
    key, value = (randn(1, 32, 128, seed=s, dtype=F16) for s in (0, 1))
    reshape_and_cache_flash(key, value, k_cache, v_cache, ints([slot], subject, slot_dtype), backend=subject.name)
    for cache, token in ((k_cache, key), (v_cache, value)):
        equal(cache[63999, 15], token[0])
        flat = cache.view(-1)
        assert not cache[63999, :15].any()
        assert not any(flat[spot : spot + 4096].any() for spot in wrapped(slot * 32 * 128))

    q = randn(1, 32, 128, seed=2, dtype=F16)
    small = [c[63999:].clone() for c in (k_cache, v_cache)]
    far = attend(subject, q, k_cache, v_cache, ints([[63999]], subject), [16], [1])
    near = attend(subject, q, *small, ints([[0]], subject), [16], [1])
    equal(far[0], near[0])
    equal(far[1], near[1])
    assert far[0].any()


@each_backend()
def test_index_overflow_interleaved_vllm_50427(subject: Subject) -> None:
    """K and V as halves of one row: the K view passes 2^31 at half the blocks (vllm-project/vllm#50427, #50483)."""
    only_on_cpu(subject)
    num_blocks, heads, block_size, size = 65537, 8, 16, 128
    buffer = reserve(num_blocks, heads, block_size, 2 * size)
    k_cache, v_cache = (buffer[..., half].transpose(1, 2) for half in (slice(0, size), slice(size, None)))
    key, value = (randn(13, heads, size, seed=s, dtype=F16) for s in (0, 1))
    q = randn(2, 16, size, seed=2, dtype=F16)
    results = []
    for block in (65536, 0):
        slots = block * block_size + torch.arange(13)
        reshape_and_cache_flash(key, value, k_cache, v_cache, slots, backend=subject.name)
        results.append(attend(subject, q, k_cache, v_cache, ints([[block]], subject), [13], [2], causal=True))
        equal(k_cache[block, :13], key)
        equal(v_cache[block, :13], value)
        if block:
            assert not buffer[0].any()
            assert not buffer[32768].any()
    equal(results[0][0], results[1][0])
    equal(results[0][1], results[1][1])


@fast_backends()
def test_query_overflow_sglang_20389(subject: Subject) -> None:
    """262145 query rows of stride 8192: the row offset times the stride passes 2^31 (sgl-project/sglang#20389)."""
    only_on_cpu(subject)
    rows, stride, heads, size = 262145, 8192, 2, 8
    q = reserve(rows, stride).as_strided((rows, heads, size), (stride, size, 1))
    q[-1] = randn(heads, size, dtype=F16)
    k, v = (randn(1, 1, 1, size, seed=s, dtype=F16) for s in (1, 2))
    table = torch.zeros(rows, 1, dtype=torch.int32)
    out, lse = attend(subject, q, k, v, table, [1] * rows, [1] * rows)
    equal(out, v.view(1, 1, size).expand(rows, heads, size).contiguous())
    right = (q[-1].double() @ k.view(size).double()) * size**-0.5
    torch.testing.assert_close(lse[:, -1].double(), right, rtol=1e-6, atol=1e-6)
    assert not lse[:, :-1].any()


@each_backend()
def test_page_size_1_aiter_2517(subject: Subject) -> None:
    """8401239 pages of one token: output silently zero from page 16435 on (ROCm/aiter#2517)."""
    only_on_cpu(subject)
    pages = 8401239
    k_cache, v_cache = (reserve(pages, 1, 8, 64) for _ in "kv")
    where = [16434, 16435, 4194304, 8388608, 8401238, 5, 7000001]
    key, value = (randn(len(where), 8, 64, seed=s, dtype=F16) for s in (0, 1))
    reshape_and_cache_flash(key, value, k_cache, v_cache, ints(where, subject, torch.int64), backend=subject.name)
    equal(k_cache[where, 0], key)
    q = randn(1, 8, 64, seed=2, dtype=F16)
    far = attend(subject, q, k_cache, v_cache, ints([where], subject), [len(where)], [1])
    near = attend(subject, q, key[:, None], value[:, None], ints([list(range(len(where)))], subject), [len(where)], [1])
    equal(far[0], near[0])
    assert far[0].any()


@each_backend()
def test_batch_stride_of_2_to_30_flash_attention_772(subject: Subject) -> None:
    """Cache rows 2^30 elements apart: appends to rows 1 to 4 land in row 0 (Dao-AILab/flash-attention#772)."""
    only_on_cpu(subject)
    stride, length, heads, size = 2**30, 8, 2, 16
    buffers = [reserve(4 * stride + length * heads * size) for _ in "kv"]
    k_cache, v_cache = (b.as_strided((5, length, heads, size), (stride, heads * size, size, 1)) for b in buffers)
    key, value = (randn(4, 3, heads, size, seed=s, dtype=F16) for s in (0, 1))
    q = randn(4, 3, heads, size, seed=2, dtype=F16)
    rows, how = ints([1, 2, 3, 4], subject), {"causal": True, "backend": subject.name}
    lens = ints([2] * 4, subject)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, key, value, cache_seqlens=lens, cache_batch_idx=rows, **how)
    assert not k_cache[0].any()
    assert not v_cache[0].any()
    equal(k_cache[1:, 2:5], key)
    equal(v_cache[1:, 2:5], value)
    small = [c[1:].clone() for c in (k_cache, v_cache)]
    again = flash_attn_with_kvcache(q, *small, cache_seqlens=ints([5] * 4, subject), **how)
    equal(out, again)


@fast_backends()
def test_outer_stride_wraps_flash_attention_2611(subject: Subject) -> None:
    """Row stride 9728, more than 220752 rows, in q and in out (Dao-AILab/flash-attention#2611, run forward)."""
    only_on_cpu(subject)
    rows, stride, heads, size = 220760, 9728, 1, 8
    q, out = (reserve(rows, stride).as_strided((rows, heads, size), (stride, size, 1)) for _ in "qo")
    ends = torch.tensor([0, 1, 1000, rows - 9, rows - 2, rows - 1])
    q[ends] = randn(len(ends), heads, size, dtype=F16)
    k, v = (randn(3, heads, size, seed=s, dtype=F16) for s in (1, 2))
    how = {"cu_seqlens_k": loc([3], subject), "return_softmax_lse": True, "backend": subject.name}
    got, lse = flash_attn_varlen_func(q, k, v, rows, loc([rows], subject), 3, out=out, **how)
    assert got.data_ptr() == out.data_ptr()
    near, near_lse = flash_attn_varlen_func(q.contiguous(), k, v, rows, loc([rows], subject), 3, **how)
    equal(out.contiguous(), near)
    equal(lse, near_lse)
    assert near[ends].any()
