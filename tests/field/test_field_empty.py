"""Empty, masked and uninitialised data: NaN, a hang, or a crash where the answer is 0 and -inf."""

from __future__ import annotations

import math

import pytest
import torch
from field_kit import attend, each_backend, ints, loc, randn, scatter, table_of, zero_query

from pagetile.ops import flash_attn_varlen_func, merge_attn_states, reshape_and_cache_flash
from pagetile.testing import same_bits
from pagetile.testing.machine import Subject


@each_backend()
def test_nan_after_the_last_token_vllm_936(subject: Subject) -> None:
    """0 * NaN: unused V slots of the last block (vllm-project/vllm#936)."""
    q = randn(1, 1, 8, seed=2).to(subject.device)
    tokens = [[randn(5, 1, 8, seed=s)] for s in (0, 1)]
    results = []
    for fill in (0.0, math.nan, math.inf):
        caches = (scatter(t, [[0]], 16, 1, fill).to(subject.device) for t in tokens)
        results.append(attend(subject, q, *caches, ints([[0]], subject), [5], [1]))
    assert results[0][0].isfinite().all()
    for other in results[1:]:
        assert same_bits(results[0][0], other[0])
        assert same_bits(results[0][1], other[1])


@each_backend()
def test_reserved_slot_sglang_32477(subject: Subject) -> None:
    """Padded rows put undefined values into block 0, and table padding points there (sgl-project/sglang#32477)."""
    tokens = [[randn(9, 1, 8, seed=s)] for s in (0, 1)]
    k, v = (scatter(t, [[2, 1, 3]], 4, 4, 0.0).to(subject.device) for t in tokens)
    rows = torch.full((2, 1, 8), math.nan, device=subject.device)
    reshape_and_cache_flash(rows, rows, k, v, ints([0, 1], subject, torch.int64), backend=subject.name)
    table = ints([[2, 1, 3, 0, 0]], subject)
    q = randn(1, 1, 8, seed=2).to(subject.device)
    for window in ((-1, 0), (3, 0)):
        out, lse = attend(subject, q, k, v, table, [9], [1], window_size=window)
        assert out.isfinite().all()
        assert lse.isfinite().all()


@pytest.mark.parametrize("nothing", [-math.inf, math.inf])
@each_backend()
def test_merge_of_empty_states_flashinfer_4051(subject: Subject, nothing: float) -> None:
    """(0, -inf) + (0, -inf) is NaN (flashinfer-ai/flashinfer#4051, #4054, #5262)."""
    zero, gone = torch.zeros(3, 2, 4, device=subject.device), torch.full((2, 3), nothing, device=subject.device)
    x, lse = randn(3, 2, 4).to(subject.device), randn(2, 3, seed=1).to(subject.device)
    out, out_lse = torch.empty_like(x), torch.empty_like(lse)
    merge_attn_states(out, zero, gone, zero, gone, out_lse, backend=subject.name)
    assert not out.any()
    assert out_lse.isneginf().all()
    for a, b in (((x, lse), (zero, gone)), ((zero, gone), (x, lse))):
        merge_attn_states(out, *a, *b, out_lse, backend=subject.name)
        assert same_bits(out, x)
        assert same_bits(out_lse, lse)
    total, total_lse = zero.clone(), gone.clone()  # three ways, in place
    for state in ((zero, gone), (x, lse), (zero, gone)):
        merge_attn_states(total, total, total_lse, *state, total_lse, backend=subject.name)
    assert same_bits(total, x)
    assert same_bits(total_lse, lse)


@each_backend()
def test_lse_of_no_keys_flash_attention_978(subject: Subject) -> None:
    """The log-sum-exp of a row with no keys is +inf (Dao-AILab/flash-attention#978, deepseek-ai/FlashMLA#77)."""
    out, lse = zero_query(subject, [0, 3, 0], block_size=4)
    assert out.flatten().tolist() == [0.0, 1.0, 0.0]
    assert lse.flatten().tolist() == [-math.inf, pytest.approx(math.log(3)), -math.inf]


