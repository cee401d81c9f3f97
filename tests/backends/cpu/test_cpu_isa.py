"""Vectors of every width: which are chosen, that narrow ones are kept to, that all are right."""

from __future__ import annotations

import pytest
from cpu_kit import run_python

from pagetile.backends.cpu.isa import choose_isa, host_isa
from pagetile.contracts.errors import ArgumentError

AVX2 = {"avx2": True, "fma": True, "f16c": True}
AVX512 = {**AVX2, "avx512f": True, "avx512bw": True, "avx512vl": True}
AMX = {**AVX512, "avx512bf16": True, "amx-tile": True, "amx-bf16": True}


@pytest.mark.parametrize(
    ("features", "forced", "name", "width"),
    [
        (AVX512, None, "avx512", 16),
        ({**AVX512, "avx512vl": False}, None, "avx2", 8),
        (AVX2, None, "avx2", 8),
        ({"avx2": True}, None, "generic", 4),
        ({"neon": True}, None, "generic", 4),
        ({}, None, "generic", 4),
        ({**AVX512, "avx512bf16": True}, None, "avx512bf16", 16),
        (AMX, None, "amx", 16),
        ({**AMX, "avx512bf16": False}, None, "avx512", 16),
        ({**AMX, "amx-bf16": False}, None, "avx512bf16", 16),
        (AVX512, "avx2", "avx2", 8),
        (AMX, "avx2", "avx2", 8),
        (AVX512, "generic", "generic", 4),
    ],
)
def test_choice(features: dict[str, bool], forced: str | None, name: str, width: int) -> None:
    isa = choose_isa(features, forced)
    assert (isa.name, isa.width) == (name, width)
    assert (isa.features is not None) == (forced is not None)
    if isa.features is not None:
        assert "-avx512f" in isa.features
        assert "+avx512" not in isa.features
        assert "+amx" not in isa.features


@pytest.mark.parametrize(("forced", "dot"), [("amx", "amx"), ("avx512bf16", "bf16"), ("avx512", "")])
def test_products_are_chosen_by_name_and_vectors_stay(forced: str, dot: str) -> None:
    isa = choose_isa(AMX, forced)
    assert (isa.name, isa.width, isa.dot, isa.features) == (forced, 16, dot, None)


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="avx512f"):
        choose_isa(AVX2, "avx512")
    with pytest.raises(ArgumentError, match="must be one of amx, avx512bf16, avx512, avx2, generic"):
        choose_isa(AVX2, "sse9")


ATTEND = """
import re, torch
from cpu_kit import attend_call, truth
from pagetile.backends.cpu import CpuBackend
from pagetile.backends.cpu.kernels import attend, prepare, score, value, weigh
kernels = [prepare.PREPARE, attend.ATTEND, weigh.WEIGH["float32"], score.SCORE["float32"], value.ADD["float32"]]
text = "".join(kernel.assembly() for kernel in kernels)
for pattern in ("zmm", "[xy]mm(?:1[6-9]|[23][0-9])", "vfmadd"):
    print(len(re.findall(pattern, text)))
worst = 0.0
for size in (64, 72, 7):
    call = attend_call([1, 9, 3], [130, 9, 1100], size=size)
    CpuBackend().attend(call)
    worst = max(worst, (call.out - truth(call).out).abs().max().item())
print(worst < 2e-6)
"""


def test_avx2_is_kept_to(tmp_path) -> None:
    """No 512-bit register, and none of the registers that only AVX-512 encodes, in any kernel of an attention."""
    if host_isa().name == "generic":
        pytest.skip("this CPU has no AVX2")
    done = run_python(ATTEND, PAGETILE_CPU_ISA="avx2", PAGETILE_CACHE_DIR=str(tmp_path))
    zmm, high, fused, right = done.stdout.split()
    assert (zmm, high, right) == ("0", "0", "True")
    assert int(fused) > 50


def test_generic_is_right(tmp_path) -> None:
    done = run_python(ATTEND, PAGETILE_CPU_ISA="generic", PAGETILE_CACHE_DIR=str(tmp_path))
    assert done.stdout.split()[-1] == "True"


def test_avx512_is_used_where_it_is(tmp_path) -> None:
    if host_isa().width != 16:
        pytest.skip("this CPU has no AVX-512")
    code = """
from pagetile.backends.cpu.kernels.score import SCORE
print(SCORE["float32"].assembly().count("zmm"))
"""
    assert int(run_python(code, PAGETILE_CACHE_DIR=str(tmp_path)).stdout) > 100


def test_a_choice_that_comes_too_late_is_said(tmp_path) -> None:
    if host_isa().width != 16:
        pytest.skip("nothing can come too late here")
    code = """
import numba
numba.njit(lambda x: x + 1)(1)
from pagetile.backends.cpu.kernels.write import CHECK
CHECK.compile()
"""
    done = run_python(code, PAGETILE_CPU_ISA="avx2", PAGETILE_CACHE_DIR=str(tmp_path))
    assert "came too late" in done.stderr
