"""From token ids to text as they arrive, and where a stop string ends it.

Two things keep text back: a token may end in the middle of a character, and the end of the text may be the beginning
of a stop string. What has been released never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers put where the bytes so far are not a whole character."""

LONGEST_INCOMPLETE = 8
"""Tokens after which a replacement character is taken to be meant: a character has at most 4 bytes."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer here; those of Transformers have it."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Ids to text."""
        ...


class TextStream:
    """The text of one answer.

    Args:
        live: False decodes nothing before :meth:`finish`, which then decodes all at once: cheaper, when nobody reads
            along and there are no stop strings.

    Attributes:
        text: everything decoded so far, cut before a stop string.
        released: characters of ``text`` handed out by :meth:`release`.
        stopped_by: the stop string that was met.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special_tokens: bool = True, live: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.skip_special_tokens = skip_special_tokens
        self.live = live or bool(stop)
        self.text = ""
        self.released = 0
        self.stopped_by: str | None = None
        self._ids: list[int] = []
        self._context = 0  # first id of the window that is decoded again
        self._settled = 0  # ids before it are in `text`
        self._search_from = 0  # stop strings count from this character on

    def append(self, token_id: int, search: bool = True) -> str | None:
        """Take the next token; the stop string it completes, or None. Without ``search``, none is looked for so far.

        Decoding is quadratic if the whole answer is decoded each time, and wrong if tokens are decoded one by one
        (a word's leading space, a character of several tokens). So a window is decoded twice, with and without the
        new ids; what the second has more than the first is new. Source: the incremental decoding of Text Generation
        Inference and vLLM.
        """
        self._ids.append(token_id)
        if not self.live:
            return None
        before = self._decode(self._ids[self._context : self._settled])
        now = self._decode(self._ids[self._context :])
        waiting = len(self._ids) - self._settled
        if len(now) <= len(before) or (now.endswith(INCOMPLETE) and waiting < LONGEST_INCOMPLETE):
            return None
        self._context, self._settled = self._settled, len(self._ids)
        return self._add(now[len(before) :], search)

    def finish(self) -> str | None:
        """Settle the ids that still wait for more; the stop string that this completes, or None."""
        before = self._decode(self._ids[self._context : self._settled])
        now = self._decode(self._ids[self._context :])
        self._context, self._settled = self._settled, len(self._ids)
        return self._add(now[len(before) :], True) if self.stopped_by is None else None

    def release(self, final: bool) -> str:
        """The text that became certain since the last call. ``final`` releases what was kept for a stop string."""
        end = len(self.text)
        if not final and self.stopped_by is None:
            end -= max((_overlap(self.text, stop) for stop in self.stop), default=0)
        new = self.text[self.released : end]
        self.released = max(self.released, end)
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens) if ids else ""

    def _add(self, new: str, search: bool) -> str | None:
        searched = len(self.text)
        self.text += new
        if not search:
            self._search_from = len(self.text)
            return None
        first: tuple[int, str] | None = None
        for stop in self.stop:
            at = self.text.find(stop, max(self._search_from, searched - len(stop) + 1))
            if at >= 0 and (first is None or at < first[0]):
                first = at, stop
        if first is None:
            return None
        self.text = self.text[: first[0]]
        self.stopped_by = first[1]
        return first[1]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a true beginning of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