@each_backend()
def test_row_that_sees_nothing_pytorch_103749(subject: Subject) -> None:
    """A row whose mask is all False is NaN in SDPA (pytorch/pytorch#103749, #103963): here it is zero."""
    out, lse = zero_query(subject, [4], [6], causal=True)  # rows 0 and 1 stand before the first key
    assert out.flatten().tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 1.5])
    assert lse[0, :2].tolist() == [-math.inf] * 2


@each_backend()
def test_softcap_overflow_vllm_56578(subject: Subject) -> None:
    """Softcap by a ratio of exponentials overflows past 88 (vllm-project/vllm#56578, #56579)."""
    for logits, weights in (([1e4, -1e4], [1.0, 0.0]), ([4400.0, 1000.0], [0.5, 0.5])):
        k = torch.tensor(logits, device=subject.device).view(1, 2, 1, 1)
        v = torch.tensor([1.0, 3.0], device=subject.device).view(1, 2, 1, 1)
        q = torch.ones(1, 1, 1, device=subject.device)
        out, lse = attend(subject, q, k, v, ints([[0]], subject), [2], [1], softmax_scale=1.0, softcap=50.0)
        assert out.item() == pytest.approx(weights[0] + 3 * weights[1], rel=1e-6)
        capped = [50 * math.tanh(x / 50) for x in logits]
        assert lse.item() == pytest.approx(50 + math.log(sum(math.exp(c - 50) for c in capped)), rel=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@each_backend()
def test_batch_of_padding_flash_attention_2470(subject: Subject, causal: bool) -> None:
    """All lengths 0: a division by zero on the host, or an illegal instruction (Dao-AILab/flash-attention#2470)."""
    k = torch.full((1, 4, 1, 8), math.nan, device=subject.device)
    q = randn(2, 1, 8).to(subject.device)
    out, lse = attend(subject, q, k, k, ints([[0], [0]], subject), [0, 0], [1, 1], causal=causal)
    assert not out.any()
    assert lse.isneginf().all()


@each_backend()
def test_no_queries_in_the_middle_flash_attention_1713(subject: Subject) -> None:
    """A sequence of no queries with keys of its own (Dao-AILab/flash-attention#1713)."""
    q = torch.zeros(300, 1, 8, device=subject.device)
    k = randn(300, 1, 8).to(subject.device)
    v = torch.arange(300.0, device=subject.device)[:, None, None].expand(300, 1, 8).contiguous()
    starts = ints([0, 150, 150, 300], subject)
    out = flash_attn_varlen_func(q, k, v, 150, starts, 100, cu_seqlens_k=loc([100] * 3, subject), backend=subject.name)
    assert out[:150].cpu().flatten().tolist() == pytest.approx([49.5] * 1200)
    assert out[150:].cpu().flatten().tolist() == pytest.approx([249.5] * 1200)


@each_backend()
def test_max_seqlen_q_1_with_empty_flash_attention_1537(subject: Subject) -> None:
    """max_seqlen_q 1 and some empty sequences: a reshape error (Dao-AILab/flash-attention#1537)."""
    out, lse = zero_query(subject, [0, 3, 0, 5], [0, 1, 0, 1], num_q_heads=9, num_kv_heads=3, head_size=64)
    assert out.shape == (2, 9)
    assert out.tolist() == [[1.0] * 9, [2.0] * 9]
    assert lse[:, 1].tolist() == pytest.approx([math.log(5)] * 9)


@each_backend()
def test_idle_splits_sgl_kernel_xpu_487(subject: Subject) -> None:
    """Splits with nothing to do overwrite the log-sum-exp with -inf (sgl-project/sgl-kernel-xpu#487)."""
    for window in ((5, 0), (15, 0)):
        out, lse = zero_query(subject, [200], num_splits=4, window_size=window)
        assert lse.item() == pytest.approx(math.log(window[0] + 1))
        assert out.item() == pytest.approx(199 - window[0] / 2)


@each_backend()
def test_blocks_nobody_owns_are_not_read(subject: Subject) -> None:
    """A cache of NaN in which one block is alive."""
    k = torch.full((50, 4, 2, 8), math.nan, device=subject.device)
    v = k.clone()
    k[31], v[31] = 1.0, 2.0
    out, lse = attend(subject, torch.ones(1, 2, 8, device=subject.device), k, v, table_of([[31]], subject), [4], [1])
    assert out.flatten().tolist() == [2.0] * 16
    assert lse.isfinite().all()
