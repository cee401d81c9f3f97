"""Element conversions, exp2 and tanh of the kernels, exhaustively, with each width of vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_kit import run_python

from pagetile.backends.cpu.isa import WIDTHS, host_isa


@pytest.mark.parametrize("isa", WIDTHS)
def test_conversions_and_functions(isa: str, tmp_path: Path) -> None:
    if WIDTHS[isa] > host_isa().width:
        pytest.skip(f"this CPU has no {isa}")
    done = run_python(
        "import convert_probe; print(convert_probe.W)", PAGETILE_CPU_ISA=isa, PAGETILE_CACHE_DIR=str(tmp_path)
    )
    assert done.stdout.strip() == str(WIDTHS[isa])
