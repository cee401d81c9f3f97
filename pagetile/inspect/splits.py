"""How a write is cut into work: by each of our backends, and by the kernel whose arguments our op has.

Ours are read off the backends' own tuning functions. vLLM's is described from its source, since it cannot be asked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

from pagetile.backends import registry
from pagetile.contracts.dtypes import FLOATING, storage_kind
from pagetile.contracts.problem import Granularity, WriteProblem
from pagetile.inspect.explain import ITEM_BYTES, CacheShape, source_dtype

WARP = 32


@dataclass(frozen=True, slots=True)
class Split:
    """One way to cut a write.

    Attributes:
        who: backend, or vLLM.
        layout: of the cache.
        spans: contiguous runs that a token's K is moved in: 1, or one a KV head.
        elements: of a run.
        how: one line.
        why: the reasons, one line each.
        hazards: inputs on which it goes wrong, one line each.
    """

    who: str
    layout: str
    spans: int
    elements: int
    how: str
    why: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()


def write_problem(
    cache: CacheShape, layout: str, num_tokens: int, dtype: str | None = None, scale: Granularity = "none", device="cpu"
) -> WriteProblem:
    """The write of ``num_tokens`` dense rows into a contiguous cache, as dispatch would see it."""
    kind = storage_kind(cache.dtype, "fp8_e4m3" if cache.dtype == "uint8" else "auto")
    return WriteProblem(
        device=device,
        dtype=source_dtype(cache.dtype, dtype),
        kind=kind,
        layout="paged",
        num_tokens=num_tokens,
        num_kv_heads=cache.num_kv_heads,
        head_size=cache.head_size,
        head_size_v=cache.head_size,
        block_size=cache.block_size,
        aligned=cache.head_size * cache.itemsize % 16 == 0,
        heads_contiguous=layout == "NHD" or cache.num_kv_heads == 1,
        scale=scale,
    )


def _tuning(backend: str) -> ModuleType | None:
    """The tuning file of a backend; None where the backend cannot be imported here."""
    try:
        return import_module(f"pagetile.backends.{backend}.tuning")
    except ImportError:
        return None


def _refusal(backend: str, layout: str, problem: WriteProblem) -> Split | None:
    """Why a backend does not take a quantised cache; None when it does. (Floating caches all of them take.)"""
    if problem.kind in FLOATING:
        return None
    found = registry.load(backend)
    why = [found] if isinstance(found, str) else found.why_not(problem)
    return Split(backend, layout, 0, 0, "does not take it", tuple(why)) if why else None


def cpu_split(cache: CacheShape, layout: str, problem: WriteProblem, threads: int) -> Split | None:
    """What the CPU backend does, by :func:`pagetile.backends.cpu.tuning.plan_write`; or why it does not take it."""
    tuning = _tuning("cpu")
    if tuning is None or (refusal := _refusal("cpu", layout, problem)):
        return None if tuning is None else refusal
    joined = problem.heads_contiguous and problem.scale in ("none", "tensor")
    plan = tuning.plan_write(problem, threads, cache.itemsize, joined, joined)
    what = "the whole token as one span" if plan.k_spans == 1 else "a head at a time"
    return Split(
        "cpu",
        layout,
        plan.k_spans,
        plan.k_bytes // cache.itemsize,
        f"{what}: {plan.k_spans} x {plan.k_bytes} bytes of K a token, {plan.threads} thread"
        f"{'s' if plan.threads > 1 else ''}, {plan.chunk} tokens a ticket",
        tuple(f"{name}: {reason}" for name, reason in plan.why),
    )


def triton_split(cache: CacheShape, layout: str, problem: WriteProblem) -> Split | None:
    """What the Triton backend would do on a GPU, by its own tuning; None where Triton is not installed."""
    tuning = _tuning("triton")
    if tuning is None or (refusal := _refusal("triton", layout, problem)):
        return None if tuning is None else refusal
    plan = tuning.plan_write(problem)
    spans = 1 if plan.span else cache.num_kv_heads
    what = "whole tokens" if plan.span else "single heads"
    return Split(
        "triton",
        layout,
        spans,
        cache.num_kv_heads * cache.head_size // spans,
        f"{what}: {plan.rows} a program, {plan.width} elements wide, {plan.warps} warps",
        plan.reasons,
    )


def vllm_split(cache: CacheShape, layout: str, problem: WriteProblem) -> Split:
    """What vLLM's ``reshape_and_cache_flash`` kernel does with the same write.

    One thread block a token, ``min(Hkv * D, 512)`` threads. The heads of a token are swept as one run where the cache
    has them side by side and one scale serves all; else each warp takes heads in turn. Rows move in packs of 16 bytes
    of the source (8 elements of 2 bytes, 4 of 4), after a scalar prefix up to 16-byte alignment, with a scalar tail.

    Source: vLLM, ``csrc/cache_kernels.cu`` (``reshape_and_cache_flash_kernel``) and
    ``csrc/quantization/vectorization_utils.cuh``, read at version 0.25.1.
    """
    heads, size = cache.num_kv_heads, cache.head_size
    source = ITEM_BYTES[problem.dtype]
    pack = 8 if source == 2 else 4
    threads = min(heads * size, 512)
    warps = threads // WARP
    sweep = problem.heads_contiguous and problem.scale in ("none", "tensor")
    hazards = []
    if sweep:
        run, workers, spans = heads * size, threads, 1
        how = f"one sweep of {run} elements by {threads} threads"
        why = "head stride equals head size and one scale serves all heads"
    else:
        run, workers, spans = size, WARP, heads
        how = f"a warp a head: {heads} heads over {warps} warps of {threads} threads"
        why = "heads are apart in the cache" if not problem.heads_contiguous else "each head has a scale of its own"
        if warps == 0:
            hazards.append(
                f"Hkv * D = {heads * size} is less than {WARP} threads, so there are 0 whole warps and the loop over "
                "heads never advances"
            )
    packs, tail = divmod(run, pack)
    rounds = -(-packs // workers)
    how += f"; {packs} pack{'' if packs == 1 else 's'} of {pack} x {source} bytes"
    how += f" in {rounds} round{'' if rounds == 1 else 's'}"
    how += f", {tail} element{'' if tail == 1 else 's'} one by one" if tail else ""
    return Split("vLLM", layout, spans, run, how, (why, "packs are aligned by the source address"), tuple(hazards))


def splits(
    cache: CacheShape,
    num_tokens: int,
    *,
    dtype: str | None = None,
    scale: Granularity = "none",
    threads: int = 1,
) -> list[Split]:
    """Every cut of the same write, for both layouts.

    >>> [(s.who, s.layout, s.spans) for s in splits(CacheShape(), 1) if s.who == "vLLM"]
    [('vLLM', 'NHD', 1), ('vLLM', 'HND', 8)]
    """
    found: list[Split | None] = []
    for layout in ("NHD", "HND"):
        problem = write_problem(cache, layout, num_tokens, dtype, scale)
        found += [
            cpu_split(cache, layout, problem, threads),
            triton_split(cache, layout, replace(problem, device="cuda")),
            vllm_split(cache, layout, problem),
        ]
    return [split for split in found if split is not None]


def to_dicts(found: list[Split]) -> list[dict[str, Any]]:
    """Plain values, for JSON."""
    return [asdict(split) for split in found]
