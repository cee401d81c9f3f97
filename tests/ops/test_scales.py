"""Scales in every form that people pass them.

Source: vllm-project/vllm#6761, sgl-project/sglang#20705, vllm-project/vllm#51363.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import flash_attn_varlen_func, reshape_and_cache_flash
from pagetile.ops.plans import PLANS
from pagetile.reference import dequantise

KINDS = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
FORMS = {
    "float": 0.5,
    "int": 1,
    "0-d": torch.tensor(0.5),
    "[1]": torch.tensor([0.5]),
    "[Hkv]": torch.tensor([0.5, 2.0]),
    "parameter": torch.nn.Parameter(torch.tensor([0.5, 2.0]), requires_grad=False),
    "strided": torch.tensor([0.5, 9.0, 2.0, 9.0])[::2],
}


def caches(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.zeros(12, 4, 2, 8).to(dtype), torch.zeros(12, 4, 2, 16).to(dtype)


def per_head(scale: Any) -> Tensor:
    return torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32).expand(2)


def stored(batch: Any, kind: str, k_scale: Any, v_scale: Any, **options: Any) -> tuple[Tensor, Tensor]:
    k, v = caches(KINDS[kind])
    reshape_and_cache_flash(
        batch.key, batch.value, k, v, batch.slot_mapping, kind, k_scale, v_scale, backend="reference", **options
    )
    return k, v


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [None, *FORMS])
def test_a_write_divides_by_each_form(batch: Any, kind: str, form: str | None) -> None:
    scale = FORMS[form] if form else None
    k, v = stored(batch, kind, scale, None)
    wanted = batch.key[0] / per_head(scale).unsqueeze(1)
    got = dequantise(k[7, 0].unsqueeze(0), kind, 1.0)[0]
    tolerance = 0.13 if kind == "fp8_e5m2" else 0.5 if kind == "int8" else 0.07
    torch.testing.assert_close(got.float(), wanted, rtol=tolerance if kind != "int8" else 0, atol=tolerance)
    assert not torch.equal(v[7, 0].float(), torch.zeros(2, 16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [None, *FORMS, "[B, Hkv]", "expanded"])
def test_a_read_multiplies_by_each_form(batch: Any, kind: str, form: str | None) -> None:
    """K and V with different scales, so that a swap shows; against attention over what the bytes stand for."""
    rows = {
        "[B, Hkv]": torch.tensor([[0.5, 2.0], [1.0, 1.0], [0.25, 4.0]]),
        "expanded": torch.tensor([0.5, 2.0]).expand(3, 2),
    }
    k_scale = rows.get(form, FORMS.get(form)) if form else None
    k, v = stored(batch, kind, None, None)
    k.view(torch.uint8).copy_(torch.randint(0, 60, k.shape, dtype=torch.uint8))  # small positive numbers of every kind
    v.view(torch.uint8).copy_(torch.randint(0, 60, v.shape, dtype=torch.uint8))
    options = {"backend": "reference", "kv_cache_dtype": kind}
    got = flash_attn_varlen_func(
        **{**batch.attend_arguments(), "k": k, "v": v}, k_descale=k_scale, v_descale=3.0, **options
    )
    for seq, (lo, hi) in enumerate(((0, 3), (3, 3), (3, 5))):
        scale = k_scale[seq] if isinstance(k_scale, Tensor) and k_scale.dim() == 2 else k_scale
        real_k = dequantise(k, kind, 1.0).float() * per_head(scale).reshape(1, 1, 2, 1)
        real_v = dequantise(v, kind, 1.0).float() * 3.0
        plain = {**batch.attend_arguments(), "k": real_k, "v": real_v}
        torch.testing.assert_close(got[lo:hi], flash_attn_varlen_func(**plain, backend="reference")[lo:hi])


def test_a_uint8_cache_and_a_float8_cache_are_the_same(batch: Any) -> None:
    k, v = stored(batch, "fp8_e4m3", 0.5, 2.0)
    k8, v8 = caches(torch.uint8)
    arguments = (batch.key, batch.value, k8, v8, batch.slot_mapping)
    reshape_and_cache_flash(*arguments, "fp8", 0.5, 2.0, backend="reference")
    assert torch.equal(k8, k.view(torch.uint8))
    read = {"k_descale": 0.5, "v_descale": 2.0, "backend": "reference"}
    a = flash_attn_varlen_func(**{**batch.attend_arguments(), "k": k, "v": v}, **read)
    b = flash_attn_varlen_func(**{**batch.attend_arguments(), "k": k8, "v": v8}, kv_cache_dtype="fp8", **read)
    assert torch.equal(a, b)
    with pytest.raises(pagetile.DTypeError, match=r"uint8.*kv_cache_dtype='fp8_e4m3' or 'fp8_e5m2'"):
        reshape_and_cache_flash(*arguments)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (torch.ones(3), pagetile.ShapeError, r"k_scale is \[3\].*\[Hkv\].*Hkv is 2"),
        (torch.ones(3, 2), pagetile.ShapeError, r"k_scale is \[3, 2\]"),
        (torch.ones(12, 4, 2), pagetile.ShapeError, r"k_scale is \[12, 4, 2\]"),
        (torch.ones(2).double(), pagetile.DTypeError, "k_scale is float64, but must be float32"),
        (torch.ones(2, device="meta"), pagetile.DeviceError, "k_scale is on meta, but key is on cpu"),
        ("0.5", pagetile.DTypeError, "k_scale is a str"),
        (True, pagetile.DTypeError, "k_scale is a bool"),
        (0.0, pagetile.ArgumentError, "k_scale is 0.0; a scale must be above 0"),
        (-1.0, pagetile.ArgumentError, "k_scale is -1.0"),
        (float("nan"), pagetile.ArgumentError, "k_scale is nan"),
    ],
)
def test_a_bad_scale_is_named(batch: Any, scale: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        stored(batch, "fp8_e4m3", scale, None)


def test_a_scale_of_a_sequence_belongs_to_reads(batch: Any) -> None:
    k, v = stored(batch, "int8", None, None)
    arguments = {**batch.attend_arguments(), "k": k, "v": v, "backend": "reference"}
    flash_attn_varlen_func(**arguments, k_descale=torch.ones(3, 2), v_descale=torch.ones(12, 4, 2))
    with pytest.raises(pagetile.ShapeError, match=r"k_descale is \[2, 2\].*\[3, 2\], \[12, 4, 2\]"):
        flash_attn_varlen_func(**arguments, k_descale=torch.ones(2, 2))


@pytest.mark.parametrize("form", [None, 1.0, 1, torch.tensor(1.0), torch.ones(1), torch.ones(2)])
def test_a_cache_that_is_not_quantised_takes_a_scale_of_one(batch: Any, backend: str, form: Any) -> None:
    """Engines hand their scales to every cache; with 1 there is nothing to apply and the copy is bit by bit."""
    arguments = batch.write_arguments()
    reshape_and_cache_flash(**arguments, k_scale=form, v_scale=form, backend=backend)
    assert torch.equal(batch.key_cache[7, 0], batch.key[0])
    expected = flash_attn_varlen_func(**batch.attend_arguments(), backend=backend)
    got = flash_attn_varlen_func(**batch.attend_arguments(), k_descale=form, v_descale=form, backend=backend)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("form", [0.5, torch.tensor(0.5), torch.tensor([1.0, 2.0])])
def test_a_cache_that_is_not_quantised_refuses_any_other(batch: Any, form: Any) -> None:
    before = batch.key_cache.clone()
    with pytest.raises(
        pagetile.ArgumentError, match=r"k_scale is .*the cache holds float32, which is copied bit by bit"
    ):
        reshape_and_cache_flash(**batch.write_arguments(), k_scale=form)
    with pytest.raises(pagetile.ArgumentError, match="v_descale is"):
        flash_attn_varlen_func(**batch.attend_arguments(), v_descale=form)
    assert torch.equal(batch.key_cache, before)


def test_a_number_is_checked_each_time(batch: Any) -> None:
    for good, bad in ((1, 0), (1, True), (1.0, True), (0.5, -0.5)):
        stored(batch, "int8", good, None)
        with pytest.raises(pagetile.PagetileError, match="k_scale is"):
            stored(batch, "int8", bad, None)


def test_the_values_of_a_scale_are_not_part_of_a_plan(batch: Any) -> None:
    stored(batch, "fp8_e4m3", torch.tensor([0.5, 2.0]), None)
    plans = len(PLANS)
    k, _ = stored(batch, "fp8_e4m3", torch.tensor([4.0, 1.0]), None)
    assert len(PLANS) == plans
    torch.testing.assert_close(k[7, 0].float(), batch.key[0] / torch.tensor([[4.0], [1.0]]), rtol=0.07, atol=0.02)
