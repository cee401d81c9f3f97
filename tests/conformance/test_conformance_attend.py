"""Attention of every backend against the float64 truth, and against itself asked in another way."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from conformance_kit import attended, each_case, each_of, each_subject, run
from torch import Tensor

from pagetile.backends.protocol import AttendCall, MergeCall
from pagetile.contracts.problem import MergeProblem
from pagetile.testing import (
    AttendCase,
    BuiltAttend,
    assert_attend,
    attend_cases,
    build_attend,
    first_difference,
    same_bits,
)
from pagetile.testing.build import without_poison
from pagetile.testing.fixtures import alone, decode_at, one_hot_answer, stride_family, uniform_answer, with_splits
from pagetile.testing.machine import Subject

BATCH = ((1, 37), (5, 37), (0, 9), (1, 0), (3, 3), (4, 2), (2, 130))
PLAIN = AttendCase(seqs=BATCH, block_size=8)
EVERYTHING = replace(
    PLAIN, window=(20, 0), softcap=3.0, alibi="sequence", sinks=True, key_starts=(0, 30, 0, 0, 1, 0, 7), num_q_heads=6
)
HALF = replace(PLAIN, dtype="bfloat16", head_size=40, head_size_v=24, block_size=17)
QUANTISED = replace(PLAIN, kind="fp8_e4m3", scale="sequence_head")
RAGGED = replace(EVERYTHING, layout="ragged", key_starts=())
SOME = (PLAIN, EVERYTHING, HALF, QUANTISED, RAGGED)


@each_case(attend_cases, seed=1, count=60)
def test_right(subject: Subject, case: AttendCase) -> None:
    built = attended(subject, case)
    assert_attend(built)
    broken = [canary.broken() for canary in built.canaries]
    assert not any(broken), broken


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(20))
@each_subject()
def test_right_long_matrix(subject: Subject, chunk: int) -> None:
    for case in islice(attend_cases(subject.backend, 1000 + chunk, 150, subject.device), 40, None):
        built = attended(subject, case)
        assert_attend(built)
        assert not any(canary.broken() for canary in built.canaries), case


@each_case(attend_cases, seed=2, count=20)
def test_poison_changes_nothing(subject: Subject, case: AttendCase) -> None:
    _same(attended(subject, case), attended(subject, without_poison(case)))


@each_case(attend_cases, seed=3, count=10)
def test_blocks_may_lie_anywhere(subject: Subject, case: AttendCase) -> None:
    _same(attended(subject, case), attended(subject, case, in_order=True))


@each_case(attend_cases, seed=4, count=10)
def test_run_to_run(subject: Subject, case: AttendCase) -> None:
    first = attended(subject, case)
    for _ in range(2):
        _same(first, attended(subject, case))


@each_of(*SOME)
def test_strides_change_nothing(subject: Subject, case: AttendCase) -> None:
    first = attended(subject, case)
    for other in stride_family(case):
        _same(first, attended(subject, other))


@each_case(attend_cases, seed=5, count=20)
def test_a_sequence_alone(subject: Subject, case: AttendCase) -> None:
    built = build_attend(case, subject.device)
    starts = built.call.query_start_loc.tolist()
    for seq in range(len(case.seqs)):
        call = alone(built.call, seq)
        run(subject, call)
        _put_rows(built, call, starts[seq])
    assert_attend(built)


@each_of(*(replace(case, batch_invariant=True) for case in SOME))
def test_batch_invariant_alone(subject: Subject, case: AttendCase) -> None:
    built = attended(subject, case)
    starts = built.call.query_start_loc.tolist()
    for seq in range(len(case.seqs)):
        call = alone(built.call, seq)
        run(subject, call)
        _same_rows(built, call, starts[seq])


@each_of(
    *(replace(case, batch_invariant=True) for case in SOME),
    AttendCase(seqs=((150, 150), (70, 300)), batch_invariant=True, num_q_heads=3, num_kv_heads=1, window=(100, 0)),
    AttendCase(seqs=((5, 1100), (3, 2050)), batch_invariant=True, num_q_heads=5, num_kv_heads=1, dtype="bfloat16"),
)
def test_batch_invariant_prefill_is_decode(subject: Subject, case: AttendCase) -> None:
    built = attended(subject, case)
    starts = built.call.query_start_loc.tolist()
    for seq, (q_len, k_len) in enumerate(case.seqs):
        for i in range(max(0, q_len - k_len), q_len):  # a query before position 0 is no decode step
            call = decode_at(built.call, seq, i)
            run(subject, call)
            _same_rows(built, call, starts[seq] + i)


@each_of(
    *(replace(case, batch_invariant=True) for case in SOME),
    AttendCase(seqs=((1, 3), (5, 700), (2, 64)), batch_invariant=True, sinks=True),
)
def test_batch_invariant_splits(subject: Subject, case: AttendCase) -> None:
    built = attended(subject, case)
    for num_splits in (1, 2, 3, 7, 64):
        call = with_splits(built.call, num_splits)
        run(subject, call)
        _same_rows(built, call, 0)


@each_of(*SOME, AttendCase(seqs=((1, 3), (5, 700), (2, 64)), sinks=True), AttendCase(seqs=((1, 2000),), window=(9, 0)))
def test_any_number_of_splits_is_right(subject: Subject, case: AttendCase) -> None:
    for num_splits in (1, 2, 3, 7, 64, 1000):
        assert_attend(attended(subject, replace(case, num_splits=num_splits)))


@each_of(*(replace(case, tokens="uniform", gain=1.0) for case in (PLAIN, RAGGED, replace(PLAIN, window=(3, 2)))))
def test_zero_query_gives_the_mean(subject: Subject, case: AttendCase) -> None:
    case = replace(case, alibi="", sinks=False, softcap=0.0)
    built = attended(subject, case)
    mean, log = uniform_answer(case)
    out, lse = built.call.out.cpu().double(), built.call.lse
    assert lse is not None
    torch.testing.assert_close(out, mean[:, None, None].expand_as(out), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.cpu().double(), log.expand_as(lse), rtol=1e-6, atol=1e-6)


@each_of(
    AttendCase(seqs=((7, 60), (1, 33)), tokens="one_hot", head_size=64, causal=False),
    AttendCase(seqs=((7, 60), (1, 33)), tokens="one_hot", head_size=64, causal=False, block_size=3, dtype="bfloat16"),
)
def test_one_hot_query_gives_one_value(subject: Subject, case: AttendCase) -> None:
    built = attended(subject, case)
    assert torch.equal(built.call.out.cpu().double(), one_hot_answer(case, built.values))


@each_of(AttendCase(seqs=((3, 20), (4, 20), (1, 9)), block_size=4))
def test_nan_stays_in_its_sequence(subject: Subject, case: AttendCase) -> None:
    clean = attended(subject, case)
    for tensor, value in (("k", torch.nan), ("v", torch.nan), ("v", torch.inf)):
        built = build_attend(case, subject.device)
        cache = getattr(built.call, tensor)
        block = int(built.call.block_table[1, 18 // 4])  # position 18 of the second sequence: rows 2 and 3 see it
        cache[block, 18 % 4] = value
        run(subject, built.call)
        out = built.call.out
        sees = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0], dtype=torch.bool, device=out.device)
        assert same_bits(out[~sees], clean.call.out[~sees])
        assert not out[sees].isfinite().any()


@each_of(
    AttendCase(seqs=((1, 40), (4, 40)), block_size=8),
    AttendCase(seqs=((1, 40), (4, 40)), block_size=8, dtype="bfloat16", head_size=64),
)
def test_sequences_may_share_blocks(subject: Subject, case: AttendCase) -> None:
    built = build_attend(case, subject.device)
    table = built.call.block_table
    assert table is not None
    table[1, :4] = table[0, :4]  # a shared prefix of 32 tokens
    for tokens in (built.keys, built.values):
        tokens[1] = torch.cat([tokens[0][:32], tokens[1][32:]])
    run(subject, built.call)
    assert_attend(built)


@each_of(replace(PLAIN, causal=False, sinks=True), replace(HALF, causal=False, alibi="head"))
def test_states_over_two_halves_add(subject: Subject, case: AttendCase) -> None:
    """Prefix and suffix, merged, are the whole: the sink joins one of them, ALiBi keeps its distances."""
    case = replace(case, alibi="")
    whole = build_attend(case, subject.device)
    first, second = (build_attend(case, subject.device) for _ in range(2))
    cut = torch.tensor([k_len // 2 for _, k_len in case.seqs], dtype=torch.int32, device=subject.device)
    first.call.seq_lens.copy_(cut)
    first.call = replace(first.call, sinks=None, problem=replace(first.call.problem, sinks=False))
    second.call = replace(second.call, key_starts=cut, problem=replace(second.call.problem, key_starts=True))
    for built in (first, second):
        run(subject, built.call)
    a, b, out = first.call, second.call, whole.call
    problem = MergeProblem(out.problem.device, case.dtype, case.num_rows, case.num_q_heads, case.value_size)
    run(subject, MergeCall(problem, out.out, out.lse, a.out, a.lse, b.out, b.lse))
    assert_attend(whole, roundings=3)


def _same(a: BuiltAttend, b: BuiltAttend) -> None:
    rows = a.case.num_rows
    assert same_bits(a.call.out[:rows], b.call.out[:rows]), first_difference(a.call.out[:rows], b.call.out[:rows])
    if a.call.lse is not None and b.call.lse is not None:
        x, y = a.call.lse[:, :rows], b.call.lse[:, :rows]
        assert same_bits(x, y), first_difference(x, y)


def _same_rows(built: BuiltAttend, call: AttendCall, start: int) -> None:
    """The rows of ``call`` are the rows of the whole batch from ``start`` on, bit for bit."""
    rows = slice(start, start + int(call.query_start_loc[-1]))
    pairs: list[tuple[Tensor, Tensor]] = [(built.call.out[rows], call.out[: rows.stop - start])]
    if built.call.lse is not None and call.lse is not None:
        pairs.append((built.call.lse[:, rows], call.lse[:, : rows.stop - start]))
    for whole, part in pairs:
        assert same_bits(whole, part), f"{first_difference(whole, part)}\n{call.problem}"


def _put_rows(built: BuiltAttend, call: AttendCall, start: int) -> None:
    rows = slice(start, start + len(call.out))
    built.call.out[rows] = call.out
    if built.call.lse is not None and call.lse is not None:
        built.call.lse[:, rows] = call.lse
