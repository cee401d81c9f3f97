"""The CPU's quantised writes: the reference's bytes, with each width of vectors and any number of threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpu_kit import run_python

from pagetile.backends.cpu import CpuBackend
from pagetile.backends.cpu.isa import WIDTHS, host_isa
from pagetile.contracts.dtypes import QUANTISED
from pagetile.contracts.errors import SlotError
from pagetile.testing import WriteCase, build_write, first_difference, same_bits


@pytest.mark.parametrize("isa", WIDTHS)
def test_every_pattern_and_every_boundary(isa: str, tmp_path: Path) -> None:
    if WIDTHS[isa] > host_isa().width:
        pytest.skip(f"this CPU has no {isa}")
    done = run_python(
        "import quantise_probe; print(quantise_probe.WIDTH)", PAGETILE_CPU_ISA=isa, PAGETILE_CACHE_DIR=str(tmp_path)
    )
    assert done.stdout.strip() == str(WIDTHS[isa])


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("scale", ["float", "head", "token_head"])
def test_threads_store_the_same(kind: str, scale: str) -> None:
    case = WriteCase(num_tokens=700, num_kv_heads=3, head_size=72, kind=kind, scale=scale, loud=True, skip=5)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            built = build_write(case)
            CpuBackend().write(built.call)
            for got, right in zip(built.buffers, built.expected, strict=True):
                assert same_bits(got, right), first_difference(got, right)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [9, 700])
def test_a_bad_slot_leaves_cache_and_scales_alone(tokens: int) -> None:
    built = build_write(WriteCase(num_tokens=tokens, num_kv_heads=3, head_size=72, kind="int8", scale="token_head"))
    built.call.slot_mapping[-1] = 2**40
    before = [buffer.clone() for buffer in built.buffers]
    with pytest.raises(SlotError, match=rf"slot_mapping\[{tokens - 1}\] is {2**40}"):
        CpuBackend().write(built.call)
    assert all(same_bits(a, b) for a, b in zip(built.buffers, before, strict=True))


def test_the_plan_says_how() -> None:
    spans = {}
    for scale in ("float", "head", "token_head"):
        call = build_write(WriteCase(num_kv_heads=3, kind="fp8_e4m3", scale=scale)).call
        plan = CpuBackend().plan(call)
        spans[scale] = plan.k_spans
    assert spans == {"float": 1, "head": 3, "token_head": 3}
