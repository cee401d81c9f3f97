"""Quantised caches on a GPU: writes against a copy of the same bytes, attention against the bf16 cache and the others.

    python -m benchmarks.gpu.quantised                      # everything; CSV under $OUT, or beside the other results
    python -m benchmarks.gpu.quantised --only decode_64

A row is printed only after its gate: a write's bytes are those of the reference; an attention is within 1 % of float32
over what the stored bytes stand for (a contender that also quantises the query: within 15 %). ``error`` is against
float32 over the numbers before they were stored: unit normal data, at scale 1 (int8: 4 / 127). Quote ratios of one run.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pagetile
from pagetile.cli.bench.cases import AttendWork, WriteWork, attend_error, attend_inputs, write_inputs
from pagetile.cli.bench.run import facts
from pagetile.cli.bench.timing import device_us, host_us, machine_rates
from pagetile.reference.quantise import STORED_AS, bits_of, dequantise, head_scale, quantise

Call = Callable[[], object]
FIELDS = (
    "case",
    "who",
    "us",
    "host_us",
    "GBps",
    "of_copy",
    "TFLOPs",
    "error",
    "how",
    "device",
    "torch",
    "triton",
    "commit",
)


@dataclass(frozen=True)
class Quantised:
    """A piece of work over a cache of ``kind``; its scales are of the ``tensor``, each ``head`` or ``token_head``."""

    work: WriteWork | AttendWork
    kind: str = "fp8_e4m3"
    scale: str = "tensor"

    @property
    def name(self) -> str:
        return f"{self.work.name}_{self.kind}_{self.scale}"

    @property
    def floor_bytes(self) -> int:
        """Bytes moved once: 16-bit sources and queries, 8-bit caches."""
        work = self.work
        if isinstance(work, WriteWork):
            return work.tokens * work.heads * work.size * 2 * (2 + 1)
        keys, rows = sum(k for _, k in work.seqs), sum(q for q, _ in work.seqs)
        return keys * work.kv_heads * work.size * 2 + 2 * rows * work.q_heads * work.size * 2


def _attend(name: str, batch: int, queries: int, keys: int) -> AttendWork:
    return AttendWork(f"{name}_{batch}x{keys}", ((queries, keys),) * batch)


CASES = [
    *(Quantised(WriteWork(tokens), scale=scale) for tokens in (64, 8192, 65536) for scale in ("tensor", "head")),
    Quantised(WriteWork(65536), scale="token_head"),
    Quantised(WriteWork(65536), "fp8_e5m2"),
    Quantised(WriteWork(65536), "int8", "head"),
    *(Quantised(_attend("decode", 64, 1, 4096), kind) for kind in STORED_AS),
    Quantised(_attend("decode", 64, 1, 4096), scale="head"),
    Quantised(_attend("decode", 64, 1, 4096), scale="token_head"),
    Quantised(_attend("decode", 1, 1, 131072)),
    Quantised(_attend("prefill", 1, 8192, 8192)),
    Quantised(_attend("prefill", 1, 8192, 8192), "int8"),
]


def number_of(kind: str) -> float:
    """The scale with which unit normal data is stored."""
    return 4 / 127 if kind == "int8" else 1.0


def scale_of(case: Quantised, cache: Tensor, value: float) -> Tensor:
    """A scale of the case's granularity, the same number everywhere."""
    heads = cache.shape[2]
    shape = {"tensor": (1,), "head": (heads,), "token_head": (*cache.shape[:2], heads)}[case.scale]
    return torch.full(shape, value, device=cache.device)


