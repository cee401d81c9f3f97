"""Who is timed: pagetile, plain torch, and whichever of vLLM, FlashAttention and FlashInfer are installed.

A contender is a name and up to two makers: from a workload's tensors to the call that is timed. A maker returns None
for work that the contender does not do; planning that a server does once a step stays outside the timed call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagetile.cli.bench.cases import AttendWork, WriteWork

Maker = Callable[[Any, dict[str, Tensor]], Callable[[], object] | None]


@dataclass(frozen=True)
class Contender:
    """``missing`` is why it cannot run here, or empty."""

    name: str
    write: Maker | None = None
    attend: Maker | None = None
    missing: str = ""


def _longest(work: AttendWork) -> tuple[int, int]:
    return max(q for q, _ in work.seqs), max(k for _, k in work.seqs)


def _pagetile(backend: str) -> Contender:
    import pagetile

    def write(_: WriteWork, x: dict[str, Tensor]) -> Callable[[], object]:
        args = (x["key"], x["value"], x["key_cache"], x["value_cache"], x["slots"])
        return lambda: pagetile.reshape_and_cache_flash(*args, backend=backend)

    def attend(work: AttendWork, x: dict[str, Tensor]) -> Callable[[], object]:
        max_q, max_k = _longest(work)
        return lambda: pagetile.flash_attn_varlen_func(
            x["q"], x["k"], x["v"], max_q, x["starts"], max_k, seqused_k=x["lens"], causal=True,
            block_table=x["table"], out=x["out"], backend=backend,
        )  # fmt: skip

    return Contender("pagetile" if backend == "auto" else f"pagetile-{backend}", write, attend)


def _torch() -> Contender:
    """A plain copy of the same bytes; dense attention over keys that lie together already."""

    def write(_: WriteWork, x: dict[str, Tensor]) -> Callable[[], object]:
        source = torch.cat([x["key"].reshape(-1), x["value"].reshape(-1)])
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def attend(work: AttendWork, x: dict[str, Tensor]) -> Callable[[], object] | None:
        queries, keys = work.seqs[0]
        if len(set(work.seqs)) > 1 or queries not in (1, keys):
            return None
        causal = queries > 1
        batch = len(work.seqs)
        k, v = (x[n][x["table"].long()].flatten(1, 2)[:, :keys].transpose(1, 2).contiguous() for n in "kv")
        q = x["q"].view(batch, queries, work.q_heads, work.size).transpose(1, 2).contiguous()
        out = x["out"].view(batch, queries, work.q_heads, work.size)
        out.copy_(scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2))
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return Contender("torch", write, attend)


def _vllm() -> Contender:
    if find_spec("vllm") is None:
        return Contender("vllm", missing="vllm is not installed")
    from vllm import _custom_ops as ops  # pyright: ignore[reportMissingImports]
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    one = torch.ones(1, device="cuda")

    def write(_: WriteWork, x: dict[str, Tensor]) -> Callable[[], object]:
        args = (x["key"], x["value"], x["key_cache"], x["value_cache"], x["slots"])
        return lambda: ops.reshape_and_cache_flash(*args, "auto", one, one)

    def attend(work: AttendWork, x: dict[str, Tensor]) -> Callable[[], object]:
        max_q, max_k = _longest(work)
        return lambda: flash_attn_varlen_func(
            q=x["q"], k=x["k"], v=x["v"], max_seqlen_q=max_q, cu_seqlens_q=x["starts"], max_seqlen_k=max_k,
            seqused_k=x["lens"], causal=True, block_table=x["table"], out=x["out"],
        )  # fmt: skip

    return Contender("vllm", write, attend)


def _flash_attn() -> Contender:
    if find_spec("flash_attn") is None:
        return Contender("flash-attn", missing="flash-attn is not installed")
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    def attend(work: AttendWork, x: dict[str, Tensor]) -> Callable[[], object] | None:
        if work.block % 256:
            return None  # its pages are multiples of 256 tokens
        max_q, max_k = _longest(work)
        ends = torch.nn.functional.pad(x["lens"].cumsum(0, dtype=torch.int32), (1, 0))

        def call() -> None:
            x["out"].copy_(
                flash_attn_varlen_func(
                    x["q"], x["k"], x["v"], x["starts"], ends, max_q, max_k, causal=True, block_table=x["table"]
                )
            )

        return call

    return Contender("flash-attn", attend=attend)


def _flashinfer() -> Contender:
    if find_spec("flashinfer") is None:
        return Contender("flashinfer", missing="flashinfer-python is not installed")
    import flashinfer  # pyright: ignore[reportMissingImports]

    def attend(work: AttendWork, x: dict[str, Tensor]) -> Callable[[], object]:
        need = torch.tensor([-(-k // work.block) for _, k in work.seqs])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), need.cumsum(0)]).to(torch.int32)
        pages = torch.cat([row[:n] for row, n in zip(x["table"], need.tolist(), strict=True)])
        last = torch.tensor([(k - 1) % work.block + 1 for _, k in work.seqs], dtype=torch.int32)
        space = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
        heads = (work.q_heads, work.kv_heads, work.size, work.block)
        kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        if _longest(work)[0] == 1:
            decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
            decode.plan(starts, pages, last, *heads, **kinds)
            return lambda: decode.run(x["q"], (x["k"], x["v"]), out=x["out"])
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
        prefill.plan(x["starts"].cpu(), starts, pages, last, *heads, causal=True, **kinds)
        return lambda: prefill.run(x["q"], (x["k"], x["v"]), out=x["out"])

    return Contender("flashinfer", attend=attend)


def _invariant() -> Contender:
    """What bits that do not depend on the batch cost."""
    import pagetile

    def attend(work: AttendWork, x: dict[str, Tensor]) -> Callable[[], object]:
        max_q, max_k = _longest(work)
        return lambda: pagetile.flash_attn_varlen_func(
            x["q"], x["k"], x["v"], max_q, x["starts"], max_k, seqused_k=x["lens"], causal=True,
            block_table=x["table"], out=x["out"], batch_invariant=True,
        )  # fmt: skip

    return Contender("pagetile-invariant", attend=attend)


MAKERS: dict[str, Callable[[], Contender]] = {
    "pagetile": lambda: _pagetile("auto"),
    "pagetile-triton": lambda: _pagetile("triton"),
    "pagetile-invariant": _invariant,
    "torch": _torch,
    "vllm": _vllm,
    "flash-attn": _flash_attn,
    "flashinfer": _flashinfer,
}
"""Every contender by name; calling one imports what it needs."""

EVERYWHERE: tuple[str, ...] = ("pagetile", "pagetile-invariant", "torch")
"""Those that run on a CPU too."""
