"""Time the contenders that are installed on the same workloads, in one run, on any NVIDIA GPU.

    python -m benchmarks.gpu.bench                                # everything, to benchmarks/results/gpu.csv
    python -m benchmarks.gpu.bench --suite decode --only 64x4096  # some of it
    python -m benchmarks.gpu.bench --plot decode.png              # and a picture (matplotlib)

A result is printed only after it passed the gate: relative error against float32 below 1 %. Quote ratios of one run.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import SUITES, AttendWork, WriteWork, attend_error, attend_inputs, write_inputs
from benchmarks.gpu.contenders import MAKERS, Contender
from benchmarks.gpu.timing import device_us, host_us, machine_rates

GATE = 1e-2
FIELDS = (
    "case", "who", "us", "host_us", "GBps", "of_copy", "TFLOPs", "of_matmul", "error", "how", "device", "torch",
    "triton", "commit",
)  # fmt: skip


def measure(contender: Contender, work: WriteWork | AttendWork) -> dict[str, Any] | None:
    """One row, or None where the contender does not do this work.

    Raises:
        AssertionError: the contender's result is wrong.
    """
    sets = 2 if work.floor_bytes > 2e8 else 4
    if isinstance(work, WriteWork):
        maker, inputs = contender.write, [write_inputs(work, seed) for seed in range(sets)]
    else:
        maker, inputs = contender.attend, [attend_inputs(work, seed) for seed in range(sets)]
    if maker is None:
        return None
    calls = [maker(work, x) for x in inputs]
    if calls[0] is None:
        return None
    error = check(contender, work, inputs[0], calls[0])
    us, how = device_us(calls)
    host = host_us(calls[0], 100 if us < 2000 else 20) if us < 100 else None
    return {"case": work.name, "who": contender.name, "us": us, "host_us": host, "error": error, "how": how,
            "GBps": work.floor_bytes / us / 1e3, "TFLOPs": work.flops / us / 1e6}  # fmt: skip


def check(contender: Contender, work: Any, x: dict, call: Any) -> float | None:
    """The gate; the error of an attention, 0 for a write whose bytes are right, None for torch's plain copy."""
    if isinstance(work, AttendWork):
        if contender.name != "torch":
            x["out"].fill_(float("nan"))
        call()
        error = attend_error(work, x)
        assert error < GATE, f"{contender.name} is wrong on {work.name}: relative error {error:.2e}"
        return error
    call()
    if contender.name == "torch":
        return None
    block, offset = x["slots"] // work.block, x["slots"] % work.block
    assert torch.equal(x["key_cache"][block, offset], x["key"]), f"{contender.name} stored other keys on {work.name}"
    assert torch.equal(x["value_cache"][block, offset], x["value"]), f"{contender.name} stored other values"
    return 0.0


def facts() -> dict[str, str]:
    """What a row must say to be understood later."""
    import triton

    shown = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
            "commit": shown.stdout.strip()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="*", default=list(SUITES), choices=list(SUITES))
    parser.add_argument("--who", nargs="*", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/gpu.csv"))
    parser.add_argument("--plot", type=Path, default=None)
    arguments = parser.parse_args()

    contenders = [MAKERS[name]() for name in arguments.who]
    for contender in contenders:
        if contender.missing:
            print(f"without {contender.name}: {contender.missing}")
    rates, common, rows = machine_rates(), facts(), []
    print(f"{common['device']}: copy {rates['copy_GBps']:.0f} GB/s, bf16 product {rates['matmul_TFLOPs']:.0f} TFLOP/s")
    arguments.csv.parent.mkdir(parents=True, exist_ok=True)
    with arguments.csv.open("w", newline="") as file:
        out = csv.DictWriter(file, FIELDS)
        out.writeheader()
        for suite in arguments.suite:
            for work in SUITES[suite]:
                if arguments.only not in work.name:
                    continue
                for contender in contenders:
                    row = _row(contender, work, rates)
                    if row is not None:
                        rows.append(row)
                        out.writerow({**row, **common})
                        file.flush()
    if arguments.plot is not None:
        plot(rows, arguments.plot)


def _row(contender: Contender, work: Any, rates: dict[str, float]) -> dict[str, Any] | None:
    if contender.missing:
        return None
    try:
        row = measure(contender, work)
    except Exception as error:  # one contender's failure on one case must not end the run
        print(f"{work.name:<44} {contender.name:<16} {type(error).__name__}: {str(error)[:120]}", flush=True)
        return None
    finally:
        torch.cuda.empty_cache()
    if row is None:
        return None
    row |= {"of_copy": row["GBps"] / rates["copy_GBps"], "of_matmul": row["TFLOPs"] / rates["matmul_TFLOPs"]}
    host = "" if row["host_us"] is None else f"host {row['host_us']:5.1f} us"
    print(
        f"{work.name:<44} {contender.name:<16} {row['us']:9.2f} us {row['of_copy']:6.1%} of copy "
        f"{row['TFLOPs']:6.1f} TFLOP/s {host} {'' if row['how'] == 'graph' else row['how']}",
        flush=True,
    )
    return {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of device time, a group a case, relative to the slowest of the case."""
    from matplotlib import pyplot

    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["who"] for row in rows))
    slowest = {case: max(float(r["us"]) for r in rows if r["case"] == case) for case in cases}
    figure, axes = pyplot.subplots(figsize=(10, 0.4 * len(cases) + 1.5))
    height = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        mine = {row["case"]: float(row["us"]) for row in rows if row["who"] == name}
        at = [y + i * height for y, case in enumerate(cases) if case in mine]
        axes.barh(at, [mine[c] / slowest[c] for c in cases if c in mine], height, label=name)
    axes.set_yticks([y + 0.4 for y in range(len(cases))], cases, fontsize=7)
    axes.set_xlabel("device time, relative to the slowest of the case")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
