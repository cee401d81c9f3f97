"""Everything that only a GPU can tell, in one call of less than nine minutes.

    python -m benchmarks.gpu.everything --out results [--peers FOLDER] [--minutes 8.5] [--stages tests rows ...]

Stages, each in processes of its own with a limit of its own, so that one that fails or hangs costs its share only:

- ``tests``: conformance of the Triton backend with the long matrix, and what only a GPU can show (graphs captured at
  one length and replayed at another, no synchronisation, streams, two devices where there are two).
- ``rows``: the workloads of ``pagetile bench`` for pagetile, its batch-invariant form, torch, and the peers.
- ``prefix``: a prefix of 8192 under 64 requests of 512 own tokens, shared against plain.
- ``plans``: tiles that a prefill with heads of 256 could have, beside the plan's own, which spills registers.
- ``host``: microseconds of host time of one eager call, by the short way, by its plan, and by Triton's public launch.

Every stage leaves its log and rows in ``--out``; ``table.md`` joins the rows, with ratios of this run.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("tests", "rows", "prefix", "host", "plans")
OURS = "pagetile"
WHO = (OURS, "vllm", "flashinfer", "torch", "vllm-triton", "pagetile-invariant")
"""In the order of how much a row without them would be missed."""
PEERS = ("vllm", "vllm-triton", "flashinfer")
SUITES = ("decode", "write", "prefill", "mixed")


@dataclass(frozen=True)
class Job:
    """A process: its name, what it runs, and after how many seconds it is stopped."""

    name: str
    command: list[str]
    seconds: float


def jobs(stages: Sequence[str], out: Path, peers: Path | None, workers: int) -> tuple[list[Job], list[Job]]:
    """``(at once, one after the other)``: tests and compilers share the machine, but nothing that is timed does."""
    python = [sys.executable, "-m"]
    first, then = [], []
    if "tests" in stages:
        spread = ["-n", str(workers)] if workers > 1 else []
        tests = ["tests/backends/triton", "tests/conformance", "tests/ops/test_again.py"]
        without = [f"--ignore={name}" for name in ("tests/backends/triton/test_ahead.py",)]
        command = [*python, "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--maxfail=40", *spread, *tests]
        first.append(Job("tests", [*command, *without, f"--junitxml={out / 'tests.xml'}"], 230))
    here = [*python, "benchmarks.gpu.everything", "--out", str(out)]
    given = [] if peers is None else ["--peers", str(peers)]
    for stage in ("host", "prefix", "plans"):
        if stage in stages:
            then.append(Job(stage, [*here, "--one", stage], 30))
    if "rows" in stages:
        compiled = [who for who in WHO if who not in ("torch", "vllm")]
        first += [Job(f"warm-{who}", [*here, *given, "--one", "warm", "--who", who], 230) for who in compiled]
        then += [Job(f"rows-{who}", [*here, *given, "--one", "rows", "--who", who], 40) for who in WHO]
    return first, then


def start(job: Job, out: Path) -> subprocess.Popen[bytes]:
    """A job on its way, its words in ``<name>.log``."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment |= {"PYTHONUNBUFFERED": "1", "PAGETILE_TEST_BACKENDS": "triton"}
    with (out / f"{job.name}.log").open("w") as log:
        return subprocess.Popen(job.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)


def finish(job: Job, process: subprocess.Popen[bytes], out: Path, until: float) -> None:
    """Wait for a job until then, stop it if need be (124), and say how it ended."""
    began = time.monotonic()
    try:
        status = process.wait(timeout=max(1, until - began))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        status = 124
    last = (out / f"{job.name}.log").read_text(errors="replace").strip().splitlines()[-1:] or [""]
    print(f"{job.name}: exit {status}: {last[0][:160]}", flush=True)


