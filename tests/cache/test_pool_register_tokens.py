"""``register_tokens`` registers all the full blocks of a list of tokens, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagetile.cache import BlockPool
from pagetile.contracts.errors import ArgumentError, BlockTableError, PagetileError

TOKENS = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=8, block_size=2)


def registered(pool: BlockPool) -> list[int]:
    return [block for block in range(pool.num_blocks) if pool.prefix(block) is not None]


def too_few(pool: BlockPool) -> list[int]:
    return pool.allocate(2)


def none(pool: BlockPool) -> list[int]:  # noqa: ARG001
    return []


def one_is_free(pool: BlockPool) -> list[int]:
    blocks = pool.allocate(3)
    pool.free(blocks[2:])
    return blocks


def one_is_taken(pool: BlockPool) -> list[int]:
    blocks = pool.allocate(3)
    pool.register_tokens(blocks[2:], [8, 9])
    return blocks


def one_twice(pool: BlockPool) -> list[int]:
    first, second = pool.allocate(2)
    return [first, second, first]


def one_outside(pool: BlockPool) -> list[int]:
    return [*pool.allocate(2), 8]


@pytest.mark.parametrize(
    ("blocks_of", "error", "message"),
    [
        (too_few, ArgumentError, "6 tokens fill 3 blocks of 2, but 2 blocks are given"),
        (none, ArgumentError, "6 tokens fill 3 blocks of 2, but 0 blocks are given"),
        (one_is_free, ArgumentError, "is not live"),
        (one_is_taken, ArgumentError, "it cannot become"),
        (one_twice, ArgumentError, "is given twice"),
        (one_outside, BlockTableError, "block 8 is not in the pool"),
    ],
)
def test_nothing_is_registered(
    pool: BlockPool, blocks_of: Callable[[BlockPool], list[int]], error: type[PagetileError], message: str
) -> None:
    blocks = blocks_of(pool)
    before = registered(pool)
    with pytest.raises(error, match=message):
        pool.register_tokens(blocks, TOKENS)
    assert registered(pool) == before
    assert pool.match(TOKENS) == []
    pool.check()


def test_a_tail_and_spare_blocks_are_fine(pool: BlockPool) -> None:
    blocks = pool.allocate(4)
    pool.register_tokens(blocks, [*TOKENS, 7])
    assert registered(pool) == sorted(blocks[:3])
    pool.register_tokens(blocks, [*TOKENS, 7])  # again: they hold that already
    assert pool.match(TOKENS) == blocks[:3]
    pool.check()
