"""The block pool: places, references, eviction order, refusals that change nothing."""

from __future__ import annotations

import pytest

from pagetile.cache.pool import BlockPool
from pagetile.cache.prefix import chain
from pagetile.contracts.errors import ArgumentError, BlockTableError, OutOfBlocksError


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check()
    assert pool.num_live + pool.num_cached + pool.num_free == pool.num_blocks
    return pool.num_live, pool.num_cached, pool.num_free


def fill(pool: BlockPool, tokens, salt=None) -> list[int]:
    """A sequence of full blocks, written and registered."""
    blocks = pool.allocate(len(tokens) // pool.block_size)
    pool.register_tokens(blocks, tokens, salt)
    return blocks


def state(pool: BlockPool) -> tuple:
    return (
        [pool.ref(b) for b in range(pool.num_blocks)],
        [pool.digest(b) for b in range(pool.num_blocks)],
        list(pool._free),
        list(pool._cached),
    )


def test_blocks_move_between_the_three_places() -> None:
    pool = BlockPool(4, 2)
    assert counts(pool) == (0, 0, 4)
    blocks = fill(pool, [1, 2, 3, 4])
    tail = pool.allocate(1)  # a partial block: never registered
    assert counts(pool) == (3, 0, 1)
    pool.free([*blocks, *tail])
    assert counts(pool) == (0, 2, 2)
    assert pool.match([1, 2, 3, 4, 5]) == blocks
    assert counts(pool) == (2, 0, 2)


def test_free_blocks_go_before_cached_and_tails_before_heads() -> None:
    """vllm-project/vllm#48489: flattening the free list lost the order in which a sequence must be evicted."""
    pool = BlockPool(5, 1)
    first, second = fill(pool, [1, 2]), fill(pool, [8, 9])
    pool.free(first)
    pool.free(second)
    assert pool.allocate(1) == [4]  # the one that remembers nothing
    order = [pool.allocate(1)[0] for _ in range(4)]
    assert order == [first[1], first[0], second[1], second[0]]
    assert pool.stats.evictions == 4


def test_an_evicted_block_keeps_nothing() -> None:
    """ovg-project/kvcached#362, vllm-project/vllm#4761: the evicted block kept its hash and its place in the map."""
    pool = BlockPool(1, 2)
    pool.free(fill(pool, [1, 2]))
    assert pool.digest(0) is not None
    assert pool.allocate(1) == [0]
    assert pool.digest(0) is None
    assert pool.match([1, 2]) == []
    assert pool._by_digest == {}
    pool.check()


def test_a_reallocated_block_is_never_hit_under_its_old_hash() -> None:
    """GeeeekExplorer/nano-vllm#163: X fills A and leaves; Y takes A; who asks for X again must not get Y's data."""
    pool = BlockPool(2, 2)
    pool.free(fill(pool, [1, 2, 3, 4]))
    fill(pool, [5, 6, 7, 8])
    assert pool.match([1, 2, 3, 4]) == []
    assert counts(pool) == (2, 0, 0)


def test_the_same_block_twice_in_one_free_list() -> None:
    """vllm-project/vllm#42571, NVIDIA/TensorRT-LLM#14937: queued twice, it had two owners later."""
    pool = BlockPool(3, 2)
    (b,) = pool.allocate(1)
    pool.share([b])
    pool.free([b, b])
    assert counts(pool) == (0, 0, 3)
    assert len(set(pool.allocate(3))) == 3

    pool = BlockPool(3, 2)
    (b,) = pool.allocate(1)
    before = state(pool)
    with pytest.raises(ArgumentError, match=f"block {b} is freed 2 times but has 1 references"):
        pool.free([b, b])
    assert state(pool) == before


def test_freeing_and_sharing_check_every_block_before_the_first_changes() -> None:
    pool = BlockPool(4, 2)
    a, b = pool.allocate(2)
    before = state(pool)
    for call, error in (
        (lambda: pool.free([a, b, 3]), ArgumentError),  # 3 is free
        (lambda: pool.free([a, 4]), BlockTableError),
        (lambda: pool.free([a, -1]), BlockTableError),
        (lambda: pool.share([a, 3]), ArgumentError),
        (lambda: pool.share([a, 99]), BlockTableError),
        (lambda: pool.allocate(3), OutOfBlocksError),
        (lambda: pool.allocate(-1), ArgumentError),
    ):
        with pytest.raises(error):
            call()
        assert state(pool) == before
        pool.check()


def test_out_of_blocks_names_both_numbers() -> None:
    pool = BlockPool(5, 2)
    pool.free(fill(pool, [1, 2, 3, 4]))
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match=r"5 blocks asked for, 4 available \(2 free, 2 cached, 1 live of 5\)"):
        pool.allocate(5)
    assert counts(pool) == (1, 2, 2)


