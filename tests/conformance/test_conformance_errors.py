"""Bad values: an error that names tensor, place, value and limit, and nothing half-written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conformance_kit import SUBJECTS, run

from pagetile.backends.protocol import AttendCall
from pagetile.contracts.errors import ArgumentError, BlockTableError
from pagetile.testing import AttendCase, build_attend
from pagetile.testing.machine import Subject

ON_CPU = [s for s in SUBJECTS if s.device == "cpu" and s.name in ("reference", "cpu")]
PAGED = AttendCase(seqs=((2, 37), (1, 5), (3, 20)), poison=False)
RAGGED = replace(PAGED, layout="ragged")

Change = Callable[[AttendCall], None]


def _set(name: str, at: object, value: int) -> Change:
    def change(call: AttendCall) -> None:
        getattr(call, name)[at] = value

    return change


def _bound(name: str, value: int) -> Change:
    def change(call: AttendCall) -> None:
        call.problem = replace(call.problem, **{name: value})

    return change


BAD = [
    (PAGED, _set("block_table", (0, 1), -1), BlockTableError, r"block_table\[0, 1\] is -1.*9 blocks.*0 to 8"),
    (PAGED, _set("block_table", (2, 0), 9), BlockTableError, r"block_table\[2, 0\] is 9.*9 blocks"),
    (PAGED, _set("block_table", (1, 0), 2**31 - 1), BlockTableError, r"block_table\[1, 0\] is 2147483647"),
    (PAGED, _set("block_table", (1, 0), -(2**31)), BlockTableError, r"block_table\[1, 0\] is -2147483648"),
    (PAGED, _set("seq_lens", 1, -5), ArgumentError, r"seq_lens\[1\] is -5"),
    (PAGED, _set("seq_lens", 2, 97), (ArgumentError, BlockTableError), r"seq_lens\[2\] is 97.*6 columns.*96|max_k_len"),
    (PAGED, _set("query_start_loc", 0, 1), ArgumentError, r"query_start_loc\[0\] is 1"),
    (PAGED, _set("query_start_loc", 1, 5), ArgumentError, r"query_start_loc decreases from 5 .*to 3"),
    (PAGED, _set("query_start_loc", 3, 7), ArgumentError, r"query_start_loc\[3\] is 7.*q has 6 rows"),
    (PAGED, _bound("max_q_len", 2), ArgumentError, r"sequence 2 has 3 queries.*max_q_len is 2"),
    (PAGED, _bound("max_k_len", 36), ArgumentError, r"sequence 0 has 37 keys.*max_k_len is 36"),
    (replace(PAGED, key_starts=(1, 0, 2)), _set("key_starts", 2, -3), ArgumentError, r"key_starts\[2\] is -3"),
    (RAGGED, _set("key_start_loc", 0, 2), ArgumentError, r"key_start_loc\[0\] is 2"),
    (RAGGED, _set("key_start_loc", 2, 36), ArgumentError, r"key_start_loc decreases from 37 .*to 36"),
    (RAGGED, _set("key_start_loc", 3, 63), ArgumentError, r"key_start_loc\[3\] is 63.*k has 62 rows"),
    (RAGGED, _set("query_start_loc", 2, 1), ArgumentError, r"query_start_loc decreases from 2 .*to 1"),
]


@pytest.mark.parametrize(("case", "change", "error", "message"), BAD, ids=[b[3][:28] for b in BAD])
@pytest.mark.parametrize("subject", ON_CPU, ids=str)
def test_bad_value(subject: Subject, case: AttendCase, change: Change, error: type[Exception], message: str) -> None:
    built = build_attend(case, subject.device)
    change(built.call)
    with pytest.raises(error, match=message):
        run(subject, built.call)
    for canary in built.canaries:
        canary.frozen.fill_(True)  # on an error not even the outputs change
        assert not canary.broken(), canary.broken()


@pytest.mark.parametrize("subject", ON_CPU, ids=str)
def test_the_call_after_an_error_is_right(subject: Subject) -> None:
    built = build_attend(PAGED, subject.device)
    good = built.call.block_table.clone()
    built.call.block_table[0, 1] = 99
    with pytest.raises(BlockTableError):
        run(subject, built.call)
    built.call.block_table.copy_(good)
    run(subject, built.call)
    assert built.call.out.isfinite().all()
    other = build_attend(PAGED, subject.device)
    run(subject, other.call)
    assert torch.equal(built.call.out, other.call.out)
