"""Plans of the Hopper backend, and what it refuses: pure functions, no Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagetile.backends.hopper.backend import HopperBackend, problem_reasons
from pagetile.backends.hopper.tuning import DeviceFacts, box_keys, padded_size, plan_attend
from pagetile.contracts.errors import BackendError
from pagetile.contracts.problem import AttendProblem, MergeProblem

H200 = DeviceFacts()
RESERVED = 1024
"""Bytes of shared memory that each program takes besides its own."""
A_MULTIPROCESSOR = 233472


def problem(seqs: int = 1, queries: int = 1, keys: int = 8192, **changes) -> AttendProblem:
    base = AttendProblem(
        device="cuda", dtype="bfloat16", kind="bfloat16", layout="paged", num_seqs=seqs, num_tokens=seqs * queries,
        max_q_len=queries, max_k_len=keys, num_q_heads=32, num_kv_heads=8, head_size=128, head_size_v=128,
        block_size=16, window=(-1, 0),
    )  # fmt: skip
    return replace(base, **changes)


SHAPES = [
    {"num_q_heads": hq, "num_kv_heads": hk, "head_size": d, "head_size_v": dv}
    for hq, hk in ((32, 8), (16, 1), (9, 3), (32, 32), (64, 1), (15, 3))
    for d, dv in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (16, 256))
]


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: "{num_q_heads}_{num_kv_heads}_{head_size}_{head_size_v}".format(**s)
)
@pytest.mark.parametrize(("seqs", "queries"), [(1, 1), (64, 1), (256, 1), (16, 4), (1, 8192), (8, 1024)])
def test_plans_fit(shape: dict, seqs: int, queries: int) -> None:
    plan = plan_attend(problem(seqs, queries, **shape), H200)
    assert plan.prefill or plan.decode
    if plan.prefill:
        assert plan.prefill.shared_bytes + 2048 <= H200.shared_bytes
        assert plan.prefill.tokens * plan.prefill.packed == 128
    if plan.decode:
        assert plan.decode.max_q * plan.decode.packed <= 64
        assert plan.decode.held >= plan.decode.max_q * plan.decode.packed
        a_program = plan.decode.shared_bytes + 1024 + RESERVED
        assert a_program * -(-plan.decode.programs // H200.processors) <= A_MULTIPROCESSOR
        states, elements = plan.decode.part
        assert plan.decode.dv % elements == 0
        assert states * plan.decode.held * elements <= 8192


def test_each_row_goes_to_the_kernel_of_its_length() -> None:
    assert plan_attend(problem(64, 16), H200).prefill is None
    assert plan_attend(problem(64, 17), H200).decode is None
    mixed = plan_attend(problem(64, 2048, num_tokens=2048 + 63), H200)
    assert mixed.prefill
    assert mixed.decode
    assert mixed.prefill.min_q == mixed.decode.max_q == 16
    assert mixed.decode.programs < H200.processors


def test_a_share_of_the_device_follows_the_work() -> None:
    few, many = (plan_attend(problem(seqs, 2048, num_tokens=2048 + seqs - 1), H200).decode for seqs in (8, 200))
    assert few
    assert many
    assert few.programs < many.programs < H200.processors


def test_plans_print_their_reasons() -> None:
    text = str(plan_attend(problem(64, 2048, num_tokens=2111), H200))
    for word in ("prefill: 32 tokens x 4 heads by 128 keys", "decode: up to 16 tokens x 4 heads", "some are shorter"):
        assert word in text


def test_boxes_divide_blocks_and_tiles() -> None:
    assert [box_keys(block, 128) for block in (8, 16, 24, 48, 128, 256, 544)] == [8, 16, 8, 16, 128, 128, 32]
    assert [padded_size(d) for d in (1, 64, 65, 128, 192, 256)] == [64, 64, 128, 128, 256, 256]


REFUSED = [
    ({"block_size": 17}, "multiples of 8.*17"),
    ({"head_size": 264}, "up to 256.*264/128"),
    ({"num_q_heads": 65, "num_kv_heads": 1}, "up to 64 query heads.*65"),
    ({"dtype": "float32", "kind": "float32"}, "float32 is not one of"),
    ({"kind": "fp8_e4m3"}, "over a cache of fp8_e4m3"),
    ({"layout": "ragged", "block_size": 0}, "keys are ragged"),
    ({"aligned": False}, "multiples of 16 bytes"),
    ({"batch_invariant": True}, "batch_invariant.*triton"),
    ({"num_splits": 4}, "no number of splits"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[str(next(iter(c))) for c, _ in REFUSED])
def test_what_it_does_not_take_is_a_reason(change: dict, reason: str) -> None:
    import re

    found = problem_reasons(problem(**change))
    assert len(found) == 1, found
    assert re.search(reason, found[0])


def test_it_takes_everything_else() -> None:
    assert not problem_reasons(
        problem(softcap=True, alibi=True, sinks=True, lse=True, key_starts=True, window=(5, 3), head_size=80)
    )


def test_it_neither_writes_nor_merges() -> None:
    assert "only attends" in problem_reasons(MergeProblem("cuda", "bfloat16", 3, 4, 64))[0]
    backend = HopperBackend()
    call = type("Call", (), {"problem": MergeProblem("cuda", "bfloat16", 3, 4, 64)})()
    with pytest.raises(BackendError, match="only attends"):
        backend.merge(call)


def test_why_not_names_the_device() -> None:
    assert any("on cpu" in reason for reason in HopperBackend().why_not(problem(device="cpu")))