def write_calls(case: Quantised, x: dict[str, Tensor]) -> dict[str, Call | None]:
    """What is timed for a write, by contender."""
    key, value, slots = x["key"], x["value"], x["slots"]
    stored = STORED_AS[case.kind]
    k, v = (torch.zeros(x[n].shape, dtype=stored, device=key.device) for n in ("key_cache", "value_cache"))
    k_scale, v_scale = (scale_of(case, cache, 0.01) for cache in (k, v))
    if case.scale == "token_head":
        ours: Call = lambda: pagetile.reshape_and_cache_flash_per_token_head(  # noqa: E731
            key, value, k, v, slots, case.kind, k_scale, v_scale
        )
    else:
        ours = lambda: pagetile.reshape_and_cache_flash(key, value, k, v, slots, case.kind, k_scale, v_scale)  # noqa: E731
    ours()
    block, offset = slots // k.shape[1], slots % k.shape[1]
    for cache, rows, scale in ((k, key, k_scale), (v, value, v_scale)):
        by = scale[block, offset].unsqueeze(-1) if case.scale == "token_head" else head_scale(scale, rows.device)
        assert torch.equal(bits_of(cache)[block, offset], bits_of(quantise(rows, case.kind, by))), "other bytes"
    half = torch.cat([key.reshape(-1), value.reshape(-1)]).view(torch.uint8)
    half = half[: half.numel() * 3 // 4]  # read and written, it is as many bytes as a write reads and writes
    target = torch.empty_like(half)
    calls: dict[str, Call | None] = {"pagetile": ours, "torch copy of the bytes": lambda: target.copy_(half)}
    if find_spec("vllm") is not None and case.kind == "fp8_e4m3" and case.scale != "token_head":
        from vllm import _custom_ops as ops  # pyright: ignore[reportMissingImports]

        args = (key, value, k.view(torch.uint8), v.view(torch.uint8), slots, "fp8", k_scale, v_scale)
        calls["vllm"] = lambda: ops.reshape_and_cache_flash(*args)
    return calls


def attend_calls(case: Quantised, x: dict[str, Tensor]) -> dict[str, Call | None]:
    """What is timed for an attention, by contender; each fills ``x["out"]``."""
    work = case.work
    assert isinstance(work, AttendWork)
    max_q, max_k = max(q for q, _ in work.seqs), max(k for _, k in work.seqs)
    by = number_of(case.kind)
    k, v = (quantise(x[n], case.kind, by) for n in "kv")
    scales = {"k_descale": scale_of(case, k, by), "v_descale": scale_of(case, v, by)}
    shared: dict[str, Any] = {"causal": True, "block_table": x["table"], "out": x["out"], "seqused_k": x["lens"]}
    args = (max_q, x["starts"], max_k)
    calls: dict[str, Call | None] = {
        "pagetile": lambda: pagetile.flash_attn_varlen_func(x["q"], k, v, *args, **shared, **scales),
        "pagetile bf16 cache": lambda: pagetile.flash_attn_varlen_func(x["q"], x["k"], x["v"], *args, **shared),
    }
    if find_spec("vllm") is not None and case.kind == "fp8_e4m3" and case.scale != "token_head":
        from vllm.vllm_flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        one = torch.ones(len(work.seqs), work.kv_heads, device="cuda")
        q8 = x["q"].to(torch.float8_e4m3fn)
        calls["vllm FA3, fp8 query"] = lambda: flash_attn_varlen_func(
            q=q8, k=k, v=v, max_seqlen_q=max_q, cu_seqlens_q=x["starts"], max_seqlen_k=max_k, seqused_k=x["lens"],
            causal=True, block_table=x["table"], out=x["out"], fa_version=3, q_descale=one, k_descale=one,
            v_descale=one,
        )  # fmt: skip
    return calls


def attend_gate(case: Quantised, who: str, x: dict[str, Tensor], call: Call) -> float:
    """The error against float32 over the numbers before they were stored, after the gate."""
    work = case.work
    assert isinstance(work, AttendWork)
    x["out"].fill_(float("nan"))
    call()
    by = number_of(case.kind)
    stands_for = {n: dequantise(quantise(x[n], case.kind, by), case.kind, by).to(x[n].dtype) for n in "kv"}
    error = attend_error(work, {**x, **stands_for} if "bf16" not in who else x)
    allowed = 0.15 if "fp8 query" in who else 0.01
    assert error < allowed, f"{who} is wrong on {case.name}: relative error {error:.2e}"
    return attend_error(work, x)


def rows_of(case: Quantised, rates: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each contender; a failure is printed and has none."""
    sets = 2 if case.floor_bytes > 2e8 else 4
    writing = isinstance(case.work, WriteWork)
    inputs = [(write_inputs if writing else attend_inputs)(case.work, seed) for seed in range(sets)]  # type: ignore[operator]
    made = [(write_calls if writing else attend_calls)(case, x) for x in inputs]
    found = []
    for who in made[0]:
        calls = [calls_of[who] for calls_of in made]
        try:
            error = None if writing else attend_gate(case, who, inputs[0], calls[0])  # type: ignore[arg-type]
            us, how = device_us(calls)  # type: ignore[arg-type]
            host = host_us(calls[0], 20) if us < 100 else None  # type: ignore[arg-type]
        except Exception as failure:  # one contender's failure on one case must not end the run
            print(f"{case.name:<44} {who:<24} {type(failure).__name__}: {str(failure)[:160]}", flush=True)
            continue
        rate = case.floor_bytes / us / 1e3
        row = {"case": case.name, "who": who, "us": us, "host_us": host, "GBps": rate, "error": error, "how": how,
               "of_copy": rate / rates["copy_GBps"], "TFLOPs": case.work.flops / us / 1e6}  # fmt: skip
        print(f"{case.name:<44} {who:<24} {us:9.2f} us {row['of_copy']:6.1%} of copy  error {error}", flush=True)
        found.append(row)
    return found


def main() -> None:
    """Time every case whose name contains ``--only``, and write a CSV."""
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("--only", default="")
    asked = parse.parse_args()
    path = Path(os.environ.get("OUT", "benchmarks/results")) / "gpu_quantised.csv"
    rates, common = machine_rates(), facts("cuda")
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, FIELDS, extrasaction="ignore")
        out.writeheader()
        for case in CASES:
            if asked.only in case.name:
                for row in rows_of(case, rates):
                    out.writerow({**common, **row})
                    file.flush()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
