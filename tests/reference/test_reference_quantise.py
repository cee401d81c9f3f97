"""The bytes of quantised caches, against a conversion written independently of torch's."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pagetile import reference

FP8 = {"fp8_e4m3": (3, 7, 448.0), "fp8_e5m2": (2, 15, 57344.0)}  # mantissa bits, bias, largest


def value_of(byte: int, mantissa_bits: int, bias: int) -> Fraction:
    """A positive finite byte as an exact number."""
    exponent, mantissa = byte >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    one = Fraction(1 << mantissa_bits)
    if exponent == 0:
        return mantissa / one * Fraction(2) ** (1 - bias)
    return (1 + mantissa / one) * Fraction(2) ** (exponent - bias)


@cache
def finite_values(kind: str) -> list[Fraction]:
    """Every positive finite value, by byte."""
    mantissa_bits, bias, largest = FP8[kind]
    values = [value_of(byte, mantissa_bits, bias) for byte in range(0x7F)]
    return [v for v in values if v <= largest]


def nearest_even(x: float, kind: str) -> int:
    """The byte of ``x``: nearest, ties to the even byte, saturating; NaN is 0x7F."""
    largest = FP8[kind][-1]
    if math.isnan(x):
        return 0x7F
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    magnitude = min(abs(x), largest)
    table = finite_values(kind)
    exact = Fraction(magnitude)
    best = min(range(len(table)), key=lambda byte: (abs(table[byte] - exact), byte & 1))
    return sign | best


def interesting(kind: str) -> Tensor:
    """Every finite value, every midpoint, their float32 neighbours, and what does not fit."""
    largest = FP8[kind][-1]
    values = [float(v) for v in finite_values(kind)]
    points = values + [(a + b) / 2 for a, b in pairwise(values)]
    x = torch.tensor([*points, largest * 1.04, largest * 1.06, 1e38, torch.inf], dtype=torch.float32)
    up, down = (torch.nextafter(x, torch.tensor(edge)) for edge in (torch.inf, 0.0))
    x = torch.cat([x, up, down])
    return torch.cat([x, -x, torch.tensor([torch.nan, -torch.nan])])


@pytest.mark.parametrize("kind", list(FP8))
def test_every_rounding_of_fp8(kind: str) -> None:
    x = interesting(kind)
    got = reference.quantise(x, kind).view(torch.uint8).tolist()
    right = [nearest_even(v, kind) for v in x.tolist()]
    assert got == right


@pytest.mark.parametrize("kind", list(FP8))
def test_every_byte_comes_back(kind: str) -> None:
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kind]
    every = torch.arange(256, dtype=torch.uint8)
    values = reference.dequantise(every, kind)
    assert torch.equal(values.nan_to_num(1e9), every.view(dtype).float().nan_to_num(1e9))
    finite = values.isfinite()
    assert torch.equal(reference.quantise(values, kind).view(torch.uint8)[finite], every[finite])


def test_e5m2_is_not_e4m3() -> None:
    x = torch.tensor([1.0, 2.0, 3.5, 0.25])
    for kind in FP8:
        assert reference.dequantise(reference.quantise(x, kind), kind).tolist() == x.tolist()
    assert not torch.equal(*(reference.quantise(x, kind).view(torch.uint8) for kind in FP8))


def test_int8() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.6, 127.5, 1e9, -1e9, torch.inf, -torch.inf, torch.nan])
    assert reference.quantise(x, "int8").tolist() == [0, 2, 2, 0, -2, 127, 127, 127, -127, 127, -127, 0]


def test_the_scale_divides_truly() -> None:
    """x / s and x * (1 / s) differ in float32 for a third of all numbers; a byte shows it where it is a tie."""
    scale = torch.tensor(3.0)
    x = torch.arange(1, 1000, dtype=torch.float32) * 0.1
    right = [nearest_even(float(torch.tensor(v) / scale), "fp8_e4m3") for v in x.tolist()]
    for form in (scale, 3.0, scale.view(1)):
        assert reference.quantise(x, "fp8_e4m3", form).view(torch.uint8).tolist() == right


def test_token_head_scale() -> None:
    x = torch.tensor([[1.0, -4.48], [0.0, 0.0], [torch.inf, 44.8], [torch.nan, -torch.inf], [1e-44, 0.0]])
    scale = reference.token_head_scale(x, "fp8_e4m3")
    assert scale.tolist() == pytest.approx([0.01, 1.0, 0.1, 1.0, 1.0])
    assert reference.quantise(x, "fp8_e4m3", scale.unsqueeze(-1)).float().abs()[:, 1].tolist()[0] == 448.0


@pytest.mark.parametrize("kind", list(FP8))
def test_uint8_and_float8_caches_hold_the_same(kind: str) -> None:
    key = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kind]
    caches = [torch.zeros(2, 4, 2, 8, dtype=d) for d in (torch.uint8, torch.uint8, dtype, dtype)]
    for k, v in (caches[:2], caches[2:]):
        reference.write(key, key, k, v, torch.tensor([5, 0, 7]), kind=kind, k_scale=0.5)
    assert torch.equal(caches[0], caches[2].view(torch.uint8))
    assert torch.equal(caches[1], caches[3].view(torch.uint8))
    assert not torch.equal(caches[0], caches[1])  # K has a scale of its own
    reads = [
        reference.attend(
            key, k, v, torch.tensor([0, 3]), seq_lens=torch.tensor([8]), block_table=torch.tensor([[0, 1]]),
            scale=1.0, kind=kind, k_scale=0.5,
        )
        for k, v in (caches[:2], caches[2:])
    ]  # fmt: skip
    assert torch.equal(reads[0].out, reads[1].out)
