"""Which keys a query may see: causal and window, both aligned to the end of the sequence.

Query ``i`` of a sequence with ``q_len`` queries and ``seq_len`` keys stands at position ``p = i + seq_len - q_len``
(bottom-right alignment). It sees the keys ``j`` with ``p - left <= j <= p + right``, both ends included; -1 is
unbounded; causal means ``right = min(right, 0)``. The visible keys are always one contiguous range, so every kernel
asks one question: *from where to where?*
"""

from __future__ import annotations

from collections.abc import Sequence

from pagetile.contracts.errors import ArgumentError

UNBOUNDED = -1


def window_from_sliding(sliding_window: int | None) -> tuple[int, int]:
    """The window of a model whose ``sliding_window = W`` counts W tokens, the query's own included.

    >>> window_from_sliding(4)      # position 9 sees 6, 7, 8, 9
    (3, 0)
    >>> window_from_sliding(None)
    (-1, -1)

    Source: Hugging Face Transformers and vLLM both count W tokens; FlashAttention's ``window_size`` is an
    inclusive radius, hence the -1.
    """
    if sliding_window is None:
        return UNBOUNDED, UNBOUNDED
    if sliding_window < 1:
        raise ArgumentError(f"sliding_window is {sliding_window}; it counts tokens, so it must be at least 1 (or None)")
    return sliding_window - 1, 0


def normalize_window(window: Sequence[int] | None, causal: bool) -> tuple[int, int]:
    """``(left, right)`` with causality folded in; -1 is unbounded, causal gives ``right = 0``.

    >>> normalize_window(None, causal=True)
    (-1, 0)
    >>> normalize_window((7, 3), causal=True)
    (7, 0)

    Raises:
        ArgumentError: not two integers, or a negative value other than -1.
    """
    if window is None:
        window = (UNBOUNDED, UNBOUNDED)
    if len(window) != 2:
        raise ArgumentError(f"window_size must be (left, right), got {tuple(window)!r}")
    left, right = (int(w) if w is not None else UNBOUNDED for w in window)
    for name, value in (("left", left), ("right", right)):
        if value < UNBOUNDED:
            raise ArgumentError(f"window_size {name} is {value}; use -1 for unbounded, or a distance of 0 or more")
    return left, 0 if causal else right


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
