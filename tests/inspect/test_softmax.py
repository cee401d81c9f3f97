"""The walk of the online softmax against one softmax over all keys, and against the reference's states."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagetile import reference
from pagetile.contracts.errors import ArgumentError, ShapeError
from pagetile.inspect.softmax import Running, cut, rescale, table, walk


def row(keys: int, size: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=make, dtype=torch.float64)  # noqa: E731
    return 3 * draw(size), draw(keys, size), draw(keys, 5)


@given(
    keys=st.integers(0, 60),
    tile=st.integers(1, 70),
    splits=st.integers(1, 9),
    visible=st.none() | st.tuples(st.integers(-3, 60), st.integers(0, 63)),
)
def test_any_tile_and_split_merges_to_the_full_softmax(keys: int, tile: int, splits: int, visible) -> None:
    walked = walk(*row(keys), tile=tile, splits=splits, visible=visible)
    assert walked.error < 1e-12
    assert walked.lse_error < 1e-12
    lo, hi = (0, keys) if visible is None else (max(0, visible[0]), min(keys, visible[1]))
    assert math.isinf(walked.merged.lse) is (lo >= hi)


def test_a_split_merges_to_the_state_of_one_pass() -> None:
    q, k, v = row(50)
    one, many = walk(q, k, v, tile=7), walk(q, k, v, tile=7, splits=3)
    assert many.merged.m == one.merged.m
    assert many.merged.l == pytest.approx(one.merged.l, rel=1e-14)
    torch.testing.assert_close(many.merged.acc, one.merged.acc, rtol=1e-13, atol=1e-14)


def test_states_are_those_of_the_reference() -> None:
    """Each split's (out, lse) is the reference's attention over the split's keys, and merges by the reference."""
    q, k, v = row(40)
    walked = walk(q, k, v, tile=8, splits=2)
    states = []
    for (first, last), own in zip(cut(40, 8, 2), walked.splits, strict=True):
        state = reference.attend(
            q[None, None],
            k[first:last, None],
            v[first:last, None],
            torch.tensor([0, 1], dtype=torch.int32),
            scale=8**-0.5,
            layout="ragged",
            key_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
        )
        torch.testing.assert_close(state.out[0, 0], own.out)
        assert float(state.lse[0, 0]) == pytest.approx(own.lse, rel=1e-6)
        states.append(state)
    merged = reference.merge(states[0].out, states[0].lse, states[1].out, states[1].lse)
    torch.testing.assert_close(merged.out[0, 0], walked.full_out, rtol=1e-6, atol=1e-6)


def test_alpha_undoes_the_old_maximum() -> None:
    """Replaying the alphas by hand over the tiles' scores gives the last l."""
    walked = walk(*row(33), tile=5)
    total = 0.0
    for step in walked.steps:
        total = step.alpha * total + float(torch.exp(step.scores - step.state.m).sum())
    assert total == pytest.approx(walked.merged.l, rel=1e-14)
    assert {s.alpha for s in walked.steps} != {1.0}, "no tile brought a larger score; the row shows nothing"


def test_hidden_nan_never_reaches_the_state() -> None:
    q, k, v = row(20)
    clean = walk(q, k, v, tile=4, visible=(5, 15))
    k[:5] = v[:5] = k[15:] = v[15:] = float("nan")
    dirty = walk(q, k, v, tile=4, visible=(5, 15))
    assert torch.equal(dirty.merged.out, clean.merged.out)
    assert dirty.merged.lse == clean.merged.lse


def test_nothing_visible_is_the_empty_state() -> None:
    walked = walk(*row(9), tile=4, visible=(9, 9))
    assert walked.merged.lse == -math.inf
    assert torch.equal(walked.merged.out, torch.zeros(5, dtype=torch.float64))
    assert rescale(-math.inf, -math.inf) == 1.0


def test_empty_is_the_identity() -> None:
    state = walk(*row(9)).merged
    for both in (state.merge(Running.empty(5)), Running.empty(5).merge(state)):
        assert (both.m, both.l) == (state.m, state.l)
        assert torch.equal(both.acc, state.acc)


def test_the_table_names_the_blocks() -> None:
    lines = table(walk(*row(37)), [7, 2, 9], 16)
    assert [line.split()[2] for line in lines[1:4]] == ["7", "2", "9"]


def test_refusals() -> None:
    q, k, v = row(4)
    with pytest.raises(ShapeError, match=r"\[4, 8\]"):
        walk(q[:3], k, v)
    with pytest.raises(ArgumentError, match="tile is 0"):
        walk(q, k, v, tile=0)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_nan_that_is_seen_is_not_lost(splits: int) -> None:
    """A visible NaN makes the row NaN, whatever tile it is in; a hidden one leaves it as it was."""
    q, k, v = row(20)
    clean = walk(q, k[:15], v[:15], tile=4, splits=splits)
    k[15:], v[16:] = math.nan, math.nan
    hidden = walk(q, k, v, tile=4, splits=splits, visible=(0, 15))
    torch.testing.assert_close(hidden.merged.out, clean.merged.out)
    k[2] = math.nan
    seen = walk(q, k, v, tile=4, splits=splits, visible=(0, 15))
    assert seen.merged.out.isnan().all()
    assert math.isnan(seen.merged.lse)
    assert (seen.error, seen.lse_error) == (0.0, 0.0), "the full softmax is NaN as well"
    text = json.dumps(seen.to_dict(), allow_nan=False)
    assert json.loads(text)["merged"]["lse"] is None


def test_a_score_of_minus_infinity_weighs_nothing() -> None:
    q, k, v = row(9)
    k[:3] = -math.inf * q.sign()
    walked = walk(q, k, v, tile=3)
    torch.testing.assert_close(walked.merged.out, walk(q, k[3:], v[3:]).merged.out)
    assert walked.lse_error < 1e-12
