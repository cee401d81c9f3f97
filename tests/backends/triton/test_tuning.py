"""Plans are pure: same question, same plan; nothing here needs triton or a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pagetile.backends.triton.available import compiler_reasons
from pagetile.backends.triton.tuning import (
    MAX_PARTIAL_BYTES,
    DeviceFacts,
    head_parts,
    partial_bytes,
    plan_attend,
    plan_write,
)
from pagetile.contracts.problem import WriteProblem
from pagetile.testing.cases import AttendCase

DEVICE = DeviceFacts()


def plan(**case):
    return plan_attend(AttendCase(dtype="bfloat16", head_size=128, **case).problem("cuda"), DEVICE)


@pytest.mark.parametrize(
    ("size", "parts"),
    [(1, (64, 0)), (16, (64, 0)), (24, (64, 0)), (64, (64, 0)), (80, (128, 0)), (128, (128, 0)), (192, (256, 0)),
     (256, (256, 0)), (257, (256, 64)), (320, (256, 64)), (512, (512, 0)), (576, (512, 64))],
)  # fmt: skip
def test_head_parts(size: int, parts: tuple[int, int]) -> None:
    assert head_parts(size) == parts
    assert all(p == 0 or (p & (p - 1) == 0 and p >= 64) for p in parts)
    assert sum(parts) >= size


def test_decode_is_split_until_the_device_is_full() -> None:
    one = plan(seqs=((1, 8192),))
    assert one.rows is None
    assert one.split is not None
    assert one.split.combine
    assert one.split.programs > 8
    assert any("programs" in reason for reason in one.reasons)


def test_long_prefill_is_not_split() -> None:
    long = plan(seqs=((8192, 8192),))
    assert long.split is None
    assert long.rows is not None
    assert long.rows.min_q == 0


def test_mixed_batches_send_short_sequences_to_the_split_kernel() -> None:
    mixed = plan(seqs=((2048, 8192), *[(1, 4096)] * 63))
    assert mixed.rows is not None
    assert mixed.split is not None
    assert mixed.rows.min_q == mixed.split.max_q >= 1


def test_a_shared_prefix_is_split() -> None:
    """64 rows that all see one long prefix are few tiles, so the keys are spread."""
    prefix = plan(seqs=((64, 8192),), causal=False)
    assert prefix.split is not None
    assert prefix.split.programs > 1


def test_asked_splits_are_taken_unless_their_states_are_too_large() -> None:
    assert plan(seqs=((1, 900),), num_splits=7).split.programs == 7
    huge = plan(seqs=((8192, 8192),), num_splits=64, num_q_heads=32, num_kv_heads=8)
    assert huge.split.programs == 1
    assert any("too large" in reason for reason in huge.reasons)


def test_partial_states_are_bounded() -> None:
    for seqs in (((1, 131072),), ((4, 131072),) * 64, ((100, 90000),) * 3):
        problem = AttendCase(dtype="bfloat16", head_size=128, seqs=seqs, num_q_heads=32, num_kv_heads=8).problem("cuda")
        found = plan_attend(problem, DEVICE)
        if found.split is not None:
            assert partial_bytes(problem, found.split) <= MAX_PARTIAL_BYTES


def test_invariant_tiles_do_not_depend_on_the_batch() -> None:
    tiles = {
        plan(seqs=seqs, batch_invariant=True).invariant.tile
        for seqs in (((1, 10),), ((1, 100000),) * 200, ((5000, 5000), (1, 9)), ((4, 3000),) * 7)
    }
    assert len(tiles) == 1


def test_pipelines_fit_in_shared_memory() -> None:
    for shared in (101376, 166912, 232448):
        facts = replace(DEVICE, shared_bytes=shared)
        for size in (64, 80, 128, 192, 256, 576):
            for dtype in ("bfloat16", "float32"):
                for seqs in (((1, 4096),), ((4096, 4096),)):
                    case = AttendCase(dtype=dtype, head_size=size, seqs=seqs, num_q_heads=32, num_kv_heads=8)
                    found = plan_attend(case.problem("cuda"), facts)
                    for part in (found.rows, found.split):
                        if part is None:
                            continue
                        tile, item = part.tile, 4 if dtype == "float32" else 2
                        held = max(1, tile.stages - 1) * tile.keys * item * (sum(tile.d) + sum(tile.dv))
                        assert held + tile.rows * sum(tile.d) * item <= shared or tile.keys == 16


def test_write_splits_and_says_why() -> None:
    problem = WriteProblem("cuda", "bfloat16", "bfloat16", "paged", 8192, 8, 128, 128, 16)
    span, heads = plan_write(problem), plan_write(replace(problem, heads_contiguous=False))
    assert span.span
    assert not heads.span
    assert "one run" in str(span)
    assert "lie apart" in str(heads)
    assert plan_write(replace(problem, num_tokens=1)).rows == 1


def test_missing_compiler_and_headers_are_reasons(tmp_path: Path) -> None:
    reasons = compiler_reasons({"PATH": str(tmp_path)}, str(tmp_path))
    assert any("C compiler" in reason and "gcc" in reason for reason in reasons)
    assert any("Python.h" in reason and "python3-dev" in reason for reason in reasons)
    (tmp_path / "Python.h").touch()
    compiler = tmp_path / "mycc"
    compiler.touch(mode=0o755)
    assert compiler_reasons({"PATH": "", "CC": str(compiler)}, str(tmp_path)) == []
