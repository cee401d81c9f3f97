"""The gate, the clock and a row: one contender on one piece of work."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pagetile import __version__
from pagetile.cli.bench.cases import (
    AttendWork,
    WriteWork,
    attend_error,
    attend_inputs,
    floor_bytes,
    write_inputs,
)
from pagetile.cli.bench.contenders import Contender
from pagetile.cli.bench.timing import device_us, host_us, wall_us

GATE = 1e-2
"""Largest relative error against float32 with which a contender is still timed."""

FIELDS: tuple[str, ...] = (
    "case", "who", "us", "host_us", "GBps", "of_copy", "TFLOPs", "of_matmul", "error", "how", "device", "torch",
    "triton", "pagetile", "commit",
)  # fmt: skip

Work = WriteWork | AttendWork


def measure(contender: Contender, work: Work, device: str) -> dict[str, Any] | None:
    """One row, or None where the contender does not do this work.

    Raises:
        AssertionError: the contender's result is wrong; a wrong result has no time.
    """
    moved = floor_bytes(work, device)
    sets = 2 if moved > 2e8 else 4
    if isinstance(work, WriteWork):
        maker, inputs = contender.write, [write_inputs(work, seed, device) for seed in range(sets)]
    else:
        maker, inputs = contender.attend, [attend_inputs(work, seed, device) for seed in range(sets)]
    made = [maker(work, x) for x in inputs] if maker is not None else []
    calls = [call for call in made if call is not None]
    if not calls:
        return None
    error = check(contender, work, inputs[0], calls[0])
    us, how = wall_us(calls) if device == "cpu" else device_us(calls)
    host = host_us(calls[0], 100 if us < 2000 else 20) if us < 100 and device != "cpu" else None
    return {"case": work.name, "who": contender.name, "us": us, "host_us": host, "error": error, "how": how,
            "GBps": moved / us / 1e3, "TFLOPs": work.flops / us / 1e6}  # fmt: skip


def check(contender: Contender, work: Work, x: dict, call: Any) -> float | None:
    """The gate; the error of an attention, 0 for a write whose bytes are right, None for torch's plain copy."""
    if isinstance(work, AttendWork):
        if contender.name != "torch":
            x["out"].fill_(float("nan"))
        call()
        error = attend_error(work, x)
        if not error < GATE:
            raise AssertionError(f"{contender.name} is wrong on {work.name}: relative error {error:.2e}")
        return error
    call()
    if contender.name == "torch":
        return None
    block, offset = x["slots"] // work.block, x["slots"] % work.block
    for name, cache in (("key", "key_cache"), ("value", "value_cache")):
        if not torch.equal(x[cache][block, offset], x[name]):
            raise AssertionError(f"{contender.name} stored another {name} on {work.name}")
    return 0.0


def facts(device: str) -> dict[str, str]:
    """What a row must say to be understood later."""
    root = Path(__file__).resolve().parents[3]  # of a checkout; an installed wheel has no commit
    command = ["git", "-C", str(root), "log", "-1", "--format=%h", "--", "pagetile"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__, "triton": triton, "pagetile": __version__, "commit": commit}


def rows(
    contenders: Sequence[Contender], works: Iterable[Work], device: str, rates: dict[str, float],
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each contender on each piece of work, said aloud as they come; a failure is said and has no row."""
    for work in works:
        for contender in contenders:
            try:
                row = None if contender.missing else measure(contender, work, device)
            except Exception as error:  # one contender's failure on one case must not end the run
                say(f"{work.name:<44} {contender.name:<19} {type(error).__name__}: {str(error)[:160]}")
                continue
            finally:
                if device == "cuda":
                    torch.cuda.empty_cache()
            if row is None:
                continue
            row |= {"of_copy": row["GBps"] / rates["copy_GBps"], "of_matmul": row["TFLOPs"] / rates["matmul_TFLOPs"]}
            say(line(row))
            yield row


def line(row: dict[str, Any]) -> str:
    """A row as a person reads it."""
    host = "" if row["host_us"] is None else f"host {row['host_us']:5.1f} us"
    how = "" if row["how"] in ("graph", "wall") else row["how"]
    return (
        f"{row['case']:<44} {row['who']:<19} {row['us']:9.2f} us {row['of_copy']:6.1%} of copy "
        f"{row['TFLOPs']:7.2f} TFLOP/s {host} {how}".rstrip()
    )


def write_csv(path: Path, found: Iterable[dict[str, Any]], common: dict[str, str]) -> list[dict[str, Any]]:
    """Write rows as they come, so that a run that is cut short leaves what it had; returns them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, FIELDS)
        out.writeheader()
        for row in found:
            kept.append(row)
            short = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
            out.writerow({**short, **common})
            file.flush()
    return kept


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of time, a group a case, relative to the slowest of the case."""
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    cases = list(dict.fromkeys(row["case"] for row in found))
    names = list(dict.fromkeys(row["who"] for row in found))
    slowest = {case: max(row["us"] for row in found if row["case"] == case) for case in cases}
    figure, axes = pyplot.subplots(figsize=(10, 0.4 * len(cases) + 1.5))
    height = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        mine = {row["case"]: row["us"] for row in found if row["who"] == name}
        at = [y + i * height for y, case in enumerate(cases) if case in mine]
        axes.barh(at, [mine[case] / slowest[case] for case in cases if case in mine], height, label=name)
    axes.set_yticks([y + 0.4 for y in range(len(cases))], cases, fontsize=7)
    axes.set_xlabel("time, relative to the slowest of the case")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
