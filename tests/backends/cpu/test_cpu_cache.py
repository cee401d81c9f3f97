"""Compiled code on disk: found again, never stale, announced once, dispensable."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cpu_kit import ROOT, run_python

from pagetile.backends.cpu import jit

EMPTY_PLUS_EMPTY = """
import torch
from cpu_kit import merge_call
from pagetile.backends.cpu import CpuBackend
from pagetile.contracts.state import State

empty = State(torch.ones(1, 1, 16), torch.full((1, 1), -torch.inf))
call = merge_call(empty, empty)
CpuBackend().merge(call)
print(call.out.unique().item())
from pagetile.backends.cpu.kernels.merge import MERGE
print("from cache" if MERGE.from_cache else "compiled")
"""


def test_an_edited_helper_is_not_run_from_the_cache(tmp_path: Path) -> None:
    """``clear_row`` is inlined into the merge kernel from another file, which numba's own check would not look at."""
    shutil.copytree(ROOT / "pagetile", tmp_path / "pagetile", ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PAGETILE_CACHE_DIR": str(tmp_path / "cache")}
    first = run_python(EMPTY_PLUS_EMPTY, tmp_path, **env)
    assert first.stdout.split("\n")[:2] == ["0.0", "compiled"]
    assert first.stderr.count("compiling CPU kernels") == 1
    assert str(tmp_path / "cache") in first.stderr

    again = run_python(EMPTY_PLUS_EMPTY, tmp_path, **env)
    assert again.stdout.split("\n")[:2] == ["0.0", "from cache"]
    assert "compiling" not in again.stderr

    helper = tmp_path / "pagetile/backends/cpu/kernels/softmax.py"
    source = helper.read_text()
    old = "store(b, constant(0.0, vec(f32)), advance(b, row, i, ROW_BYTES))"
    assert source.count(old) == 1
    helper.write_text(source.replace(old, old.replace("0.0", "7.0")))
    edited = run_python(EMPTY_PLUS_EMPTY, tmp_path, **env)
    assert edited.stdout.split("\n")[:2] == ["7.0", "compiled"]


def test_runs_where_nothing_can_be_cached(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")
    done = run_python(EMPTY_PLUS_EMPTY, PAGETILE_CACHE_DIR=str(in_the_way))
    assert done.stdout.split("\n")[:2] == ["0.0", "compiled"]
    assert "not kept" in done.stderr
    assert "PAGETILE_CACHE_DIR" in done.stderr


def test_digest_covers_every_source_file(tmp_path: Path) -> None:
    copy = tmp_path / "cpu"
    shutil.copytree(jit.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    digests = {jit.source_digest(copy)}
    files = sorted(copy.rglob("*.py"))
    assert {"vector.py", "tuning.py", "params.py", "attend.py"} <= {path.name for path in files}
    for path in files:
        path.write_bytes(path.read_bytes() + b"\n")
        digests.add(jit.source_digest(copy))
    assert len(digests) == len(files) + 1


def test_digest_covers_the_vectors(tmp_path: Path) -> None:
    code = "from pagetile.backends.cpu.jit import source_digest; print(source_digest())"
    digests = {
        run_python(code, PAGETILE_CPU_ISA=isa, PAGETILE_CACHE_DIR=str(tmp_path)).stdout for isa in ("", "generic")
    }
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"PAGETILE_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/pagetile"),
        ({"HOME": "/c"}, "/c/.cache/pagetile"),
    ],
)
def test_cache_root(env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGETILE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert jit.cache_root() == Path(expected)


def test_numba_settings_are_left_alone(backend) -> None:  # noqa: ARG001 - loads the backend
    import numba

    from pagetile.backends.cpu.kernels.merge import MERGE

    before = numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES
    MERGE.compile()
    assert before == (numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES)
