"""The x-packed layout and its ops: one agreement over the same data, the meaning of the partition buffers, errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import ArgumentError, BlockTableError, DTypeError, ShapeError, SlotError, UnsupportedError

PARTITION = 512
CONTEXTS = [1, 511, 512, 513, 8191, 8193, 70000]


@dataclass
class Decode:
    """One query a sequence over the same keys and values in both layouts."""

    query: Tensor
    paged: tuple[Tensor, Tensor]
    packed: tuple[Tensor, Tensor]
    table: Tensor
    lens: Tensor
    slopes: Tensor | None
    scales: tuple[Any, Any]
    scale: float = 0.3

    @property
    def bound(self) -> int:
        return int(self.lens.max())

    def arguments(self) -> tuple[Any, ...]:
        heads, block_size = self.paged[0].shape[2], self.paged[0].shape[1]
        return (
            self.query, *self.packed, heads, self.scale, self.table, self.lens, block_size, self.bound, self.slopes,
            "auto", *self.scales,
        )  # fmt: skip

    def v1(self, backend: str, **how: Any) -> Tensor:
        out = torch.full((*self.query.shape[:2], self.paged[1].shape[3]), 9.0).to(self.query.dtype)
        pagetile.paged_attention_v1(out, *self.arguments(), backend=backend, **how)
        return out

    def buffers(self, parts: int) -> list[Tensor]:
        shape = (*self.query.shape[:2], parts)
        tmp = torch.full((*shape, self.paged[1].shape[3]), 9.0).to(self.query.dtype)
        return [torch.full(shape, 9.0), torch.full(shape, 9.0), tmp]

    def v2(self, backend: str, parts: int = 0, **how: Any) -> tuple[Tensor, ...]:
        out = torch.full((*self.query.shape[:2], self.paged[1].shape[3]), 9.0).to(self.query.dtype)
        buffers = self.buffers(parts or max(1, -(-self.bound // PARTITION)))
        pagetile.paged_attention_v2(out, *buffers, *self.arguments(), backend=backend, **how)
        return out, *buffers

    def varlen(self, backend: str, packed: bool = False, **how: Any) -> Tensor:
        return pagetile.flash_attn_varlen_func(
            self.query, *(self.packed if packed else self.paged), 1,
            torch.arange(len(self.query) + 1, dtype=torch.int32), self.bound, seqused_k=self.lens,
            block_table=self.table, alibi_slopes=self.slopes, softmax_scale=self.scale, k_descale=self.scales[0],
            v_descale=self.scales[1], backend=backend, **how,
        )  # fmt: skip


def decode(
    lens: list[int],
    dtype: torch.dtype = torch.float32,
    kind: str = "auto",
    alibi: bool = False,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 24),
    block_size: int = 16,
) -> Decode:
    """Random sequences in scattered blocks; slots that hold no token, and unused table entries, are poison."""
    need = [-(-n // block_size) for n in lens]
    blocks = sum(need) + 2
    order = torch.randperm(blocks).to(torch.int32)
    table = torch.full((len(lens), max(need) + 1), -3, dtype=torch.int32)
    used = torch.zeros(blocks * block_size, dtype=torch.bool)
    for row, (part, n) in enumerate(zip(order[: sum(need)].split(need), lens, strict=True)):
        table[row, : len(part)] = part
        at = torch.arange(n)
        used[part.long()[at // block_size] * block_size + at % block_size] = True
    caches = []
    for size in sizes:
        cache = torch.randn(blocks * block_size, heads[1], size)
        cache[~used] = float("nan")
        if kind == "auto":
            cache = cache.to(dtype)
        else:
            cache = cache.to({"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kind])
        caches.append(cache.reshape(blocks, block_size, heads[1], size))
    slopes = torch.rand(heads[0]) * 0.05 if alibi else None
    scales = (torch.tensor([0.7]), torch.tensor([1.3])) if kind != "auto" else (None, None)
    query = torch.randn(len(lens), heads[0], sizes[0]).to(dtype)
    packed = pagetile.to_legacy(caches[0], caches[1])
    return Decode(query, (caches[0], caches[1]), packed, table, torch.tensor(lens, dtype=torch.int32), slopes, scales)


def exact(work: Decode) -> Tensor:
    """The reference in float64, over float64 copies of the values that the cache stands for."""
    from pagetile.reference import dequantise

    caches = []
    for cache, scale in zip(work.paged, work.scales, strict=True):
        kind = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}.get(cache.dtype, "")
        values = dequantise(cache, kind, scale) if kind else cache
        caches.append(values.double())
    paged, none = (caches[0], caches[1]), (None, None)
    return replace(work, query=work.query.double(), paged=paged, scales=none).varlen("reference")


STEP = {torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Two roundings to the dtype (of the output, and of a partition's), and what a sum in float32 loses."""


