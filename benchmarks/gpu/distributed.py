"""Attention over the GPUs of one host: one request split by token, many split by head, and the exchange alone.

    python -m benchmarks.gpu.distributed                 # 2, 4, 8, ... ranks, as many as there are GPUs
    python -m benchmarks.gpu.distributed --worlds 2 --csv benchmarks/results/distributed.csv
    python -m benchmarks.gpu.distributed --backend gloo --quick    # a trial of this script on CPUs, no figures

Each world is held to one GPU first: results within two rounding steps of the largest output of a head. Times are
medians of the slowest rank, of CUDA-graph replays where NCCL can be captured, else of eager calls; quote ratios of one
run.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pagetile import flash_attn_varlen_func
from pagetile.distributed import ContextParallel, LocalBatch, RankGrid, TokenSplit, build_local_batch
from pagetile.distributed.model import sent_bytes

FIELDS = ("case", "world", "grid", "mode", "us", "how", "times_one", "bytes", "error", "device", "torch")
BLOCK = 16


@dataclass(frozen=True)
class Case:
    """``num_seqs`` requests of ``length`` tokens, one query each."""

    name: str
    num_seqs: int
    length: int
    by: str
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128


CASES = [
    Case("one request, by token", 1, 1_000_000, "token"),
    Case("one request, short, by token", 1, 32_768, "token"),
    Case("64 requests, by head", 64, 16_384, "head"),
    Case("64 requests, by token", 64, 16_384, "token"),
]
QUICK = [
    Case("one request, by token", 1, 1000, "token", 8, 2, 32),
    Case("4 requests, by head", 4, 300, "head", 8, 2, 32),
]


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--worlds", type=int, nargs="*", default=None)
    parse.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parse.add_argument("--quick", action="store_true")
    parse.add_argument("--csv", type=Path, default=None)
    asked = parse.parse_args()
    gpus = torch.cuda.device_count()
    worlds = asked.worlds or ([n for n in (2, 4, 8) if n <= gpus] if asked.backend == "nccl" else [2])
    if asked.backend == "nccl" and (not worlds or max(worlds) > gpus):
        raise SystemExit(f"{gpus} GPUs here; pass --worlds of at most that, or --backend gloo")
    rows: list[dict[str, Any]] = []
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            context = torch.multiprocessing.spawn(
                _rank, (world, asked.backend, asked.quick, folder), nprocs=world, join=False
            )
            assert context is not None
            while not context.join(timeout=600):
                pass
            rows += torch.load(Path(folder) / "rows.pt")
    if asked.csv is not None:
        asked.csv.parent.mkdir(parents=True, exist_ok=True)
        with asked.csv.open("w", newline="") as file:
            out = csv.DictWriter(file, FIELDS)
            out.writeheader()
            out.writerows(rows)


def _rank(rank: int, world: int, backend: str, quick: bool, folder: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    rows = []
    for case in QUICK if quick else CASES:
        rows += measure(case, rank, world, device)
    rows += exchange_alone(rank, world, device, quick)
    if rank == 0:
        torch.save(rows, Path(folder) / "rows.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(case: Case, rank: int, world: int, device: torch.device) -> list[dict[str, Any]]:
    """One GPU and all of them on the same tokens: the check, then the times."""
    grid = RankGrid(1, world) if case.by == "token" else RankGrid.of(world, case.num_kv_heads)
    group = grid.make_groups(timeout=120)
    heads = grid.heads(rank, case.num_q_heads, case.num_kv_heads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = _drawn((case.num_seqs, case.num_q_heads, case.head_size), 0, device, dtype)
    whole = Cache(case, TokenSplit(1, 0), range(case.num_kv_heads), device, dtype)
    right = whole.alone(q)()
    alone_us, how = timed(whole.alone(q), device)
    del whole
    mine = q[:, heads.q_heads.start : heads.q_heads.stop]
    found = [_row(case, 1, RankGrid(1, 1), "-", alone_us, how, alone_us, 0, 0.0, device)]
    for mode in ("all_to_all", "reduce_scatter", "all_gather") if grid.cp > 1 else ("-",):
        cp = ContextParallel(group, interleave=BLOCK, mode="all_to_all" if mode == "-" else mode)
        shard = Cache(case, cp.split, heads.kv_heads, device, dtype)
        call = shard.together(cp, mine)
        here = range(heads.q_heads.start, heads.q_heads.stop)
        share = [here[i] for i in cp.heads(len(here))]
        error = _check(call()[0], right[:, share], f"{case.name}, {world} ranks, {mode}")
        us, how = timed(call, device)
        sent = (
            0
            if grid.cp == 1
            else sent_bytes(case.num_seqs, len(here), case.head_size, dtype.itemsize, grid.cp, cp.mode)
        )
        found.append(_row(case, world, grid, mode, us, how, alone_us, sent, error, device))
        del shard
    if rank == 0:
        for row in found:
            print(" ".join(f"{row[name]!s:<14}" for name in FIELDS[:9]), flush=True)
    return found


class Cache:
    """A rank's keys and values of a case, equal in every split: a token's numbers are those of its position."""

    def __init__(self, case: Case, split: TokenSplit, heads: range, device: torch.device, dtype: torch.dtype) -> None:
        local = split.local_len(case.length)
        per_seq = -(-local // BLOCK)
        shape = (case.num_seqs * per_seq, BLOCK, len(heads), case.head_size)
        self.k, self.v = (torch.empty(shape, device=device, dtype=dtype) for _ in "kv")
        positions = torch.arange(per_seq * BLOCK, device=device)
        chunk = torch.div(positions, split.interleave, rounding_mode="floor")
        positions = (chunk * split.size + split.rank) * split.interleave + positions % split.interleave
        channels = torch.arange(case.head_size, device=device)
        for seq in range(case.num_seqs):
            for i, head in enumerate(heads):
                phase = positions[:, None] * (0.37 + 0.11 * head) + channels * (1.7 + seq)
                rows = slice(seq * per_seq, (seq + 1) * per_seq)
                self.k[rows, :, i] = torch.sin(phase).view(per_seq, BLOCK, -1).to(dtype)
                self.v[rows, :, i] = torch.cos(1.3 * phase).view(per_seq, BLOCK, -1).to(dtype)
        blocks = [range(seq * per_seq, (seq + 1) * per_seq) for seq in range(case.num_seqs)]
        lens = [case.length] * case.num_seqs
        self.batch: LocalBatch = build_local_batch(blocks, lens, [1] * case.num_seqs, BLOCK, split, device=device)

    def alone(self, q: Tensor) -> Callable[[], Tensor]:
        b = self.batch
        return lambda: flash_attn_varlen_func(
            q, self.k, self.v, 1, b.row_loc, b.max_local_len, seqused_k=b.row_lens, block_table=b.table_of_rows()
        )  # pyright: ignore[reportReturnType]

    def together(self, cp: ContextParallel, q: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: cp.attend(q, self.k, self.v, self.batch)


def exchange_alone(rank: int, world: int, device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """The exchange and merge of ready states, beside an all-gather of as many bytes."""
    found = []
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for num_tokens in (1, 8) if quick else (1, 64, 512):
        case = Case(f"exchange of {num_tokens} rows", num_tokens, 0, "token")
        out = torch.randn(num_tokens, case.num_q_heads, case.head_size, device=device).to(torch.bfloat16)
        lse = torch.randn(case.num_q_heads, num_tokens, device=device)
        for mode in ("all_to_all", "reduce_scatter", "all_gather"):
            cp = ContextParallel(mode=mode)
            us, how = timed(lambda cp=cp, out=out, lse=lse: cp.combine(out, lse), device)
            sent = sent_bytes(num_tokens, case.num_q_heads, case.head_size, 2, world, mode)
            piece = torch.empty(max(1, sent // (world - 1)), dtype=torch.uint8, device=device)
            pieces = torch.empty(world * piece.numel(), dtype=torch.uint8, device=device)
            plain_us, _ = timed(lambda piece=piece, pieces=pieces: gather(pieces, piece), device)
            found.append(_row(case, world, RankGrid(1, world), mode, us, how, plain_us, sent, 0.0, device))
    if rank == 0:
        print("the exchange alone; times_one is NCCL's all-gather of the same bytes over it", flush=True)
        for row in found:
            print(" ".join(f"{row[name]!s:<14}" for name in FIELDS[:8]), flush=True)
    return found


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, str]:
    """Median microseconds of a call on the slowest rank, and how it was taken."""
    for _ in range(3):
        call()
    how, again = "eager", call
    if device.type == "cuda":
        torch.cuda.synchronize()
        how, again = _captured(call)
    times = []
    for _ in range(7):
        dist.barrier()
        _synchronise(device)
        start = time.perf_counter()
        for _ in range(10):
            again()
        _synchronise(device)
        times.append((time.perf_counter() - start) / 10 * 1e6)
    worst = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst), how


def _captured(call: Callable[[], Any]) -> tuple[str, Callable[[], Any]]:
    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return f"eager ({type(error).__name__})", call
    return "graph", graph.replay


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check(got: Tensor, right: Tensor, what: str) -> float:
    """The gate: within two rounding steps of the largest output of a head; the relative error."""
    scale = right.float().abs().amax(dim=-1, keepdim=True)
    error = float(((got.float() - right.float()).abs() / scale).max()) if got.numel() else 0.0
    steps = max(2 * torch.finfo(right.dtype).eps, 1e-5)
    assert error <= steps, f"{what}: relative error {error:.2e}, allowed {steps:.2e}"
    return error


def _drawn(shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def _row(
    case: Case, world: int, grid: RankGrid, mode: str, us: float, how: str, one: float, sent: int, error: float,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "case": case.name,
        "world": world,
        "grid": f"{grid.tp}x{grid.cp}",
        "mode": mode,
        "us": f"{us:.2f}",
        "how": how,
        "times_one": f"{one / us:.3f}",
        "bytes": sent,
        "error": f"{error:.1e}",
        "device": name,
        "torch": str(torch.__version__),
    }


if __name__ == "__main__":
    main()
