"""Fixed shapes, as a captured graph has them: padding that is written, or read."""

from __future__ import annotations

import math

import pytest
import torch
from field_kit import attend, each_backend, ints, randn, zero_query

from pagetile.ops import flash_attn_varlen_func, reshape_and_cache_flash
from pagetile.testing import first_difference, same_bits
from pagetile.testing.machine import Subject


@pytest.mark.parametrize("pad", [-1, -2, -8, -9, -(2**31)])
@each_backend()
def test_slot_minus_one_is_not_the_last_slot_vllm_43810(subject: Subject, pad: int) -> None:
    """Indexing with -1 overwrites the last slot (vllm-project/vllm#43810, #43869)."""
    k, v = (torch.zeros(2, 4, 1, 8, device=subject.device) for _ in "kv")
    rows = torch.ones(3, 1, 8, device=subject.device)
    reshape_and_cache_flash(rows, rows, k, v, ints([0, pad, pad], subject, torch.int64), backend=subject.name)
    for cache in (k, v):
        assert (cache[0, 0] == 1).all()
        assert cache.sum() == 8


@pytest.mark.parametrize("padding", [0, 1])
@each_backend()
def test_dummy_lengths_sglang_1469(subject: Subject, padding: int) -> None:
    """Length 0 or 1 in padded rows (sgl-project/sglang#1469, gty111/gLLM#174): both safe, and their rows defined."""
    k, v = (randn(4, 4, 1, 8, seed=s).to(subject.device) for s in (0, 1))
    q = randn(3, 2, 8, seed=2).to(subject.device)
    table = ints([[3, 1], [0, 2**31 - 1], [0, -1]], subject)
    out, lse = attend(subject, q, k, v, table, [6, padding, padding], [1, 1, 1])
    alone = attend(subject, q[:1], k, v, table[:1], [6], [1])
    torch.testing.assert_close(out[:1], alone[0], rtol=1e-6, atol=1e-6)
    if padding:
        assert torch.equal(out[1:], v[0, :1].expand(2, 2, 8))
    else:
        assert not out[1:].any()
        assert lse[:, 1:].isneginf().all()


@each_backend()
def test_100_rows_in_a_graph_of_112_xllm_1939(subject: Subject) -> None:
    """Metadata for 100 of 112 rows (xLLM-AI/xllm#1939): flat starts, length 0, garbage in the table's tail."""
    real, padded = 100, 112
    k, v = (randn(40, 4, 1, 8, seed=s).to(subject.device) for s in (0, 1))
    lens = [1 + i % 12 for i in range(real)]
    table = torch.randint(0, 40, (padded, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    table[real:] = torch.tensor([2**31 - 1, -1, 40], dtype=torch.int32)
    table = table.to(subject.device)
    q = randn(padded, 2, 8, seed=2).to(subject.device)
    q[real:] = math.nan
    out = torch.full_like(q, 7.0)
    starts = ints([*range(real + 1), *[real] * (padded - real)], subject)
    how = {"return_softmax_lse": True, "backend": subject.name, "batch_invariant": True}
    seqused = ints(lens + [0] * (padded - real), subject)
    flash_attn_varlen_func(q, k, v, 1, starts, 12, seqused_k=seqused, block_table=table, out=out, **how)
    alone, _ = attend(subject, q[:real].clone(), k, v, table[:real].clone(), lens, [1] * real, batch_invariant=True)
    assert same_bits(out[:real], alone), first_difference(out[:real], alone)
    assert (out[real:] == 7.0).all()


@each_backend()
def test_bounds_of_the_capture_sglang_26019(subject: Subject) -> None:
    """A plan frozen at one length, replayed at another (sgl-project/sglang#26019, flashinfer-ai/flashinfer#4365): the
    host's bounds stay at the captured maximum while the lengths move, 256 to 257 and 1 to 100000."""
    longest, block_size = 100_000, 256
    num_blocks = -(-longest // block_size)
    v = torch.arange(num_blocks * block_size * 1.0, device=subject.device).view(num_blocks, block_size, 1, 1)
    k = torch.ones_like(v)
    table = ints([list(range(num_blocks))], subject)
    q = torch.zeros(1, 1, 1, device=subject.device)
    for num_splits in (0, 8):
        for length in (1, 256, 257, longest, 0, 1):
            out, lse = flash_attn_varlen_func(
                q, k, v, 1, ints([0, 1], subject), longest, seqused_k=ints([length], subject), block_table=table,
                num_splits=num_splits, return_softmax_lse=True, backend=subject.name,
            )  # fmt: skip
            rounding = length * 2**-24  # a float32 sum of that many terms, in any order
            assert out.item() == pytest.approx(max(length - 1, 0) / 2, rel=rounding)
            assert lse.item() == (pytest.approx(math.log(length), rel=1e-6) if length else -math.inf)


@each_backend()
def test_no_rows_at_all(subject: Subject) -> None:
    """An empty batch, and a batch of sequences without queries."""
    assert zero_query(subject, [5, 9], [0, 0])[0].shape == (0, 1)
    k = torch.zeros(1, 4, 1, 8, device=subject.device)
    rows = torch.zeros(0, 1, 8, device=subject.device)
    reshape_and_cache_flash(rows, rows, k, k.clone(), ints([], subject, torch.int64), backend=subject.name)
    none = torch.zeros(0, 2, dtype=torch.int32, device=subject.device)
    out, lse = attend(subject, torch.zeros(0, 2, 8, device=subject.device), k, k, none, [], [])
    assert out.shape == (0, 2, 8)
    assert lse.shape == (2, 0)
