"""The command ``pagetile bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagetile.cli.errors import UsageError, user_errors


def bench(
    suite: Annotated[list[str] | None, typer.Option(help="write, decode, prefill, mixed; all by default.")] = None,
    who: Annotated[list[str] | None, typer.Option(help="A contender; all that are installed by default.")] = None,
    only: Annotated[str, typer.Option(help="Part of a case's name.")] = "",
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto.")] = "auto",
    csv: Annotated[Path | None, typer.Option(help="Where to write the rows.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where to draw them (needs matplotlib).")] = None,
) -> None:
    """Time pagetile and whatever else is installed (vLLM, FlashAttention, FlashInfer, torch) on the same work.

    A contender is timed only after its result has passed the gate against float32. On a GPU a time is the median of
    CUDA-graph replays over rotating inputs, on a CPU the median wall time. Quote ratios of one run.
    """
    with user_errors():
        import torch

        from pagetile.cli.bench import cases, contenders, run
        from pagetile.cli.bench.timing import machine_rates

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device not in ("cuda", "cpu"):
            raise UsageError(f"--device is {device!r}; it must be cuda, cpu or auto")
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no CUDA device; take --device cpu")
        suites = cases.SUITES if device == "cuda" else cases.CPU_SUITES
        wanted = _known("--suite", suite, list(suites))
        allowed = list(contenders.MAKERS) if device == "cuda" else list(contenders.EVERYWHERE)
        works = [work for name in wanted for work in suites[name] if only in work.name]
        if not works:
            raise UsageError(f"--only {only!r} is part of no case of {', '.join(wanted)}")
        found = [contenders.MAKERS[name]() for name in _known("--who", who, allowed)]
        for contender in found:
            if contender.missing:
                typer.echo(f"without {contender.name}: {contender.missing}")
        rates, common = machine_rates(device), run.facts(device)
        typer.echo(
            f"{common['device']}, torch {common['torch']}: copy {rates['copy_GBps']:.0f} GB/s, "
            f"product {rates['matmul_TFLOPs']:.2f} TFLOP/s"
        )
        with torch.inference_mode():
            lines = run.rows(found, works, device, rates, typer.echo)
            kept = list(lines) if csv is None else run.write_csv(csv, lines, common)
        if plot is not None:
            run.plot(kept, plot)
        if not kept:
            raise UsageError("no contender passed the gate on any case")


def _known(option: str, asked: list[str] | None, allowed: list[str]) -> list[str]:
    wrong = [name for name in asked or () if name not in allowed]
    if wrong:
        raise UsageError(f"{option} is {wrong[0]!r}; it must be one of {', '.join(allowed)}")
    return asked or allowed
