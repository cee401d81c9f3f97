"""Every row sees every key it may exactly once, whatever the lengths, and states add to the truth: on the twin."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twin import (
    FAR,
    Batch,
    State,
    decode_steps,
    locate_tile,
    merge,
    pieces,
    prefill_steps,
    row_range,
    share_of,
    slot_of,
    tiles_of,
)

KEYS = 8
SIZE = 4


@st.composite
def batches(draw: st.DrawFn, longest_q: int = 40, longest_k: int = 90) -> Batch:
    seqs = draw(st.lists(st.tuples(st.integers(0, longest_q), st.integers(0, longest_k)), min_size=1, max_size=7))
    left = draw(st.sampled_from([FAR, FAR, 0, 3, 20]))
    right = draw(st.sampled_from([FAR, 0, 0, 2]))
    padded = draw(st.booleans()) and left == FAR
    first = tuple(draw(st.integers(0, k + 1)) for _, k in seqs) if padded else ()
    return Batch(tuple(seqs), left, right, first)


def wanted(batch: Batch, seq: int, i: int) -> set[int]:
    """Keys that query i sees, by the contract."""
    q_len, k_len = batch.seqs[seq]
    p = i + k_len - q_len
    return {j for j in range(k_len) if p - batch.left <= j <= p + batch.right and j >= batch.first_key(seq)}


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(1, 5), st.integers(0, 3), st.sampled_from([1, 4, 16]), st.integers(1, 5))
def test_every_prefill_tile_once(batch: Batch, heads: int, min_q: int, tokens: int, section: int) -> None:
    total_rows = sum(q for q, _ in batch.seqs)
    items = (total_rows // tokens + len(batch.seqs)) * heads
    found = [locate_tile(batch, item, heads, min_q, tokens, section) for item in range(items)]
    got = Counter((seq, head, token) for seq, head, token, real in found if real)
    right = {
        (seq, head, token)
        for seq, (q_len, _) in enumerate(batch.seqs)
        if q_len > min_q
        for head in range(heads)
        for token in range(0, q_len, tokens)
    }
    assert set(got) == right
    assert set(got.values()) <= {1}


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(1, 3), st.integers(1, 4))
def test_the_longest_tiles_of_a_section_come_first(batch: Batch, heads: int, section: int) -> None:
    items = (sum(q for q, _ in batch.seqs) // 4 + len(batch.seqs)) * heads
    seen: dict[tuple[int, int], int] = {}
    for item in range(items):
        seq, head, token, real = locate_tile(batch, item, heads, 0, 4, section)
        if real:
            assert token < seen.get((seq, head), 1 << 30)
            seen[(seq, head)] = token


@settings(max_examples=200, deadline=None)
@given(batches(), st.sampled_from([1, 4, 16]))
def test_prefill_visits_every_key_and_masks_where_it_must(batch: Batch, tokens: int) -> None:
    for seq, (q_len, k_len) in enumerate(batch.seqs):
        for token in range(0, q_len, tokens):
            steps, lo, hi, rows = prefill_steps(batch, seq, token, tokens, KEYS)
            visited = [key for tile, _ in steps for key in range(tile * KEYS, (tile + 1) * KEYS)]
            assert len(visited) == len(set(visited))
            for i in range(token, token + rows):
                see = wanted(batch, seq, i)
                assert see <= set(visited)
                assert see <= set(range(lo, hi))
                row_lo, row_hi = row_range(batch, i + k_len - q_len, k_len, batch.first_key(seq))
                for tile, masked in steps:
                    inside = set(range(tile * KEYS, (tile + 1) * KEYS))
                    assert masked or inside <= see, "a tile without a mask has a key that some row does not see"
                    assert {j for j in inside if row_lo <= j < row_hi} == inside & see


@settings(max_examples=200, deadline=None)
@given(
    batches(longest_q=5, longest_k=200), st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 3, 7, 16, 132]),
    st.integers(1, 4), st.sampled_from([2, 128]),
)  # fmt: skip
def test_every_decode_tile_once(
    batch: Batch, heads: int, max_q: int, programs: int, min_tiles: int, chunk: int
) -> None:
    got: Counter[tuple[int, int, int]] = Counter()
    left_by = defaultdict(list)
    share, _ = share_of(batch, heads, max_q, KEYS, programs, min_tiles)
    for program in range(programs):
        for seq, head, tile, count, start, tiles in pieces(
            batch, program, heads, max_q, KEYS, programs, min_tiles, chunk
        ):
            got.update((seq, head, tile + i) for i in range(count))
            if count < tiles:
                left_by[(seq, head, start, tiles)].append(program)
    assert set(got.values()) <= {1}
    assert set(got) == {
        (seq, head, tile)
        for seq in range(len(batch.seqs))
        for head in range(heads)
        for tile in range(tiles_of(batch, seq, max_q, KEYS))
    }
    slots = Counter(slot_of(p, start, share) for (_, _, start, _), ps in left_by.items() for p in ps)
    assert set(slots.values()) <= {1}, "two states in one place"
    for (_, _, start, tiles), whose in left_by.items():
        assert whose == list(range(start // share, (start + tiles - 1) // share + 1)), (
            "the last to arrive waits for others"
        )


@settings(max_examples=60, deadline=None)
@given(
    batches(longest_q=4, longest_k=150), st.sampled_from([1, 3, 7, 40]), st.sampled_from([1, 4, 16]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_decode_is_the_truth(batch: Batch, programs: int, parts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, max_q = 2, 4
    share, _ = share_of(batch, heads, max_q, KEYS, programs, 1)
    shape = [(k + KEYS, SIZE) for _, k in batch.seqs]
    q = [rng.normal(size=(heads, n, SIZE)) for n, _ in batch.seqs]
    k, v = ([rng.normal(size=(heads, *s)) for s in shape] for _ in "kv")
    for seq, (_, k_len) in enumerate(batch.seqs):
        v[seq][:, k_len:] = np.nan  # what nobody owns
    left: dict[tuple[int, int], dict[int, State]] = defaultdict(dict)
    done: dict[tuple[int, int], State] = {}
    for program in rng.permutation(programs).tolist():
        for seq, head, tile, count, start, tiles in pieces(batch, program, heads, max_q, KEYS, programs, 1, 2):
            state = _piece(batch, seq, tile, count, q[seq][head], k[seq][head], v[seq][head])
            if count == tiles:
                done[seq, head] = state
                continue
            slots = left[seq, head]
            slots[slot_of(program, start, share)] = state
            first, last = start // share, (start + tiles - 1) // share
            if len(slots) == last - first + 1:
                done[seq, head] = merge([slots[slot_of(p, start, share)] for p in range(first, last + 1)], parts)
    for (seq, head), state in done.items():
        for i in range(batch.seqs[seq][0]):
            see = sorted(wanted(batch, seq, i))
            if not see:
                assert state.total[i] == 0
                continue
            s = k[seq][head][see] @ q[seq][head][i]
            p = np.exp2(s - s.max())
            assert np.allclose(state.acc[i] / state.total[i], p @ v[seq][head][see] / p.sum())
            assert math.isclose(state.peak[i] + np.log2(state.total[i]), s.max() + np.log2(p.sum()), abs_tol=1e-9)


def _piece(batch: Batch, seq: int, tile: int, count: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> State:
    q_len, k_len = batch.seqs[seq]
    steps, lo, _ = decode_steps(batch, seq, tile, count, KEYS)
    state = State.empty(q_len, SIZE)
    for at, masked in steps:
        j = np.arange(at * KEYS, (at + 1) * KEYS)
        inside = np.minimum(j, len(k) - 1)
        s, values = q @ k[inside].T, v[inside]
        if masked:
            for i in range(q_len):
                row_lo, row_hi = row_range(batch, i + k_len - q_len, k_len, batch.first_key(seq))
                s[i, (j < row_lo) | (j >= row_hi)] = -np.inf
            values = np.where(((j >= lo) & (j < k_len))[:, None], values, 0.0)  # device.clear_values
        state = state.add(s, values)
    return state


def test_merge_of_nothing_is_nothing() -> None:
    got = merge([State.empty(2, SIZE)] * 3, 2)
    assert (got.total == 0).all()
    assert (got.acc == 0).all()


@pytest.mark.parametrize("lengths", [(1024,) * 8, (8192,), (512,) * 16, (64, 128, 4096, 30)])
def test_dealing_out_in_order_leaves_few_idle(lengths: tuple[int, ...]) -> None:
    """Programs that take the next tile when they are done end close together, since the last tiles are short."""
    batch = Batch(tuple((n, n) for n in lengths), right=0)
    loads = [0.0] * 132
    items = (sum(lengths) // 32 + len(lengths)) * 8
    for item in range(items):
        seq, _, token, real = locate_tile(batch, item, 8, 0, 32, 8)
        if real:
            least = loads.index(min(loads))
            loads[least] += 1 + len(prefill_steps(batch, seq, token, 32, 128)[0])
    assert sum(loads) / len(loads) > 0.95 * max(loads)
