"""``pagetile doctor`` and ``pagetile warmup``."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer", reason="the command line is an extra: pip install 'pagetile[cli]'")

import torch
from typer.testing import CliRunner

from pagetile.backends import registry
from pagetile.cli.app import app
from pagetile.cli.warmup import warmup


def pagetile(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_doctor_as_json() -> None:
    result = pagetile("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu"
    assert found["devices"][0]["torch_threads"] == torch.get_num_threads()
    by_name = {entry["backend"]: entry for entry in found["backends"]}
    assert list(by_name) == list(registry.BACKENDS)
    assert by_name["reference"]["available"]
    for entry in by_name.values():
        assert entry["available"] == (not entry["why_not"]), "a backend that is not available says why"
    if not torch.cuda.is_available():
        assert "CUDA" in by_name["triton"]["why_not"][0]


def test_doctor_for_people() -> None:
    result = pagetile("doctor")
    assert result.exit_code == 0, result.output
    for name in (*registry.BACKENDS, "torch", "default model"):
        assert name in result.stdout


def test_warmup_says_why_it_cannot(monkeypatch) -> None:
    monkeypatch.setattr(registry, "load", lambda _: "numba is not installed; pip install 'pagetile[cpu]'")
    result = pagetile("warmup")
    assert result.exit_code == 2
    assert (
        result.stderr
        == "pagetile: the cpu backend is not available: numba is not installed; pip install 'pagetile[cpu]'\n"
    )


def test_warmup_compiles(monkeypatch) -> None:
    called = []

    class Fake:
        def warmup(self) -> None:
            called.append(True)

    monkeypatch.setattr(registry, "load", lambda _: Fake())
    warmup()
    assert called == [True]
