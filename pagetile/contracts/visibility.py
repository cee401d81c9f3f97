"""Which keys a query may see: causal and window, both aligned to the end of the sequence.

Query ``i`` of a sequence with ``q_len`` queries and ``seq_len`` keys stands at position ``p = i + seq_len - q_len``
(bottom-right alignment). It sees the keys ``j`` with ``p - left <= j <= p + right``, both ends included; -1 is
unbounded; causal means ``right = min(right, 0)``. The visible keys are always one contiguous range, so every kernel
asks one question: *from where to where?*
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from pagetile.contracts.errors import ArgumentError

UNBOUNDED = -1

FARTHEST = 2**31 - 1
"""Lengths are int32, so no sequence is longer and no distance in one is greater."""


def window_from_sliding(sliding_window: int | None) -> tuple[int, int]:
    """The window of a model whose ``sliding_window = W`` counts W tokens, the query's own included.

    >>> window_from_sliding(4)      # position 9 sees 6, 7, 8, 9
    (3, 0)
    >>> window_from_sliding(None)
    (-1, -1)

    Source: Hugging Face Transformers and vLLM both count W tokens; FlashAttention's ``window_size`` is an
    inclusive radius, hence the -1.

    Raises:
        ArgumentError: not an integer, or below 1.
    """
    if sliding_window is None:
        return UNBOUNDED, UNBOUNDED
    sliding_window = _whole("sliding_window", sliding_window)
    if sliding_window < 1:
        raise ArgumentError(f"sliding_window is {sliding_window}; it counts tokens, so it must be at least 1 (or None)")
    return sliding_window - 1, 0


def normalize_window(window: Sequence[int | None] | None, causal: bool) -> tuple[int, int]:
    """``(left, right)`` with causality folded in; -1 (or None) is unbounded, causal gives ``right = 0``.

    A distance past any sequence becomes :data:`FARTHEST`.

    >>> normalize_window(None, causal=True)
    (-1, 0)
    >>> normalize_window((7, 3), causal=True)
    (7, 0)

    Raises:
        ArgumentError: not two integers, or a negative value other than -1.
    """
    if window is None:
        window = (UNBOUNDED, UNBOUNDED)
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ArgumentError(f"window_size is {window!r}; it must be (left, right), two integers, or None") from None
    left, right = _side("left", left), _side("right", right)
    return left, 0 if causal else right


def _side(name: str, value: Any) -> int:
    if value is None:
        return UNBOUNDED
    value = _whole(f"window_size {name}", value)
    if value < UNBOUNDED:
        raise ArgumentError(f"window_size {name} is {value}; use -1 for unbounded, or a distance of 0 or more")
    return min(value, FARTHEST)


def _whole(name: str, value: Any) -> int:
    """An integer known on the host: no float, no text, no bool, and no tensor, whose value may be on a device."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or hasattr(value, "data_ptr"):
        raise ArgumentError(f"{name} is {value!r}; it must be a Python int")
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} is {value!r}; it must be an integer") from None


def visible_range(
    i: int, q_len: int, seq_len: int, window: tuple[int, int] = (UNBOUNDED, UNBOUNDED), first_key: int = 0
) -> tuple[int, int]:
    """Half-open range ``[lo, hi)`` of keys that query ``i`` sees; ``lo >= hi`` means none.

    ``window`` is already normalised (causal folded in); ``first_key`` hides the keys below it (left padding).

    >>> visible_range(0, q_len=2, seq_len=6, window=(-1, 0))
    (0, 5)
    """
    position = i + seq_len - q_len
    left, right = window
    lo = first_key if left < 0 else max(first_key, position - left)
    hi = seq_len if right < 0 else min(seq_len, position + right + 1)
    return lo, hi
