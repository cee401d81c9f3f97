"""Attention over quantised caches: every kind under every granularity of scales, which nothing else here has two of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_kit import NAN, attend_call, truth
from torch import Tensor

from pagetile.backends.protocol import AttendCall

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
LENGTHS = [1, 9, 40], [130, 9, 1100]


def scale_of(form: str, seed: int, blocks: int, heads: int = 2) -> Tensor | float | None:
    """Scales that all differ; those of slots that no token has are NaN."""
    rng = torch.Generator().manual_seed(seed)
    shape = {"tensor": (), "head": (heads,), "sequence_head": (3, heads), "token_head": (blocks, 16, heads)}
    if form == "none":
        return None
    if form == "float":
        return 0.37
    return torch.rand(shape[form], generator=rng) * 0.02 + 0.01


def spread(scale: Tensor | float | None, like: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """The scale of each stored element, ``[NB, BS, Hkv, 1]``."""
    if not isinstance(scale, Tensor) or scale.dim() == 0:
        return torch.full_like(like[..., :1], 1.0 if scale is None else float(scale))
    if scale.dim() == 3:
        return scale[..., None].double()
    out = torch.ones_like(like[..., :1])
    for b, length in enumerate(lens.tolist()):
        own = scale if scale.dim() == 1 else scale[b]
        out[table[b, : -(-length // 16)].long()] = own[:, None].double()
    return out


def quantised(kind: str, form: str, dtype: torch.dtype, size: int, size_v: int) -> tuple[AttendCall, AttendCall]:
    """A call over a quantised cache, and one over the same numbers in float64."""
    call = attend_call(*LENGTHS, size=size, size_v=size_v, dtype=dtype)
    table, lens = call.block_table, call.seq_lens
    assert table is not None
    assert lens is not None
    scales = [scale_of(form, seed, len(call.k)) for seed in (1, 2)]
    caches, exact = [], []
    for cache, scale in zip((call.k, call.v), scales, strict=True):
        each = spread(scale, cache.double(), table, lens)
        wanted = cache.double().nan_to_num(0) / each
        limit = 127 if kind == "int8" else torch.finfo(DTYPES[kind]).max
        wanted = wanted.clamp(-limit, limit)
        stored = (wanted.round() if kind == "int8" else wanted.float()).to(DTYPES[kind])
        caches.append(stored)
        exact.append(stored.double() * each)
    if form == "token_head":  # a scale that belongs to no token may be anything
        empty = cache_slots_without_tokens(call)
        for scale in scales:
            assert isinstance(scale, Tensor)
            scale[empty] = NAN
    problem = replace(call.problem, kind=kind, scale="tensor" if form == "float" else form)
    asked = replace(call, problem=problem, k=caches[0], v=caches[1], k_scale=scales[0], v_scale=scales[1])
    return asked, replace(call, k=exact[0], v=exact[1])


def cache_slots_without_tokens(call: AttendCall) -> Tensor:
    used = torch.zeros(call.k.shape[:2], dtype=torch.bool)
    assert call.block_table is not None
    assert call.seq_lens is not None
    for b, length in enumerate(call.seq_lens.tolist()):
        position = torch.arange(length)
        used[call.block_table[b, position // 16].long(), position % 16] = True
    return ~used


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("form", ["none", "float", "tensor", "head", "sequence_head", "token_head"])
def test_values_are_those_of_the_dequantised_cache(backend, kind: str, form: str) -> None:
    call, exact = quantised(kind, form, torch.float32, 64, 40)
    assert backend.why_not(call.problem) == []
    backend.attend(call)
    true = truth(exact)
    largest = true.out.abs().max()
    assert (call.out.double() - true.out).abs().max() < 3e-6 * largest
    assert torch.allclose(call.lse.double(), true.lse.double(), atol=3e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_queries_keep_their_accuracy(backend, dtype: torch.dtype) -> None:
    """Odd sizes, so that no row is whole vectors; the error is the rounding of the output."""
    call, exact = quantised("fp8_e4m3", "token_head", dtype, 72, 7)
    backend.attend(call)
    true = truth(exact).out
    assert ((call.out.double() - true).abs() <= true.abs() * torch.finfo(dtype).eps + 1e-5).all()


def test_splits_and_decodes_keep_their_bits(backend) -> None:
    """A scale of a token or of a sequence changes nothing about what a row depends on."""
    for form in ("sequence_head", "token_head"):
        call, _ = quantised("int8", form, torch.float32, 64, 64)
        backend.attend(call)
        again = replace(call, problem=replace(call.problem, num_splits=2), out=torch.empty_like(call.out))
        backend.attend(again)
        assert again.out.equal(call.out)


def test_the_bad_code_of_a_visible_value_reaches_its_rows_and_no_other(backend) -> None:
    call, _ = quantised("fp8_e4m3", "head", torch.float32, 64, 64)
    backend.attend(call)
    clean = call.out.clone()
    position = 1080  # of the last sequence, whose 40 queries stand at 1060 to 1099
    assert call.block_table is not None
    call.v.view(torch.uint8)[call.block_table[2, position // 16].long(), position % 16, 1, 3] = 0x7F
    backend.attend(call)
    assert call.out[:30].equal(clean[:30])
    assert call.out[30:, 3:, 3].isnan().all()
    assert call.out[30:, :3].equal(clean[30:, :3])


def test_a_scale_for_each_token_needs_a_paged_cache(backend) -> None:
    call, _ = quantised("int8", "token_head", torch.float32, 64, 64)
    assert "paged" in "".join(backend.why_not(replace(call.problem, layout="ragged")))
