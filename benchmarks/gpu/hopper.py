"""The plans that the Hopper backend could make, timed against the ones it makes, on the benchmark's own workloads.

    python -m benchmarks.gpu.hopper probe                   # eight small cases, each in a process that may be killed
    python -m benchmarks.gpu.hopper time                    # the backend as it is, every case; CSV under $OUT
    python -m benchmarks.gpu.hopper variants                # what tuning decides, decided otherwise
    python -m benchmarks.gpu.hopper variants --only decode_64x4096

Times are medians of CUDA-graph replays over rotating inputs, each variant three times. A row is printed only after its
result is within 1 % of float32.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagetile.backends.hopper.tuning import AttendPlan

Variant = Callable[[AttendPlan], AttendPlan]


def prefill(**changes: Any) -> Variant:
    """Fields of the prefill plan."""
    return lambda plan: replace(plan, prefill=replace(plan.prefill, **changes) if plan.prefill else None)


def decode(**changes: Any) -> Variant:
    """Fields of the decode plan."""
    return lambda plan: replace(plan, decode=replace(plan.decode, **changes) if plan.decode else None)


WIDE = {"keys": 128, "stages": 3, "queries": 2, "programs": 132, "registers": 168}
DEEP = {"keys": 64, "stages": 6, "queries": 2, "programs": 132, "registers": 168}
PAIRED = {"keys": 64, "stages": 3, "queries": 1, "programs": 264, "registers": 128}

VARIANTS: dict[str, dict[str, Variant]] = {
    "prefill_1x8192@8192_h32/8_d128_p16": {
        "turns": prefill(turns=True),
        "one_query_place": prefill(queries=1),
        "section1": prefill(section=1),
        "section2": prefill(section=2),
        "keys64": prefill(keys=64, stages=4),
        "keys64_turns": prefill(keys=64, stages=4, turns=True),
    },
    "prefill_1x32768@32768_h32/8_d128_p16": {
        "turns": prefill(turns=True),
        "section8": prefill(section=8),
        "section1": prefill(section=1),
    },
    "prefill_8x1024@1024_h32/8_d128_p16": {"turns": prefill(turns=True), "one_query_place": prefill(queries=1)},
    "prefill_4x512@16384_h32/8_d128_p16": {"turns": prefill(turns=True), "section8": prefill(section=8)},
    "prefill_1x8192@8192_h32/8_d64_p16": {
        "turns": prefill(turns=True),
        "stages2": prefill(stages=2),
        "stages4": prefill(stages=4),
    },
    "prefill_1x8192@8192_h16/8_d256_p16": {"turns": prefill(turns=True)},
    "decode_1x8192_h32/8_d128_p16": {
        "tiles1": decode(min_tiles=1),
        "tiles4": decode(min_tiles=4),
        "deep": decode(**DEEP, min_tiles=4),
        "paired": decode(**PAIRED, min_tiles=4),
    },
    "decode_1x131072_h32/8_d128_p16": {"paired": decode(**PAIRED, min_tiles=4), "wide": decode(**WIDE, min_tiles=2)},
    "decode_16x4096_h32/8_d128_p16": {"wide": decode(**WIDE, min_tiles=2), "deep": decode(**DEEP, min_tiles=4)},
    "decode_64x4096_h32/8_d128_p16": {"wide": decode(**WIDE, min_tiles=2), "deep": decode(**DEEP, min_tiles=4)},
    "decode_256x2048_h32/8_d128_p16": {"wide": decode(**WIDE, min_tiles=2), "deep": decode(**DEEP, min_tiles=4)},
    "decode_64x4096_h16/1_d128_p16": {"wide": decode(**WIDE, min_tiles=2)},
    "decode_64x4096_h9/3_d64_p16": {
        "wide": decode(keys=128, stages=6, queries=2, programs=132, registers=168),
        "short": decode(keys=64, stages=6),
    },
    "decode_64x4096_h16/8_d256_p16": {"stages2": decode(stages=2)},
    "ragged_decode_64": {"wide": decode(**WIDE, min_tiles=2)},
    "mixed_1x2048@8192+63x1@4096": {
        "one_after_the_other": lambda plan: decode(**PAIRED, min_tiles=4)(replace(plan, together=False)),
        **{f"decode_on_{n}": decode(programs=n) for n in (24, 32, 40, 48, 56, 64)},
    },
}
"""Case -> what to try on it."""


def tuned(variant: Variant) -> Any:
    """A Hopper backend whose plans a variant has changed."""
    from pagetile.backends.hopper import HopperBackend

    class Tuned(HopperBackend):
        def plan(self, problem: Any, device: int = 0) -> AttendPlan:
            return variant(super().plan(problem, device))

    return Tuned()


def measure(work: Any, backend: Any, runs: int = 3) -> dict[str, Any]:
    """Times of one backend on one workload, after its gate."""
    import torch

    import pagetile
    from benchmarks.gpu.cases import attend_error, attend_inputs
    from benchmarks.gpu.timing import device_us, host_us

    max_q, max_k = max(q for q, _ in work.seqs), max(k for _, k in work.seqs)
    inputs = [attend_inputs(work, seed) for seed in range(2 if work.floor_bytes > 2e8 else 4)]

    def call_on(x: dict[str, torch.Tensor]) -> Callable[[], object]:
        return lambda: pagetile.flash_attn_varlen_func(
            x["q"], x["k"], x["v"], max_q, x["starts"], max_k, seqused_k=x["lens"], causal=True,
            block_table=x["table"], out=x["out"], backend=backend,
        )  # fmt: skip

    calls = [call_on(x) for x in inputs]
    inputs[0]["out"].fill_(float("nan"))
    calls[0]()
    error = attend_error(work, inputs[0])
    assert error < 1e-2, f"wrong on {work.name}: relative error {error:.2e}"
    times = [device_us(calls)[0] for _ in range(runs)]
    us = statistics.median(times)
    return {
        "us": us, "spread": max(times) / min(times) - 1, "TFLOPs": work.flops / us / 1e6,
        "TBps": work.floor_bytes / us / 1e6, "host_us": host_us(calls[0], 100) if us < 200 else None, "error": error,
    }  # fmt: skip


def works(only: str = "") -> list[Any]:
    """Attention workloads of the benchmark whose name has ``only`` in it."""
    from benchmarks.gpu.cases import DECODE, MIXED, PREFILL

    return [work for work in (*DECODE, *PREFILL, *MIXED) if only in work.name]


def report(rows: list[dict[str, Any]], case: str, variant: str, found: dict[str, Any]) -> None:
    """One line, and one row of the CSV."""
    rows.append({"case": case, "variant": variant, **found})
    host = "" if found["host_us"] is None else f"host {found['host_us']:5.1f} us"
    print(
        f"{case:<42} {variant:<20} {found['us']:9.2f} us +-{found['spread']:5.1%} {found['TFLOPs']:6.1f} TFLOP/s "
        f"{found['TBps']:5.2f} TB/s {host}",
        flush=True,
    )


def run(arguments: argparse.Namespace) -> None:
    """Time the backend as it is, and with ``variants`` its alternatives, case by case."""
    import torch

    rows: list[dict[str, Any]] = []
    for work in works(arguments.only):
        tries: dict[str, Variant] = {"as it is": lambda plan: plan}
        if arguments.what == "variants":
            tries |= VARIANTS.get(work.name, {})
            if len(tries) == 1:
                continue
        for name, variant in tries.items():
            try:
                report(rows, work.name, name, measure(work, tuned(variant)))
            except Exception as error:  # one variant's failure must not end the run
                print(f"{work.name:<42} {name:<20} {type(error).__name__}: {str(error)[:160]}", flush=True)
            torch.cuda.empty_cache()
    with Path(os.environ.get("OUT", "."), f"hopper_{arguments.what}.csv").open("w", newline="") as file:
        if rows:
            out = csv.DictWriter(file, list(rows[0]))
            out.writeheader()
            out.writerows(rows)


PROBES = {
    "decode one piece": {"seqs": ((1, 100),)},
    "decode many pieces": {"seqs": ((1, 3000), (1, 17), (2, 700))},
    "decode nothing to see": {"seqs": ((1, 0), (3, 2))},
    "prefill one tile": {"seqs": ((40, 40),)},
    "prefill many tiles": {"seqs": ((500, 1500), (300, 300))},
    "prefill window": {"seqs": ((500, 1500),), "window": (200, 0)},
    "prefill d64": {"seqs": ((500, 1500),), "head_size": 64},
    "prefill d256": {"seqs": ((500, 1500),), "head_size": 256},
    "decode d256": {"seqs": ((1, 1500), (1, 64)), "head_size": 256},
    "mixed": {"seqs": ((300, 900), (1, 700), (1, 64), (2, 1))},
}
"""The first things to run on a new machine, from the plainest on."""


def probe(arguments: argparse.Namespace) -> None:
    """Each probe in a process of its own, a few at a time: right, wrong, raised or hung."""
    if arguments.case:
        _probe_one(arguments.case)
        return
    command = [sys.executable, "-m", "benchmarks.gpu.hopper", "probe", "--case"]
    started = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in PROBES
    }
    for name, process in started.items():
        try:
            said = process.communicate(timeout=arguments.seconds)[0].strip().splitlines()
            print(f"{name:<24} {said[-1][:200] if said else 'said nothing'}", flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{name:<24} HANGS", flush=True)


def _probe_one(name: str) -> None:
    import torch

    from pagetile.backends.hopper import HopperBackend
    from pagetile.testing.build import build_attend
    from pagetile.testing.cases import AttendCase
    from pagetile.testing.tolerance import assert_attend

    shape = {"head_size": 128, **PROBES[name]}
    case = AttendCase(dtype="bfloat16", num_q_heads=8, num_kv_heads=2, block_size=16, **shape)
    backend = HopperBackend()
    built = build_attend(case, "cuda")
    why = backend.why_not(built.call.problem)
    if why:
        print("not taken: " + "; ".join(why))
        return
    outs = []
    for _ in range(3):
        backend.attend(built.call)
        torch.cuda.synchronize()
        outs.append(built.call.out.clone())
    try:
        assert_attend(built)
    except AssertionError as error:
        print(f"WRONG: {str(error).splitlines()[0]}")
        return
    same = all(torch.equal(outs[0][: case.num_rows], o[: case.num_rows]) for o in outs)
    print("right, " + ("the same bits three times" if same else "BUT OTHER BITS each time"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["probe", "time", "variants"])
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--case", default="", help="probe: this one, in this process")
    parser.add_argument("--seconds", type=float, default=90, help="probe: after which it counts as hung")
    arguments = parser.parse_args()
    (probe if arguments.what == "probe" else run)(arguments)


if __name__ == "__main__":
    main()