def near(out: Tensor, right: Tensor, dtype: torch.dtype, growth: float = 1.0) -> None:
    assert not out.isnan().any()
    error, largest = float((out.double() - right).abs().max()), float(right.abs().max())
    assert error <= STEP[dtype] * growth * largest, f"{error / largest:.2e} of the largest output"


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_v1_v2_and_varlen_agree_at_any_context(context: int, alibi: bool, kind: str) -> None:
    """The backend that ``auto`` takes, over one small head pair where the context is long."""
    small = context > 1000
    heads = (2, 1) if small else (4, 2)
    work = decode([context] if small else [context, 3], torch.bfloat16, kind, alibi, heads, (16, 16))
    right = exact(work)
    for out in (work.v1("auto"), work.v2("auto")[0], work.varlen("auto", packed=True)):
        near(out, right, torch.bfloat16)
    if kind == "auto":
        near(work.varlen("auto"), right, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": (4, 2), "block_size": 16},
        {"heads": (5, 1), "block_size": 8, "sizes": (32, 7)},
        {"heads": (6, 3), "block_size": 3, "sizes": (48, 16)},
        {"heads": (2, 2), "block_size": 32, "alibi": True},
        {"heads": (7, 1), "block_size": 1},
    ],
    ids=str,
)
def test_agreement_over_shapes(backend: str, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    work = decode([40, 0, 7], dtype, **shape)
    right = exact(work)
    for out in (work.v1(backend), work.v2(backend)[0], work.varlen(backend, packed=True)):
        near(out, right, dtype, 4)
        assert not out[1].any()


def test_the_buffers_of_v2_mean_what_they_say(backend: str) -> None:
    work = decode([700, 0, 512, 3], alibi=True)
    out, sums, maxima, partial = work.v2(backend, parts=3)
    k, v = (cache.float() for cache in work.paged)
    for seq, length in enumerate(work.lens.tolist()):
        at = torch.arange(length)
        blocks = work.table[seq].long()[at // 16]
        keys, values = (x[blocks, at % 16].repeat_interleave(2, 1) for x in (k, v))
        scores = work.scale * torch.einsum("hd,nhd->hn", work.query[seq], keys)
        scores -= work.slopes[:, None] * (length - 1 - at)
        for part in range(3):
            here = slice(part * PARTITION, min(length, (part + 1) * PARTITION))
            if here.start >= here.stop:
                assert maxima[seq, :, part].isneginf().all()
                assert not sums[seq, :, part].any()
                assert not partial[seq, :, part].any()
                continue
            most = scores[:, here].amax(1)
            weights = (scores[:, here] - most[:, None]).exp()
            torch.testing.assert_close(maxima[seq, :, part], most, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(sums[seq, :, part], weights.sum(1), rtol=1e-4, atol=0)
            right = torch.einsum("hn,nhd->hd", weights / weights.sum(1, keepdim=True), values[here])
            torch.testing.assert_close(partial[seq, :, part], right, rtol=1e-4, atol=1e-5)
    share = (maxima - maxima.amax(2, keepdim=True).clamp(min=-1e30)).exp() * sums
    total = share.sum(2, keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(out, (share / total).unsqueeze(-1).mul(partial).sum(2), rtol=1e-4, atol=1e-5)


def test_scales_of_heads_and_sequences(backend: str) -> None:
    work = decode([20, 40], torch.float16, "fp8_e5m2")
    work.scales = (torch.rand(2, 2) + 0.5, torch.rand(2) + 0.5)
    near(work.v1(backend), work.varlen("reference").double(), torch.float16, 4)


def test_a_write_then_a_read(backend: str) -> None:
    """More heads than the original op stored: Hkv * D / x is above 512."""
    k, v = torch.randn(33, 40, 64).half(), torch.randn(33, 40, 64).half()
    cache = pagetile.to_legacy(torch.zeros(5, 16, 40, 64).half(), torch.zeros(5, 16, 40, 64).half())
    slots = torch.cat([torch.arange(20, 48), torch.tensor([3, -1, 60, 2, 1])])
    pagetile.reshape_and_cache(k, v, *cache, slots, backend=backend)
    keys, values = pagetile.from_legacy(*cache)
    kept = slots >= 0
    assert torch.equal(keys.view(80, 40, 64)[slots[kept]], k[kept])
    assert torch.equal(values.view(80, 40, 64)[slots[kept]], v[kept])
    others = torch.ones(80, dtype=torch.bool)
    others[slots[kept]] = False
    assert not keys.view(80, 40, 64)[others].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_converters_are_inverse(dtype: torch.dtype) -> None:
    k, v = torch.randn(3, 5, 2, 32).to(dtype), torch.randn(3, 2, 5, 7).transpose(1, 2).to(dtype)
    packed = pagetile.to_legacy(k, v)
    x = 16 // k.element_size()
    assert packed[0].shape == (3, 2, 32 // x, 5, x)
    assert packed[1].shape == (3, 2, 7, 5)
    for mine, right in zip(pagetile.from_legacy(*packed), (k, v), strict=True):
        assert torch.equal(mine.view(torch.uint8), right.contiguous().view(torch.uint8))


def refused(error: type[Exception], words: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=words):
        call(*args, **kwargs)


def test_what_is_refused_says_so(backend: str) -> None:
    work = decode([40, 7])
    out = torch.zeros(2, 4, 24)
    v1, v2 = pagetile.paged_attention_v1, pagetile.paged_attention_v2
    args = list(work.arguments())

    def without(index: int, value: Any) -> list[Any]:
        return [value if i == index else x for i, x in enumerate(args)]

    refused(UnsupportedError, "blocksparse_vert_stride is 8", v1, out, *args, blocksparse_vert_stride=8)
    v1(out, *args, tp_rank=3, blocksparse_local_blocks=16, blocksparse_vert_stride=1, backend=backend)
    refused(ShapeError, r"axis 1 \(Hkv\) is 2, but num_kv_heads is 4", v1, out, *without(3, 4), backend=backend)
    refused(ShapeError, r"axis 3 \(BS\) is 16, but block_size is 8", v1, out, *without(7, 8), backend=backend)
    refused(ArgumentError, "max_seq_len is 39", v1, out, *without(8, 39), backend=backend)
    refused(ShapeError, "pagetile.to_legacy", v1, out, *without(1, work.paged[0]), backend=backend)
    refused(ArgumentError, "k_scale is 2.0", v1, out, *without(11, 2.0), backend=backend)
    table = work.table.clone()
    table[0, 1] = 77
    refused(BlockTableError, r"block_tables\[0, 1\] is 77", v1, out, *without(5, table), backend=backend)
    small = work.buffers(1)
    refused(DTypeError, "exp_sums is float16", v2, out, small[0].half(), *small[1:], *args, backend=backend)
    refused(ShapeError, "P = 1", v2, out, small[0], torch.zeros(2, 4, 2), small[2], *args, backend=backend)
    refused(
        ShapeError, r"axis 2 \(P\) is 1, but max_seq_len is 900", v2, out, *small, *without(8, 900), backend=backend
    )
    refused(ArgumentError, "share memory", v2, out, small[0], small[0], small[2], *args, backend=backend)
    slots = torch.tensor([10_000])
    key = torch.zeros(1, 2, 16)
    refused(
        SlotError, r"slot_mapping\[0\] is 10000", pagetile.reshape_and_cache, key, torch.zeros(1, 2, 24), *work.packed,
        slots, backend=backend,
    )  # fmt: skip


def test_operators_and_compiled_graphs() -> None:
    work = decode([40, 7])
    out, buffers = torch.zeros(2, 4, 24), work.buffers(1)
    starts = torch.arange(3, dtype=torch.int32)
    attend = (work.query, *work.packed, starts, work.lens, None, work.table, 1, 40, 0.3)
    torch.library.opcheck(torch.ops.pagetile.attend_partitions.default, (out, *buffers, *attend))
    torch.library.opcheck(torch.ops.pagetile.attend.default, attend)

    def step(k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        key, value, slots, out, *buffers = rest
        pagetile.reshape_and_cache(key, value, k, v, slots)
        args = (work.query, k, v, 2, 0.3, work.table, work.lens, 16, 40, None, "auto", None, None)
        pagetile.paged_attention_v1(out, *args)
        first = out * 2
        pagetile.paged_attention_v2(out, *buffers, *args)
        return first + out

    given = [*work.packed, torch.randn(1, 2, 16), torch.randn(1, 2, 24), torch.tensor([5]), out, *buffers]
    expected = step(*[x.clone() for x in given])
    torch.testing.assert_close(torch.compile(step, backend="aot_eager", fullgraph=True)(*given), expected)
