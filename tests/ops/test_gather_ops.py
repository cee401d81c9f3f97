"""gather_cache and scatter_cache: positions through the table, starts inside blocks, scales, and what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import ArgumentError, BlockTableError, DTypeError, ShapeError, UnsupportedError
from pagetile.reference import dequantise

TABLE = torch.tensor([[7, 2, 4], [5, -1, 99], [1, 3, 8]], dtype=torch.int32)
SUMS = torch.tensor([0, 6, 6, 12], dtype=torch.int32)
STARTS = torch.tensor([3, 0, 6])


def pool(dtype: torch.dtype = torch.float32, blocks: int = 9) -> tuple[Tensor, Tensor]:
    """K tokens first, V heads first, block size 4, 2 heads of 5 and 3."""
    k, v = torch.randn(blocks, 4, 2, 5), torch.randn(blocks, 2, 4, 3).transpose(1, 2)
    return k.to(dtype), v.to(dtype)


def by_hand(cache: Tensor) -> Tensor:
    rows = [cache[7, 3], *cache[2], cache[4, 0], cache[3, 2], cache[3, 3], *cache[8]]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_are_the_tokens_of_their_positions(backend: str, dtype: torch.dtype) -> None:
    k, v = pool(dtype)
    key, value = pagetile.gather_cache(k, v, TABLE, SUMS, seq_starts=STARTS, backend=backend)
    assert torch.equal(key, by_hand(k))
    assert torch.equal(value, by_hand(v))


def test_scatter_is_the_inverse(backend: str) -> None:
    k, v = pool()
    key, value = torch.randn(12, 2, 5), torch.randn(12, 2, 3)
    before = k.clone(), v.clone()
    how: dict[str, Any] = {"seq_starts": STARTS, "backend": backend}
    pagetile.scatter_cache(key, value, k, v, TABLE, SUMS, **how)
    again = pagetile.gather_cache(k, v, TABLE, SUMS, **how)
    assert torch.equal(again[0], key)
    assert torch.equal(again[1], value)
    pagetile.scatter_cache(by_hand(before[0]), by_hand(before[1]), k, v, TABLE, SUMS, **how)
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])


SCALES = {
    "none": None,
    "number": 0.25,
    "tensor": torch.tensor([0.3]),
    "head": torch.tensor([0.3, 2.0]),
    "sequence": torch.rand(3, 2),
    "token": torch.rand(9, 4, 2),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_quantised_caches(backend: str, kind: str, scale: str) -> None:
    by = SCALES[scale]
    stored = torch.int8 if kind == "int8" else torch.uint8
    k, v = (torch.randint(0, 256, (9, 4, 2, n)).to(stored) for n in (5, 3))  # every byte, NaN too
    key, value = pagetile.gather_cache(
        k, v, TABLE, SUMS, seq_starts=STARTS, k_scale=by, dtype=torch.float16, kv_cache_dtype=kind, backend=backend
    )
    rows = torch.ones(12, 2) if by is None else torch.full((12, 2), by) if isinstance(by, float) else by
    if scale == "sequence":
        rows = SCALES[scale][torch.tensor([0] * 6 + [2] * 6)]
    if scale == "token":
        rows = by_hand(SCALES[scale])
    expected = dequantise(by_hand(k), kind, rows.expand(12, 2).unsqueeze(-1)).half()
    assert torch.equal(key.nan_to_num(9e4), expected.nan_to_num(9e4))
    assert torch.equal(value.nan_to_num(9e4), dequantise(by_hand(v), kind).half().nan_to_num(9e4))


def test_rows_past_the_last_sequence_stay(backend: str) -> None:
    k, v = pool()
    out = torch.full((15, 2, 8), 7.0)[..., :5], torch.full((15, 2, 3), 7.0)
    pagetile.gather_cache(k, v, TABLE, SUMS, seq_starts=STARTS, out=out, backend=backend)
    assert torch.equal(out[0][:12], by_hand(k))
    assert (out[0][12:] == 7).all()
    assert (out[1][12:] == 7).all()
    empty = pagetile.gather_cache(k, v, TABLE, torch.zeros(4, dtype=torch.int32), backend=backend)
    assert [tuple(x.shape) for x in empty] == [(0, 2, 5), (0, 2, 3)]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"block_table": TABLE.clone().fill_(9)}, BlockTableError, r"block_table\[0, 0\] is 9.* ids 0 to 8"),
        ({"seq_starts": torch.tensor([3, 0, 7])}, BlockTableError, r"block_table\[2\] has 3 columns of 4"),
        ({"seq_starts": torch.tensor([3, -1, 0])}, ArgumentError, r"seq_starts\[1\] is -1"),
        ({"cu_seq_lens": torch.tensor([0, 6, 5, 9], dtype=torch.int32)}, ArgumentError, "decreases from 6"),
        ({"cu_seq_lens": torch.tensor([1, 6, 6, 9], dtype=torch.int32)}, ArgumentError, r"cu_seq_lens\[0\] is 1"),
        ({"cu_seq_lens": SUMS.long()}, DTypeError, "cu_seq_lens is int64"),
        ({"cu_seq_lens": SUMS[:3]}, ShapeError, "number of sequences"),
        ({"dtype": torch.float16}, DTypeError, "copied bit by bit"),
        ({"k_scale": 2.0}, ArgumentError, "k_scale is 2.0"),
    ],
)
def test_errors_write_nothing(backend: str, change: dict[str, Any], error: type[Exception], words: str) -> None:
    k, v = pool()
    arguments: dict[str, Any] = {"block_table": TABLE, "cu_seq_lens": SUMS, "seq_starts": STARTS, **change}
    with pytest.raises(error, match=words):
        pagetile.gather_cache(k, v, **arguments, backend=backend)
    if "dtype" in change or "k_scale" in change:
        return
    key, value = torch.ones(12, 2, 5), torch.ones(12, 2, 3)
    before = k.clone()
    with pytest.raises(error):
        pagetile.scatter_cache(key, value, k, v, **arguments, backend=backend)
    assert torch.equal(k, before)


def test_out_that_is_a_cache_is_refused() -> None:
    k, v = pool()
    with pytest.raises(ArgumentError, match="share memory"):
        pagetile.gather_cache(k, v, TABLE, SUMS, out=(k.view(-1, 2, 5)[:12], torch.zeros(12, 2, 3)))


def test_operators_and_compiled_graphs() -> None:
    k, v = pool()
    out = torch.zeros(14, 2, 5), torch.zeros(14, 2, 3)
    slots = pagetile.ops.gather.row_slots(TABLE, SUMS, STARTS, 14, 9, 4)
    torch.library.opcheck(torch.ops.pagetile.row_slots.default, (TABLE, SUMS, STARTS, 14, 9, 4))
    torch.library.opcheck(torch.ops.pagetile.gather_rows.default, (*out, k, v, slots))

    def step(k: Tensor, v: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pagetile.gather_cache(k, v, TABLE, SUMS, seq_starts=STARTS, out=(key, value))
        pagetile.scatter_cache(key * 2, value, k, v, TABLE, SUMS, seq_starts=STARTS)
        return key.sum() + k.sum()

    expected_cache = k.clone()
    expected = step(expected_cache, v.clone(), *(x.clone() for x in out))
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(k, v, *out), expected)
    assert torch.equal(k, expected_cache)

    with pytest.raises(Exception, match="pass out="):
        torch.compile(lambda: pagetile.gather_cache(k, v, TABLE, SUMS), backend="aot_eager", fullgraph=True)()
    assert issubclass(UnsupportedError, NotImplementedError)
