"""Windows, causal alignment, ALiBi and sinks: the wrong set of visible keys, or an origin that is off."""

from __future__ import annotations

import math

import pytest
import torch
from field_kit import attend, each_backend, ints, loc, randn, zero_query

from pagetile.contracts.errors import PagetileError
from pagetile.contracts.visibility import window_from_sliding
from pagetile.ops import flash_attn_varlen_func, flash_attn_with_kvcache
from pagetile.testing import same_bits
from pagetile.testing.machine import Subject


@each_backend()
def test_sliding_window_counts_itself_transformers_39408(subject: Subject) -> None:
    """W passed straight as an inclusive radius sees W + 1 tokens (huggingface/transformers#39408)."""
    out, lse = zero_query(subject, [10], window_size=window_from_sliding(4))
    assert out.item() == pytest.approx(7.5)
    assert lse.item() == pytest.approx(math.log(4))
    assert zero_query(subject, [10], window_size=(4, 0))[0].item() == pytest.approx(7.0)


@each_backend()
def test_the_helper_is_the_mask_of_transformers_vllm_3385(subject: Subject) -> None:
    """Does W count the query's own token? Two stacks disagree (vllm-project/vllm#3385); it does, as in Transformers."""
    masking = pytest.importorskip("transformers.masking_utils")
    length, window = 12, 5
    visible = masking.sliding_window_causal_mask_function(window)
    out, lse = zero_query(subject, [length], [length], window_size=window_from_sliding(window), block_size=4)
    for position in range(length):
        seen = [j for j in range(length) if visible(0, 0, torch.tensor(position), torch.tensor(j))]
        assert out[position].item() == pytest.approx(sum(seen) / len(seen), abs=1e-6)
        assert lse[0, position].item() == pytest.approx(math.log(len(seen)), abs=1e-6)


@each_backend()
def test_four_ways_to_say_causal_flash_attention_1133(subject: Subject) -> None:
    """``(S-1, 0)``, ``(S, 0)``, ``(-1, 0)`` and causal differ (Dao-AILab/flash-attention#1133): bit-equal here."""
    size = 40
    q, k, v = (randn(size, 2, 16, seed=s).to(subject.device) for s in range(3))
    starts = loc([size], subject)
    ways = [{"window_size": w} for w in ((size - 1, 0), (size, 0), (-1, 0))] + [{"causal": True}]
    results = [
        flash_attn_varlen_func(
            q, k, v, size, starts, size, cu_seqlens_k=starts, return_softmax_lse=True, backend=subject.name, **way
        )
        for way in ways
    ]
    for out, lse in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(lse, results[0][1])


@each_backend()
def test_window_of_one_layer_only_vllm_51756(subject: Subject) -> None:
    """Full-attention layers that share a group with windowed ones lose old tokens (vllm-project/vllm#51756)."""
    assert zero_query(subject, [64], window_size=window_from_sliding(8))[0].item() == pytest.approx(59.5)
    assert zero_query(subject, [64], causal=True)[0].item() == pytest.approx(31.5)


@each_backend()
def test_step_at_which_the_window_is_full_transformers_37574(subject: Subject) -> None:
    """A rolling window goes wrong when the length reaches it (huggingface/transformers#37574): W = 8, prefill 6."""
    window = window_from_sliding(8)
    means = [zero_query(subject, [n], window_size=window, block_size=4)[0].item() for n in (6, 7, 8, 9, 10)]
    assert means == pytest.approx([2.5, 3.0, 3.5, 4.5, 5.5])  # the first token leaves at length 9


@each_backend()
def test_causal_is_bottom_right_pytorch_110144(subject: Subject) -> None:
    """Causal aligned to the top left with a cache (pytorch/pytorch#110144)."""
    assert zero_query(subject, [6], [2], causal=True)[0].flatten().tolist() == pytest.approx([2.0, 2.5])
    out, lse = zero_query(subject, [2], [5], causal=True)
    assert out.flatten().tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.5])
    assert lse[0].tolist() == pytest.approx([-math.inf] * 3 + [0.0, math.log(2)])


@each_backend()
def test_two_tokens_at_once_hyprstream_1521(subject: Subject) -> None:
    """A cached forward of several tokens masks the whole history (hyprstream/hyprstream#1521)."""
    k, v = (randn(2, 8, 2, 16, seed=s).to(subject.device) for s in (0, 1))
    q = randn(2, 4, 16, seed=2).to(subject.device)
    table = ints([[1, 0]], subject)
    how = {"causal": True, "batch_invariant": True}
    both, both_lse = attend(subject, q, k, v, table, [11], [2], **how)
    for i in range(2):
        one, one_lse = attend(subject, q[i : i + 1], k, v, table, [10 + i], [1], **how)
        assert same_bits(both[i : i + 1], one)
        assert same_bits(both_lse[:, i : i + 1], one_lse)


