"""Strides, layouts and copies: contiguity assumed where nobody promised it."""

from __future__ import annotations

import pytest
import torch
from field_kit import attend, each_backend, ints, randn
from torch import Tensor

from pagetile.ops import flash_attn_varlen_func, merge_attn_states, reshape_and_cache_flash
from pagetile.testing import first_difference, same_bits
from pagetile.testing.machine import Subject

TABLE, LENGTH = [[2, 0, 3]], [41]


def equal(a: Tensor, b: Tensor) -> None:
    assert same_bits(a, b), first_difference(a, b)


def caches_of(subject: Subject, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [randn(4, 16, 2, 64, seed=s, dtype=dtype).to(subject.device) for s in (0, 1)]


@each_backend()
def test_query_out_of_a_packed_row_flashinfer_4625(subject: Subject) -> None:
    """q out of packed QKV, its strides not in the plan: wrong from row 1 on (flashinfer-ai/flashinfer#4625)."""
    packed = randn(4, (32 + 2 * 4) * 128).to(subject.device)
    q = packed[:, : 32 * 128].unflatten(1, (32, 128))
    k, v = (randn(3, 16, 4, 128, seed=s).to(subject.device) for s in (1, 2))
    table, lens = ints([[0], [1], [2], [0]], subject), [5, 16, 9, 1]
    for query in (q, q.contiguous(), q):  # one after the other: a plan made for one must not serve the other
        out, lse = attend(subject, query, k, v, table, lens, [1] * 4)
        right = attend(subject, q.clone(), k, v, table, lens, [1] * 4)
        equal(out, right[0])
        equal(lse, right[1])


@each_backend()
def test_key_and_value_out_of_a_packed_row(subject: Subject) -> None:
    """The write takes K and V as slices of the same packed row."""
    packed = randn(7, 8 * 16).to(subject.device)
    key, value = (packed[:, a : a + 32].unflatten(1, (2, 16)) for a in (64, 96))
    k, v = (torch.zeros(2, 8, 2, 16, device=subject.device) for _ in "kv")
    reshape_and_cache_flash(key, value, k, v, ints(list(range(3, 10)), subject, torch.int64), backend=subject.name)
    equal(k.view(16, 2, 16)[3:10], key.contiguous())
    equal(v.view(16, 2, 16)[3:10], value.contiguous())
    assert not k.view(16, 2, 16)[:3].any()


@each_backend()
def test_every_second_page_of_a_pool_flashinfer_3856(subject: Subject) -> None:
    """The pool's block stride is never read: silently wrong from page 1 on (flashinfer-ai/flashinfer#3856)."""
    k, v = caches_of(subject)
    q = randn(2, 4, 64, seed=3).to(subject.device)
    right = attend(subject, q, k, v, ints(TABLE, subject), LENGTH, [2])
    pools = [torch.full((8, 16, 2, 64), torch.nan, device=subject.device) for _ in "kv"]
    for pool, cache in zip(pools, (k, v), strict=True):
        pool[::2] = cache
    got = attend(subject, q, pools[0][::2], pools[1][::2], ints(TABLE, subject), LENGTH, [2])
    equal(got[0], right[0])
    equal(got[1], right[1])


@each_backend()
def test_transposed_log_sum_exp_vllm_22003(subject: Subject) -> None:
    """A log-sum-exp that is a transposed view, fed to merge (vllm-project/vllm#22003)."""
    a, b = (randn(5, 3, 16, seed=s).to(subject.device) for s in (0, 1))
    a_lse, b_lse = (randn(5, 3, seed=s).to(subject.device).T for s in (2, 3))
    results = []
    for x, y in ((a_lse, b_lse), (a_lse.contiguous(), b_lse.contiguous()), (a_lse, b_lse.contiguous())):
        out, lse = torch.empty_like(a), torch.empty(5, 3, device=subject.device).T
        merge_attn_states(out, a, x, b, y, lse, backend=subject.name)
        results.append((out, lse.contiguous()))
    for out, lse in results[1:]:
        equal(out, results[0][0])
        equal(lse, results[0][1])


@each_backend()
def test_two_kv_heads_are_never_guessed_lmcache_4467(subject: Subject) -> None:
    """With two KV heads ``[NB, BS, 2, 2D]`` reads two ways (LMCache/LMCache#4467): here strides say it, not shapes."""
    size = 16
    buffer = randn(3, 8, 2, 2 * size).to(subject.device)
    by_half = buffer[..., :size], buffer[..., size:]  # two heads, K and V side by side
    by_index = buffer[:, :, 0].unflatten(-1, (2, size)), buffer[:, :, 1].unflatten(-1, (2, size))  # K, then V
    q = randn(1, 4, size, seed=1).to(subject.device)
    outs = []
    for k, v in (by_half, by_index):
        out, _ = attend(subject, q, k, v, ints([[2, 1]], subject), [13], [1])
        right, _ = attend(subject, q, k.contiguous(), v.contiguous(), ints([[2, 1]], subject), [13], [1])
        equal(out, right)
        outs.append(out)
    assert not torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_backend()
def test_k_and_v_each_their_own_strides_vllm_ascend_95(subject: Subject, dtype: torch.dtype) -> None:
    """Contiguity missing on V only (vllm-project/vllm-ascend#95): K and V in different storages."""
    k, v = caches_of(subject, dtype)
    q = randn(3, 4, 64, seed=3, dtype=dtype).to(subject.device)
    right = attend(subject, q, k, v, ints(TABLE, subject), LENGTH, [3], causal=True)

    def nhd(x: Tensor) -> Tensor:
        return x

    def hnd(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full_like(x[..., :3], torch.nan)], dim=-1)[..., :64]

    def interleaved(x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(x, torch.nan), x], dim=1)[:, 1]

    ways = (nhd, hnd, padded, interleaved)
    for k_way in ways:
        for v_way in ways:
            got = attend(subject, q, k_way(k), v_way(v), ints(TABLE, subject), LENGTH, [3], causal=True)
            equal(got[0], right[0])
            equal(got[1], right[1])


@each_backend()
def test_output_of_the_caller_with_strides(subject: Subject) -> None:
    """``out=`` a slice of a wider row: only its own columns and rows change."""
    k, v = caches_of(subject)
    q = randn(3, 4, 64, seed=3).to(subject.device)
    wide = torch.full((5, 4 * 64 + 32), 7.0, device=subject.device)
    out = wide[1:4, 16 : 16 + 256].unflatten(1, (4, 64))
    starts, lens = ints([0, 2], subject), ints(LENGTH, subject)
    how = {"seqused_k": lens, "block_table": ints(TABLE, subject), "backend": subject.name}
    got = flash_attn_varlen_func(q, k, v, 2, starts, 41, out=out, **how)
    assert got.data_ptr() == out.data_ptr()
    right = flash_attn_varlen_func(q[:2].clone(), k, v, 2, starts, 41, **how)
    equal(out[:2].contiguous(), right)
    wide[1:3, 16:272] = 7.0
    assert (wide == 7.0).all(), "rows past cu_seqlens_q[-1], and columns beside the slice, stay as they are"
