"""Writes of every backend, byte for byte, and nothing beside them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from conformance_kit import each_case, each_subject, run

from pagetile.backends.protocol import WriteCall
from pagetile.contracts.errors import SlotError
from pagetile.testing import (
    BuiltWrite,
    WriteCase,
    build_attend,
    build_write,
    first_difference,
    same_bits,
    takes,
    write_cases,
)
from pagetile.testing.cases import AttendCase
from pagetile.testing.machine import Subject


@each_case(write_cases, seed=1, count=40)
def test_every_byte(subject: Subject, case: WriteCase) -> None:
    built = build_write(case, subject.device)
    run(subject, built.call)
    _exact(built)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
@each_subject()
def test_every_byte_long_matrix(subject: Subject, chunk: int) -> None:
    for case in islice(write_cases(subject.backend, 1000 + chunk, 400, subject.device), 30, None):
        built = build_write(case, subject.device)
        run(subject, built.call)
        _exact(built)


@pytest.mark.parametrize("slot", ["end", "past", 2**31 - 1, 2**40])
@pytest.mark.parametrize("row", [0, 5, 11])
@each_subject()
def test_a_slot_outside_the_cache_writes_nothing(subject: Subject, row: int, slot: int | str) -> None:
    if subject.device != "cpu":
        pytest.skip("without validate= a GPU skips the slot")
    built = build_write(WriteCase(num_tokens=12), subject.device)
    num_slots = built.case.num_blocks * built.case.block_size
    bad = {"end": num_slots, "past": num_slots + 17}.get(slot, slot)
    before = [b.clone() for b in built.buffers]
    built.call.slot_mapping[row] = bad
    with pytest.raises(SlotError, match=rf"slot_mapping\[{row}\] is {bad}.*{num_slots - 1}"):
        run(subject, built.call)
    assert all(same_bits(b, a) for b, a in zip(built.buffers, before, strict=True))


@pytest.mark.parametrize("slot", [-1, -2, -17, -(2**31), -(2**62)])
@each_subject()
def test_any_negative_slot_is_skipped(subject: Subject, slot: int) -> None:
    built = build_write(WriteCase(num_tokens=3), subject.device)
    before = [b.clone() for b in built.buffers]
    built.call.slot_mapping.fill_(slot)
    run(subject, built.call)
    assert all(same_bits(b, a) for b, a in zip(built.buffers, before, strict=True))


@each_subject()
def test_of_two_rows_with_one_slot_one_wins_whole(subject: Subject) -> None:
    built = build_write(WriteCase(num_tokens=4, head_size=64), subject.device)
    call = built.call
    call.slot_mapping.copy_(torch.tensor([20, 3, 20, 5]))
    run(subject, call)
    kept = call.key_cache[20 // 16, 20 % 16]
    assert same_bits(kept, call.key[0]) or same_bits(kept, call.key[2])


@each_subject()
def test_written_tokens_are_the_ones_attended(subject: Subject) -> None:
    """Write a sequence through its block table, attend to it: the round trip uses one arithmetic of slots."""
    case = AttendCase(seqs=((3, 41),), block_size=7, dtype="bfloat16")
    built = build_attend(case, subject.device)
    expected = build_attend(case, subject.device)
    run(subject, expected.call)
    call = built.call
    table = call.block_table[0].cpu()
    slots = torch.tensor([int(table[p // 7]) * 7 + p % 7 for p in range(41)], device=subject.device)
    problem = WriteCase(num_tokens=41, block_size=7, dtype="bfloat16").problem(call.problem.device)
    tokens = [x[0].to(torch.bfloat16).to(subject.device) for x in (built.keys, built.values)]
    for cache in (call.k, call.v):
        cache.fill_(torch.nan)
    run(subject, WriteCall(problem, *tokens, call.k, call.v, slots))
    run(subject, call)
    assert same_bits(call.out, expected.call.out), first_difference(call.out, expected.call.out)


@pytest.mark.parametrize("source", ["contiguous", "packed", "padded", "transposed", "unaligned"])
@each_subject()
def test_a_long_write(subject: Subject, source: str) -> None:
    """More tokens than any launch treats at once."""
    case = WriteCase(num_tokens=3000, num_kv_heads=3, head_size=40, dtype="float16", source=source, cache="hnd", skip=7)
    for one in (case, replace(case, cache="nhd", slot_dtype="int32")):
        assert takes(subject.backend, one, subject.device)
        built = build_write(one, subject.device)
        run(subject, built.call)
        _exact(built)


def _exact(built: BuiltWrite) -> None:
    for got, right in zip(built.buffers, built.expected, strict=True):
        assert same_bits(got, right), f"{first_difference(got, right)}\n{built.case}"
