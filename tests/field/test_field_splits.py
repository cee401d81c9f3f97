"""Splits of the context, the base of the logarithm, and what determinism means."""

from __future__ import annotations

import math

import pytest
import torch
from field_kit import attend, deal, each_backend, ints, randn, scatter, table_of, zero_query

from pagetile.ops import flash_attn_varlen_func, merge_attn_states
from pagetile.testing import AttendCase, assert_attend, build_attend, first_difference, same_bits
from pagetile.testing.machine import Subject


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 64, 1000])
@each_backend()
def test_ragged_paged_and_split_flash_attention_1217(subject: Subject, num_splits: int) -> None:
    """Ragged and paged right with one split, wrong with more (Dao-AILab/flash-attention#1217)."""
    case = AttendCase(seqs=((1, 3), (5, 700), (2, 64)), num_splits=num_splits, head_size=64, dtype="bfloat16")
    built = build_attend(case, subject.device)
    subject.backend.attend(built.call)
    assert_attend(built)


@each_backend()
def test_run_to_run_and_batch_invariance_flash_mla_212(subject: Subject) -> None:
    """Repeatable is not batch-invariant (deepseek-ai/FlashMLA#212): the first always, the second when asked for."""
    lens = [700, 33, 64]
    blocks, num_blocks = deal(lens, 16)
    tokens = [[randn(n, 2, 64, seed=3 * s + i) for i, n in enumerate(lens)] for s in (1, 2)]
    caches = [scatter(t, blocks, 16, num_blocks, 0.0).to(subject.device) for t in tokens]
    q = randn(3, 8, 64).to(subject.device)
    table = table_of(blocks, subject)
    first = attend(subject, q, *caches, table, lens, [1, 1, 1])
    for _ in range(3):
        again = attend(subject, q, *caches, table, lens, [1, 1, 1])
        assert same_bits(first[0], again[0])
        assert same_bits(first[1], again[1])
    together = attend(subject, q, *caches, table, lens, [1, 1, 1], batch_invariant=True)
    for i, length in enumerate(lens):
        one = attend(subject, q[i : i + 1], *caches, table[i : i + 1], [length], [1], batch_invariant=True)
        assert same_bits(together[0][i : i + 1], one[0]), first_difference(together[0][i : i + 1], one[0])
        assert same_bits(together[1][:, i : i + 1], one[1])


