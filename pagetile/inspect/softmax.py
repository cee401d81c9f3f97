"""The online softmax, tile by tile: what a kernel keeps of the keys it has seen, and how splits add up.

A kernel never holds all scores of a row. It keeps ``m``, their largest so far, ``l``, the sum of ``exp(s - m)``, and
``acc``, the sum of ``exp(s - m) * v``. When a tile brings a larger score, what was kept is rescaled by
``alpha = exp(m_old - m_new)``. At the end ``out = acc / l`` and ``lse = m + ln(l)``: the same as the full softmax.
Everything here is float64 on the host, one query and one head, so that each number can be looked at.

Source: Milakov and Gimelshein 2018, online normalizer; Dao et al. 2022, FlashAttention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError, DTypeError, ShapeError

MOST_SPLITS = 65536
"""Pieces that a row is cut into at most; no kernel has more."""


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """What is kept of the keys so far. ``m`` is -inf and ``l`` is 0 when none was visible.

    Attributes:
        m: largest score.
        l: sum of ``exp(s - m)``.
        acc: float64 ``[Dv]``, sum of ``exp(s - m) * v``.
    """

    m: float
    l: float  # noqa: E741  (the name that the papers use)
    acc: Tensor

    @classmethod
    def empty(cls, size: int) -> Running:
        """Nothing seen yet."""
        return cls(-math.inf, 0.0, torch.zeros(size, dtype=torch.float64))

    @property
    def out(self) -> Tensor:
        """``acc / l``; 0 when nothing was visible."""
        return self.acc / self.l if self.l else torch.zeros_like(self.acc)

    @property
    def lse(self) -> float:
        """``m + ln(l)``, the logarithm of the softmax denominator; -inf when nothing was visible."""
        return self.m + math.log(self.l) if self.l else -math.inf

    def merge(self, other: Running) -> Running:
        """The state over the keys of both."""
        m = highest(self.m, other.m)
        a, b = rescale(self.m, m), rescale(other.m, m)
        return Running(m, a * self.l + b * other.l, a * self.acc + b * other.acc)


@dataclass(frozen=True, slots=True, eq=False)
class TileStep:
    """One tile: its keys, and the state after it.

    Attributes:
        split: number of the split that the tile belongs to.
        first, last: keys ``[first, last)``.
        scores: float64 ``[last - first]``; -inf where a key is hidden.
        alpha: what the state before was multiplied by; 0 for a split's first visible tile, which finds nothing kept.
        state: afterwards.
    """

    split: int
    first: int
    last: int
    scores: Tensor
    alpha: float
    state: Running


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """A whole row: each split's tiles, the splits' states, their sum, and the full softmax beside it.

    Attributes:
        steps: in the order of keys; each split starts from nothing.
        splits: state of each split.
        merged: their sum.
        full_out, full_lse: the same row by one softmax over all keys.
    """

    steps: tuple[TileStep, ...]
    splits: tuple[Running, ...]
    merged: Running
    full_out: Tensor
    full_lse: float

    @property
    def error(self) -> float:
        """Largest distance between the merged output and the full softmax's; 0 where both are NaN."""
        return max(
            (_distance(a, b) for a, b in zip(self.merged.out.tolist(), self.full_out.tolist(), strict=True)),
            default=0.0,
        )

    @property
    def lse_error(self) -> float:
        """Distance of the two log-sum-exps; 0 when both are -inf, or NaN."""
        return _distance(self.merged.lse, self.full_lse)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has finite numbers only: -inf, inf and NaN become None."""
        return {
            "tiles": [
                {
                    "split": s.split,
                    "first": s.first,
                    "last": s.last,
                    "scores": _all_finite(s.scores),
                    "alpha": _finite(s.alpha),
                    **_state(s.state),
                }
                for s in self.steps
            ],
            "splits": [_state(s) for s in self.splits],
            "merged": {**_state(self.merged), "out": _all_finite(self.merged.out), "lse": _finite(self.merged.lse)},
            "full": {"out": _all_finite(self.full_out), "lse": _finite(self.full_lse)},
            "error": _finite(self.error),
            "lse_error": _finite(self.lse_error),
        }


def highest(a: float, b: float) -> float:
    """The larger of two scores; NaN if one is (Python's ``max`` would depend on their order)."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def rescale(old: float, new: float) -> float:
    """``exp(old - new)``, the factor of a state whose largest score moves from ``old`` to ``new``.

    1 when nothing moved, also while nothing was visible (``exp(-inf - -inf)`` would be NaN).
    """
    return 1.0 if old == new else math.exp(old - new)


def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tile: int = 16,
    splits: int = 1,
    scale: float | None = None,
    visible: tuple[int, int] | None = None,
) -> Walk:
    """Attend from one query to all keys, tile by tile.

    >>> q, v = torch.zeros(4), torch.arange(6.0)[:, None]          # all scores are 0: the mean of the values
    >>> w = walk(q, torch.ones(6, 4), v, tile=2, splits=2)
    >>> w.merged.out.item(), round(w.merged.lse, 5), round(math.log(6), 5)
    (2.5, 1.79176, 1.79176)

    Args:
        q: ``[D]``. k: ``[L, D]``. v: ``[L, Dv]``; any floating dtype, computed in float64.
        tile: keys a tile.
        splits: pieces that the tiles are dealt into, neighbours together; more than there are tiles leaves some empty.
        scale: of the scores; ``D ** -0.5`` by default.
        visible: half-open range of keys that the query sees; all by default.

    Raises:
        ShapeError: sizes that do not agree, or a head of no elements.
        DTypeError: complex numbers.
        ArgumentError: a tile or a number of splits below 1, or more than :data:`MOST_SPLITS`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.is_complex():
            raise DTypeError(f"{name} is {x.dtype}; it must be real")
    q, k, v = (x.detach().to("cpu", torch.float64) for x in (q, k, v))
    if q.dim() != 1 or k.dim() != 2 or v.dim() != 2 or k.shape[1] != q.shape[0] or len(v) != len(k):
        raise ShapeError(
            f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}; they must be [D], [L, D] and [L, Dv]"
        )
    if not len(q):
        raise ShapeError(f"q is [0] and k is {list(k.shape)}; a head has at least one element")
    if splits > MOST_SPLITS:
        raise ArgumentError(f"splits is {splits}; give {MOST_SPLITS} at most")
    if tile < 1 or splits < 1:
        raise ArgumentError(f"tile is {tile} and splits is {splits}; both must be at least 1")
    factor = q.shape[0] ** -0.5 if scale is None else scale
    scores = factor * (k @ q)
    lo, hi = (0, len(k)) if visible is None else (max(0, visible[0]), min(len(k), visible[1]))
    keys = torch.arange(len(k))
    seen = (keys >= lo) & (keys < hi)
    scores = torch.where(seen, scores, -math.inf)

    steps: list[TileStep] = []
    states: list[Running] = []
    for split, (first, last) in enumerate(cut(len(k), tile, splits)):
        state = Running.empty(v.shape[1])
        for start in range(first, last, tile):
            step = _tile(split, start, min(start + tile, last), scores, seen, v, state)
            steps.append(step)
            state = step.state
        states.append(state)
    merged = Running.empty(v.shape[1])
    for state in states:
        merged = merged.merge(state)
    full_lse = float(torch.logsumexp(scores, 0)) if lo < hi and len(k) else -math.inf
    full_out = torch.softmax(scores[lo:hi], 0) @ v[lo:hi]
    return Walk(tuple(steps), tuple(states), merged, full_out, full_lse)


def cut(num_keys: int, tile: int, splits: int) -> list[tuple[int, int]]:
    """Keys ``[first, last)`` of each split: whole tiles, as even as they come.

    >>> cut(37, 16, 2)
    [(0, 32), (32, 37)]
    """
    tiles = -(-num_keys // tile)
    each = -(-tiles // splits)
    return [(min(num_keys, s * each * tile), min(num_keys, (s + 1) * each * tile)) for s in range(splits)]


def _tile(split: int, first: int, last: int, scores: Tensor, visible: Tensor, v: Tensor, before: Running) -> TileStep:
    own, seen = scores[first:last], visible[first:last]
    m = highest(before.m, float(own.max()))
    alpha = rescale(before.m, m)
    # Only rows that are seen are multiplied: a weight of 0 would not stop a NaN in a hidden one.
    p = torch.exp(own[seen] - m) if m != -math.inf else torch.zeros_like(own[seen])
    acc = alpha * before.acc + p @ v[first:last][seen]
    return TileStep(split, first, last, own, alpha, Running(m, alpha * before.l + float(p.sum()), acc))


def table(w: Walk, block_table: Sequence[int] = (), block_size: int = 0) -> list[str]:
    """The walk as lines of text, one a tile; with a block table, the blocks that each tile reads."""
    lines = [f"{'tile':>4} {'keys':>9} {'blocks':>12} {'max s':>9} {'m':>9} {'alpha':>9} {'l':>10} {'|acc|':>10}"]
    split = -1
    for number, s in enumerate(w.steps):
        if len(w.splits) > 1 and s.split != split:
            split = s.split
            lines.append(f"split {split}: starts from m = -inf, l = 0, acc = 0")
        blocks = _blocks(s.first, s.last, block_table, block_size)
        lines.append(
            f"{number:>4} {f'{s.first}-{s.last - 1}':>9} {blocks:>12} {float(s.scores.max()):>9.4f} {s.state.m:>9.4f} "
            f"{s.alpha:>9.6f} {s.state.l:>10.5f} {float(s.state.acc.norm()):>10.5f}"
        )
    if len(w.splits) > 1:
        for number, state in enumerate(w.splits):
            lines.append(f"split {number}: m {state.m:.4f}, l {state.l:.5f}, lse {state.lse:.6f}")
    lines += [
        f"merged:       lse {w.merged.lse:.10f}   out {_head(w.merged.out)}",
        f"full softmax: lse {w.full_lse:.10f}   out {_head(w.full_out)}",
        f"largest difference: out {w.error:.1e}, lse {w.lse_error:.1e}",
    ]
    return lines


def _blocks(first: int, last: int, block_table: Sequence[int], block_size: int) -> str:
    if not block_table or not block_size:
        return "-"
    return ",".join(str(block_table[b]) for b in range(first // block_size, (last - 1) // block_size + 1))


def _head(out: Tensor, count: int = 4) -> str:
    shown = " ".join(f"{x:+.6f}" for x in out[:count].tolist())
    return shown + (" ..." if len(out) > count else "")


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _state(s: Running) -> dict[str, Any]:
    return {"m": _finite(s.m), "l": _finite(s.l), "acc": _all_finite(s.acc)}


def _all_finite(values: Tensor) -> list[float | None]:
    return [_finite(x) for x in values.tolist()]


def _distance(a: float, b: float) -> float:
    """How far two numbers are apart; nothing if they are the same, be it infinite or NaN."""
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b)
