"""Dtypes, fp8 kinds and scales: a silent reinterpretation, or a scale that is lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from field_kit import attend, each_backend, ints, quantised_backends, randn
from torch import Tensor

from pagetile.contracts.errors import DTypeError, PagetileError
from pagetile.ops import reshape_and_cache_flash
from pagetile.testing.machine import Subject

FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def written(subject: Subject, key: Tensor, value: Tensor, kind: str, dtype: torch.dtype, **scales: Any) -> list[Tensor]:
    """One block of caches with the tokens from slot 0 on."""
    shape = (1, 16, *key.shape[1:])
    k_cache, v_cache = (torch.zeros(shape, dtype=dtype, device=subject.device) for _ in "kv")
    slots = torch.arange(len(key), device=subject.device)
    reshape_and_cache_flash(key, value, k_cache, v_cache, slots, kind, backend=subject.name, **scales)
    return [k_cache, v_cache]


@pytest.mark.parametrize("storage", ["uint8", "float8"])
@quantised_backends("fp8_e5m2")
def test_e5m2_is_e5m2_vllm_54341(subject: Subject, storage: str) -> None:
    """e5m2 asked for, e4m3 written, e5m2 read (vllm-project/vllm#54341): the fault gives 0.5, 2, 6, 0.03125."""
    dtype = torch.uint8 if storage == "uint8" else torch.float8_e5m2
    token = torch.tensor([1.0, 2.0, 3.5, 0.25], device=subject.device).view(1, 1, 4)
    k, v = written(subject, token, token, "fp8_e5m2", dtype)
    out, _ = attend(subject, token, k, v, ints([[0]], subject), [1], [1], kv_cache_dtype="fp8_e5m2")
    assert out.flatten().tolist() == [1.0, 2.0, 3.5, 0.25]
    assert torch.equal(v[0, 0, 0].view(torch.float8_e5m2).float(), token[0, 0])


@quantised_backends("fp8_e4m3")
def test_scales_of_each_head_vllm_51363(subject: Subject) -> None:
    """One backend drops the descales (vllm-project/vllm#51363): per KV head, K's not V's, none of them 1."""
    k_scale, v_scale = (torch.tensor(s, device=subject.device) for s in ([0.5, 2.0], [4.0, 0.25]))
    key, value = (randn(9, 2, 16, seed=s).to(subject.device) for s in (0, 1))
    caches = written(subject, key, value, "fp8", torch.float8_e4m3fn, k_scale=k_scale, v_scale=v_scale)
    q = randn(1, 4, 16, seed=2).to(subject.device)
    out, lse = attend(subject, q, *caches, ints([[0]], subject), [9], [1], k_descale=k_scale, v_descale=v_scale)
    plain = [c.float() * s[:, None] for c, s in zip(caches, (k_scale, v_scale), strict=True)]
    right, right_lse = attend(subject, q, *plain, ints([[0]], subject), [9], [1])
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-6)
    lost, _ = attend(subject, q, *caches, ints([[0]], subject), [9], [1], k_descale=v_scale, v_descale=k_scale)
    assert (lost - right).abs().max() > 0.1, "swapped scales must show"


@quantised_backends("fp8_e4m3")
def test_every_form_of_a_scale_vllm_6761(subject: Subject) -> None:
    """A scale as None, float, 0-d, [1], [Hkv] crashes here and is 1.0 there (vllm-project/vllm#6761, #6738,
    sgl-project/sglang#20705)."""
    tokens = randn(9, 2, 16).to(subject.device)
    q = randn(1, 4, 16, seed=2).to(subject.device)
    for value in (1.0, 0.25):
        one = torch.tensor(value, device=subject.device)
        forms = [value, one, one.view(1), one.expand(2).contiguous(), *([None] if value == 1 else [])]
        results = []
        for scale in forms:
            caches = written(subject, tokens, tokens, "fp8", torch.uint8, k_scale=scale, v_scale=scale)
            table, how = ints([[0]], subject), {"k_descale": scale, "v_descale": scale, "kv_cache_dtype": "fp8"}
            results.append((caches, attend(subject, q, *caches, table, [9], [1], **how)))
        for caches, (out, lse) in results[1:]:
            assert torch.equal(caches[0], results[0][0][0])
            assert torch.equal(out, results[0][1][0])
            assert torch.equal(lse, results[0][1][1])
    for wrong in (torch.ones(3), torch.ones(2, dtype=torch.float16), torch.ones(2, device="meta")):
        with pytest.raises(PagetileError, match="k_scale"):
            written(subject, tokens, tokens, "fp8", torch.uint8, k_scale=wrong)


