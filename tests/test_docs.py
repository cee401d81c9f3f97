"""The README's code and every docstring example are run as they stand."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import pagetile

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
NEEDS_MODEL = "default_model"


def readme_blocks() -> list[str]:
    return BLOCK.findall((ROOT / "README.md").read_text())


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def modules_with_examples() -> list[str]:
    names = []
    for info in pkgutil.walk_packages(pagetile.__path__, "pagetile."):
        spec = importlib.util.find_spec(info.name)
        if spec and spec.origin and spec.origin.endswith(".py") and ">>> " in Path(spec.origin).read_text():
            names.append(info.name)
    return names


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run(document: Path) -> None:
    """Blocks of one document share a namespace, as a reader would type them; those that load weights run below."""
    namespace: dict[str, object] = {}
    for block in BLOCK.findall(document.read_text()):
        if NEEDS_MODEL not in block:
            exec(compile(block, str(document), "exec"), namespace)


@pytest.mark.model
def test_readme_engine_block_runs() -> None:
    blocks = [block for block in readme_blocks() if NEEDS_MODEL in block]
    assert blocks, "the README shows the engine no more"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


def test_readme_commands_exist() -> None:
    """Each `make` target and each `pagetile` command that a document names is there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for document in [*documents(), ROOT / "CONTRIBUTING.md"]:
        for line in re.findall(r"^make (.+?)(?:\s+#.*)?$", document.read_text(), re.M):
            assert set(line.split()) <= targets, f"{document.name} names a make target that is not there: {line}"