def warm(who: str, peers: Path | None, device: str) -> None:
    """Run every workload of a contender once, so that what compiles is on disk when the clock runs."""
    import torch

    from benchmarks.gpu.peers import peer
    from pagetile.cli.bench import cases
    from pagetile.cli.bench.contenders import MAKERS

    contender = peer(who, peers) if who in PEERS and peers is not None else MAKERS[who]()
    suites = cases.SUITES if device == "cuda" else cases.CPU_SUITES
    with torch.inference_mode():
        for work in (work for suite in SUITES for work in suites[suite]):
            written = isinstance(work, cases.WriteWork)
            maker = contender.write if written else contender.attend
            if maker is None or contender.missing:
                continue
            try:
                call = maker(work, (cases.write_inputs if written else cases.attend_inputs)(work, 0, device))
                if call is not None:
                    call()
            except Exception as error:  # said again, with the rest, when it is timed
                print(work.name, type(error).__name__, error)


def rows(who: str, out: Path, peers: Path | None, device: str) -> None:
    """All workloads for one contender, to ``rows-<who>.csv``."""
    import torch

    from benchmarks.gpu.peers import peer
    from pagetile.cli.bench import cases
    from pagetile.cli.bench import run as bench
    from pagetile.cli.bench.contenders import MAKERS
    from pagetile.cli.bench.timing import machine_rates

    contender = peer(who, peers) if who in PEERS and peers is not None else MAKERS[who]()
    if contender.missing:
        print(f"without {who}: {contender.missing}")
        return
    suites = cases.SUITES if device == "cuda" else cases.CPU_SUITES
    works = [work for suite in SUITES for work in suites[suite]]
    with torch.inference_mode():
        found = bench.rows([contender], works, device, machine_rates(device), print)
        bench.write_csv(out / f"rows-{who}.csv", found, bench.facts(device))


