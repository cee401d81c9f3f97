"""Time the legacy path, copies of blocks, gathers and the fused write, beside vLLM's binaries where they are installed.

    python -m benchmarks.gpu.legacy                        # everything, to benchmarks/results/gpu_legacy.csv
    python -m benchmarks.gpu.legacy --only paged_attention

Every result has passed a gate before its time is printed: bytes of a write, relative error of an attention against
float32 below 1 %. Quote ratios of one run; ``of_copy`` is the share of the machine's own copy bandwidth.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pagetile
from benchmarks.gpu.bench import GATE, facts
from benchmarks.gpu.cases import AttendWork, attend_error, attend_inputs
from benchmarks.gpu.timing import Call, device_us, machine_rates

FIELDS = ("case", "who", "us", "GBps", "of_copy", "how", "device", "torch", "triton", "commit")


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        name, who: of the row.
        moved: bytes that have to be read and written.
        make: from a seed to a call and a check of what it did.
    """

    name: str
    who: str
    moved: int
    make: Callable[[int], tuple[Call, Callable[[], None]]]


def random(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=rng)


def vllm_op(name: str) -> Any:
    """An op of vLLM's extension, or None."""
    if find_spec("vllm") is None:
        return None
    from vllm import _custom_ops

    return getattr(_custom_ops, name, None)


def writers() -> Iterator[tuple[str, Any]]:
    """``reshape_and_cache`` of everybody who has it."""
    yield "pagetile", pagetile.reshape_and_cache
    if op := vllm_op("reshape_and_cache"):
        one = torch.ones(1, device="cuda")
        yield "vllm", lambda k, v, kc, vc, slots: op(k, v, kc, vc, slots, "auto", one, one)


