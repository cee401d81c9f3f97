"""GQA ratios, head sizes, and the scale that follows from them."""

from __future__ import annotations

import math

import pytest
import torch
from field_kit import attend, each_backend, ints, randn

from pagetile.contracts.errors import PagetileError
from pagetile.ops import flash_attn_varlen_func
from pagetile.testing import AttendCase, assert_attend, build_attend, takes
from pagetile.testing.machine import Subject


@each_backend()
def test_bad_ratio_is_a_python_exception_pegainfer_519(subject: Subject) -> None:
    """A refusal that kills the process (pegainfer-project/pegainfer#519)."""
    q, cache = randn(1, 5, 8).to(subject.device), randn(1, 4, 2, 8).to(subject.device)
    with pytest.raises(ValueError, match=r"5.*2"):
        attend(subject, q, cache, cache, ints([[0]], subject), [4], [1])


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 12, 16, 64, 71])
@each_backend()
def test_every_ratio(subject: Subject, group: int) -> None:
    """Query head h reads KV head ``h // ratio``: each KV head holds its own number."""
    k = torch.zeros(1, 4, 3, 16, device=subject.device)
    v = torch.arange(3.0, device=subject.device)[:, None].expand(1, 4, 3, 16).contiguous()
    q = randn(2, 3 * group, 16).to(subject.device)
    out, _ = attend(subject, q, k, v, ints([[0], [0]], subject), [4, 3], [1, 1])
    assert out[:, :, 0].tolist() == [[float(h // group) for h in range(3 * group)]] * 2


@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 192, 256, 512, 576])
@each_backend()
def test_all_channels_count_triton_621(subject: Subject, head_size: int) -> None:
    """Only the first 64 channels are used (triton-lang/triton#621): here the last one decides the winner."""
    k = torch.zeros(1, 4, 1, head_size, device=subject.device)
    k[0, :, 0, -1] = torch.tensor([0.0, 0.0, 1.0, 0.0])
    k[0, 1, 0, : head_size - 1] = 0.5 / head_size
    v = randn(1, 4, 1, head_size, seed=1).to(subject.device)
    q = torch.full((1, 1, head_size), 1000.0, device=subject.device)
    out, lse = attend(subject, q, k, v, ints([[0]], subject), [4], [1], softmax_scale=1.0)
    assert torch.equal(out[0, 0], v[0, 2, 0])
    assert lse.item() == 1000.0


@each_backend()
def test_two_head_sizes_on_one_workspace_vllm_41656(subject: Subject) -> None:
    """Scratch sized by one layer's head size while another uses 512 (vllm-project/vllm#41656)."""
    small = AttendCase(seqs=((1, 900), (1, 30)), head_size=256, num_splits=5)
    large = AttendCase(seqs=((1, 900), (1, 30)), head_size=512, num_splits=5, num_q_heads=16)
    for case in (small, large, small, large):
        assert takes(subject.backend, case, subject.device)
        built = build_attend(case, subject.device)
        subject.backend.attend(built.call)
        assert_attend(built)
        assert not any(canary.broken() for canary in built.canaries)


@pytest.mark.parametrize("head_size", [80, 96, 33, 576])
@each_backend()
def test_scale_of_the_true_head_size_ipex_llm_12619(subject: Subject, head_size: int) -> None:
    """Default scale of a padded head (intel/ipex-llm#12619, the trap of vllm-project/vllm-ascend#1958): D = 80 is
    0.111803, not 0.088388 of 128 nor 0.102062 of 96."""
    k = torch.ones(1, 4, 1, head_size, device=subject.device)
    q = torch.ones(1, 1, head_size, device=subject.device)
    _, lse = attend(subject, q, k, k, ints([[0]], subject), [4], [1])
    assert lse.item() == pytest.approx(math.sqrt(head_size) + math.log(4), rel=1e-6)


@each_backend()
def test_values_of_another_size(subject: Subject) -> None:
    """Dv differs from D, both ways."""
    for size, size_v in ((192, 128), (16, 40)):
        k, v = randn(1, 4, 1, size).to(subject.device), torch.ones(1, 4, 1, size_v, device=subject.device)
        out, _ = attend(subject, randn(1, 2, size).to(subject.device), k, v, ints([[0]], subject), [4], [1])
        assert out.shape == (1, 2, size_v)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-6, atol=0)


@each_backend()
def test_head_size_mismatch_names_both_sizes(subject: Subject) -> None:
    q, cache = randn(1, 2, 8).to(subject.device), randn(1, 4, 2, 16).to(subject.device)
    with pytest.raises(PagetileError, match=r"(8.*16|16.*8)"):
        flash_attn_varlen_func(
            q, cache, cache, 1, ints([0, 1], subject), 4, seqused_k=ints([4], subject),
            block_table=ints([[0]], subject), backend=subject.name,
        )  # fmt: skip
