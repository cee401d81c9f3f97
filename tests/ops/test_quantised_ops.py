"""The ops that only quantised caches have: scales of tokens and heads, conversion, and what validation finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pagetile
from pagetile import convert_fp8, flash_attn_varlen_func, reshape_and_cache_flash_per_token_head
from pagetile.reference import dequantise, quantise, token_head_scale
from pagetile.testing import same_bits

KINDS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
OPS = torch.ops.pagetile


def token_head(batch: Any, kind: str, storage: torch.dtype | None = None, **options: Any) -> tuple[Tensor, ...]:
    """K, V and their scales after a write; scales NaN where nothing was written."""
    dtype = storage or KINDS[kind]
    k, v = torch.zeros(12, 4, 2, 8).to(dtype), torch.zeros(12, 4, 2, 16).to(dtype)
    scales = torch.full((2, 12, 2, 4), torch.nan).transpose(2, 3).unbind(0)
    arguments = (batch.key, batch.value, k, v, batch.slot_mapping, kind, *scales)
    reshape_and_cache_flash_per_token_head(*arguments, **options)
    return k, v, *scales


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_and_head_has_its_own_scale(batch: Any, kind: str) -> None:
    k, v, k_scale, v_scale = token_head(batch, kind)
    for rows, cache, scales in ((batch.key, k, k_scale), (batch.value, v, v_scale)):
        own = token_head_scale(rows, kind)
        for row, slot in enumerate(batch.slot_mapping.tolist()):
            if slot >= 0:
                assert torch.equal(scales[slot // 4, slot % 4], own[row])
                assert same_bits(cache[slot // 4, slot % 4], quantise(rows[row], kind, own[row].unsqueeze(-1)))
        assert int(scales.isnan().sum()) == (12 * 4 - 4) * 2  # a skipped row and the unused slots stay as they were


@pytest.mark.parametrize("kind", KINDS)
def test_attention_takes_the_scale_caches(batch: Any, kind: str) -> None:
    k, v, k_scale, v_scale = token_head(batch, kind)
    for cache, rows, scales in ((k, batch.key_cache, k_scale), (v, batch.value_cache, v_scale)):
        scales.copy_(token_head_scale(rows, kind))
        stored = quantise(rows, kind, scales.unsqueeze(-1))
        cache.view(torch.uint8).copy_(stored.view(torch.uint8))
    arguments = {**batch.attend_arguments(), "k": k, "v": v, "k_descale": k_scale, "v_descale": v_scale}
    got = flash_attn_varlen_func(**arguments, backend="reference")
    meant = {
        "k": dequantise(k, kind, k_scale.unsqueeze(-1)),
        "v": dequantise(v, kind, v_scale.unsqueeze(-1)),
    }
    torch.testing.assert_close(got, flash_attn_varlen_func(**{**batch.attend_arguments(), **meant}))


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_uint8_storage_holds_the_same_bytes(batch: Any, kind: str) -> None:
    for a, b in zip(token_head(batch, kind), token_head(batch, kind, torch.uint8), strict=True):
        assert torch.equal(a.view(torch.uint8) if a.element_size() == 1 else a.nan_to_num(), b.nan_to_num())


def test_scales_may_lie_between_the_rows(batch: Any) -> None:
    """As in vLLM: four bytes after the elements of each row, in one buffer with them."""
    buffer = torch.zeros(2, 12, 4, 2, 20, dtype=torch.uint8)
    k, v = buffer[..., :16].view(torch.int8)[..., :8].unbind(0)[0], buffer[1, ..., :16].view(torch.int8)
    scales = [x.view(torch.float32)[..., 4] for x in buffer]
    reshape_and_cache_flash_per_token_head(batch.key, batch.value, k, v, batch.slot_mapping, "int8", *scales)
    own = token_head_scale(batch.value, "int8")
    assert torch.equal(scales[1][7, 0], own[0])
    assert same_bits(v[7, 0], quantise(batch.value[0], "int8", own[0].unsqueeze(-1)))
    inside = buffer.view(torch.float32)[1, ..., 0]
    with pytest.raises(pagetile.ArgumentError, match="value_cache and v_scale_cache share memory"):
        reshape_and_cache_flash_per_token_head(
            batch.key, batch.value, k, v, batch.slot_mapping, "int8", scales[0], inside
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_scale_cache": torch.zeros(12, 4, 3)}, pagetile.ShapeError, r"k_scale_cache: axis 2 \(Hkv\) is 3"),
        ({"v_scale_cache": torch.zeros(12, 4)}, pagetile.ShapeError, "v_scale_cache"),
        ({"v_scale_cache": torch.zeros(12, 4, 2).double()}, pagetile.DTypeError, "v_scale_cache is float64"),
        ({"v_scale_cache": torch.zeros(1).expand(12, 4, 2)}, pagetile.ArgumentError, "v_scale_cache: axis 0"),
        ({"k_scale_cache": torch.zeros(12, 4, 2, device="meta")}, pagetile.DeviceError, "k_scale_cache is on meta"),
        ({"key_cache": torch.zeros(12, 4, 2, 8)}, pagetile.DTypeError, "float32"),
        ({"kv_cache_dtype": "fp8_e5m2"}, pagetile.DTypeError, "fp8_e5m2"),
    ],
)
def test_what_does_not_agree_is_named(batch: Any, change: dict, error: type, message: str) -> None:
    k, v = (torch.zeros(12, 4, 2, n, dtype=torch.int8) for n in (8, 16))
    named = {
        **batch.write_arguments(), "key_cache": k, "value_cache": v, "kv_cache_dtype": "int8",
        "k_scale_cache": torch.zeros(12, 4, 2), "v_scale_cache": torch.zeros(12, 4, 2),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        reshape_and_cache_flash_per_token_head(**{**named, **change})
    assert not k.any()


def test_a_cache_that_is_not_quantised_has_no_scales(batch: Any) -> None:
    scales = (torch.zeros(12, 4, 2), torch.zeros(12, 4, 2))
    with pytest.raises(pagetile.ArgumentError, match=r"key_cache holds float32.*call reshape_and_cache_flash"):
        reshape_and_cache_flash_per_token_head(*batch.write_arguments().values(), "auto", *scales)


def test_a_bad_slot_leaves_everything_alone(batch: Any) -> None:
    batch.slot_mapping[3] = 48
    k, v = (torch.zeros(12, 4, 2, n, dtype=torch.int8) for n in (8, 16))
    scales = torch.zeros(2, 12, 4, 2)
    with pytest.raises(pagetile.SlotError, match=r"slot_mapping\[3\] is 48"):
        reshape_and_cache_flash_per_token_head(batch.key, batch.value, k, v, batch.slot_mapping, "int8", *scales)
    assert not k.any()
    assert not v.any()
    assert not scales.any()


def test_opcheck(batch: Any) -> None:
    k, v = (torch.zeros(12, 4, 2, n, dtype=torch.uint8) for n in (8, 16))
    scales = (torch.zeros(12, 4, 2), torch.zeros(12, 4, 2))
    arguments = (batch.key, batch.value, k, v, batch.slot_mapping, "fp8_e5m2", *scales)
    torch.library.opcheck(OPS.write_token_head.default, (*arguments, "reference"))
    numbers = torch.randn(3, 2, 8)
    torch.library.opcheck(OPS.convert.default, (torch.zeros(3, 2, 8, dtype=torch.int8), numbers, None, 0.1, "int8"))
    stored = numbers.to(torch.float8_e4m3fn).view(torch.uint8)  # opcheck cannot compare float8
    torch.library.opcheck(OPS.convert.default, (torch.zeros(3, 2, 8), stored, torch.ones(2), None, "fp8"))
    marked = {
        name: [a.name for a in getattr(OPS, name).default._schema.arguments if a.alias_info and a.alias_info.is_write]
        for name in ("write_token_head", "convert")
    }
    assert marked == {
        "write_token_head": ["key_cache", "value_cache", "k_scale_cache", "v_scale_cache"],
        "convert": ["dst"],
    }


def test_fake_tensors_go_through_the_operators(batch: Any) -> None:
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in batch.write_arguments().values()]
        caches = [torch.empty(12, 4, 2, n, dtype=torch.int8) for n in (8, 16)]
        scales = [torch.empty(12, 4, 2) for _ in "kv"]
        reshape_and_cache_flash_per_token_head(*fake[:2], *caches, fake[4], "int8", *scales)
        convert_fp8(torch.empty(5, 2, 8, dtype=torch.uint8), fake[0])
        with pytest.raises(pagetile.ShapeError, match="k_scale_cache"):
            reshape_and_cache_flash_per_token_head(*fake[:2], *caches, fake[4], "int8", *(s[:3] for s in scales))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [None, 0.3, torch.tensor(0.3), torch.tensor([0.3, 7.0])], ids=str)
def test_conversion_is_what_a_write_does(kind: str, scale: Any) -> None:
    x = torch.randn(7, 2, 8, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    stored = torch.empty(7, 8, 2, dtype=KINDS[kind]).transpose(1, 2)
    convert_fp8(stored, x, scale, kind)
    per_head = torch.as_tensor(1.0 if scale is None else scale).expand(2).unsqueeze(-1)
    assert same_bits(stored.contiguous(), quantise(x, kind, per_head))
    back = torch.empty(7, 2, 8)
    convert_fp8(back, stored, scale, kind)
    assert torch.equal(back, dequantise(stored, kind, per_head))


def test_conversion_refuses_what_it_cannot_mean() -> None:
    x, stored = torch.zeros(3, 2, 8), torch.zeros(3, 2, 8, dtype=torch.uint8)
    cases = [
        ((x, x), pagetile.DTypeError, "dst is float32 and src is float32"),
        ((stored, stored), pagetile.DTypeError, "dst is uint8 and src is uint8"),
        ((stored, x[:2]), pagetile.ShapeError, r"dst has 3 along axis 0, but src 2"),
        ((stored, x[0]), pagetile.ShapeError, "pass one shape"),
        ((stored, x, torch.ones(3)), pagetile.ShapeError, r"scale is \[3\]"),
        ((stored, x, 0.0), pagetile.ArgumentError, "scale is 0.0"),
        ((stored, x, torch.tensor([1.0, -1.0])), pagetile.ArgumentError, r"scale\[1\] is -1.0"),
        ((stored, x, 1.0, "auto"), pagetile.DTypeError, "uint8"),
        ((stored, x, 1.0, "int8"), pagetile.DTypeError, "uint8"),
        ((stored.to(torch.int32), x), pagetile.DTypeError, "int32"),
        ((x.to(torch.bfloat16).view(torch.uint8)[..., :8], x.to(torch.bfloat16)), None, ""),
    ]
    for arguments, error, message in cases:
        if error is None:
            convert_fp8(*arguments)
            continue
        with pytest.raises(error, match=message):
            convert_fp8(*arguments)
    own = torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(pagetile.ArgumentError, match="share memory"):
        convert_fp8(own.view(torch.uint8)[..., :8], own)
    with pytest.raises(pagetile.UnsupportedError, match="src requires grad"):
        convert_fp8(stored, x.clone().requires_grad_())


def test_nan_for_int8_is_found_by_validation(batch: Any) -> None:
    """It becomes 0 otherwise; a row that is skipped, or past the slots, is not looked at."""
    batch.value[2] = torch.nan  # its slot is negative
    token_head(batch, "int8", validate=True)
    batch.value[3, 1, 5] = torch.nan
    k, v = (torch.zeros(12, 4, 2, n, dtype=torch.int8) for n in (8, 16))
    write = (batch.key, batch.value, k, v, batch.slot_mapping, "int8")
    with pytest.raises(pagetile.ArgumentError, match=r"value\[3, 1, 5\] is NaN, which int8 cannot store"):
        pagetile.reshape_and_cache_flash(*write, 0.1, 0.1, validate=True)
    with pytest.raises(pagetile.ArgumentError, match=r"value\[3, 1, 5\] is NaN"):
        token_head(batch, "int8", validate=True)
    assert not k.any()
    pagetile.reshape_and_cache_flash(*write, 0.1, 0.1)
    assert int(v[38 // 4, 38 % 4, 1, 5]) == 0
    token_head(batch, "fp8_e4m3", validate=True)  # which has a NaN


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_on_the_cpu_are_looked_at(batch: Any, bad: float) -> None:
    scale = torch.tensor([1.0, bad])
    k, v = (torch.zeros(12, 4, 2, n, dtype=torch.int8) for n in (8, 16))
    with pytest.raises(pagetile.ArgumentError, match=rf"v_scale\[1\] is {bad}; a scale is a finite number above 0"):
        pagetile.reshape_and_cache_flash(batch.key, batch.value, k, v, batch.slot_mapping, "int8", None, scale)
    with pytest.raises(pagetile.ArgumentError, match=r"k_descale\[0\] is"):
        flash_attn_varlen_func(**{**batch.attend_arguments(), "k": k, "v": v}, k_descale=scale[1:])
