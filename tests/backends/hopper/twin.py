"""The hopper kernels' schedules and sums in plain NumPy, formula for formula, for machines without a GPU.

Each function quotes the device helper of the same name; a change there belongs here too. A program that the real
kernel runs at once is run here one after another, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

FAR = 1 << 29


@dataclass(frozen=True)
class Batch:
    """Host facts of a batch: queries and keys of each sequence, and what limits the view."""

    seqs: tuple[tuple[int, int], ...]
    left: int = FAR
    right: int = FAR
    first_keys: tuple[int, ...] = ()

    @property
    def q_loc(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([q for q, _ in self.seqs])]).astype(int)

    def first_key(self, seq: int) -> int:
        return self.first_keys[seq] if self.first_keys else 0

    @property
    def has_left(self) -> bool:
        return self.left < FAR or bool(self.first_keys)


def key_range(batch: Batch, pos0: int, tokens: int, seq_len: int, first_key: int) -> tuple[int, int, int, int]:
    """``device.key_range``."""
    last = pos0 + tokens - 1
    hi = max(min(seq_len, last + batch.right + 1), 0)
    full_hi = max(min(seq_len, pos0 + batch.right + 1), 0)
    lo = min(max(first_key, 0), hi)
    full_lo = lo
    if batch.has_left:
        lo = min(max(lo, pos0 - batch.left), hi)
        full_lo = max(full_lo, last - batch.left)
    return lo, hi, full_lo, full_hi


def row_range(batch: Batch, position: int, seq_len: int, first_key: int) -> tuple[int, int]:
    """``device.row_range``."""
    hi = min(seq_len, position + batch.right + 1)
    lo = max(first_key, 0)
    return (max(lo, position - batch.left) if batch.has_left else lo), hi


# The prefill kernel: tiles.py


def locate_tile(batch: Batch, item: int, kv_heads: int, min_q: int, tokens: int, section_heads: int):
    """``tiles.locate_tile``: ``(seq, head, first token, whether there is such a tile)``."""
    loc, x = batch.q_loc, item // kv_heads
    lower, upper = 0, len(batch.seqs)
    while upper - lower > 1:
        middle = (lower + upper) // 2
        below = loc[middle] // tokens + middle <= x
        lower, upper = (middle, upper) if below else (lower, middle)
    seq = lower
    q_len = int(loc[seq + 1] - loc[seq])
    rest = item - (loc[seq] // tokens + seq) * kv_heads
    levels = max(-(-q_len // tokens), 1)
    section = rest // (levels * section_heads)
    rest -= section * levels * section_heads
    width = min(section_heads, kv_heads - section * section_heads)
    level = rest // max(width, 1)
    head = section * section_heads + rest - level * width
    real = q_len > min_q and width > 0 and level < levels
    return seq, int(head), int((levels - 1 - level) * tokens), real


def prefill_steps(batch: Batch, seq: int, token: int, tokens: int, keys: int):
    """``tiles.describe``: ``(tiles from last to first, whether each is masked, lo, hi, tokens)``."""
    q_len, seq_len = batch.seqs[seq]
    tokens = min(q_len - token, tokens)
    pos0 = token + seq_len - q_len
    lo, hi, full_lo, full_hi = key_range(batch, pos0, tokens, seq_len, batch.first_key(seq))
    first = lo // keys
    last = max(-(-hi // keys), first + 1)
    count = last - first
    masked = min(max(last - max(full_hi // keys, first), 1), count)
    plain = count
    if batch.has_left:
        plain = max(min(last - -(-full_lo // keys), count), masked)
    steps = [(last - 1 - i, i < masked or i >= plain) for i in range(count)]
    return steps, lo, hi, tokens


# The decode kernel: stretch.py, states.py


def tiles_of(batch: Batch, seq: int, max_q: int, keys: int) -> int:
    """``stretch.tiles_of``."""
    q_len, seq_len = batch.seqs[seq]
    lo, hi, _, _ = key_range(batch, seq_len - q_len, q_len, seq_len, batch.first_key(seq))
    return max(-(-hi // keys) - lo // keys, 1) if 0 < q_len <= max_q else 0


def share_of(batch: Batch, kv_heads: int, max_q: int, keys: int, programs: int, min_tiles: int) -> tuple[int, int]:
    """``stretch.find_stretch``: ``(tiles a program, tiles in all)``."""
    total = sum(tiles_of(batch, s, max_q, keys) for s in range(len(batch.seqs))) * kv_heads
    return max(-(-total // programs), min_tiles), total


def pieces(batch: Batch, program: int, kv_heads: int, max_q: int, keys: int, programs: int, min_tiles: int, chunk: int):
    """``stretch.schedule``: ``(seq, head, first tile, tiles, start of the pair, tiles of the pair)`` of each piece."""
    share, total = share_of(batch, kv_heads, max_q, keys, programs, min_tiles)
    at = program * share
    end = min(at + share, total)
    if at >= end:
        return
    seq = start = before = 0
    for base in range(0, len(batch.seqs), chunk):
        tiles = [tiles_of(batch, s, max_q, keys) * kv_heads for s in range(base, min(base + chunk, len(batch.seqs)))]
        sums = before + np.cumsum(tiles)
        seq += int((sums <= at).sum())
        start = max(start, int(np.where(sums <= at, sums, 0).max(initial=0)))
        before += sum(tiles)
    while at < end:
        tiles = tiles_of(batch, seq, max_q, keys)
        stop = min(start + tiles * kv_heads, end)
        while at < stop:
            head = (at - start) // tiles
            tile = at - start - head * tiles
            count = min(tiles - tile, end - at)
            yield seq, head, tile, count, at - tile, tiles
            at += count
        start += tiles * kv_heads
        seq += 1


def decode_steps(batch: Batch, seq: int, tile: int, count: int, keys: int):
    """``stretch.describe``: ``(tiles of the piece, whether each is masked, lo, hi)``."""
    q_len, seq_len = batch.seqs[seq]
    lo, hi, full_lo, full_hi = key_range(batch, seq_len - q_len, q_len, seq_len, batch.first_key(seq))
    first = lo // keys + tile
    edge_a = max(min(-(-full_lo // keys) - first, count), 0) if batch.has_left else 0
    edge_b = max(min(full_hi // keys - first, count), edge_a)
    return [(first + i, i < edge_a or i >= edge_b) for i in range(count)], lo, hi


def slot_of(program: int, start: int, share: int) -> int:
    """``states.slot_of``."""
    return 2 * program + int(program * share < start)


@dataclass
class State:
    """Peak and total of each row in base 2, and the weighted sum."""

    peak: np.ndarray
    total: np.ndarray
    acc: np.ndarray

    @staticmethod
    def empty(rows: int, size: int) -> State:
        return State(np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, size)))

    def add(self, scores: np.ndarray, values: np.ndarray) -> State:
        """``device.softmax_step`` and the product."""
        peak = np.maximum(self.peak, scores.max(1))
        safe = np.where(np.isneginf(peak), 0.0, peak)
        p, decay = np.exp2(scores - safe[:, None]), np.exp2(self.peak - safe)
        return State(peak, self.total * decay + p.sum(1), self.acc * decay[:, None] + p @ values)


def merge(states: list[State], parts: int) -> State:
    """``states.merge``: the greatest peak first, then ``parts`` states at a time."""
    peak = reduce(np.maximum, (s.peak for s in states))
    safe = np.where(np.isneginf(peak), 0.0, peak)
    total, acc = np.zeros_like(peak), np.zeros_like(states[0].acc)
    for base in range(0, len(states), parts):
        some = states[base : base + parts]
        weights = [np.exp2(s.peak - safe) for s in some]
        total += sum(s.total * w for s, w in zip(some, weights, strict=True))
        acc += sum(s.acc * w[:, None] for s, w in zip(some, weights, strict=True))
    return State(peak, total, acc)
