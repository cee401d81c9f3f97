"""Quantised caches of every backend: each pair of query dtype and cache kind, with each granularity that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance_kit import each_subject, run

from pagetile.contracts.dtypes import FLOATING, QUANTISED
from pagetile.testing import (
    AttendCase,
    WriteCase,
    assert_attend,
    build_attend,
    build_write,
    first_difference,
    same_bits,
    takes,
)
from pagetile.testing.build import without_poison
from pagetile.testing.cases import ScaleForm
from pagetile.testing.machine import Subject

FORMS: tuple[ScaleForm, ...] = ("none", "float", "0d", "one", "head", "sequence_head", "token_head")
WRITTEN: tuple[ScaleForm, ...] = ("none", "float", "0d", "one", "head", "token_head")

each_pair = pytest.mark.parametrize(("dtype", "kind"), [(d, k) for d in FLOATING for k in QUANTISED])


def attend_case(dtype: str, kind: str, form: ScaleForm) -> AttendCase:
    return AttendCase(seqs=((1, 21), (3, 9), (0, 2)), head_size=8, block_size=4, dtype=dtype, kind=kind, scale=form)


@each_pair
@each_subject()
def test_attends_with_each_granularity(subject: Subject, dtype: str, kind: str) -> None:
    for form in FORMS:
        case = attend_case(dtype, kind, form)
        if takes(subject.backend, case, subject.device):
            built = build_attend(case, subject.device)
            run(subject, built.call)
            assert_attend(built)
            assert not [canary.broken() for canary in built.canaries if canary.broken()]


@each_pair
@each_subject()
def test_what_nobody_owns_changes_no_bit(subject: Subject, dtype: str, kind: str) -> None:
    """NaN bytes, NaN scales of tokens and garbage in the table, against zeros."""
    for form in ("head", "token_head"):
        case = attend_case(dtype, kind, form)
        if not takes(subject.backend, case, subject.device):
            continue
        dirty, clean = build_attend(case, subject.device), build_attend(without_poison(case), subject.device)
        for built in (dirty, clean):
            run(subject, built.call)
        rows = case.num_rows
        assert same_bits(dirty.call.out[:rows].contiguous(), clean.call.out[:rows].contiguous())


@each_pair
@each_subject()
def test_writes_with_each_granularity(subject: Subject, dtype: str, kind: str) -> None:
    for form in WRITTEN:
        case = WriteCase(num_tokens=9, head_size=24, dtype=dtype, kind=kind, scale=form, loud=True, skip=4)
        for one in (case, replace(case, cache="hnd", source="padded", block_size=3, num_slots=5)):
            if takes(subject.backend, one, subject.device):
                built = build_write(one, subject.device)
                run(subject, built.call)
                for got, right in zip(built.buffers, built.expected, strict=True):
                    assert same_bits(got, right), f"{first_difference(got, right)}\n{one}"


@each_pair
@each_subject()
def test_a_written_cache_is_read_with_the_same_scales(subject: Subject, dtype: str, kind: str) -> None:
    """One argument, one meaning: what a write divides by, a read multiplies by, K's for K and V's for V."""
    write = WriteCase(num_tokens=21, head_size=8, block_size=4, dtype=dtype, kind=kind, scale="head")
    read = replace(attend_case(dtype, kind, "head"), seqs=((1, 21),))
    if not (takes(subject.backend, write, subject.device) and takes(subject.backend, read, subject.device)):
        pytest.skip(f"{subject} does not both write and read {kind} under {dtype}")
    built, call = build_write(write, subject.device), build_attend(read, subject.device).call
    source = built.call
    call.k.view(torch.uint8).zero_()
    call.v.view(torch.uint8).zero_()
    table = call.block_table[0].long().cpu()
    slots = torch.tensor([int(table[p // 4]) * 4 + p % 4 for p in range(21)], device=subject.device)
    scales = [torch.tensor(s, device=subject.device) for s in ([0.03, 0.06], [0.05, 0.03])]
    problem = write.problem(source.problem.device)
    run(subject, replace(source, problem=problem, key_cache=call.k, value_cache=call.v, slot_mapping=slots,
                         k_scale=scales[0], v_scale=scales[1]))  # fmt: skip
    run(subject, replace(call, k_scale=scales[0], v_scale=scales[1]))
    q, k, v = (x.float() for x in (call.q[:1], source.key[:21], source.value[:21]))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    weights = (torch.einsum("thd,nhd->htn", q, k) * call.scale).softmax(-1)
    right = torch.einsum("htn,nhd->thd", weights, v)
    error = float((call.out[:1].float() - right).norm() / right.norm())
    # Steps of half a bit of the mantissa, or of half a scale; K's scales for V's are off by half of it all.
    assert error < {"fp8_e4m3": 0.08, "fp8_e5m2": 0.16, "int8": 0.04}[kind], error