def test_can_allocate_is_a_promise() -> None:
    """vllm-project/vllm#6849: cached blocks were counted as free twice, so the allocation failed after a yes."""
    pool = BlockPool(4, 1)
    pool.free(fill(pool, [1, 2]))
    assert pool.can_allocate(4)
    assert not pool.can_allocate(5)
    assert not pool.can_allocate(-1)
    hits = pool.match([1, 2])  # taken: no longer there for others
    assert pool.can_allocate(2)
    assert not pool.can_allocate(3)
    assert len(pool.allocate(2)) == 2
    assert counts(pool) == (4, 0, 0)
    pool.free(hits)


def test_table_and_queue_stay_in_step() -> None:
    """vllm-project/vllm#16825: add a, remove a, add a, evict: one eviction, and no KeyError."""
    pool = BlockPool(1, 1)
    pool.free(fill(pool, [1]))
    (b,) = pool.match([1])
    pool.free([b])
    assert pool.allocate(1) == [b]
    assert pool.stats.evictions == 1
    pool.check()


def test_gauges_tell_live_cached_and_free_apart() -> None:
    """kekzl/imp#1115, #1120: "one block leaks per request" was a gauge that mixed live and cached blocks.

    xLLM-AI/xllm#829: utilisation went past 100 %.
    """
    pool = BlockPool(8, 2)
    for request in range(20):
        blocks = fill(pool, [request, request, request, 0])
        partial = pool.allocate(1)
        pool.free([*blocks, *partial])
        live, cached, free = counts(pool)
        assert (live, cached + free) == (0, 8)
        assert 0 <= pool.num_live / pool.num_blocks <= 1


def test_a_block_is_hit_only_after_it_was_registered() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    assert pool.match([1, 2, 3, 4]) == []
    pool.register_tokens(blocks, [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4]) == blocks
    assert [pool.ref(b) for b in blocks] == [2, 2]


def test_two_copies_of_one_prefix() -> None:
    """Two requests that computed the same prompt at once: either copy serves; once both are unused, one is kept."""
    pool = BlockPool(4, 2)
    a, b = fill(pool, [1, 2]), fill(pool, [1, 2])
    pool.free(a)
    assert counts(pool) == (1, 0, 3)  # the other copy is live, so this one need not be kept
    assert pool.match([1, 2]) == b
    pool.free(b)
    pool.free(b)
    assert counts(pool) == (0, 1, 3)
    other = fill(pool, [1, 2])  # and with a cached twin: the newcomer goes, the twin is as good as just used
    newer = fill(pool, [5, 6])
    pool.free(newer)
    pool.free(other)
    assert counts(pool) == (0, 2, 2)
    pool.allocate(2)
    assert pool.allocate(1) == newer
    assert pool.match([1, 2]) == b


def test_forget_keeps_references() -> None:
    pool = BlockPool(2, 2)
    (b,) = fill(pool, [1, 2])
    pool.forget(b)
    pool.forget(b)
    assert pool.match([1, 2]) == []
    pool.free([b])
    assert counts(pool) == (0, 0, 2)
    pool.free(fill(pool, [1, 2]))
    pool.forget(0 if pool.digest(0) else 1)  # a cached one becomes free
    assert counts(pool) == (0, 0, 2)


