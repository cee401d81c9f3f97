"""What tuning plans for the benchmark and for each feature compiles for sm_90a: no spills, no hazards, short loops.

A kernel whose hash is in ``known_kernels.json`` is not compiled again: the table has what came out. Needs Triton, no
GPU; ``hopper_ahead.py`` compiles what is missing and rewrites the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Gluon has no interpreter", allow_module_level=True)

from hopper_ahead import BENCHMARK, EACH_FEATURE, HERE, call_of, identity, launches, read_known

from pagetile.backends.hopper.tuning import DeviceFacts

CASES = (*BENCHMARK, *EACH_FEATURE)
MAX_KERNELS = 60

MAX_SPILLED = 128
"""Bytes, outside the loops; inside them nothing may spill."""
EXCUSED = {"window": 1, "key_starts": 1, "softcap": 8, "alibi": 8}
"""Accesses to local memory that loops of a feature may have: of a masked step, or of edited scores."""
COPY_BUDGET = 460
"""Instructions of a loop that loads a tile; the tile's two products take about 2000 cycles of a multiprocessor."""
LOOP_BUDGET = {
    "prefill": {16: 480, 12: 440, 20: 430},
    "decode": {16: 460, 12: 420, 20: 420},
}
"""Instructions of the loop without masks, by warpgroup products in a step, where nothing edits scores."""


def excused(case) -> int:
    """Accesses to local memory that loops of a case may have."""
    if len(case.features) > 1:  # no model has them all
        return 48
    return sum(EXCUSED.get(feature, 0) for feature in case.features) + (case.block & (case.block - 1) != 0)


def test_the_cases_are_few() -> None:
    seen = {identity(launch, call, tensors) for call in map(call_of, CASES) for _, launch, tensors in launches(call)}
    assert len(seen) <= MAX_KERNELS


def test_launches_pass_arguments_in_the_order_of_the_signature() -> None:
    for case in CASES:
        for _, launch, tensors in launches(call_of(case)):
            names = launch.kernel.arg_names
            assert len(names) == len(launch.boxes) + len(tensors) + len(launch.scalars) + len(launch.constants)
            assert names[-len(launch.constants) :] == list(launch.constants)
            assert names[:3] == ["q_map", "k_map", "v_map"]
            assert names[len(launch.boxes) + len(tensors)] == "out_token"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name.replace("/", "_"))
def test_no_spills_no_hazards(case, record_property) -> None:
    call = call_of(case)
    for name, launch, tensors in launches(call):
        key = identity(launch, call, tensors)
        if key not in read_known():  # in a process of its own: a failing compiler may abort
            subprocess.run([sys.executable, str(HERE / "hopper_ahead.py"), case.name], check=True, cwd=Path.cwd())
        row = read_known().get(key)
        assert row is not None, f"{case.name} {name} does not compile; run tests/backends/hopper/hopper_ahead.py"
        record_property("report", str(row))
        assert row["spilled_in_loops"] <= excused(case), row
        assert row["spilled"] <= MAX_SPILLED, row
        assert row["hazards"] == 0, row
        assert row["copy_instructions"] <= COPY_BUDGET, row
        if not {"softcap", "alibi"} & set(case.features):
            assert row["loop_instructions"] <= LOOP_BUDGET[name][row["loop_products"]], row
        assert row["products"] > 0, row
        assert row["shared"] <= DeviceFacts().shared_bytes, row
