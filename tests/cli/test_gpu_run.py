"""The run that gathers everything on a GPU, as far as it can be tried without one."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")

from benchmarks.gpu import everything
from benchmarks.gpu.peers import peer
from pagetile.cli.bench import cases, run, timing
from pagetile.cli.bench.cases import AttendWork, WriteWork, attend_inputs

TINY = AttendWork("tiny", ((1, 40), (3, 20)), q_heads=4, kv_heads=2, size=16, block=4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    suites = {"write": [WriteWork(7, heads=2, size=16, block=4)], "decode": [TINY], "prefill": [], "mixed": []}
    monkeypatch.setattr(cases, "CPU_SUITES", suites)
    monkeypatch.setattr(timing, "machine_rates", lambda _: {"copy_GBps": 2.0, "matmul_TFLOPs": 0.5})
    monkeypatch.setattr(run, "wall_us", lambda calls: ([call() for call in calls], (3.0, "wall"))[1])


@pytest.mark.usefixtures("small")
def test_rows_and_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything.rows("pagetile", tmp_path, None, "cpu")
    monkeypatch.setattr(run, "wall_us", lambda calls: ([call() for call in calls], (6.0, "wall"))[1])
    everything.rows("pagetile-invariant", tmp_path, None, "cpu")
    everything.rows("vllm", tmp_path, tmp_path / "nothing", "cpu")
    everything.warm("pagetile", None, "cpu")
    lines = everything.table(tmp_path).splitlines()
    assert lines[0] == "| case | pagetile | pagetile-invariant | host us | of copy | TFLOP/s |"
    assert lines[2].startswith("| tiny | 3 | 6 (2.00x) |  | ")
    assert lines[3].startswith("| write_NHD_T7 | 3 |  |  | ")
    assert len({line.count("|") for line in lines[:4]}) == 1


def test_a_peer_gets_the_workload_under_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "contenders"
    folder.mkdir()
    (folder / "vtriton.py").write_text(
        "def attend(i, c):\n"
        "    assert c['hq'] == 4 and c['hk'] == 2 and c['d'] == 16 and c['bs'] == 4 and c['b'] == 2\n"
        "    assert i['qlens'] == [1, 3] and i['ctxs'] == [40, 20] and i['need'] == [10, 5] and len(i['perm']) == 15\n"
        "    return lambda: i['out'].fill_(float(i['seq'].sum()))\n"
    )
    monkeypatch.setitem(sys.modules, "contenders", None)
    del sys.modules["contenders"]
    contender = peer("vllm-triton", tmp_path)
    sys.path.remove(str(tmp_path))
    assert not contender.missing
    assert contender.write is None
    x = attend_inputs(TINY, 0, "cpu")
    contender.attend(TINY, x)()
    assert torch.equal(x["out"], torch.full_like(x["out"], 60.0))
    assert "ModuleNotFoundError" in peer("flashinfer", tmp_path).missing


def test_jobs_and_their_limits(tmp_path: Path) -> None:
    first, then = everything.jobs(everything.STAGES, tmp_path, tmp_path, 4)
    assert [job.name for job in then][:3] == ["host", "prefix", "plans"]
    assert {job.name for job in then} >= {f"rows-{who}" for who in everything.WHO}
    longest = max(job.seconds for job in first) + sum(job.seconds for job in then)
    assert longest <= 9.5 * 60  # and --minutes cuts the rest off
    assert "-n" in first[0].command
    assert everything.jobs(["host"], tmp_path, None, 1)[0] == []


def test_a_job_that_hangs_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, code in (("slow", "print('begun', flush=True); import time; time.sleep(60)"), ("wrong", "1 / 0")):
        job = everything.Job(name, [sys.executable, "-c", code], 60)
        until = time.monotonic() + (3 if name == "slow" else 30)
        everything.finish(job, everything.start(job, tmp_path), tmp_path, until)
    said = capsys.readouterr().out.splitlines()
    assert said == ["slow: exit 124: begun", "wrong: exit 1: ZeroDivisionError: division by zero"]


@pytest.mark.usefixtures("small")
def test_a_cpu_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        everything, "jobs", lambda *_: ([], [everything.Job("host", [sys.executable, "-c", "print('done')"], 30)])
    )
    asked = SimpleNamespace(minutes=0.5, stages=["host"], peers=None, device="cpu")
    everything.everything(asked, tmp_path)
    assert (tmp_path / "table.md").read_text().startswith("| case |")
