"""The truth against answers worked out by hand, and against torch's own attention where that has the feature."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagetile import reference
from pagetile.contracts.errors import ArgumentError
from pagetile.contracts.geometry import slot_of

F64 = torch.float64


def paged(tokens: Tensor, table: list[int], block_size: int, num_blocks: int) -> Tensor:
    """``tokens`` ``[L, H, D]`` scattered by hand into a cache full of NaN."""
    cache = torch.full((num_blocks, block_size, *tokens.shape[1:]), torch.nan, dtype=tokens.dtype)
    for position, token in enumerate(tokens):
        slot = slot_of(table, position, block_size)
        cache.view(-1, *tokens.shape[1:])[slot] = token
    return cache


def loc(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def one_head(logits: list[float], values: list[float], **how: object) -> tuple[float, float]:
    """A query of 1 over keys that are the logits: output and log-sum-exp of a decode step."""
    k = torch.tensor(logits, dtype=F64)[:, None, None]
    v = torch.tensor(values, dtype=F64)[:, None, None]
    state = reference.attend(
        torch.ones(1, 1, 1, dtype=F64), k, v, loc(1), key_start_loc=loc(len(logits)), layout="ragged", scale=1.0, **how
    )
    return float(state.out), float(state.lse)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 37), (5, 37), (37, 37)])
@pytest.mark.parametrize("group", [1, 3])
def test_is_torchs_attention(dtype: torch.dtype, q_len: int, k_len: int, group: int) -> None:
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(q_len, 2 * group, 8, generator=rng, dtype=dtype)
    k, v = (torch.randn(k_len, 2, 8, generator=rng, dtype=dtype) for _ in "kv")
    table = [7, 2, 9]
    state = reference.attend(
        q,
        paged(k, table, 16, 12),
        paged(v, table, 16, 12),
        loc(q_len),
        seq_lens=torch.tensor([k_len]),
        block_table=torch.tensor([[*table, -1, 99]]),
        scale=0.3,
        window=(-1, 0),
    )
    right = scaled_dot_product_attention(
        q.transpose(0, 1),
        *(x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v)),
        attn_mask=torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len),
        scale=0.3,
    ).transpose(0, 1)
    torch.testing.assert_close(state.out, right)


def test_softmax_of_two_keys_by_hand() -> None:
    out, lse = one_head([0.0, math.log(3)], [1.0, 3.0])
    assert (out, lse) == pytest.approx((2.5, math.log(4)))


def test_softcap_by_hand_and_at_any_size() -> None:
    out, lse = one_head([1.0, -2.0], [1.0, 0.0], softcap=2.0)
    capped = [2 * math.tanh(0.5), 2 * math.tanh(-1.0)]
    total = sum(map(math.exp, capped))
    assert (out, lse) == pytest.approx((math.exp(capped[0]) / total, math.log(total)))
    assert one_head([4400.0, 1000.0], [0.0, 1.0], softcap=50.0)[0] == pytest.approx(0.5)


def test_sink_joins_the_denominator_only() -> None:
    out, lse = one_head([0.0, 0.0], [1.0, 3.0], sinks=torch.tensor([math.log(2)]))
    assert (out, lse) == pytest.approx((1.0, math.log(4)))


def test_sink_comes_after_softcap_and_scale() -> None:
    out, lse = one_head([100.0], [1.0], softcap=1.0, sinks=torch.tensor([1.0]))
    assert (out, lse) == pytest.approx((0.5, 1 + math.log(2)))


def test_alibi_is_minus_slope_times_distance() -> None:
    out, lse = one_head([0.0] * 4, [0.0, 1.0, 2.0, 3.0], alibi_slopes=torch.tensor([0.5]))
    weights = [math.exp(0.5 * (j - 3)) for j in range(4)]
    assert out == pytest.approx(sum(j * w for j, w in enumerate(weights)) / sum(weights))
    assert lse == pytest.approx(math.log(sum(weights)))


def test_alibi_looks_both_ways() -> None:
    """Two queries over two keys, not causal: the first one's distance to the key ahead of it counts as 1."""
    state = reference.attend(
        torch.zeros(2, 1, 1, dtype=F64),
        torch.zeros(2, 1, 1, dtype=F64),
        torch.tensor([0.0, 1.0], dtype=F64)[:, None, None],
        loc(2),
        key_start_loc=loc(2),
        layout="ragged",
        scale=1.0,
        alibi_slopes=torch.tensor([[1.0]]),
    )
    far = math.exp(-1) / (1 + math.exp(-1))
    assert state.out.flatten().tolist() == pytest.approx([far, 1 - far])


@pytest.mark.parametrize("sink", [None, 0.7])
def test_nothing_visible(sink: float | None) -> None:
    state = reference.attend(
        torch.ones(3, 2, 4),
        torch.full((1, 4, 1, 4), torch.nan),
        torch.full((1, 4, 1, 4), torch.nan),
        loc(2, 1),
        seq_lens=torch.tensor([0, 3]),
        block_table=torch.tensor([[-1], [0]]),
        key_starts=torch.tensor([0, 3]),
        scale=1.0,
        sinks=None if sink is None else torch.full((2,), sink),
    )
    assert (state.out == 0).all()
    assert (state.lse == (-math.inf if sink is None else torch.tensor(sink))).all()


@pytest.mark.parametrize(
    ("window", "means"),
    [
        ((-1, -1), [2.5, 2.5]),
        ((-1, 0), [2.0, 2.5]),  # bottom right: positions 4 and 5
        ((2, 0), [3.0, 4.0]),
        ((0, 0), [4.0, 5.0]),
        ((1, 1), [4.0, 4.5]),
        ((-1, 1), [2.5, 2.5]),
        ((3, -1), [3.0, 3.5]),
    ],
)
def test_windows(window: tuple[int, int], means: list[float]) -> None:
    values = torch.arange(6.0).view(1, 6, 1, 1)
    state = reference.attend(
        torch.zeros(2, 1, 1),
        torch.zeros(1, 6, 1, 1),
        values,
        loc(2),
        seq_lens=torch.tensor([6]),
        block_table=torch.tensor([[0]]),
        scale=1.0,
        window=window,
    )
    assert state.out.flatten().tolist() == pytest.approx(means)


def test_rows_past_the_last_sequence_are_not_returned() -> None:
    q = torch.full((5, 1, 1), torch.nan)
    q[:2] = 0
    state = reference.attend(
        q, torch.zeros(2, 1, 1), torch.ones(2, 1, 1), loc(2), key_start_loc=loc(2), layout="ragged", scale=1.0
    )
    assert state.out.flatten().tolist() == [1.0, 1.0]


def test_paged_keys_need_their_table() -> None:
    cache = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ArgumentError, match=r"block_table.*seq_lens"):
        reference.attend(torch.zeros(1, 1, 1), cache, cache, loc(1), scale=1.0)
    with pytest.raises(ArgumentError, match="key_start_loc"):
        reference.attend(torch.zeros(1, 1, 1), cache[0], cache[0], loc(1), scale=1.0, layout="ragged")


def test_stands_on_torch_alone() -> None:
    """In a process in which the extras cannot be imported, the reference still can."""
    code = (
        "import sys\n"
        "for name in ('numba', 'llvmlite', 'triton', 'transformers'): sys.modules[name] = None\n"
        "import pagetile.reference, pagetile.backends.reference\n"
        "above = [m for m in sys.modules if m.startswith(('pagetile.ops', 'pagetile.cache', 'pagetile.engine'))]\n"
        "print(above)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
