"""Device time of a call from CUDA-graph replays, and host time of launching it eagerly."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


def device_us(calls: list[Call], budget_ms: float = 60) -> tuple[float, str]:
    """Median microseconds of one call, and how it was taken.

    A graph of calls that rotate over several input sets, so that the caches are cold, replayed seven times between
    events. A call that cannot be captured is timed eagerly, and says so.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    once = max(1e-3, begin.elapsed_time(end) / len(calls))
    count = max(len(calls), min(40, int(budget_ms / 6 / once) or 1))
    count = -(-count // len(calls)) * len(calls)

    def run() -> None:
        for i in range(count):
            calls[i % len(calls)]()

    how = "graph"
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        again: Call = graph.replay
    except RuntimeError as error:
        torch.cuda.synchronize()
        how, again = f"eager ({type(error).__name__})", run
    again()
    torch.cuda.synchronize()
    times = []
    for _ in range(7):
        begin.record()
        again()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / count * 1e3)
    return sorted(times)[3], how


def host_us(call: Call, count: int = 100) -> float:
    """Microseconds of host time to enqueue one eager call: the best of three rounds."""
    call()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count * 1e6)
        torch.cuda.synchronize()
    return best


def wall_us(calls: list[Call], budget_ms: float = 300) -> tuple[float, str]:
    """Median microseconds of one call on the CPU, over calls that rotate over several input sets."""
    for call in calls:
        call()
    began = time.perf_counter()
    calls[0]()
    once = max(1e-6, time.perf_counter() - began)
    count = max(1, min(200, int(budget_ms / 1e3 / 7 / once)))
    times = []
    for turn in range(7):
        began = time.perf_counter()
        for i in range(count):
            calls[(turn + i) % len(calls)]()
        times.append((time.perf_counter() - began) / count * 1e6)
    return sorted(times)[3], "wall"


def machine_rates(device: str = "cuda") -> dict[str, float]:
    """The machine's own ceilings: ``copy_GBps`` (bytes read and written) and ``matmul_TFLOPs`` (bf16, 8192 cubed; on a
    CPU float32, 2048 cubed)."""
    if device == "cpu":
        a = torch.zeros(1 << 28, dtype=torch.uint8)
        b = torch.empty_like(a)
        copy, _ = wall_us([lambda: b.copy_(a)])
        x, y = torch.randn(2, 2048, 2048)
        out = torch.empty_like(x)
        product, _ = wall_us([lambda: torch.mm(x, y, out=out)])
        return {"copy_GBps": 2 * a.numel() / copy / 1e3, "matmul_TFLOPs": 2 * 2048**3 / product / 1e6}
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy, _ = device_us([lambda: b.copy_(a)])
    x, y = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in "xy")
    out = torch.empty_like(x)
    product, _ = device_us([lambda: torch.mm(x, y, out=out)])
    return {"copy_GBps": 2 * a.numel() / copy / 1e3, "matmul_TFLOPs": 2 * 8192**3 / product / 1e6}
