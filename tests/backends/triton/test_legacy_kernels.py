"""The x-packed layout, gathers, copies of blocks and the fused write, under the interpreter or on a GPU: the bytes and
the numbers of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile.backends.verbs import PARTITION_KEYS

DTYPES = [torch.float32, torch.float16]
"""bfloat16 is not for the interpreter."""

STEP = {torch.float32: 2.0**-20, torch.float16: 2.0**-9}


def poisoned(lens: list[int], kind: str, dtype: torch.dtype, block_size: int, device: str) -> dict[str, Tensor]:
    """K and V ``[NB, BS, 2, D]`` of scattered sequences; what holds no token is NaN."""
    need = [-(-n // block_size) for n in lens]
    blocks = sum(need) + 1
    order = torch.randperm(blocks).to(torch.int32)
    table = torch.full((len(lens), max(need)), -1, dtype=torch.int32)
    used = torch.zeros(blocks * block_size, dtype=torch.bool)
    for row, (part, n) in enumerate(zip(order[: sum(need)].split(need), lens, strict=True)):
        table[row, : len(part)] = part
        at = torch.arange(n)
        used[part.long()[at // block_size] * block_size + at % block_size] = True
    found = {"table": table.to(device), "lens": torch.tensor(lens, dtype=torch.int32, device=device)}
    for name, size in (("k", 32), ("v", 24)):
        cache = torch.randn(blocks * block_size, 2, size)
        cache[~used] = float("nan")
        stored = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(kind, dtype)
        found[name] = cache.to(stored).view(blocks, block_size, 2, size).to(device)
    found["k"], found["v"] = pagetile.to_legacy(found["k"], found["v"])
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "window_size": (9, 0), "softcap": 3.0},
    {"causal": True, "s_aux": True, "alibi_slopes": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "alibi"])
@pytest.mark.parametrize("block_size", [16, 3, 128])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [*((dtype, "auto") for dtype in DTYPES), (torch.float16, "fp8_e4m3"), (torch.float32, "fp8_e5m2")],
)
def test_attention(dtype: torch.dtype, kind: str, block_size: int, options: dict[str, Any], kernel_device: str) -> None:
    x = poisoned([37, 0, 150], kind, dtype, block_size, kernel_device)
    q = torch.randn(7, 6, 32).to(dtype).to(kernel_device)
    starts = torch.tensor([0, 5, 5, 6], dtype=torch.int32, device=kernel_device)
    options = dict(options)
    for name in ("s_aux", "alibi_slopes"):
        if name in options:
            options[name] = torch.rand(6, device=kernel_device)
    if kind != "auto":
        options |= {"k_descale": torch.rand(2, device=kernel_device) + 0.1, "v_descale": 0.6}

    def run(backend: str, **how: Any) -> tuple[Tensor, Tensor]:
        return pagetile.flash_attn_varlen_func(
            q, x["k"], x["v"], 5, starts, 150, seqused_k=x["lens"], block_table=x["table"], return_softmax_lse=True,
            backend=backend, **options, **how,
        )  # fmt: skip

    right, right_lse = run("reference")
    for how in ({}, {"batch_invariant": True}):
        out, lse = run("triton", **how)
        assert torch.equal(lse[:, :6].isneginf(), right_lse[:, :6].isneginf())
        torch.testing.assert_close(out[:6], right[:6], rtol=STEP[dtype], atol=4 * STEP[dtype])
        torch.testing.assert_close(
            lse[:, :6], right_lse[:, :6], rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-3
        )


def test_partitions(kernel_device: str) -> None:
    x = poisoned([PARTITION_KEYS + 9, 0, 5], "auto", torch.float32, 16, kernel_device)
    q = torch.randn(3, 4, 32, device=kernel_device)
    made = {}
    for backend in ("reference", "triton"):
        out = torch.full((3, 4, 24), 9.0, device=kernel_device)
        shape = (3, 4, 2)
        buffers = [torch.full(s, 9.0, device=kernel_device) for s in (shape, shape, (*shape, 24))]
        pagetile.paged_attention_v2(
            out, *buffers, q, x["k"], x["v"], 2, 0.2, x["table"], x["lens"], 16, PARTITION_KEYS + 9,
            torch.rand(4, generator=torch.Generator().manual_seed(1)).to(kernel_device) * 0.1, backend=backend,
        )  # fmt: skip
        made[backend] = [out, *buffers]
    for mine, right in zip(made["triton"], made["reference"], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_and_gather(dtype: torch.dtype, kind: str, kernel_device: str) -> None:
    stored = {"auto": dtype, "int8": torch.int8}.get(kind, torch.uint8)
    key, value = (torch.randn(20, 2, n).to(dtype).to(kernel_device) for n in (32, 24))
    slots = torch.tensor([*range(14, 26), -1, 3, 47, 2, -7, 0], device=kernel_device)
    how: dict[str, Any] = {} if kind == "auto" else {"k_scale": torch.tensor([0.1, 2.0], device=kernel_device)}
    caches = {}
    for backend in ("reference", "triton"):
        blank = (torch.zeros(3, 16, 2, n, dtype=stored, device=kernel_device) for n in (32, 24))
        caches[backend] = pagetile.to_legacy(*blank)
        pagetile.reshape_and_cache(key, value, *caches[backend], slots, kind, **how, backend=backend)
    assert all(same_bytes(a, b) for a, b in zip(caches["triton"], caches["reference"], strict=True))

    k, v = pagetile.from_legacy(*caches["reference"])
    table = torch.tensor([[1, 0], [2, -5]], device=kernel_device)
    sums = torch.tensor([0, 20, 22], dtype=torch.int32, device=kernel_device)
    starts = torch.tensor([3, 9], device=kernel_device)
    rows = {
        backend: pagetile.gather_cache(
            k, v, table, sums, seq_starts=starts, dtype=dtype, kv_cache_dtype=kind, **how, backend=backend
        )
        for backend in ("reference", "triton")
    }
    assert all(same_bytes(a, b) for a, b in zip(rows["triton"], rows["reference"], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_copies_of_blocks(dtype: torch.dtype, kernel_device: str) -> None:
    pairs = [(0, 3), (1, 0), (3, 1), (2, 4), (4, 5)]
    both = torch.randn(6, 2, 4, 2, 7).to(dtype).to(kernel_device)
    odd = torch.randn(6, 4, 9).to(dtype).to(kernel_device)[:, :, 1:4]
    layers = [*both.unbind(1), odd]
    expected = [cache.clone() for cache in layers]
    for cache in expected:
        for source, destination in pairs:
            cache[destination] = cache[source].clone()
    pagetile.copy_blocks(layers[:2], layers[2:], pairs, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_fused_write(norm: bool, interleaved: bool, kind: str, kernel_device: str) -> None:
    dtype = torch.float16
    stored = {"auto": dtype, "int8": torch.int8}.get(kind, torch.uint8)
    g = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype).to(kernel_device)

    packed, value = random(5, 6 * 24), random(5, 2, 8)
    query, key = packed.view(5, 6, 24)[:, :4], packed.view(5, 6, 24)[:, 4:]
    weights = {"q_weight": random(24), "k_weight": random(24)} if norm else {}
    scales: dict[str, Any] = (
        {} if kind == "auto" else {"k_scale": 0.02, "v_scale": torch.tensor([0.3], device=kernel_device)}
    )
    cos, sin = random(9, 10), random(9, 10)
    positions = torch.tensor([0, 8, 3, 3, 7], device=kernel_device)
    slots = torch.tensor([5, -1, 11, 0], dtype=torch.int32, device=kernel_device)
    made = {}
    for backend in ("reference", "triton"):
        caches = [torch.zeros(4, 3, 2, n, dtype=stored, device=kernel_device) for n in (24, 8)]
        keys = torch.empty_like(key)
        out = pagetile.rope_and_cache(
            query, key, value, *caches, slots, positions, cos, sin, kind, **scales, **weights, eps=1e-5,
            interleaved=interleaved, key_out=keys, backend=backend,
        )  # fmt: skip
        again = [torch.zeros_like(cache) for cache in caches]
        pagetile.reshape_and_cache_flash(keys, value, *again, slots, kind, **scales, backend=backend)
        assert all(same_bytes(a, b) for a, b in zip(caches, again, strict=True))
        made[backend] = (out, keys)
    for mine, right in zip(made["triton"], made["reference"], strict=True):
        largest = right.float().abs().amax(-1, keepdim=True)
        allowed = right.float().abs() * 2.0**-10 + largest * 2.0**-20 + 2.0**-24
        assert ((mine.float() - right.float()).abs() <= allowed).all()
