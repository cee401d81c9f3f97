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
        (["view", "x.html", "--run", "run.json", "--max-tokens", "3"], "--max-tokens"),
        (["view", "nowhere/x.html", "a prompt"], "nowhere is no folder"),
        (["trace", "a prompt", "--save", "nowhere/x.json"], "--save nowhere/x.json"),
        (["trace", "a prompt", "--save", "x", "--page", "x"], "both x"),
        (["trace", "a\udcffb"], "not UTF-8"),
        (["explain", "--position", "20", "--block-table", "7,,2,9"], "whole numbers"),
        (["explain", "--slot", "9" * 20], "64 bits"),
        (["explain", "--slot", "3", "--tokens", "0"], "--tokens is 0"),
        (["coalesce", "--count", "0"], "0 elements"),
        (["coalesce", "--count", "99999999"], "99999999 elements"),
        (["coalesce", "--offset", "-4"], "--offset is -4"),
        (["coalesce", "--pack", "4"], "--pack means nothing"),
        (["coalesce", "--at", "0,64"], "--at means nothing"),
        (["coalesce", "--pattern", "pack", "--pack", "0"], "power of two"),
        (["coalesce", "--pattern", "scattered", "--at", "0,64", "--lanes", "2"], "--lanes means nothing"),
        (["coalesce", "--pattern", "scattered", "--stride", "64", "--lanes", "33"], "1 to 32 lanes"),
        (["coalesce", "--pattern", "scattered", "--at", "9" * 20], "2^63"),
        (["softmax", "--keys", "9" * 12], "elements at most"),
        (["softmax", "--seed", "-1"], "--seed is -1"),
        (["softmax", "--splits", "9" * 9], "65536 at most"),
        (["softmax", "--visible", "30,4"], "first and the last"),
        (["softmax", "--visible", "5,37"], "37 keys"),
        (["softmax", "--block-table", "7,2,-9"], "--block-table[2] is -9"),
        (["softmax", "--file", "row.npz", "--keys", "5"], "--keys means nothing"),
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


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04garbage"])
@pytest.mark.parametrize("name", ["row.npz", "row.pt"])
def test_a_damaged_file_of_arrays(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    result = CliRunner().invoke(app, ["softmax", "--file", str(tmp_path / name)])
    assert (result.exit_code, len(result.output.strip().split("\n"))) == (2, 1)
    assert "cannot be read as arrays alone" in result.output


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"q": [1.0]}, "must have q, k and v"),
        ({"q": [1j], "k": [[1.0]], "v": [[1.0]]}, "must be real"),
        ({"q": [], "k": [[], []], "v": [[1.0], [2.0]]}, "at least one element"),
        ({"q": [1.0], "k": [[1.0, 2.0]], "v": [[1.0]]}, "must be [D], [L, D] and [L, Dv]"),
        ({"q": ["a"], "k": [[1.0]], "v": [[1.0]]}, "cannot be read"),
    ],
)
def test_a_file_of_other_arrays(arrays: dict[str, list], says: str, tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "row.npz", **{name: np.asarray(value) for name, value in arrays.items()})
    result = CliRunner().invoke(app, ["softmax", "--file", str(tmp_path / "row.npz")])
    assert (result.exit_code, says in result.output) == (2, True), result.output


def test_json_of_a_run_and_a_pool(tmp_path: Path, crowded) -> None:
    run = crowded[1]
    run.save(tmp_path / "run.json")
    drawn = json.loads(CliRunner().invoke(app, ["map", str(tmp_path / "run.json"), "--step", "2", "--json"]).output)
    assert len(drawn["cells"]) == 12
    arguments = ["view", str(tmp_path / "x.html"), "--run", str(tmp_path / "run.json"), "--json"]
    written = json.loads(CliRunner().invoke(app, arguments).output)
    assert (written["steps"], written["bytes"]) == (len(run.steps), (tmp_path / "x.html").stat().st_size)


def test_names_are_not_markup(tmp_path: Path, crowded) -> None:
    """A group may be called what a terminal library would take for a style."""
    text = json.dumps(crowded[1].to_dict()).replace('"full"', '"[/bold]:smile:"')
    (tmp_path / "run.json").write_text(text)
    result = CliRunner().invoke(app, ["map", str(tmp_path / "run.json")])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("group [/bold]:smile:: 12 blocks of 4, step ")


def test_a_terminal_without_blocks_gets_other_signs() -> None:
    runner = CliRunner(charset="ascii")
    result = runner.invoke(app, ["coalesce", "--pattern", "scattered", "--at", "4"])
    assert result.exit_code == 0, result.output
    assert "....##.........................." in result.output


def test_audit_says_what_is_wrong(tmp_path: Path, crowded) -> None:
    run = crowded[1].to_dict()
    run["steps"][0]["slots"] = {"full": [0, 1, 2, 2, *range(4, 16)]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    result = CliRunner().invoke(app, ["audit", str(tmp_path / "run.json")])
    assert result.exit_code == 1
    assert "duplicate_slot: group 'full', step 0: 1 slot written more than once in one step: 2" in result.output
    found = json.loads(CliRunner().invoke(app, ["audit", str(tmp_path / "run.json"), "--json"]).output)
    assert {f["kind"] for f in found} == {"duplicate_slot", "dead_read"}
