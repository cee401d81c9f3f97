"""``docs/tour.md`` is true: each command is run in order, and prints what the tour says it prints.

A line ``...`` in the tour stands for any lines, ``...`` inside a line for any text.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagetile.cli.app import app

TOUR = Path(__file__).resolve().parents[2] / "docs" / "tour.md"
NEEDS_RUN = ("trace", "map", "audit", "view")


def commands() -> list[tuple[list[str], list[str]]]:
    """``(arguments, expected lines)`` of each console block."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", TOUR.read_text(), re.S):
        first, *lines = block.rstrip("\n").split("\n")
        assert first.startswith("$ pagetile "), f"not a command of ours: {first}"
        found.append((shlex.split(first)[2:], lines))
    return found


def matches(expected: list[str], printed: list[str]) -> bool:
    """Whether the printed lines are the expected ones."""
    if not expected:
        return not printed
    first, rest = expected[0], expected[1:]
    if first == "...":
        return any(matches(rest, printed[skip:]) for skip in range(len(printed) + 1))
    if not printed:
        return False
    pattern = ".*".join(re.escape(part.rstrip() if part == first else part) for part in first.split("..."))
    return re.fullmatch(pattern + r"\s*", printed[0]) is not None and matches(rest, printed[1:])


def check(arguments: list[str], expected: list[str]) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    printed = result.output.rstrip("\n").split("\n")
    # What stands below the last line that the tour shows is described in words there.
    assert matches([*expected, "..."], printed), "\n".join(["the tour says", *expected, "and it printed", *printed])
    return result.output


@pytest.mark.parametrize(
    ("arguments", "expected"), [c for c in commands() if c[0][0] not in NEEDS_RUN], ids=lambda x: " ".join(x)[:60]
)
def test_windows_without_a_model(arguments: list[str], expected: list[str]) -> None:
    check(arguments, expected)


@pytest.mark.model
def test_the_recorded_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [c for c in commands() if c[0][0] in NEEDS_RUN]
    assert [arguments[0] for arguments, _ in found] == ["trace", "map", "audit", "view"]
    for arguments, expected in found:
        check(arguments, expected)
    run = json.loads((tmp_path / "run.json").read_text())
    assert len(run["requests"]) == 3
    assert all(request["texts"] for request in run["requests"])
    assert any(event[0] == "admit" and event[2] > 0 for step in run["steps"] for event in step.get("events", []))
    assert {e["ph"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]} == {"M", "X", "i", "C"}
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_every_window_is_on_the_tour() -> None:
    assert {arguments[0] for arguments, _ in commands()} == {
        *("explain", "coalesce", "softmax", "trace", "map", "audit", "view")
    }


def test_the_matcher_can_fail() -> None:
    assert matches(["a", "...", "c ... e"], ["a", "b", "b", "c d e"])
    assert not matches(["a", "...", "c ... e"], ["a", "b", "c d f"])
    assert not matches(["a"], ["a", "b"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain"], "either --position"),
        (["explain", "--position", "48", "--block-table", "7,2,9"], "append blocks"),
        (["explain", "--slot", "3", "--block-table", "7;2"], "whole numbers"),
        (["explain", "--slot", "3", "--scale", "row"], "none, tensor or head"),
        (["coalesce", "--pattern", "diagonal"], "scalar, pack or scattered"),
        (["coalesce", "--pattern", "scattered"], "--at 0,64,128 or --stride 64"),
        (["coalesce", "--pattern", "pack", "--pack", "3"], "power of two"),
        (["softmax", "--keys", "99", "--block-table", "7,2"], "room for 32 keys"),
        (["softmax", "--file", "nothing.npz"], "no such file"),
        (["map", "nothing.json"], "not a file"),
        (["view", "x.html", "a prompt", "--run", "run.json"], "either --run or prompts"),
    ],
    ids=lambda x: " ".join(x)[:50] if isinstance(x, list) else "",
)
def test_refusals_are_one_line(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.strip().split("\n")) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "--position", "20", "--block-table", "7,2,9"],
        ["coalesce", "--pattern", "scattered", "--stride", "64", "--lanes", "4"],
        ["softmax", "--splits", "3", "--visible", "4,30"],
    ],
    ids=lambda x: x[0],
)
def test_json(arguments: list[str]) -> None:
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    expected = {
        "explain": lambda d: (d["slot"], len(d["addresses"]["HND"])) == (36, 8),
        "coalesce": lambda d: d["load"]["instructions"][0]["addresses"] == [0, 64, 128, 192],
        "softmax": lambda d: d["error"] < 1e-12 and len(d["splits"]) == 3,
    }
    assert expected[arguments[0]](found)


def test_softmax_of_a_file(tmp_path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = {"q": rng.normal(size=4), "k": rng.normal(size=(9, 4)), "v": rng.normal(size=(9, 2))}
    np.savez(tmp_path / "row.npz", **arrays)
    out = json.loads(CliRunner().invoke(app, ["softmax", "--file", str(tmp_path / "row.npz"), "--json"]).output)
    weights = np.exp(arrays["k"] @ arrays["q"] / 2)
    np.testing.assert_allclose(out["merged"]["out"], weights @ arrays["v"] / weights.sum(), rtol=1e-12)


def test_audit_says_what_is_wrong(tmp_path: Path, crowded) -> None:
    run = crowded[1].to_dict()
    run["steps"][0]["slots"] = {"full": [0, 1, 2, 2, *range(4, 16)]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    result = CliRunner().invoke(app, ["audit", str(tmp_path / "run.json")])
    assert result.exit_code == 1
    assert "duplicate_slot: group 'full', step 0: 1 slot written more than once in one step: 2" in result.output
    found = json.loads(CliRunner().invoke(app, ["audit", str(tmp_path / "run.json"), "--json"]).output)
    assert {f["kind"] for f in found} == {"duplicate_slot", "dead_read"}
