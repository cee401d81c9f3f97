"""rope_and_cache: the sequence it stands for, rounded once; the bytes of a write; nothing written on an error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import ArgumentError, DTypeError, ShapeError, SlotError, UnsupportedError

BLOCKS, BLOCK_SIZE, ROWS = 9, 3, 50


def inputs(dtype: torch.dtype, heads: int, q_heads: int, size: int, size_v: int, half: int) -> dict[str, Any]:
    """Nine tokens of which seven have slots, one of them -1; queries and keys are slices of one packed row."""
    packed = torch.randn(9, (q_heads + heads) * size).to(dtype)
    return {
        "query": packed[:, : q_heads * size].view(9, q_heads, size),
        "key": packed[:, q_heads * size :].view(9, heads, size),
        "value": torch.randn(9, heads, size_v).to(dtype),
        "slot_mapping": torch.tensor([4, 26, -1, 0, 13, 14, 15]),
        "positions": torch.tensor([0, 49, 7, 8, 9, 3, 3, 21, 30], dtype=torch.int32),
        "rotary_cos": torch.randn(ROWS, half).to(dtype),
        "rotary_sin": torch.randn(ROWS, half).to(dtype),
    }


def pool(kind: str, dtype: torch.dtype, heads: int, size: int, size_v: int) -> tuple[Tensor, Tensor]:
    stored = dtype if kind == "auto" else torch.int8 if kind == "int8" else torch.uint8
    v = torch.zeros(BLOCKS, heads, BLOCK_SIZE, size_v, dtype=stored).transpose(1, 2)
    return torch.zeros(BLOCKS, BLOCK_SIZE, heads, size, dtype=stored), v


def turned(x: Tensor, args: dict[str, Any], interleaved: bool, weight: Tensor | None, eps: float) -> Tensor:
    """The head of each row, in float64: norm, then rotation by pairs."""
    y = x.double()
    if weight is not None:
        y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    half = args["rotary_cos"].shape[1]
    cos, sin = (args[name].double()[args["positions"].long()][:, None] for name in ("rotary_cos", "rotary_sin"))
    first = range(0, 2 * half, 2) if interleaved else range(half)
    out = y.clone()
    for i, one in enumerate(first):
        two = one + 1 if interleaved else one + half
        out[..., one] = y[..., one] * cos[..., i] - y[..., two] * sin[..., i]
        out[..., two] = y[..., two] * cos[..., i] + y[..., one] * sin[..., i]
    return out


def one_rounding(x: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    """Within half a step of the dtype, and what float32 arithmetic leaves of the largest channel of the head."""
    largest = right.abs().amax(-1, keepdim=True)
    allowed = right.abs() * torch.finfo(dtype).eps * 0.51 + largest * 8 * torch.finfo(torch.float32).eps
    allowed += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((x.double() - right).abs() <= allowed).all()


SHAPES = [(3, 6, 32, 24, 16), (1, 5, 7, 130, 3), (2, 2, 128, 128, 64), (1, 1, 16, 8, 0)]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_is_the_sequence_it_stands_for(backend: str, dtype: torch.dtype, interleaved: bool, norm: bool) -> None:
    for shape in SHAPES:
        args = inputs(dtype, *shape)
        weights = {f"{x}_weight": torch.rand(shape[2]).to(dtype) + 0.5 for x in "qk"} if norm else {}
        key_cache, value_cache = pool("auto", dtype, shape[0], *shape[2:4])
        key_out = torch.empty_like(args["key"])
        out = pagetile.rope_and_cache(
            **args,
            key_cache=key_cache,
            value_cache=value_cache,
            interleaved=interleaved,
            eps=1e-5,
            key_out=key_out,
            backend=backend,
            **weights,
        )
        q_weight, k_weight = weights.get("q_weight"), weights.get("k_weight")
        one_rounding(out, turned(args["query"], args, interleaved, q_weight, 1e-5), dtype)
        one_rounding(key_out, turned(args["key"], args, interleaved, k_weight, 1e-5), dtype)
        expected = pool("auto", dtype, shape[0], *shape[2:4])
        pagetile.reshape_and_cache_flash(key_out, args["value"], *expected, args["slot_mapping"], backend=backend)
        assert torch.equal(key_cache, expected[0])
        assert torch.equal(value_cache, expected[1])


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_quantised_cache_holds_the_bytes_of_a_write(backend: str, kind: str) -> None:
    args = inputs(torch.bfloat16, 2, 4, 16, 8, 6)
    scales = {"k_scale": torch.tensor([0.01, 0.3]), "v_scale": 0.7}
    ours, expected = pool(kind, torch.bfloat16, 2, 16, 8), pool(kind, torch.bfloat16, 2, 16, 8)
    key_out = torch.empty_like(args["key"])
    named = dict(zip(("key_cache", "value_cache"), ours, strict=True))
    pagetile.rope_and_cache(**args, **named, **scales, kv_cache_dtype=kind, key_out=key_out, backend=backend)
    pagetile.reshape_and_cache_flash(
        key_out, args["value"], *expected, args["slot_mapping"], kind, **scales, backend=backend
    )
    for mine, right in zip(ours, expected, strict=True):
        assert mine.any()
        assert torch.equal(mine, right)


def test_in_place(backend: str) -> None:
    args = inputs(torch.float32, 2, 4, 16, 16, 8)
    args["query"], args["key"] = args["query"].contiguous(), args["key"].contiguous()
    caches = dict(zip(("key_cache", "value_cache"), pool("auto", torch.float32, 2, 16, 16), strict=True))
    key_out = torch.empty_like(args["key"])
    expected = pagetile.rope_and_cache(**args, **caches, key_out=key_out, backend=backend)
    out = pagetile.rope_and_cache(**args, **caches, out=args["query"], key_out=args["key"], backend=backend)
    assert out is args["query"]
    assert torch.equal(out, expected)
    assert torch.equal(args["key"], key_out)


def test_it_agrees_with_flash_attn_with_kvcache(backend: str) -> None:
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    cos, sin = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
    table, lens = torch.tensor([[3, 5], [1, 0]], dtype=torch.int32), torch.tensor([4, 2], dtype=torch.int32)
    one, two = (torch.zeros(BLOCKS, BLOCK_SIZE, 2, 16) for _ in "kv")
    three, four = one.clone(), two.clone()
    expected = pagetile.flash_attn_with_kvcache(
        q, one, two, k, v, cos, sin, lens, block_table=table, causal=True, backend=backend
    )
    slots = torch.tensor([5 * BLOCK_SIZE + 1, 1 * BLOCK_SIZE + 2])
    turned_q = pagetile.rope_and_cache(
        *(x[:, 0] for x in (q, k, v)), three, four, slots, lens, cos, sin, interleaved=True, backend=backend
    )
    out = pagetile.flash_attn_varlen_func(
        turned_q, three, four, 1, torch.arange(3, dtype=torch.int32), 6, seqused_k=lens + 1, block_table=table,
        backend=backend,
    )  # fmt: skip
    assert torch.equal(one, three)
    torch.testing.assert_close(out, expected[:, 0], rtol=0, atol=4 * torch.finfo(torch.float32).eps * math.sqrt(16))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"positions": torch.tensor([0] * 8 + [50])}, ArgumentError, r"positions\[8\] is 50, but rotary_cos has 50"),
        ({"slot_mapping": torch.tensor([0, 27])}, SlotError, r"slot_mapping\[1\] is 27"),
        ({"rotary_cos": torch.zeros(ROWS, 9)}, ShapeError, "rotary pairs"),
        ({"rotary_cos": torch.zeros(ROWS, 9), "rotary_sin": torch.zeros(ROWS, 9)}, ShapeError, "rotary_dim may be at"),
        ({"q_weight": torch.ones(16)}, ArgumentError, "pass both, or neither"),
        ({"q_weight": torch.ones(8), "k_weight": torch.ones(16)}, ShapeError, "q_weight: axis 0"),
        ({"positions": torch.zeros(9)}, DTypeError, "positions is float32"),
        ({"positions": torch.zeros(8, dtype=torch.int64)}, ShapeError, "number of tokens"),
        ({"eps": -1.0}, ArgumentError, "eps is -1.0"),
    ],
)
def test_errors_write_nothing(backend: str, change: dict[str, Any], error: type[Exception], words: str) -> None:
    args = inputs(torch.float32, 2, 4, 16, 8, 8)
    caches = pool("auto", torch.float32, 2, 16, 8)
    out = torch.full((9, 4, 16), 5.0)
    with pytest.raises(error, match=words):
        pagetile.rope_and_cache(
            **{**args, **change}, key_cache=caches[0], value_cache=caches[1], out=out, backend=backend
        )
    assert (out == 5).all()
    assert not caches[0].any()


def test_what_is_shared_or_packed_is_refused() -> None:
    args = inputs(torch.float32, 2, 4, 16, 16, 8)
    caches = pool("auto", torch.float32, 2, 16, 16)
    with pytest.raises(ArgumentError, match="share memory"):
        pagetile.rope_and_cache(**args, key_cache=caches[0], value_cache=caches[1], key_out=args["value"])
    with pytest.raises(UnsupportedError, match="x-packed"):
        pagetile.rope_and_cache(**args, key_cache=torch.zeros(9, 2, 4, 3, 4), value_cache=torch.zeros(9, 2, 16, 3))


def test_operator_and_compiled_graph() -> None:
    args = inputs(torch.float32, 2, 4, 16, 8, 8)
    order = ("query", "key", "value")
    rest = ("slot_mapping", "positions", "rotary_cos", "rotary_sin")
    caches = pool("auto", torch.float32, 2, 16, 8)
    given = [*(args[name] for name in order), *caches, *(args[name] for name in rest)]
    out = torch.zeros(9, 4, 16)
    torch.library.opcheck(torch.ops.pagetile.rope_and_cache.default, (out, None, *given))
    torch.library.opcheck(torch.ops.pagetile.rope_and_cache.default, (out, torch.zeros(9, 2, 16), *given))

    def step(*given: Tensor) -> Tensor:
        return pagetile.rope_and_cache(*given) * 2 + given[3].sum()

    expected = step(*[x.clone() for x in given])
    given[3].zero_()
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(*given), expected)
