"""``pagetile bench``: the gate, the rows, and what it says to a request that makes no sense. No timing is asserted."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from pagetile.cli.app import app
from pagetile.cli.bench import cases, contenders, run, timing
from pagetile.cli.bench.cases import AttendWork, WriteWork, attend_error, attend_inputs, write_inputs
from pagetile.cli.bench.contenders import MAKERS, Contender

TINY = AttendWork("tiny", ((1, 40), (3, 20)), q_heads=4, kv_heads=2, size=16, block=4)
SMALL = WriteWork(7, "HND", heads=2, size=16, block=4)
PACKED = WriteWork(7, packed=True, heads=2, size=16, block=4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    suites = {"write": [SMALL, PACKED], "decode": [TINY]}
    monkeypatch.setattr(cases, "CPU_SUITES", suites)
    monkeypatch.setattr(timing, "machine_rates", lambda _: {"copy_GBps": 2.0, "matmul_TFLOPs": 0.5})
    monkeypatch.setattr(run, "wall_us", lambda calls: ([call() for call in calls], (3.0, "wall"))[1])


def ask(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.usefixtures("small")
def test_rows_and_csv(tmp_path: Path) -> None:
    code, said = ask("--csv", tmp_path / "rows.csv")
    assert code == 0, said
    assert "torch" in said
    with (tmp_path / "rows.csv").open() as file:
        found = list(csv.DictReader(file))
    assert tuple(found[0]) == run.FIELDS
    assert {(row["case"], row["who"]) for row in found} == {
        *((work.name, who) for work in (SMALL, PACKED) for who in ("pagetile", "torch")),
        *(("tiny", who) for who in ("pagetile", "pagetile-invariant")),  # torch has no dense form of ragged lengths
    }
    for row in found:
        assert row["us"] == "3"
        assert float(row["GBps"]) == pytest.approx(2 * float(row["of_copy"]), rel=1e-3)
        assert row["torch"] == torch.__version__
        assert row["device"].startswith("CPU")
        assert row["who"] == "torch" or float(row["error"]) < 1e-5


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suite", "read"), "--suite is 'read'; it must be one of write, decode"),
        (("--who", "vllm"), "--who is 'vllm'; it must be one of pagetile, pagetile-invariant, torch"),
        (("--only", "nothing"), "--only 'nothing' is part of no case of write, decode"),
        (("--device", "tpu"), "--device is 'tpu'; it must be cuda, cpu or auto"),
    ],
)
def test_a_request_that_makes_no_sense(arguments: tuple[str, ...], words: str) -> None:
    code, said = ask(*arguments)
    assert code == 2
    assert words in " ".join(said.split())


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, said = ask("--device", "cuda")
    assert code == 2
    assert "torch sees no CUDA device" in said


@pytest.mark.usefixtures("small")
def test_a_wrong_result_has_no_time() -> None:
    def wrong(_: AttendWork, x: dict) -> object:
        return lambda: x["out"].zero_()

    def lost(_: WriteWork, x: dict) -> object:
        return lambda: x["key_cache"].zero_()

    said: list[str] = []
    liar = Contender("liar", write=lost, attend=wrong)
    assert list(run.rows([liar], [TINY, SMALL], "cpu", {"copy_GBps": 1, "matmul_TFLOPs": 1}, said.append)) == []
    assert "liar is wrong on tiny: relative error 1.00e+00" in said[0]
    assert "liar stored another key on write_HND_T7" in said[1]


@pytest.mark.parametrize("who", ["pagetile", "pagetile-invariant"])
def test_the_yardstick_of_the_gate(who: str) -> None:
    x = attend_inputs(TINY, 0, "cpu")
    call = MAKERS[who]().attend(TINY, x)
    call()
    assert attend_error(TINY, x) < 1e-5
    x["out"][-1] *= 1.1
    assert attend_error(TINY, x) > run.GATE


def test_a_packed_source_is_a_slice_of_a_row() -> None:
    x = write_inputs(PACKED, 0, "cpu")
    assert x["key"].stride(0) == x["value"].stride(0) == (4 + 2) * 2 * 16
    assert x["value"].data_ptr() - x["key"].data_ptr() == 2 * 16 * 4


def test_floors() -> None:
    """Bytes of each key and value once, queries and results once; operations of the visible area."""
    assert TINY.floor_bytes == (40 + 20) * 2 * 16 * 2 * 2 + 2 * 4 * 4 * 16 * 2
    assert cases.floor_bytes(TINY, "cpu") == 2 * TINY.floor_bytes
    assert TINY.flops == 4 * (40 + 18 + 19 + 20) * 4 * 16
    assert SMALL.floor_bytes == 7 * 2 * 16 * 2 * 2 * 2


def test_absent_contenders_say_so() -> None:
    for name in ("vllm", "flash-attn", "flashinfer"):
        contender = contenders.MAKERS[name]()
        assert contender.missing or contender.attend is not None


def test_the_clocks() -> None:
    calls: list[int] = []
    us, how = timing.wall_us([lambda: calls.append(0), lambda: calls.append(1)], budget_ms=1)
    assert us > 0
    assert how == "wall"
    assert abs(calls.count(0) - calls.count(1)) <= len(calls) // 2