def writes(tokens: int = 65536, heads: int = 8, size: int = 128, block: int = 16) -> Iterator[Case]:
    """Legacy write with slots that fill blocks in order, and with slots anywhere."""
    blocks = 2 * tokens // block

    def inputs(seed: int, contiguous: bool) -> list[Tensor]:
        rng = torch.Generator("cuda").manual_seed(seed)
        key, value = random(tokens, heads, size, seed=seed), random(tokens, heads, size, seed=seed + 1)
        k = torch.zeros(blocks, heads, size // 8, block, 8, device="cuda", dtype=torch.bfloat16)
        v = torch.zeros(blocks, heads, size, block, device="cuda", dtype=torch.bfloat16)
        if contiguous:
            order = torch.randperm(blocks, generator=rng, device="cuda")[: tokens // block]
            at = torch.arange(tokens, device="cuda")
            slots = order[at // block] * block + at % block
        else:
            slots = torch.randperm(blocks * block, generator=rng, device="cuda")[:tokens]
        return [key, value, k, v, slots]

    def made(op: Any, contiguous: bool, seed: int) -> tuple[Call, Callable[[], None]]:
        x = inputs(seed, contiguous)

        def check() -> None:
            k, v = pagetile.from_legacy(x[2], x[3])
            at, offset = x[4] // block, x[4] % block
            assert torch.equal(k[at, offset], x[0])
            assert torch.equal(v[at, offset], x[1])

        return lambda: op(*x), check

    for contiguous in (True, False):
        for who, op in writers():
            name = f"reshape_and_cache_T{tokens}_{'blocks' if contiguous else 'scattered'}"
            yield Case(name, who, tokens * heads * size * 8, lambda s, op=op, c=contiguous: made(op, c, s))


def attentions(batch: int = 64, keys: int = 4096) -> Iterator[Case]:
    """``paged_attention_v1`` and ``_v2`` with 32/8 and 32/32 heads."""
    for kv_heads in (8, 32):
        work = AttendWork(f"{batch}x{keys}_h32/{kv_heads}", ((1, keys),) * batch, 32, kv_heads)
        for version in (1, 2):
            for who, op in attenders(version):
                name = f"paged_attention_v{version}_{work.name}"
                yield Case(name, who, work.floor_bytes, lambda s, op=op, w=work, n=version: attend(op, w, n, s))


def attenders(version: int) -> Iterator[tuple[str, Any]]:
    """Everybody who has that version."""
    yield "pagetile", getattr(pagetile, f"paged_attention_v{version}")
    if op := vllm_op(f"paged_attention_v{version}"):
        yield "vllm", op


def attend(op: Any, work: AttendWork, version: int, seed: int) -> tuple[Call, Callable[[], None]]:
    x = attend_inputs(work, seed)
    packed, longest = pagetile.to_legacy(x["k"], x["v"]), max(keys for _, keys in work.seqs)
    shape = (len(work.seqs), work.q_heads, -(-longest // 512))
    buffers = [torch.empty(shape, device="cuda") for _ in "sm"]
    buffers.append(torch.empty(*shape, work.size, device="cuda", dtype=torch.bfloat16))
    one = torch.ones(1, device="cuda")
    args = [x["out"], *(buffers if version == 2 else ()), x["q"], *packed, work.kv_heads, work.size**-0.5, x["table"],
            x["lens"], work.block, longest, None, "auto", one, one]  # fmt: skip

    def check() -> None:
        error = attend_error(work, x)
        assert error < GATE, f"relative error {error:.2e}"

    return lambda: op(*args), check


def copies(layers: int = 32, pairs: int = 128, block: int = 16, heads: int = 8, size: int = 128) -> Iterator[Case]:
    """``copy_blocks`` of all layers, and ``swap_blocks`` of one to pinned memory and back."""

    def copy(seed: int) -> tuple[Call, Callable[[], None]]:
        k, v = ([random(2 * pairs, block, heads, size, seed=seed + i) for i in range(layers)] for _ in "kv")
        mapping = [(i, pairs + i) for i in range(pairs)]

        def check() -> None:
            assert all(torch.equal(x[:pairs], x[pairs:]) for x in (*k, *v))

        return lambda: pagetile.copy_blocks(k, v, mapping), check

    each = block * heads * size * 2
    yield Case(f"copy_blocks_{layers}x{pairs}", "pagetile", 4 * layers * pairs * each, copy)

    def swap(seed: int, out: bool) -> tuple[Call, Callable[[], None]]:
        there = random(16 * pairs, block, heads, size, seed=seed)
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        source, target = (there, here) if out else (here, there)
        mapping = [(i, i) for i in range(16 * pairs)]

        def check() -> None:
            torch.cuda.synchronize()
            assert torch.equal(source.cpu(), target.cpu())

        return lambda: pagetile.swap_blocks(source, target, mapping), check

    for out in (True, False):
        way = "to" if out else "from"
        yield Case(f"swap_blocks_{way}_pinned", "pagetile", 16 * pairs * each, lambda s, o=out: swap(s, o))


def gathers(tokens: int = 65536, heads: int = 8, size: int = 128, block: int = 16) -> Iterator[Case]:
    """``gather_cache`` of one long sequence, from bf16 and from fp8."""
    for stored in (torch.bfloat16, torch.float8_e4m3fn):

        def made(seed: int, stored: torch.dtype = stored) -> tuple[Call, Callable[[], None]]:
            blocks = tokens // block
            k, v = (random(blocks, block, heads, size, seed=seed + i).to(stored) for i in range(2))
            table = torch.randperm(blocks, device="cuda").to(torch.int32)[None]
            sums = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
            out = tuple(torch.empty(tokens, heads, size, device="cuda", dtype=torch.bfloat16) for _ in "kv")

            def check() -> None:
                assert torch.equal(out[0], k[table[0].long()].flatten(0, 1).to(torch.bfloat16))

            return lambda: pagetile.gather_cache(k, v, table, sums, out=out), check

        moved = tokens * heads * size * 2 * (2 + stored.itemsize)
        yield Case(f"gather_cache_{str(stored)[6:]}_T{tokens}", "pagetile", moved, made)


def fused(tokens: int, heads: int = 8, q_heads: int = 32, size: int = 128) -> Iterator[Case]:
    """``rope_and_cache`` with norms, beside the ops that it replaces: norm and rotation in torch, then the write."""

    def inputs(seed: int) -> dict[str, Tensor]:
        row = random(tokens, q_heads + 2 * heads, size, seed=seed)
        blocks = 2 * tokens // 16 + 2
        return {
            "query": row[:, :q_heads], "key": row[:, q_heads : q_heads + heads], "value": row[:, q_heads + heads :],
            "key_cache": torch.zeros(blocks, 16, heads, size, device="cuda", dtype=torch.bfloat16),
            "value_cache": torch.zeros(blocks, 16, heads, size, device="cuda", dtype=torch.bfloat16),
            "slot_mapping": torch.randperm(blocks * 16, device="cuda")[:tokens],
            "positions": torch.randint(0, 4096, (tokens,), device="cuda"),
            "rotary_cos": random(4096, size // 2, seed=7), "rotary_sin": random(4096, size // 2, seed=8),
        }  # fmt: skip

    weights = {"q_weight": random(size, seed=9).abs(), "k_weight": random(size, seed=10).abs()}

    def whole(seed: int) -> tuple[Call, Callable[[], None]]:
        x = inputs(seed)
        out, keys = torch.empty_like(x["query"]), torch.empty_like(x["key"])
        return lambda: pagetile.rope_and_cache(**x, **weights, out=out), lambda: check(x, keys)

    def check(x: dict[str, Tensor], keys: Tensor) -> None:
        pagetile.rope_and_cache(**x, **weights, key_out=keys, backend="triton")
        at, offset = x["slot_mapping"] // 16, x["slot_mapping"] % 16
        assert torch.equal(x["key_cache"][at, offset], keys)

    def apart(seed: int) -> tuple[Call, Callable[[], None]]:
        x = inputs(seed)

        def turn(heads: Tensor, weight: Tensor) -> Tensor:
            y = heads.float()
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
            c, s = (x[name][x["positions"]].float()[:, None] for name in ("rotary_cos", "rotary_sin"))
            one, two = y.chunk(2, -1)
            return torch.cat((one * c - two * s, two * c + one * s), -1).to(heads.dtype)

        def call() -> None:
            turn(x["query"], weights["q_weight"])
            key = turn(x["key"], weights["k_weight"])
            pagetile.reshape_and_cache_flash(key, x["value"], x["key_cache"], x["value_cache"], x["slot_mapping"])

        return call, lambda: None

    moved = tokens * (q_heads + 2 * heads) * size * 4
    yield Case(f"rope_and_cache_T{tokens}", "pagetile", moved, whole)
    yield Case(f"rope_and_cache_T{tokens}", "torch, then a write", moved, apart)


def cases() -> Iterator[Case]:
    """Everything, in order."""
    yield from writes()
    yield from attentions()
    yield from copies()
    yield from gathers()
    yield from fused(64)
    yield from fused(8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/gpu_legacy.csv"))
    arguments = parser.parse_args()
    rates, common = machine_rates(), facts()
    print(f"{common['device']}: copy {rates['copy_GBps']:.0f} GB/s")
    arguments.csv.parent.mkdir(parents=True, exist_ok=True)
    with arguments.csv.open("w", newline="") as file:
        out = csv.DictWriter(file, FIELDS)
        out.writeheader()
        for case in cases():
            if arguments.only in case.name:
                out.writerow({**row(case, rates), **common})
                file.flush()
            torch.cuda.empty_cache()


def row(case: Case, rates: dict[str, float]) -> dict[str, Any]:
    """Check, then time."""
    made = [case.make(seed) for seed in range(2)]
    made[0][0]()
    made[0][1]()
    us, how = device_us([call for call, _ in made])
    rate = case.moved / us / 1e3
    print(f"{case.name:<44} {case.who:<20} {us:9.2f} us {rate / rates['copy_GBps']:6.1%} of copy {how}", flush=True)
    return {
        "case": case.name,
        "who": case.who,
        "us": f"{us:.4g}",
        "GBps": f"{rate:.4g}",
        "of_copy": f"{rate / rates['copy_GBps']:.4g}",
        "how": how,
    }


if __name__ == "__main__":
    main()