def test_reset_forgets_everything_and_frees_nothing_live() -> None:
    pool = BlockPool(4, 2)
    live, gone = fill(pool, [1, 2]), fill(pool, [3, 4])
    pool.free(gone)
    pool.reset_prefix_cache()
    assert counts(pool) == (1, 0, 3)
    assert pool.match([1, 2]) == pool.match([3, 4]) == []
    pool.free(live)


def test_registering_checks_who_the_block_is() -> None:
    pool = BlockPool(2, 2)
    (one,), (two,) = (list(chain(t, 2)) for t in ([1, 2], [3, 4]))
    (b,) = pool.allocate(1)
    assert pool.register(b, one) is one
    (equal,) = chain([1, 2], 2)
    assert pool.register(b, equal) is one  # the object that the cache knows
    with pytest.raises(ArgumentError, match=f"block {b} holds"):
        pool.register(b, two)
    pool.free([b])
    with pytest.raises(ArgumentError, match="not live"):
        pool.register(b, one)


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    pool = BlockPool(2, 2, prefix_cache=False)
    pool.free(fill(pool, [1, 2, 3, 4]))
    assert counts(pool) == (0, 0, 2)
    assert pool.match([1, 2]) == []


def test_constant_hasher_is_slow_but_right() -> None:
    """vllm-project/vllm#8229, #12621, openvinotoolkit/openvino.genai#3722: a collision reused another's block."""
    pool = BlockPool(8, 2, hasher=lambda _parent, _content: b"")
    a, b = fill(pool, [1, 2, 3, 4]), fill(pool, [9, 2, 3, 4])
    pool.free(a)
    pool.free(b)
    assert pool.match([1, 2, 3, 4]) == a
    assert pool.match([9, 2, 3, 4]) == b
    assert pool.match([3, 4]) == []  # the same tokens at the head are another prefix
    assert pool.match([1, 2, 3, 4], salt="other") == []
    pool.check()


def test_hit_counter() -> None:
    """vllm-project/vllm#11186, #51198: the hit rate fell to 0 in silence."""
    pool = BlockPool(8, 2)
    prompt = [1, 2, 3, 4, 5, 6]
    assert pool.match(prompt) == []
    pool.free(fill(pool, prompt))
    pool.match(prompt)
    assert (pool.stats.queries, pool.stats.hits) == (6, 3)


def test_check_finds_a_broken_pool() -> None:
    """Each invariant, broken by hand."""
    breaks = {
        "no block is free twice": lambda p: p._free.append(p._free[0]),
        "live counter": lambda p: setattr(p, "_num_live", 7),
        "exactly one of": lambda p: p._free.pop(),
        "no reference count is negative": lambda p: p._refs.__setitem__(0, -1),
        "in the lookup once": lambda p: p._by_digest.clear(),
        "a cached block has a prefix": lambda p: p._prefix.__setitem__(next(iter(p._cached)), None),
        "a free block remembers": lambda p: p._prefix.__setitem__(p._free[0], p._prefix[next(iter(p._cached))]),
        "no empty bucket": lambda p: p._by_digest.__setitem__(b"", []),
    }
    for message, break_it in breaks.items():
        pool = BlockPool(6, 2)
        pool.free(fill(pool, [1, 2]))
        pool.allocate(2)
        pool.check()
        break_it(pool)
        with pytest.raises(AssertionError, match=message):
            pool.check()


@pytest.mark.parametrize("arguments", [(0, 16), (4, 0), (-1, 1)])
def test_sizes_are_at_least_one(arguments: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        BlockPool(*arguments)


def test_operations_do_not_grow_with_the_pool() -> None:
    """Allocating and freeing touch only the blocks named: counted in bytecode-level steps, not in seconds."""
    import sys

    def steps(num_blocks: int) -> int:
        pool = BlockPool(num_blocks, 1)
        pool.free(fill(pool, range(num_blocks)))  # all cached
        count = 0

        def tracer(frame, event, _arg):
            nonlocal count
            frame.f_trace_lines = True
            count += event == "line"
            return tracer

        sys.settrace(tracer)
        try:
            for i in range(20):
                blocks = pool.allocate(2)
                pool.register_tokens(blocks, [-i, -i])
                pool.free(blocks)
        finally:
            sys.settrace(None)
        return count

    assert steps(4000) == steps(40)