@each_backend()
def test_no_paged_cache_is_an_error_transformers_48296(subject: Subject) -> None:
    """Paged attention without a cache runs fully bidirectional (huggingface/transformers#48296, #48297)."""
    q, cache = randn(1, 1, 8).to(subject.device), randn(2, 4, 1, 8).to(subject.device)
    one = loc([1], subject)
    with pytest.raises(PagetileError, match="block_table"):
        flash_attn_varlen_func(q, cache, cache, 1, one, 8, seqused_k=ints([8], subject), backend=subject.name)
    with pytest.raises(PagetileError):
        flash_attn_varlen_func(q, cache, cache, 1, one, 8, cu_seqlens_k=loc([8], subject), backend=subject.name)


@pytest.mark.parametrize("per_sequence", [False, True])
@each_backend()
def test_alibi_on_both_paths_flash_attention_907(subject: Subject, per_sequence: bool) -> None:
    """ALiBi differs between ragged prefill and cached decode (Dao-AILab/flash-attention#907).

    The output does not change with the origin of the bias; the log-sum-exp does (2.28734 for ``slope * j``).
    """
    slopes = torch.full((1, 1) if per_sequence else (1,), 0.5, device=subject.device)
    decode = zero_query(subject, [4], alibi_slopes=slopes)
    prefill = zero_query(subject, [4], [4], alibi_slopes=slopes, causal=True)
    q = torch.zeros(4, 1, 8, device=subject.device)
    v = torch.arange(4.0, device=subject.device)[:, None, None].expand(4, 1, 8).contiguous()
    ragged = flash_attn_varlen_func(
        q, q, v, 4, loc([4], subject), 4, cu_seqlens_k=loc([4], subject), causal=True, alibi_slopes=slopes,
        return_softmax_lse=True, backend=subject.name,
    )  # fmt: skip
    cached = flash_attn_with_kvcache(
        q[None, :1], q[None], v[None], cache_seqlens=4, alibi_slopes=slopes, return_softmax_lse=True,
        backend=subject.name,
    )  # fmt: skip
    for out, lse in (decode, prefill, ragged, cached):
        assert out.flatten()[-1].item() == pytest.approx(2.08458, abs=5e-6)
        assert lse.flatten()[-1].item() == pytest.approx(0.78734, abs=5e-6)


@pytest.mark.parametrize("how", [{}, {"num_splits": 5}, {"batch_invariant": True}, {"window_size": (600, 0)}])
@pytest.mark.parametrize("q_lens", [[1], [4]])
@each_backend()
def test_sinks_on_every_path_vllm_metal_550(subject: Subject, q_lens: list[int], how: dict) -> None:
    """Sinks that a flag never passed on (vllm-project/vllm-metal#550): they join the denominator, once."""
    length, sink = 700, math.log(50.0)
    sinks = torch.tensor([sink, -math.inf], device=subject.device)
    how = {"causal": True, **how}
    plain, plain_lse = zero_query(subject, [length], q_lens, num_q_heads=2, **how)
    out, lse = zero_query(subject, [length], q_lens, num_q_heads=2, s_aux=sinks, **how)
    count = plain_lse[0].exp()
    torch.testing.assert_close(out[:, 0], plain[:, 0] * count / (count + 50), rtol=1e-5, atol=0)
    torch.testing.assert_close(lse[0], (count + 50).log(), rtol=1e-6, atol=0)
    torch.testing.assert_close(out[:, 1], plain[:, 1], rtol=1e-6, atol=0)  # a sink of -inf is none


@pytest.mark.parametrize("sliding_window", [1, 2, 16, 17])
@each_backend()
def test_window_at_every_offset_of_a_block(subject: Subject, sliding_window: int) -> None:
    """The window's left edge crosses every position of a block, and the blocks behind it are NaN."""
    for length in range(30, 50):
        out, lse = zero_query(subject, [length], window_size=window_from_sliding(sliding_window))
        seen = min(sliding_window, length)
        assert out.item() == pytest.approx(length - (seen + 1) / 2, rel=1e-6)
        assert lse.item() == pytest.approx(math.log(seen), abs=1e-6)
