"""Merges of every backend: a commutative monoid, as far as float32 is one, with an exact identity."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from conformance_kit import each_case, each_subject, run

from pagetile.backends.protocol import MergeCall
from pagetile.testing import MergeCase, assert_merge, build_merge, merge_cases, same_bits
from pagetile.testing.machine import Subject


@each_case(merge_cases, seed=1, count=25)
def test_right(subject: Subject, case: MergeCase) -> None:
    built = build_merge(case, subject.device)
    run(subject, built.call)
    assert_merge(built)
    written = {"new": {"out", "out_lse"}, "a": {"a", "a_lse"}, "b": {"b", "b_lse"}}[case.into]
    for canary in built.canaries:
        if canary.name not in written:
            canary.frozen.fill_(True)  # an input that is not the output does not change at all
        assert not canary.broken(), canary.broken()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(5))
@each_subject()
def test_right_long_matrix(subject: Subject, chunk: int) -> None:
    for case in islice(merge_cases(subject.backend, 1000 + chunk, 200, subject.device), 9, None):
        built = build_merge(case, subject.device)
        run(subject, built.call)
        assert_merge(built)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@each_subject()
def test_run_to_run_and_in_place(subject: Subject, dtype: str) -> None:
    case = MergeCase(dtype=dtype, num_tokens=50, head_size=40)
    results = []
    for into in ("new", "new", "a", "b"):
        call = build_merge(replace(case, into=into), subject.device).call
        run(subject, call)
        results.append(call)
    for other in results[1:]:
        assert same_bits(results[0].out, other.out)
        assert same_bits(results[0].out_lse, other.out_lse)


@each_subject()
def test_three_states_in_any_order(subject: Subject) -> None:
    """((a + b) + c) and (a + (b + c)) agree to the rounding of two merges; an empty third changes no bit."""
    case = MergeCase(num_tokens=20, empty=0.0)
    ab, cd = (build_merge(replace(case, seed=seed), subject.device).call for seed in (1, 2))
    a, b, c = (ab.a, ab.a_lse), (ab.b, ab.b_lse), (cd.a, cd.a_lse)
    left = _add(subject, ab, _add(subject, ab, a, b), c)
    right = _add(subject, ab, a, _add(subject, ab, b, c))
    # Two float32 merges a side, each right to a few steps of 2^-23 of values of order 1.
    torch.testing.assert_close(left[0], right[0], rtol=0, atol=32 * 2**-23 * float(left[0].abs().max()))
    torch.testing.assert_close(left[1], right[1], rtol=0, atol=32 * 2**-23 * float(left[1].abs().max()))
    nothing = (torch.zeros_like(a[0]), torch.full_like(a[1], -torch.inf))
    again = _add(subject, ab, nothing, _add(subject, ab, left, nothing))
    assert same_bits(again[0], left[0])
    assert same_bits(again[1], left[1])


@each_subject()
def test_a_weight_that_underflows_is_not_nan(subject: Subject) -> None:
    case = MergeCase(num_tokens=2, num_heads=1, head_size=4, empty=0.0)
    call = build_merge(case, subject.device).call
    call.a_lse.copy_(torch.tensor([[1e4, -1e4]]))
    call.b_lse.copy_(torch.tensor([[-1e4, 1e4]]))
    run(subject, call)
    assert torch.equal(call.out[0], call.a[0])
    assert torch.equal(call.out[1], call.b[1])
    assert call.out_lse.tolist() == [[1e4, 1e4]]


@each_subject()
def test_nan_stays_in_its_row_and_head(subject: Subject) -> None:
    case = MergeCase(num_tokens=6, num_heads=3, empty=0.0)
    clean, dirty = (build_merge(case, subject.device).call for _ in range(2))
    dirty.a[4, 1, 3] = torch.nan
    for call in (clean, dirty):
        run(subject, call)
    assert dirty.out[4, 1, 3].isnan()
    dirty.out[4, 1] = clean.out[4, 1]
    assert same_bits(dirty.out, clean.out)
    assert same_bits(dirty.out_lse, clean.out_lse)


def _add(subject: Subject, like: MergeCall, a: tuple, b: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.empty_like(a[0]), torch.empty_like(a[1])
    run(subject, MergeCall(like.problem, out, lse, *a, *b))
    return out, lse
