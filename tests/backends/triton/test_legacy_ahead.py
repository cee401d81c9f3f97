"""The kernels of the legacy path, of gathers, copies and the fused write compile for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall, WriteCall
from pagetile.backends.triton.tuning import DeviceFacts
from pagetile.backends.verbs import CopyCall, FusedWriteCall, GatherCall, PartitionedCall
from pagetile.contracts.problem import AttendProblem, CopyProblem, FusedWriteProblem, GatherProblem, WriteProblem

pytest.importorskip("triton")
if __import__("os").environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled under the interpreter", allow_module_level=True)

from ahead import Report, compile_launch

BLOCK, HEADS, SIZE, BLOCKS = 16, 8, 128, 64
STORED = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(run: Callable[[Callable[..., None]], None], capability: int) -> list[Report]:
    """What a launcher asks for, compiled instead of run."""
    reports = []
    run(lambda _, launch, *tensors: reports.append(compile_launch(launch, tensors, capability)))
    return reports


def packed_caches(kind: str) -> tuple[Tensor, Tensor]:
    x = 16 // STORED[kind].itemsize
    return (
        empty(BLOCKS, HEADS, SIZE // x, BLOCK, x, dtype=STORED[kind]),
        empty(BLOCKS, HEADS, SIZE, BLOCK, dtype=STORED[kind]),
    )


def attend_call(kind: str, batch: int = 64, queries: int = 1, states: bool = False) -> AttendCall:
    scale = "none" if kind == "bfloat16" else "tensor"
    problem = AttendProblem(
        "cuda", "bfloat16", kind, "xpacked", batch, batch * queries, queries, 4096, 32, HEADS, SIZE, SIZE, BLOCK,
        alibi=True, scale=scale,
    )  # fmt: skip
    q, one = empty(batch * queries, 32, SIZE), empty(1, dtype=torch.float32)
    k, v = packed_caches(kind)
    rest: dict[str, Any] = {
        "problem": problem, "q": q, "k": k, "v": v, "out": torch.empty_like(q), "lse": None,
        "query_start_loc": empty(batch + 1, dtype=torch.int32), "seq_lens": empty(batch, dtype=torch.int32),
        "key_start_loc": None, "block_table": empty(batch, 256, dtype=torch.int32), "scale": 0.1,
        "alibi_slopes": empty(32, dtype=torch.float32),
    }  # fmt: skip
    if kind != "bfloat16":
        rest |= {"k_scale": one, "v_scale": one}
    if not states:
        return AttendCall(**rest)
    shape = (batch, 32, 8)
    sums, maxima = empty(*shape, dtype=torch.float32), empty(*shape, dtype=torch.float32)
    return PartitionedCall(**rest, exp_sums=sums, max_logits=maxima, tmp_out=empty(*shape, SIZE))


SPILLS_ALLOWED = 16
"""Bytes; a register or two of the prologue."""


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("how", ["states", "one_pass", "prefill"])
def test_attention(how: str, kind: str, capability: int) -> None:
    from pagetile.backends.triton.legacy_calls import attend_packed

    facts = DeviceFacts(capability=(capability // 10, 0), fp8=capability >= 89)
    call = attend_call(kind, 4 if how == "prefill" else 512, 64 if how == "prefill" else 1, how == "states")
    error = empty(8, dtype=torch.int64)
    reports = compiled(lambda on: attend_packed(call, facts, facts.fp8, error, on), capability)
    assert len(reports) == {"states": 2, "one_pass": 1, "prefill": 2}[how]
    for report in reports:
        assert report.spilled <= SPILLS_ALLOWED, report


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", STORED)
def test_writes_and_gathers(kind: str, capability: int) -> None:
    from pagetile.backends.triton.fused import fused_launch, fused_tensors
    from pagetile.backends.triton.gather import gather_launch, gather_tensors
    from pagetile.backends.triton.legacy_write import write_packed_launch, write_packed_tensors

    scale = "none" if kind == "bfloat16" else "tensor"
    by = None if kind == "bfloat16" else empty(1, dtype=torch.float32)
    error, slots = empty(8, dtype=torch.int64), empty(4096, dtype=torch.int64)
    row = empty(4096, 6 * HEADS, SIZE)
    key, value = row[:, 4 * HEADS : 5 * HEADS], row[:, 5 * HEADS :]
    native = capability >= 89

    def written(layout: Any, caches: tuple[Tensor, Tensor]) -> WriteCall:
        problem = WriteProblem("cuda", "bfloat16", kind, layout, 4096, HEADS, SIZE, SIZE, BLOCK, scale=scale)
        return WriteCall(problem, key, value, *caches, slots, by, by)

    call = written("xpacked", packed_caches(kind))
    reports = [compile_launch(write_packed_launch(call, native), write_packed_tensors(call, error), capability)]
    k, v = (empty(BLOCKS, BLOCK, HEADS, SIZE, dtype=STORED[kind]) for _ in "kv")
    rows = empty(4096, HEADS, SIZE), empty(4096, HEADS, SIZE)
    gather = GatherCall(
        GatherProblem("cuda", "bfloat16", kind, 4096, HEADS, SIZE, SIZE, BLOCK, scale), k, v, slots, *rows, by, by
    )
    reports.append(compile_launch(gather_launch(gather, native), gather_tensors(gather, error), capability))
    for interleaved in (False, True):
        write, weight, table = written("paged", (k, v)), empty(SIZE), empty(4096, SIZE // 2)
        problem = FusedWriteProblem(write.problem, 4 * HEADS, SIZE, interleaved, True)
        query = row[:, : 4 * HEADS]
        fused = FusedWriteCall(problem, write, query, query, slots, table, table, weight, weight)
        reports.append(compile_launch(fused_launch(fused, native), fused_tensors(fused, error), capability))
    for report in reports:
        assert report.spilled <= SPILLS_ALLOWED, report


@pytest.mark.parametrize("capability", [80, 90])
def test_copies(capability: int) -> None:
    from pagetile.backends.triton.blocks import copy_blocks

    caches = [empty(BLOCKS, BLOCK, HEADS, SIZE) for _ in range(4)]
    problem = CopyProblem("cuda", 4, BLOCK * HEADS * SIZE * 2)
    call = CopyCall(problem, caches, caches, [], [torch.tensor([[0, 1], [2, 3]])])
    (report,) = compiled(lambda on: copy_blocks(call, on), capability)
    assert report.spilled <= SPILLS_ALLOWED, report
