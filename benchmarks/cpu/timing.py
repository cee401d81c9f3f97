"""Paired rounds: in each, everybody runs once (or ``repeat`` times), in an order drawn anew; ratios are taken within
a round, so that a machine that slows down slows everybody down."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of a contender over time of pagetile: above 1, pagetile is faster.

    Attributes:
        seconds: the contender's median.
        median, low, high: of the ratios; the tenth and the ninetieth percentile.
        rounds: that were run.
    """

    seconds: float
    median: float
    low: float
    high: float
    rounds: int


def paired(runs: dict[str, Callable[[], object]], rounds: int, seconds: float, first: str) -> dict[str, Ratio]:
    """``rounds`` rounds, fewer if those take longer than ``seconds``; ratios over ``first``."""
    repeat = {}
    for name, run in runs.items():
        run()
        began = time.perf_counter()
        run()
        repeat[name] = max(1, min(50, int(0.002 / (time.perf_counter() - began))))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    names, limit = list(runs), time.perf_counter() + seconds
    while len(taken[first]) < rounds and time.perf_counter() < limit:
        random.shuffle(names)
        for name in names:
            began = time.perf_counter()
            for _ in range(repeat[name]):
                runs[name]()
            taken[name].append((time.perf_counter() - began) / repeat[name])
    return {name: _ratio(times, taken[first]) for name, times in taken.items()}


def _ratio(times: list[float], base: list[float]) -> Ratio:
    ratios = sorted(a / b for a, b in zip(times, base, strict=True))
    tenth = len(ratios) // 10
    return Ratio(statistics.median(times), statistics.median(ratios), ratios[tenth], ratios[-1 - tenth], len(ratios))
