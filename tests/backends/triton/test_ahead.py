"""The kernels compile for GPUs that are not here; registers and spills of the benchmark's plans.

Triton keeps what it compiled under the hash of the source, so a second run costs next to nothing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagetile.backends.protocol import AttendCall, WriteCall
from pagetile.backends.triton.tuning import DeviceFacts, plan_attend, plan_write
from pagetile.contracts.problem import AttendProblem, WriteProblem
from pagetile.reference.quantise import STORED_AS

pytest.importorskip("triton")
if __import__("os").environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled under the interpreter", allow_module_level=True)

from ahead import attend_reports, compile_launch

TARGETS = {
    80: DeviceFacts(108, 166912, (8, 0), fp8=False),
    90: DeviceFacts(),
    100: DeviceFacts(148, 232448, (10, 0)),
}
SPILLS_ALLOWED = {80: 48, 90: 0, 100: 16}
"""Bytes; a few registers of the prologue on the targets that no one has tuned on."""

SPILLS_KNOWN = {("prefill_256", 90): 164, ("prefill_256", 100): 164}
"""Plans that spill and stay, with their reason in the tuning."""

PLANS = {
    "decode": (64, 1, 4096, 32, 8, 128, 16),
    "decode_one": (1, 1, 8192, 32, 8, 128, 16),
    "decode_mha": (64, 1, 4096, 32, 32, 128, 16),
    "decode_mqa": (64, 1, 4096, 16, 1, 128, 16),
    "decode_64": (64, 1, 4096, 9, 3, 64, 16),
    "decode_256": (64, 1, 4096, 16, 8, 256, 16),
    "decode_page_64": (64, 1, 4096, 32, 8, 128, 64),
    "four_tokens": (16, 4, 8192, 32, 8, 128, 16),
    "prefill": (1, 8192, 8192, 32, 8, 128, 16),
    "prefill_short": (8, 1024, 1024, 32, 8, 128, 16),
    "prefill_64": (1, 8192, 8192, 32, 8, 64, 16),
    "prefill_256": (1, 8192, 8192, 16, 8, 256, 16),
    "prefix": (1, 64, 8192, 32, 8, 128, 16),
}


def attend_call(
    seqs: int, queries: int, keys: int, q_heads: int, kv_heads: int, size: int, block: int, kind: str = "bfloat16",
    scale: str = "none", **flags,
) -> AttendCall:  # fmt: skip
    """A call over tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    store = STORED_AS.get(kind, torch.bfloat16)
    shapes = {"head": (kv_heads,), "token_head": (64, block, kv_heads)}
    scales = empty(*shapes[scale], dtype=torch.float32) if scale in shapes else None
    problem = AttendProblem(
        device="cuda", dtype="bfloat16", kind=kind, scale=scale, layout="paged", num_seqs=seqs,
        num_tokens=seqs * queries, max_q_len=queries, max_k_len=keys, num_q_heads=q_heads, num_kv_heads=kv_heads,
        head_size=size, head_size_v=size, block_size=block, window=(-1, 0), **flags,
    )  # fmt: skip
    k, v = (empty(64, block, kv_heads, size, dtype=store) for _ in "kv")
    return AttendCall(
        problem=problem, q=empty(seqs * queries, q_heads, size), k=k, v=v, out=empty(seqs * queries, q_heads, size),
        lse=None, query_start_loc=empty(seqs + 1, dtype=torch.int32), seq_lens=empty(seqs, dtype=torch.int32),
        key_start_loc=None, block_table=empty(seqs, -(-keys // block), dtype=torch.int32), scale=size**-0.5,
        window=(-1, 0), k_scale=scales, v_scale=scales,
    )  # fmt: skip


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("name", PLANS)
def test_benchmark_plans_do_not_spill(name: str, capability: int, record_property) -> None:
    call = attend_call(*PLANS[name])
    for report in attend_reports(call, plan_attend(call.problem, TARGETS[capability]), capability):
        record_property("report", str(report))
        assert report.spilled <= SPILLS_KNOWN.get((name, capability), SPILLS_ALLOWED[capability]), report
        assert report.shared <= TARGETS[capability].shared_bytes, report


QUANTISED = [
    ("decode", "fp8_e4m3", "none"),
    ("decode", "fp8_e5m2", "head"),
    ("decode", "int8", "token_head"),
    ("decode_one", "fp8_e4m3", "none"),
    ("four_tokens", "fp8_e4m3", "none"),
    ("prefill", "fp8_e4m3", "none"),
    ("prefill", "int8", "token_head"),
    ("prefill_short", "fp8_e4m3", "head"),
]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("name", "kind", "scale"), QUANTISED)
def test_quantised_plans_do_not_spill(name: str, kind: str, scale: str, capability: int, record_property) -> None:
    call = attend_call(*PLANS[name], kind, scale)
    for report in attend_reports(call, plan_attend(call.problem, TARGETS[capability]), capability):
        record_property("report", str(report))
        assert report.spilled <= SPILLS_ALLOWED[capability], report
        assert report.shared <= TARGETS[capability].shared_bytes, report


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("scale", ["number", "head", "token_head"])
def test_quantised_write_compiles(scale: str, kind: str, capability: int, record_property) -> None:
    from pagetile.backends.triton.calls import write_launch
    from pagetile.backends.triton.scales import as_bytes

    granularity = "tensor" if scale == "number" else scale
    problem = WriteProblem("cuda", "bfloat16", kind, "paged", 8192, 8, 128, 128, 16, scale=granularity)
    rows = torch.empty(8192, 8, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(64, 16, 8, 128, dtype=STORED_AS[kind], device="meta")
    slots = torch.empty(8192, dtype=torch.int64, device="meta")
    shapes = {"head": (8,), "token_head": (64, 16, 8)}
    scales = torch.empty(shapes[scale], device="meta") if scale in shapes else 0.3
    error = torch.empty(8, dtype=torch.int64, device="meta")
    launch = write_launch(
        WriteCall(problem, rows, rows, cache, cache, slots, scales, scales), plan_write(problem, TARGETS[capability])
    )
    given = [scales if isinstance(scales, torch.Tensor) else error] * 2
    report = compile_launch(launch, (rows, rows, *[as_bytes(cache)] * 2, slots, *given, error), capability)
    record_property("report", str(report))
    assert report.spilled == 0
    assert report.registers <= 128


@pytest.mark.parametrize("capability", TARGETS)
def test_batch_invariant_compiles(capability: int) -> None:
    call = attend_call(8, 4, 4096, 32, 8, 128, 16, batch_invariant=True)
    names = [r.kernel for r in attend_reports(call, plan_attend(call.problem, TARGETS[capability]), capability)]
    assert names == ["invariant_kernel", "combine_in_order_kernel"]


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("span", [True, False])
@pytest.mark.parametrize("block", [16, 24])
def test_write_compiles(capability: int, span: bool, block: int) -> None:
    from pagetile.backends.triton.calls import write_launch

    problem = WriteProblem("cuda", "bfloat16", "bfloat16", "paged", 8192, 8, 128, 128, block, heads_contiguous=span)
    rows = torch.empty(8192, 8, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(64, block, 8, 128, dtype=torch.bfloat16, device="meta")
    slots = torch.empty(8192, dtype=torch.int64, device="meta")
    call = WriteCall(replace(problem), rows, rows, cache, cache, slots)
    error = torch.empty(8, dtype=torch.int64, device="meta")
    report = compile_launch(
        write_launch(call, plan_write(problem)), (rows, rows, cache, cache, slots, error), capability
    )
    assert report.spilled == 0
    assert report.registers <= 128
