"""The house rules that a reader relies on: who may import whom, no cycles, files that fit a sitting."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "pagetile"

FLOORS = {
    "contracts": 0,
    "reference": 1,
    "backends": 2,
    "ops": 3,
    "cache": 4,
    "compat": 4,
    "engine": 5,
    "integrations": 6,
    "distributed": 6,
    "inspect": 6,
    "cli": 7,
}
HIGHEST_FOR = {"testing": FLOORS["ops"]}
"""The shipped test kit stands beside the floors: it may use everything up to the public ops."""

LAZY_ONLY = {"numba", "llvmlite", "triton", "transformers", "typer", "rich"}
"""Extras: no module that ``import pagetile`` reaches may import them at its top level."""

MAX_LINES = 420


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(parts: tuple[str, ...]) -> str:
    return parts[1].removesuffix(".py") if len(parts) > 1 else ""


def imported(path: Path) -> set[str]:
    """Absolute names of the pagetile modules that a file imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return {name for name in found if name.split(".")[0] == "pagetile"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    room = room_of(("pagetile", *path.relative_to(ROOT).parts))
    if room in ("__init__", "__main__"):
        return
    assert room in FLOORS or room in HIGHEST_FOR, f"{path} stands on no floor; add its folder to FLOORS"
    height = FLOORS.get(room, HIGHEST_FOR.get(room, 0))
    for name in imported(path):
        other = room_of(tuple(name.split(".")))
        if other in ("", room):
            continue
        if other == "testing":
            pytest.fail(f"{path.relative_to(ROOT)} imports {name}: the test kit is for tests")
        assert FLOORS.get(other, -1) < height or other in HIGHEST_FOR, (
            f"{path.relative_to(ROOT)} (floor {height}) imports {name} (floor {FLOORS.get(other)})"
        )


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_backends_do_not_know_each_other(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    if parts[0] != "backends" or len(parts) < 3:
        return
    for name in imported(path):
        bits = name.split(".")
        if len(bits) > 2 and bits[1] == "backends" and (ROOT / "backends" / bits[2]).is_dir():
            assert bits[2] == parts[1], f"{path.relative_to(ROOT)} imports its sibling {name}"


def test_no_import_cycles() -> None:
    names = {
        ".".join(("pagetile", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): p
        for p in modules()
    }
    graph = {name: {other for other in top_level_imports(path) if other in names} for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail[trail.index(name) :], name))}"
        if name in done:
            return
        for other in graph[name]:
            visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def top_level_imports(path: Path) -> set[str]:
    """Modules that a file imports when it is imported. ``from package import module`` is an import of the module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                is_module = (ROOT.parent / Path(*node.module.split("."), alias.name)).with_suffix(".py").exists()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_fit_a_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_reference_imports_torch_and_nothing_else() -> None:
    allowed = {"torch", "pagetile", "__future__"} | set(sys.stdlib_module_names)
    for path in (ROOT / "reference").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"


def test_extras_are_imported_only_where_they_are_used() -> None:
    """Rooms that ``import pagetile`` or a floor below may reach never import an extra at module level."""
    homes = {"numba": "backends/cpu", "llvmlite": "backends/cpu", "triton": "backends/triton", "transformers": "engine"}
    for path in modules():
        where = str(path.relative_to(ROOT))
        for name in top_level_imports(path):
            extra = name.split(".")[0]
            if extra in LAZY_ONLY and not where.startswith(
                (homes.get(extra, "cli"), "cli", "backends/hopper", "integrations")
            ):
                pytest.fail(f"{where} imports {extra} at its top level")
