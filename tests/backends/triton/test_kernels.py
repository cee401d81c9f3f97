"""The three verbs against float64, over small cases of the shared kit; under the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from pagetile.testing.build import build_attend, build_merge, build_write
from pagetile.testing.cases import AttendCase, MergeCase, WriteCase
from pagetile.testing.tolerance import assert_attend, assert_merge

WRITES = [
    WriteCase(),
    WriteCase(num_tokens=0),
    WriteCase(num_tokens=21, num_slots=13, skip=3, slot_dtype="int32"),
    WriteCase(cache="hnd", source="packed", head_size=24, block_size=3, num_kv_heads=3),
    WriteCase(cache="unaligned", source="unaligned", dtype="float16", block_size=1),
    WriteCase(cache="halves", head_size=16, head_size_v=40, dtype="bfloat16"),
    WriteCase(cache="layers", block_size=24, num_tokens=50),
    WriteCase(cache="mixed", dtype="float16", source="transposed"),
    WriteCase(cache="odd_singletons", num_kv_heads=1, block_size=1),
]

MERGES = [
    MergeCase(),
    MergeCase(empty=float("inf"), into="a"),
    MergeCase(dtype="float16", into="b", lse="transposed", rows="packed", head_size=24),
    MergeCase(dtype="bfloat16", empty=0.0, with_lse=False, num_tokens=40, head_size=80),
]

ATTENDS = [
    AttendCase(),
    AttendCase(seqs=()),
    AttendCase(seqs=((0, 5), (1, 0), (3, 0), (0, 0)), sinks=True),
    AttendCase(seqs=((5, 37), (1, 0), (0, 9), (1, 70)), dtype="float16", spare_rows=3),
    AttendCase(seqs=((5, 2), (3, 40)), block_size=1, table_dtype="int64"),
    AttendCase(seqs=((20, 40), (1, 33)), block_size=24, num_q_heads=5, num_kv_heads=1, q="packed", out="padded"),
    AttendCase(seqs=((40, 90), (7, 7)), num_q_heads=6, window=(9, 3), causal=False, block_size=3),
    AttendCase(seqs=((70, 100),), window=(20, -1), sinks=True, dtype="float16", cache="hnd"),
    AttendCase(seqs=((1, 150), (1, 20)), num_splits=3, sinks=True, softcap=5.0, alibi="head"),
    AttendCase(seqs=((4, 150), (2, 3)), num_splits=64, alibi="sequence", lse="transposed"),
    AttendCase(seqs=((1, 700),), num_q_heads=8, num_kv_heads=1, gain=30.0, softcap=20.0),
    AttendCase(seqs=((66, 90), (1, 60), (2, 80)), num_q_heads=2, head_size=16, dtype="float16"),
    AttendCase(layout="ragged", seqs=((9, 37), (1, 50), (0, 3)), head_size=80, head_size_v=96, dtype="float16"),
    AttendCase(seqs=((30, 50), (1, 40)), key_starts=(7, 39), window=(25, 0)),
    AttendCase(seqs=((2, 40),), head_size=192, head_size_v=128, num_q_heads=2, num_kv_heads=1),
    AttendCase(seqs=((1, 30),), num_q_heads=71, num_kv_heads=1),
    AttendCase(seqs=((1, 33), (3, 5)), cache="block_first", block_size=544, with_lse=False),
    AttendCase(seqs=((2, 40), (1, 65)), tokens="uniform", block_size=32),
    AttendCase(seqs=((2, 40), (1, 90)), batch_invariant=True, sinks=True),
    AttendCase(seqs=((9, 37),), batch_invariant=True, head_size=80, window=(11, 4), causal=False, alibi="head"),
]


@pytest.mark.parametrize("case", WRITES, ids=str)
def test_write(case: WriteCase, backend, kernel_device: str) -> None:
    built = build_write(case, kernel_device)
    backend.write(built.call)
    for buffer, expected in zip(built.buffers, built.expected, strict=True):
        assert torch.equal(buffer.view(torch.uint8), expected.view(torch.uint8)), f"stored bytes differ\n{case}"


@pytest.mark.parametrize("case", MERGES, ids=str)
def test_merge(case: MergeCase, backend, kernel_device: str) -> None:
    if case.dtype == "bfloat16" and kernel_device == "cpu":
        pytest.skip("the interpreter computes with bfloat16 as if it were integers")
    built = build_merge(case, kernel_device)
    backend.merge(built.call)
    assert_merge(built)
    assert not [c.broken() for c in built.canaries if c.broken()]


@pytest.mark.parametrize("case", ATTENDS, ids=str)
def test_attend(case: AttendCase, backend, kernel_device: str) -> None:
    built = build_attend(case, kernel_device)
    assert backend.why_not(built.call.problem) == []
    backend.attend(built.call)
    assert_attend(built)
    assert not [c.broken() for c in built.canaries if c.broken()]


def test_repeats_bit_for_bit(backend, kernel_device: str) -> None:
    case = AttendCase(seqs=((3, 90), (1, 150)), num_splits=4)
    first, second = build_attend(case, kernel_device), build_attend(case, kernel_device)
    backend.attend(first.call)
    backend.attend(second.call)
    assert torch.equal(first.call.out, second.call.out)


def test_batch_invariant_rows(backend, kernel_device: str) -> None:
    """A row's bits: prefill or decode, alone or in a batch, chunks in one program or side by side."""
    case = AttendCase(seqs=((6, 70), (1, 40)), batch_invariant=True, sinks=True)
    together = build_attend(case, kernel_device)
    backend.attend(together.call)
    call = together.call
    for row in range(6):
        alone = build_attend(case, kernel_device).call
        alone.problem = AttendCase(seqs=((1, 70),), batch_invariant=True, sinks=True).problem(kernel_device)
        alone.q, alone.out, alone.lse = call.q[row : row + 1], torch.zeros_like(call.out[:1]), call.lse[:, :1].clone()
        alone.query_start_loc = torch.tensor([0, 1], dtype=torch.int32, device=kernel_device)
        alone.seq_lens = torch.tensor([70 - 5 + row], dtype=torch.int32, device=kernel_device)
        alone.block_table = call.block_table[:1]
        backend.attend(alone)
        assert torch.equal(alone.out[0], call.out[row]), f"row {row}"
        assert torch.equal(alone.lse[:, 0], call.lse[:, row]), f"row {row}"


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("invariant", [False, True])
def test_nan_reaches_the_rows_that_see_it_and_no_other(
    where: str, invariant: bool, backend, kernel_device: str
) -> None:
    case = AttendCase(seqs=((12, 40), (1, 40)), num_q_heads=2, block_size=16, batch_invariant=invariant)
    clean, dirty = build_attend(case, kernel_device), build_attend(case, kernel_device)
    position = 33  # rows 0 to 4 of the first sequence stand at 28 to 32 and do not see it
    block = int(dirty.call.block_table[0, position // 16])
    for value, at in ((float("nan"), 0), (float("inf"), 1)):
        cache = dirty.call.k if where == "key" else dirty.call.v
        cache[block, position % 16, at, 3] = value
    backend.attend(clean.call)
    backend.attend(dirty.call)
    unseen = torch.ones(13, dtype=torch.bool)
    unseen[5:12] = False
    assert torch.equal(dirty.call.out[unseen], clean.call.out[unseen]), "a value reached rows that do not see its key"
    seen = dirty.call.out[5:12]
    if where == "value":
        assert not seen[..., 3].isfinite().any()
        assert torch.equal(seen[..., 4:], clean.call.out[5:12][..., 4:])
    else:
        assert not seen[:, 0].isfinite().any()
