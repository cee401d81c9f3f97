"""Workloads that every contender times on the same bytes, with the floor of each: bytes moved, operations done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WriteWork:
    """Store ``tokens`` new tokens in a scattered cache; ``packed``: K and V are slices of a packed QKV row."""

    tokens: int
    layout: str = "NHD"
    packed: bool = False
    heads: int = 8
    size: int = 128
    block: int = 16

    @property
    def name(self) -> str:
        return f"write_{self.layout}{'_packed' if self.packed else ''}_T{self.tokens}"

    @property
    def floor_bytes(self) -> int:
        return self.tokens * self.heads * self.size * 2 * 2 * 2

    flops = 0


@dataclass(frozen=True)
class AttendWork:
    """Causal attention of ``(queries, keys)`` of each sequence over a scattered cache."""

    name: str
    seqs: tuple[tuple[int, int], ...]
    q_heads: int = 32
    kv_heads: int = 8
    size: int = 128
    block: int = 16

    @property
    def floor_bytes(self) -> int:
        keys, rows = sum(k for _, k in self.seqs), sum(q for q, _ in self.seqs)
        return keys * self.kv_heads * self.size * 2 * 2 + 2 * rows * self.q_heads * self.size * 2

    @property
    def flops(self) -> int:
        return 4 * sum(q * k - q * (q - 1) // 2 for q, k in self.seqs) * self.q_heads * self.size


def _decode(
    batch: int, keys: int, q_heads: int = 32, kv_heads: int = 8, size: int = 128, block: int = 16
) -> AttendWork:
    name = f"decode_{batch}x{keys}_h{q_heads}/{kv_heads}_d{size}_p{block}"
    return AttendWork(name, ((1, keys),) * batch, q_heads, kv_heads, size, block)


def _prefill(
    batch: int, queries: int, keys: int, q_heads: int = 32, kv_heads: int = 8, size: int = 128, block: int = 16
) -> AttendWork:
    name = f"prefill_{batch}x{queries}@{keys}_h{q_heads}/{kv_heads}_d{size}_p{block}"
    return AttendWork(name, ((queries, keys),) * batch, q_heads, kv_heads, size, block)


def lognormal_lengths(count: int = 64) -> list[int]:
    """Lengths as a server sees them: 64 to 65536, a few long ones."""
    draws = torch.randn(count, generator=torch.Generator().manual_seed(7))
    return [int(min(65536, max(64, math.exp(float(x) * 1.2 + 7.6)))) for x in draws]


WRITE = [WriteWork(t, layout) for layout in ("NHD", "HND") for t in (1, 64, 1024, 8192, 65536)] + [
    WriteWork(65536, packed=True)
]
DECODE = [
    _decode(1, 8192),
    _decode(1, 131072),
    _decode(16, 4096),
    _decode(64, 4096),
    _decode(256, 2048),
    _decode(64, 4096, q_heads=64),
    _decode(64, 4096, kv_heads=32),
    _decode(64, 4096, q_heads=16, kv_heads=1),
    _decode(64, 4096, q_heads=9, kv_heads=3, size=64),
    _decode(64, 4096, block=64),
    _decode(64, 4096, q_heads=16, size=256),
]
PREFILL = [
    _prefill(1, 8192, 8192),
    _prefill(1, 8192, 8192, block=128),
    _prefill(8, 1024, 1024),
    _prefill(1, 32768, 32768),
    _prefill(4, 512, 16384),
    _prefill(16, 4, 8192),
    _prefill(1, 8192, 8192, size=64),
    _prefill(1, 8192, 8192, q_heads=16, size=256),
]
MIXED = [
    AttendWork("mixed_1x2048@8192+63x1@4096", ((2048, 8192), *((1, 4096),) * 63)),
    AttendWork("ragged_decode_64", tuple((1, n) for n in lognormal_lengths())),
]
SUITES: dict[str, Sequence[WriteWork | AttendWork]] = {
    "write": WRITE,
    "decode": DECODE,
    "prefill": PREFILL,
    "mixed": MIXED,
}
"""On a GPU."""

CPU_SUITES: dict[str, Sequence[WriteWork | AttendWork]] = {
    "write": [
        *(WriteWork(t, layout) for layout in ("NHD", "HND") for t in (1, 64, 4096)),
        WriteWork(4096, packed=True),
    ],
    "decode": [_decode(1, 8192), _decode(16, 1024), _decode(16, 1024, kv_heads=32), _decode(16, 1024, size=64)],
    "prefill": [_prefill(1, 512, 512), _prefill(4, 16, 1024)],
    "mixed": [AttendWork("mixed_1x256@1024+15x1@1024", ((256, 1024), *((1, 1024),) * 15))],
}
"""On a CPU: seconds, not minutes."""


def floor_bytes(work: WriteWork | AttendWork, device: str) -> int:
    """Bytes that the work has to move on a device, each once."""
    return work.floor_bytes * torch.finfo(dtype_on(device)).bits // 16


def dtype_on(device: str) -> torch.dtype:
    """What is timed on a device: bfloat16 on GPUs, float32 on CPUs."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def write_inputs(work: WriteWork, seed: int, device: str = "cuda") -> dict[str, Tensor]:
    """key, value, both caches and the slots of one write."""
    rng, dtype = torch.Generator(device).manual_seed(seed), dtype_on(device)
    tokens, heads, size, block = work.tokens, work.heads, work.size, work.block

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=rng)

    if work.packed:
        row = random(tokens, (4 + 2) * heads, size)  # four query heads a KV head, then K, then V
        key, value = row[:, 4 * heads : 5 * heads], row[:, 5 * heads :]
    else:
        key, value = random(tokens, heads, size), random(tokens, heads, size)
    blocks = max(64, -(-tokens // block) * 2)
    order = torch.randperm(blocks, generator=rng, device=device)[: -(-tokens // block)]
    at = torch.arange(tokens, device=device)
    slots = order[at // block] * block + at % block
    shape = (blocks, block, heads, size) if work.layout == "NHD" else (blocks, heads, block, size)
    caches = [torch.zeros(shape, device=device, dtype=dtype) for _ in "kv"]
    if work.layout == "HND":
        caches = [c.transpose(1, 2) for c in caches]
    return {"key": key, "value": value, "key_cache": caches[0], "value_cache": caches[1], "slots": slots}


def attend_inputs(work: AttendWork, seed: int, device: str = "cuda") -> dict[str, Tensor]:
    """Packed queries, a scattered NHD cache and the metadata of one attention."""
    rng, dtype = torch.Generator(device).manual_seed(seed), dtype_on(device)
    need = [-(-k // work.block) for _, k in work.seqs]
    order = torch.randperm(sum(need), generator=rng, device=device).to(torch.int32)
    table = torch.zeros(len(need), max(need), dtype=torch.int32, device=device)
    for row, part in zip(table, order.split(need), strict=True):
        row[: len(part)] = part

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=rng)

    k, v = (random(sum(need), work.block, work.kv_heads, work.size) for _ in "kv")
    q = random(sum(n for n, _ in work.seqs), work.q_heads, work.size)
    starts = torch.tensor([0, *(n for n, _ in work.seqs)]).cumsum(0).to(torch.int32).to(device)
    lens = torch.tensor([n for _, n in work.seqs], dtype=torch.int32, device=device)
    return {"q": q, "k": k, "v": v, "table": table, "starts": starts, "lens": lens, "out": torch.empty_like(q)}


def attend_error(work: AttendWork, x: dict[str, Tensor]) -> float:
    """Largest relative error of the last 64 rows of the first and the last sequence, against float32."""
    worst = 0.0
    for seq in {0, len(work.seqs) - 1}:
        queries, keys = work.seqs[seq]
        pages = x["table"][seq, : -(-keys // work.block)].long()
        k, v = (x[n][pages].flatten(0, 1)[:keys].float() for n in "kv")
        end = int(x["starts"][seq + 1])
        rows = min(queries, 64)
        q = x["q"][end - rows : end].float()
        group = work.q_heads // work.kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * work.size**-0.5
        last = torch.arange(keys - rows, keys, device=q.device)[:, None]
        scores.masked_fill_(torch.arange(keys, device=q.device)[None, :] > last, -torch.inf)
        right = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
        got = x["out"][end - rows : end].float()
        worst = max(worst, float((got - right).norm() / right.norm()))
    return worst
