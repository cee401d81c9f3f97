"""Copies that mean one after the other, by dependency level; and blocks as runs."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetile.contracts.moves import last_of_each, plan_moves, runs_of

PAIRS = st.integers(1, 9).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=12))
)


@given(PAIRS)
@settings(max_examples=400, deadline=None)
def test_levels_do_what_the_list_would_do_in_order(case: tuple[int, list[tuple[int, int]]]) -> None:
    num_blocks, pairs = case
    expected = list(range(num_blocks))
    for source, destination in pairs:
        expected[destination] = expected[source]
    planned = plan_moves(pairs, num_blocks)
    held = [*range(num_blocks), *[None] * planned.spares]
    for level in planned.levels:
        destinations = [destination for _, destination in level]
        assert level
        assert len(set(destinations)) == len(destinations)
        assert not set(destinations) & {source for source, _ in level}
        before = list(held)
        for source, destination in level:
            held[destination] = before[source]
    assert held[:num_blocks] == expected


def test_independent_pairs_are_one_level_and_a_shift_is_one_a_block() -> None:
    assert len(plan_moves([(i, 50 + i) for i in range(50)], 100).levels) == 1
    assert len(plan_moves([(i, i + 1) for i in reversed(range(9))], 10).levels) == 9


def test_the_last_copy_to_a_destination_stays() -> None:
    assert last_of_each([(1, 5), (2, 6), (3, 5)]) == ((3, 5), (2, 6))


@given(st.permutations(range(3)), st.permutations(range(3)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_runs_cover_a_block(first: list[int], second: list[int], gaps: bool) -> None:
    shape = (3, 2, 4)
    numbers = torch.arange(24).reshape(shape)

    def laid_out(order: list[int], wide: int) -> torch.Tensor:
        sizes = [shape[axis] for axis in order]
        sizes[-1] *= wide
        memory = torch.full(sizes, -1)
        view = memory[..., : shape[order[-1]]]
        return view.permute([order.index(axis) for axis in range(3)])

    source, target = laid_out(first, 1), laid_out(second, 2 if gaps else 1)
    source.copy_(numbers)
    run, starts, ends = runs_of(shape, source.stride(), target.stride())
    a = source.as_strided((source.untyped_storage().nbytes() // 8,), (1,))
    b = target.as_strided((target.untyped_storage().nbytes() // 8,), (1,))
    for start, end in zip(starts, ends, strict=True):
        b[end : end + run] = a[start : start + run]
    assert torch.equal(target, numbers)