@quantised_backends("fp8_e4m3")
def test_a_channel_out_of_range_vllm_41343(subject: Subject) -> None:
    """A K channel 300 times as large as the others at scale 1 (vllm-project/vllm#41343, #13133): what fits is right
    to half a step of three mantissa bits, what does not saturates at 448 * scale and never becomes NaN."""
    key = randn(16, 1, 32).to(subject.device)
    key[..., 5] *= 300
    for scale in (1.0, 4.0):
        k, _ = written(subject, key, key, "fp8", torch.float8_e4m3fn, k_scale=scale, v_scale=scale)
        got = k[0].float() * scale
        right = key.clamp(-448 * scale, 448 * scale)
        step = torch.maximum(right.abs() * 2**-4, torch.full_like(right, scale * 2**-10))  # half a step; the smallest
        assert ((got - right).abs() <= step).all()
    assert (key.abs() > 448).any()


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
@quantised_backends("fp8_e4m3")
def test_bf16_over_fp8_as_bytes_or_as_float8_vllm_6884(subject: Subject, kind: str) -> None:
    """A bf16 query over a uint8 cache dies on one path only (vllm-project/vllm#6884, #21177, #11329)."""
    tokens, q = randn(9, 2, 16, dtype=torch.bfloat16), randn(4, 4, 16, seed=2, dtype=torch.bfloat16)
    tokens, q = tokens.to(subject.device), q.to(subject.device)
    for q_lens in ([1], [4]):
        results = []
        for dtype in (torch.uint8, FLOAT8[kind]):
            caches = written(subject, tokens, tokens, kind, dtype)
            how = {"kv_cache_dtype": kind, "causal": True}
            results.append(attend(subject, q[: q_lens[0]], *caches, ints([[0]], subject), [9], q_lens, **how))
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][0].isfinite().all()


@each_backend()
def test_pairs_of_dtypes_are_named_vllm_6884(subject: Subject) -> None:
    """The refusal says the query's dtype and the cache's."""
    table = ints([[0]], subject)
    for q_dtype, cache_dtype in ((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)):
        q = torch.zeros(1, 2, 8, dtype=q_dtype, device=subject.device)
        cache = torch.zeros(1, 4, 2, 8, dtype=cache_dtype, device=subject.device)
        names = [str(d).removeprefix("torch.") for d in (q_dtype, cache_dtype)]
        with pytest.raises(DTypeError, match=rf"({names[0]}.*{names[1]}|{names[1]}.*{names[0]})"):
            attend(subject, q, cache, cache, table, [4], [1])
    bytes_only = torch.zeros(1, 4, 2, 8, dtype=torch.uint8, device=subject.device)
    with pytest.raises(DTypeError, match="kv_cache_dtype"):
        attend(subject, torch.zeros(1, 2, 8, device=subject.device), bytes_only, bytes_only, table, [4], [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each_backend()
def test_every_dtype_is_written_and_read_vllm_17225(subject: Subject, dtype: torch.dtype) -> None:
    """The CPU's write has no half kernel (vllm-project/vllm#17225)."""
    tokens = randn(9, 2, 16, dtype=dtype).to(subject.device)
    k, v = written(subject, tokens, tokens, "auto", dtype)
    assert torch.equal(k[0, :9], tokens)
    q = torch.zeros(1, 2, 16, dtype=dtype, device=subject.device)
    out, lse = attend(subject, q, k, v, ints([[0]], subject), [9], [1])
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert lse.flatten().tolist() == pytest.approx([math.log(9)] * 2)
    right = tokens.double().mean(0)
    assert ((out[0].double() - right).abs() <= torch.finfo(dtype).eps * tokens.double().abs().mean(0)).all()


@quantised_backends("fp8_e4m3")
def test_fp8_is_written_and_read_vllm_17225(subject: Subject) -> None:
    for kind, dtype in FLOAT8.items():
        tokens = torch.arange(9.0, device=subject.device)[:, None, None].expand(9, 2, 16).contiguous()
        k, v = written(subject, tokens, tokens, kind, dtype, k_scale=0.5, v_scale=0.5)
        how = {"k_descale": 0.5, "v_descale": 0.5}
        q = torch.zeros(1, 2, 16, device=subject.device)
        out, _ = attend(subject, q, k, v, ints([[0]], subject), [9], [1], **how)
        assert out.flatten().tolist() == pytest.approx([4.0] * 32), kind  # 2j is exact in both


@quantised_backends("fp8_e4m3")
def test_sink_without_the_k_scale_b12x_119(subject: Subject) -> None:
    """The fp8 path multiplies the sink by the K scale (local-inference-lab/b12x#119; sinks lost: kekzl/imp#1346)."""
    key = torch.full((4, 1, 8), 2.0, device=subject.device)
    q = torch.full((1, 1, 8), 0.125, device=subject.device)  # every logit is 2 * scale-free
    sinks = torch.tensor([1.5], device=subject.device)
    for scale in (0.5, 1.0, 2.0):
        k, v = written(subject, key, key, "fp8", torch.float8_e4m3fn, k_scale=scale, v_scale=scale)
        how = {"k_descale": scale, "v_descale": scale, "s_aux": sinks, "softmax_scale": 1.0}
        out, lse = attend(subject, q, k, v, ints([[0]], subject), [4], [1], **how)
        total = 4 * math.exp(2) + math.exp(1.5)
        assert lse.item() == pytest.approx(math.log(total), rel=1e-6)
        assert out[0, 0].tolist() == pytest.approx([2 * 4 * math.exp(2) / total] * 8, rel=1e-6)