def prefix(out: Path, device: str, length: int = 8192, own: int = 512, batch: int = 64) -> dict[str, float]:
    """Shared against plain, the two held to each other first; to ``prefix.json``."""
    import torch

    import pagetile
    from pagetile.cli.bench.cases import dtype_on
    from pagetile.cli.bench.timing import device_us, wall_us

    sets = []
    for seed in range(2):
        rng = torch.Generator(device).manual_seed(seed)
        blocks = length // 16 + batch * own // 16
        ids = torch.randperm(blocks, generator=rng, device=device).to(torch.int32)
        k, v = (torch.empty(blocks, 16, 8, 128, device=device, dtype=dtype_on(device)) for _ in "kv")
        k.normal_(generator=rng)
        v.normal_(generator=rng)
        q = torch.empty(batch, 32, 128, device=device, dtype=dtype_on(device)).normal_(generator=rng)
        head, tail = ids[: length // 16].contiguous(), ids[length // 16 :].view(batch, -1)
        starts = torch.arange(batch + 1, device=device, dtype=torch.int32)
        lens = torch.full((batch,), own, device=device, dtype=torch.int32)
        whole = torch.cat([head.expand(batch, -1), tail], 1).contiguous()
        one = torch.tensor([length], device=device, dtype=torch.int32)
        sets.append((q, k, v, starts, head, one, tail.contiguous(), lens, whole, lens + length, torch.empty_like(q)))

    def plain(x: tuple) -> Any:
        q, k, v, starts, *_, whole, total, out_ = x
        return lambda: pagetile.flash_attn_varlen_func(
            q, k, v, 1, starts, length + own, seqused_k=total, causal=True, block_table=whole, out=out_
        )

    def shared(x: tuple) -> Any:
        q, k, v, starts, head, one, tail, lens, *_, out_ = x
        return lambda: pagetile.shared_prefix_attention(q, k, v, starts, 1, head, one, tail, lens, own, out=out_)

    with torch.inference_mode():
        right = plain(sets[0])().float().clone()
        error = float((shared(sets[0])().float() - right).norm() / right.norm())
        if not error < 1e-2:
            raise AssertionError(f"shared and plain differ by {error:.2e}")
        clock = wall_us if device == "cpu" else device_us
        times = [clock([make(x) for x in sets])[0] for make in (plain, shared)]
    result = {"plain_us": times[0], "shared_us": times[1], "ratio": times[0] / times[1], "difference": error}
    (out / "prefix.json").write_text(json.dumps(result))
    words = f"plain {times[0]:.1f} us, shared {times[1]:.1f} us, {result['ratio']:.2f}x"
    print(f"prefix {length} under {batch} x {own}: {words}")
    return result


def host(out: Path, device: str) -> dict[str, dict[str, float]]:
    """Host microseconds of one eager call by each way; to ``host.json``."""
    import torch

    from pagetile.cli.bench.cases import AttendWork, WriteWork, attend_inputs, write_inputs
    from pagetile.cli.bench.contenders import MAKERS
    from pagetile.cli.bench.timing import host_us, wall_us
    from pagetile.ops import again
    from pagetile.ops.plans import PLANS

    def clock(call: Any) -> float:
        return wall_us([call], 50)[0] if device == "cpu" else host_us(call, 200)

    works = [
        AttendWork("decode_16x1024", ((1, 1024),) * 16), AttendWork("decode_1x8192", ((1, 8192),)),
        AttendWork("prefill_1x512", ((512, 512),)), WriteWork(1), WriteWork(64), WriteWork(64, packed=True),
    ]  # fmt: skip
    result: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for work in works:
            contender = MAKERS[OURS]()
            if isinstance(work, WriteWork):
                call = contender.write(work, write_inputs(work, 0, device))
            else:
                call = contender.attend(work, attend_inputs(work, 0, device))
            times = {"short": clock(call)}
            hold = again.guards_hold
            try:
                again.guards_hold = lambda: False
                PLANS.clear()
                times["by its plan"] = clock(call)
                if device == "cuda":
                    times["public launch"] = _public(call, clock)
            finally:
                again.guards_hold = hold
                PLANS.clear()
            result[work.name] = times
            print(work.name, {name: round(us, 1) for name, us in times.items()}, flush=True)
    (out / "host.json").write_text(json.dumps(result))
    return result


def _public(call: Any, clock: Any) -> float:
    """With Triton's own way of launching."""
    from pagetile.backends import registry
    from pagetile.backends.triton import launch
    from pagetile.ops.plans import PLANS

    known = launch.direct_launch_known
    backend = registry.load("triton")
    try:
        launch.direct_launch_known = lambda: False
        for part in (PLANS.clear, *([] if isinstance(backend, str) else [backend.forget])):
            part()
        return clock(call)
    finally:
        launch.direct_launch_known = known


TILES = ((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 8, 2), (128, 32, 8, 3))
"""``(rows, keys, warps, stages)``: the plan's own first. For sm_90 it spills 164 bytes, the second none."""


def plans(out: Path) -> dict[str, float | str]:
    """Microseconds of a causal prefill of 8192 with heads of 256, by tile; to ``plans.json``."""
    from dataclasses import replace

    import torch

    from pagetile.backends.deferred import error_word
    from pagetile.backends.protocol import AttendCall
    from pagetile.backends.triton.backend import device_facts
    from pagetile.backends.triton.calls import AttendLaunches
    from pagetile.backends.triton.tuning import plan_attend
    from pagetile.cli.bench.cases import PREFILL, attend_error, attend_inputs
    from pagetile.cli.bench.timing import device_us
    from pagetile.contracts.problem import AttendProblem

    work = next(work for work in PREFILL if work.size == 256)
    (queries, keys), x = work.seqs[0], attend_inputs(work, 0)
    problem = AttendProblem(
        "cuda", "bfloat16", "bfloat16", "paged", 1, queries, queries, keys, work.q_heads, work.kv_heads, work.size,
        work.size, work.block, (-1, 0),
    )  # fmt: skip
    call = AttendCall(
        problem, x["q"], x["k"], x["v"], x["out"], None, x["starts"], x["lens"], None, x["table"], work.size**-0.5,
        (-1, 0),
    )  # fmt: skip
    plan = plan_attend(problem, device_facts(0))
    assert plan.rows is not None
    result: dict[str, float | str] = {}
    for tile_rows, tile_keys, warps, stages in TILES:
        tile = plan.rows.tile
        tile = replace(tile, rows=tile_rows, tokens=tile_rows // tile.heads, keys=tile_keys, warps=warps, stages=stages)
        name = f"{tile_rows}x{tile_keys}, {warps} warps, {stages} stages"
        try:
            launches = AttendLaunches(call, replace(plan, rows=replace(plan.rows, tile=tile)))
            error = error_word(x["q"].device)
            launches(call, 0, error)
            wrong = attend_error(work, x)
            us, _ = device_us([lambda run=launches, word=error: run(call, 0, word)])
            result[name] = us if wrong < 1e-2 else f"wrong: {wrong:.1e}"
        except Exception as failure:  # a tile that does not fit is an answer, too
            result[name] = f"{type(failure).__name__}: {str(failure)[:80]}"
        torch.cuda.empty_cache()
        print(name, result[name], flush=True)
    (out / "plans.json").write_text(json.dumps(result))
    return result


def table(out: Path) -> str:
    """The rows of all contenders side by side in Markdown: a line a case, the ratio to ours in brackets."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for path in sorted(out.glob("rows-*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                found.setdefault(row["case"], {})[row["who"]] = row
    names = [who for who in WHO if any(who in rows for rows in found.values())]
    lines = ["| case | " + " | ".join(names) + " | host us | of copy | TFLOP/s |", "|---" * (len(names) + 4) + "|"]
    for case, by_name in found.items():
        ours = by_name.get(OURS)
        cells = []
        for name in names:
            row = by_name.get(name)
            if row is None:
                cells.append("")
            elif ours is None or name == OURS:
                cells.append(row["us"])
            else:
                cells.append(f"{row['us']} ({float(row['us']) / float(ours['us']):.2f}x)")
        facts = [ours[name] if ours else "" for name in ("host_us", "of_copy", "TFLOPs")]
        lines.append(f"| {case} | " + " | ".join([*cells, *facts]) + " |")
    for name in ("prefix", "host", "plans"):
        if (out / f"{name}.json").exists():
            lines += ["", f"{name}: `{(out / f'{name}.json').read_text()}`"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=Path, default=None, help="folder of contenders, see benchmarks/gpu/peers.py")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: only to try this file out")
    parser.add_argument("--one", choices=("rows", "warm", "prefix", "host", "plans"), help="one stage, in this process")
    parser.add_argument("--who", choices=WHO, default=OURS)
    asked = parser.parse_args()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if asked.one == "rows":
        rows(asked.who, out, asked.peers, asked.device)
    elif asked.one == "warm":
        warm(asked.who, asked.peers, asked.device)
    elif asked.one == "plans":
        plans(out)
    elif asked.one == "prefix":
        prefix(out, asked.device, *((64, 16, 4) if asked.device == "cpu" else ()))
    elif asked.one == "host":
        host(out, asked.device)
    else:
        everything(asked, out)


def everything(asked: argparse.Namespace, out: Path) -> None:
    """All stages within the time; the table at the end, and after each stage what there is by then."""
    try:
        import xdist  # noqa: F401

        workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    except ImportError:
        workers = 1
    end = time.monotonic() + 60 * asked.minutes
    first, then = jobs(asked.stages, out, asked.peers, workers)
    for job in (*first, *then):
        if asked.device == "cpu" and "--one" in job.command:
            job.command.extend(["--device", "cpu"])
    began = time.monotonic()
    for job, process in [(job, start(job, out)) for job in first]:
        finish(job, process, out, min(began + job.seconds, end - 60))
    for job in then:
        if end - time.monotonic() < 10:
            print(f"{job.name}: no time left", flush=True)
            continue
        finish(job, start(job, out), out, min(time.monotonic() + job.seconds, end))
        (out / "table.md").write_text(table(out))
    print(table(out))


if __name__ == "__main__":
    main()
