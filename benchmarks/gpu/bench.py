"""``pagetile bench`` under its old name: ``python -m benchmarks.gpu.bench --suite decode --csv rows.csv``."""

from __future__ import annotations

import typer

from pagetile.cli.bench import run
from pagetile.cli.bench.command import bench
from pagetile.cli.bench.run import GATE

__all__ = ["GATE", "facts"]


def facts() -> dict[str, str]:
    """What a row says of the GPU and the versions."""
    return run.facts("cuda")


if __name__ == "__main__":
    typer.run(bench)
