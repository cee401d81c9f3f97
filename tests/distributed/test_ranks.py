"""Real processes over gloo: equal to one rank, and never a hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)


def run(program: str, world: int, folder: Path, limit: float = 300) -> None:
    """Start the ranks and hold them to their time; whatever happens, none is left behind."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(Path(__file__).with_name("rank_programs.py")), program]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    said = []
    try:
        for rank in ranks:
            said.append(rank.communicate(timeout=limit)[0])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    wrong = [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]
    assert not wrong, wrong[0][-4000:]


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    run("equal", 2, tmp_path)


def test_four_ranks_equal_one_by_token_and_by_head(tmp_path: Path) -> None:
    run("four", 4, tmp_path)


@pytest.mark.parametrize("mode", ["all_to_all", "reduce_scatter"])
def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path, mode: str) -> None:
    run(f"gone:dies:{mode}", 3, tmp_path, limit=120)


def test_a_rank_that_stalls_is_an_error_on_the_others(tmp_path: Path) -> None:
    run("gone:stalls:all_to_all", 2, tmp_path, limit=120)
