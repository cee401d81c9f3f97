"""Quantised caches: the bytes of the CPU, and attention over them against float64; interpreted, or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagetile.contracts.dtypes import QUANTISED
from pagetile.contracts.problem import AttendProblem
from pagetile.reference.quantise import quantise
from pagetile.testing import (
    AttendCase,
    WriteCase,
    assert_attend,
    build_attend,
    build_write,
    first_difference,
    same_bits,
)
from pagetile.testing.patterns import digest, golden, keys, pattern_call

FEW = [key for key in keys() if key.endswith(" 0.3") or key == "bfloat16 fp8_e4m3 1e-30"]
"""The interpreter takes seconds for each; a GPU does them all."""

WRITES = [
    WriteCase(kind="fp8_e4m3", loud=True, cache="hnd", source="packed", num_kv_heads=3, head_size=24, block_size=3),
    WriteCase(kind="fp8_e5m2", loud=True, scale="head", cache="unaligned", source="unaligned", dtype="float16"),
    WriteCase(kind="int8", loud=True, scale="head", cache="padded", head_size=16, head_size_v=40, skip=3),
    WriteCase(kind="fp8_e4m3", loud=True, scale="token_head", cache="layers", dtype="bfloat16", num_slots=4),
    WriteCase(kind="int8", loud=True, scale="token_head", head_size=33, head_size_v=5, num_kv_heads=1),
    WriteCase(kind="fp8_e5m2", scale="token_head", cache="mixed", slot_dtype="int32", block_size=1),
    WriteCase(kind="int8", scale="one", cache="halves", dtype="bfloat16", source="transposed"),
]

ATTENDS = [
    AttendCase(kind="fp8_e4m3", seqs=((5, 37), (1, 0), (0, 9), (1, 70)), scale="float", dtype="float16", spare_rows=3),
    AttendCase(kind="fp8_e5m2", seqs=((20, 40), (1, 33)), scale="sequence_head", block_size=24, num_q_heads=6),
    AttendCase(kind="int8", seqs=((40, 90), (7, 7)), scale="head", window=(9, 3), causal=False, block_size=3),
    AttendCase(kind="fp8_e4m3", seqs=((70, 100),), scale="token_head", window=(20, -1), dtype="float16", cache="hnd"),
    AttendCase(kind="int8", seqs=((1, 150), (1, 20)), scale="token_head", num_splits=3, sinks=True, softcap=5.0),
    AttendCase(
        kind="int8", seqs=((4, 150), (2, 3)), scale="token_head", num_splits=64, dtype="float16", cache="padded"
    ),
    AttendCase(kind="fp8_e4m3", seqs=((1, 700),), scale="head", num_q_heads=8, num_kv_heads=1, softcap=20.0),
    AttendCase(kind="fp8_e5m2", seqs=((2, 40),), scale="token_head", head_size=192, head_size_v=128, cache="unaligned"),
    AttendCase(kind="fp8_e4m3", seqs=((2, 40), (1, 90)), scale="sequence_head", batch_invariant=True, sinks=True),
    AttendCase(kind="int8", seqs=((9, 37),), scale="token_head", batch_invariant=True, head_size=80, alibi="head"),
    AttendCase(kind="fp8_e5m2", layout="ragged", seqs=((9, 37), (1, 50)), scale="sequence_head", dtype="float16"),
]


@pytest.mark.parametrize("key", keys())
def test_every_pattern_has_the_bytes_of_the_cpu(key: str, backend, kernel_device: str, request) -> None:
    if kernel_device == "cpu" and key not in FEW and "slow" not in request.config.option.markexpr:
        pytest.skip("the interpreter takes seconds for each; -m slow runs them all")
    call = pattern_call(key, kernel_device)
    backend.write(call)
    kind, scale = key.split()[1], float(key.split()[2])
    right = quantise(call.key.cpu(), kind, scale).view_as(call.key_cache)
    assert same_bits(call.key_cache.cpu(), right), f"{key}: {first_difference(call.key_cache.cpu(), right)}"
    assert digest(call.key_cache) == golden()[key]
    reverse = quantise(call.value.cpu(), kind, scale).view_as(call.value_cache)
    assert same_bits(call.value_cache.cpu(), reverse)


@pytest.mark.parametrize("case", WRITES, ids=str)
def test_write(case: WriteCase, backend, kernel_device: str) -> None:
    built = build_write(case, kernel_device)
    assert backend.why_not(built.call.problem) == []
    backend.write(built.call)
    for buffer, expected in zip(built.buffers, built.expected, strict=True):
        assert same_bits(buffer, expected), f"{first_difference(buffer, expected)}\n{case}"


@pytest.mark.parametrize("case", ATTENDS, ids=str)
def test_attend(case: AttendCase, backend, kernel_device: str) -> None:
    built = build_attend(case, kernel_device)
    assert backend.why_not(built.call.problem) == []
    backend.attend(built.call)
    assert_attend(built)
    assert not [c.broken() for c in built.canaries if c.broken()]


def test_another_number_is_another_launch(backend, kernel_device: str) -> None:
    """A number is part of what is kept of a launch; a tensor is read again."""
    for scale in (0.01, 0.03, torch.tensor(0.02), torch.tensor(0.05)):
        built = build_attend(AttendCase(kind="int8", seqs=((2, 40),), scale="float"), kernel_device)
        given = scale.to(kernel_device) if isinstance(scale, torch.Tensor) else scale
        ratio = float(scale) / built.call.v_scale
        backend.attend(built.call)
        again = replace(built.call, v_scale=given, out=torch.empty_like(built.call.out))
        backend.attend(again)
        torch.testing.assert_close(again.out, built.call.out * ratio)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_scale_that_is_not_finite_reaches_the_rows_that_see_its_key(
    kind: str, invariant: bool, backend, kernel_device: str
) -> None:
    case = AttendCase(kind=kind, seqs=((12, 40), (1, 40)), scale="token_head", num_q_heads=2, batch_invariant=invariant)
    clean, dirty = (build_attend(case, kernel_device) for _ in range(2))
    position = 33  # rows 0 to 4 of the first sequence stand at 28 to 32 and do not see it
    block = int(dirty.call.block_table[0, position // 16])
    dirty.call.v_scale[block, position % 16, 0] = float("nan")
    dirty.call.k_scale[block, position % 16, 1] = float("nan")
    for built in (clean, dirty):
        backend.attend(built.call)
    unseen = torch.ones(13, dtype=torch.bool)
    unseen[5:12] = False
    assert same_bits(dirty.call.out[unseen], clean.call.out[unseen])
    assert not dirty.call.out[5:12].isfinite().any()


def test_nan_bytes_reach_the_rows_that_see_them(backend, kernel_device: str) -> None:
    case = AttendCase(kind="fp8_e4m3", seqs=((12, 40), (1, 40)), scale="float", num_q_heads=2)
    clean, dirty = (build_attend(case, kernel_device) for _ in range(2))
    block = int(dirty.call.block_table[0, 2])
    dirty.call.v.view(torch.uint8)[block, 1, 0, 3] = 0x7F
    dirty.call.v.view(torch.uint8)[block, 1, 1, 4] = 0xFF
    for built in (clean, dirty):
        backend.attend(built.call)
    bad = ~dirty.call.out.isfinite()
    expected = torch.zeros_like(bad)
    expected[5:12, 0, 3] = expected[5:12, 1, 4] = True
    assert torch.equal(bad, expected)
    assert same_bits(dirty.call.out[~bad], clean.call.out[~bad])


def test_what_is_not_taken_is_named(backend, kernel_device: str) -> None:
    problem: AttendProblem = AttendCase(kind="int8", layout="ragged", scale="token_head").problem(kernel_device)
    assert any("ragged keys have no scales of their own" in why for why in backend.why_not(problem))