@pytest.mark.parametrize("length", [1, 16, 255, 256, 257, 1025])
@each_backend()
def test_prefill_row_is_the_later_decode_flash_attention_2604(subject: Subject, length: int) -> None:
    """Splits by count move with the length (Dao-AILab/flash-attention#2604): split by tokens, bits stay."""
    blocks, num_blocks = deal([length], 16)
    k, v = (
        scatter([randn(length, 1, 64, seed=s)], blocks, 16, num_blocks, math.nan).to(subject.device) for s in (1, 2)
    )
    q = randn(length, 4, 64).to(subject.device)
    table, how = table_of(blocks, subject), {"causal": True, "batch_invariant": True}
    out, lse = attend(subject, q, k, v, table, [length], [length], **how)
    for p in sorted({0, length // 3, length // 2, length - 2, length - 1} - {-1}):
        for num_splits in (0, 1, 5):
            one = attend(subject, q[p : p + 1], k, v, table, [p + 1], [1], num_splits=num_splits, **how)
            assert same_bits(out[p : p + 1], one[0]), f"position {p}: {first_difference(out[p : p + 1], one[0])}"
            assert same_bits(lse[:, p : p + 1], one[1])


@each_backend()
def test_natural_logarithm_flashinfer_2113(subject: Subject) -> None:
    """A base-2 log-sum-exp in a natural-log merge gives 2.6598 (flashinfer-ai/flashinfer#2113,
    sgl-project/sglang#35045, pytorch/pytorch#181645)."""
    a, b = (torch.full((1, 1, 8), x, device=subject.device) for x in (1.0, 3.0))
    a_lse, b_lse = (torch.full((1, 1), x, device=subject.device) for x in (0.0, math.log(3)))
    out, lse = torch.empty_like(a), torch.empty_like(a_lse)
    merge_attn_states(out, a, a_lse, b, b_lse, lse, backend=subject.name)
    assert out.flatten().tolist() == pytest.approx([2.5] * 8, rel=1e-6)
    assert lse.item() == pytest.approx(1.38629, abs=5e-6)
    for length in (1, 2, 17, 300):
        assert zero_query(subject, [length])[1].item() == pytest.approx(math.log(length), abs=1e-6)


@each_backend()
def test_128_splits_lmdeploy_4920(subject: Subject) -> None:
    """The reduction of 128 splits over 20548 tokens, miscompiled by two compiler versions (InternLM/lmdeploy#4920)."""
    length = 20548
    k, v = (randn(161, 128, 1, 128, seed=s).to(subject.device) for s in (1, 2))
    q = randn(1, 2, 128).to(subject.device)
    table = ints([torch.randperm(161, generator=torch.Generator().manual_seed(0)).tolist()], subject)
    out, lse = attend(subject, q, k, v, table, [length], [1], num_splits=128)
    keys, values = (c[table[0].long()].flatten(0, 1)[:length, 0].double() for c in (k, v))
    logits = q[0].double() @ keys.T * 128**-0.5
    right = logits.softmax(-1) @ values
    # Each output is a mean of 20548 values of order 1: the sum's rounding is far below 1e-5, the fault was 0.43.
    torch.testing.assert_close(out[0].double(), right, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[:, 0].double(), logits.logsumexp(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 50])
@each_backend()
def test_shared_prefix_is_the_plain_call_vllm_22103(subject: Subject, prefix: int) -> None:
    """Cascade attention loses accuracy (vllm-project/vllm#22103): prefix and suffix merged, against one call."""
    case = AttendCase(seqs=((3, 53),), num_q_heads=4, head_size=64)
    built = build_attend(case, subject.device)
    call = built.call
    everything = {"softmax_scale": call.scale}
    table = call.block_table
    assert table is not None
    # The prefix, up to all of what stands before the queries, is visible to each of them; the suffix is causal.
    before = attend(subject, call.q, call.k, call.v, table, [prefix], [3], **everything)
    tail = [x[0][prefix:].float().to(subject.device) for x in (built.keys, built.values)]
    after = _ragged_causal(subject, call.q, *tail, **everything)
    lse = torch.empty_like(before[1])
    merge_attn_states(call.out, *before, *after, lse, backend=subject.name)
    call.lse.copy_(lse)
    assert_attend(built, roundings=3)


def _ragged_causal(subject: Subject, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: float):
    return flash_attn_varlen_func(
        q, k, v, len(q), ints([0, len(q)], subject), len(k), cu_seqlens_k=ints([0, len(k)], subject), causal=True,
        return_softmax_lse=True, backend=subject.name, **how,
    )  # fmt: skip


@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("length", [511, 512, 513, 8191, 8193, 16385, 32769, 70000])
@each_backend()
def test_long_contexts_vllm_905(subject: Subject, length: int, num_splits: int) -> None:
    """Limits of one pass at 12 to 41 k tokens (vllm-project/vllm#905, #1370, #1510), and a wrong reduction above
    16 k (ROCm/vllm#22): the mean position, whatever the number of splits."""
    num_blocks = -(-length // 256)
    v = torch.arange(num_blocks * 256.0, device=subject.device).view(num_blocks, 256, 1, 1).expand(-1, -1, 1, 8)
    k = torch.ones(num_blocks, 256, 1, 8, device=subject.device)
    q = torch.zeros(1, 1, 8, device=subject.device)
    table = ints([list(range(num_blocks))], subject)
    out, lse = attend(subject, q, k, v.contiguous(), table, [length], [1], num_splits=num_splits)
    rounding = length * 2**-24  # a float32 sum of that many terms, in any order
    assert out.flatten().tolist() == pytest.approx([(length - 1) / 2] * 8, rel=rounding)
    assert lse.item() == pytest.approx(math.log(length), rel=1e-6)


@each_backend()
def test_window_wider_than_the_sequence_trt_llm_1424(subject: Subject) -> None:
    """A window of 65 k sizes scratch by the wrong length (NVIDIA/TensorRT-LLM#1424): it is no window at all."""
    plain = zero_query(subject, [300], [4], causal=True)
    for window in (299, 300, 65536, 2**31 - 1):
        out, lse = zero_query(subject, [300], [4], causal=True, window_size=(window, 0))
        assert same_bits(out, plain[0])
        assert same_bits(lse, plain[1])
