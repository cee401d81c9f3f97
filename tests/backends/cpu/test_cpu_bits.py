"""A row's bits depend on the row: not on the batch, the tile, the splits, the layout or what lies in unused slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_kit import NAN, attend_call

from pagetile.backends.cpu.tuning import CHUNK, SEGMENT

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(backend, call):
    backend.attend(call)
    return call


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 40, 7])
@pytest.mark.parametrize("window", [(-1, 0), (200, 0), (5, 0)], ids=str)
def test_a_decode_is_a_row_of_the_prefill(backend, dtype: torch.dtype, size: int, window: tuple[int, int]) -> None:
    """Prefill of L tokens in one tile walk (staged), against a decode at several positions (read in place)."""
    length = SEGMENT + 2 * CHUNK + 3
    prefill = run(backend, attend_call([length], [length], size=size, dtype=dtype, window=window, heads=1))
    for position in (0, 1, CHUNK - 1, CHUNK, 700, SEGMENT - 1, SEGMENT, length - 1):
        call = attend_call([length], [length], size=size, dtype=dtype, window=window, heads=1)
        call.q = call.q[position : position + 1].clone()
        call.out, call.lse = call.out[:1].clone(), call.lse[:, :1].clone()
        call.query_start_loc = torch.tensor([0, 1], dtype=torch.int32)
        call.seq_lens = torch.tensor([position + 1], dtype=torch.int32)
        call.problem = replace(call.problem, num_tokens=1, max_q_len=1)
        run(backend, call)
        assert same(call.out[0], prefill.out[position]), position
        assert same(call.lse[:, 0], prefill.lse[:, position]), position


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("q_len", [1, 30])
def test_splits_change_nothing(backend, splits: int, q_len: int) -> None:
    make = lambda n: attend_call([q_len, q_len, 0, 1], [4 * SEGMENT + 77, 900, 3, 2 * SEGMENT], num_splits=n)  # noqa: E731
    torch.set_num_threads(1)
    whole = run(backend, make(1))
    torch.set_num_threads(2)
    split = make(splits)
    assert backend.plan(split).splits == min(splits, 5)  # segments of the longest sequence
    run(backend, split)
    assert same(whole.out, split.out)
    assert same(whole.lse, split.lse)


def test_a_sequence_alone_is_the_same_as_in_a_batch(backend) -> None:
    q_lens, k_lens = [1, 17, 1, 5], [300, 40, 1300, 5]
    batch = run(backend, attend_call(q_lens, k_lens))
    start = 0
    for b, q_len in enumerate(q_lens):
        call = attend_call(q_lens, k_lens)
        call.q = call.q[start : start + q_len]
        call.out, call.lse = call.out[:q_len], call.lse[:, :q_len]
        call.query_start_loc = torch.tensor([0, q_len], dtype=torch.int32)
        call.seq_lens, call.block_table = call.seq_lens[b : b + 1], call.block_table[b : b + 1]
        call.problem = replace(call.problem, num_seqs=1, num_tokens=q_len)
        run(backend, call)
        assert same(call.out, batch.out[start : start + q_len])
        assert same(call.lse, batch.lse[:, start : start + q_len])
        start += q_len


@pytest.mark.parametrize("size", [64, 24])
def test_layout_and_block_size_change_nothing(backend, size: int) -> None:
    """NHD and HND, K and V halves of one buffer, blocks of any size: the same numbers by other addresses."""
    q_lens, k_lens = [1, 20], [333, 150]
    make = lambda bs: attend_call(q_lens, k_lens, size=size, block_size=bs)  # noqa: E731
    nhd = run(backend, make(16))
    for block_size in (1, 3, 17, 544):
        assert same(run(backend, make(block_size)).out, nhd.out)
    hnd = make(16)
    hnd.k = hnd.k.transpose(1, 2).contiguous().transpose(1, 2)
    halves = make(16)
    joined = torch.cat([halves.k, halves.v], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)
    halves.k, halves.v = joined[..., :size], joined[..., size:]
    for call in (hnd, halves):
        assert same(run(backend, call).out, nhd.out)


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("position", [0, 60, CHUNK - 1, 200])
def test_a_bad_key_reaches_the_rows_that_see_it_and_no_other(backend, where: str, bad: float, position: int) -> None:
    """Causal rows below the position keep every bit; the ones from it on are not finite (K: NaN only, since a score
    of -inf is a weight of 0)."""
    if (where == "k" and bad != bad) or where == "v":
        clean = run(backend, attend_call([240], [240]))
        call = attend_call([240], [240])
        slot = call.block_table[0, position // 16], position % 16
        getattr(call, where)[slot] = bad
        run(backend, call)
        assert same(call.out[:position], clean.out[:position])
        assert same(call.lse[:, :position], clean.lse[:, :position])
        assert not call.out[position:].isfinite().any()


def test_one_key_gives_its_value_exactly(backend) -> None:
    for dtype in DTYPES:
        call = run(backend, attend_call([1], [1], dtype=dtype))
        block = call.block_table[0, 0]
        assert same(call.out[0], call.v[block, 0].repeat_interleave(3, dim=0))
