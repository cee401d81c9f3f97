"""Answers while they come.

On a terminal every answer has a panel that grows (:class:`LivePanels`); with too many for a screen, finished answers
scroll by above a progress bar. Without a terminal, answers are plain text, each printed when it and all before it are
finished (:class:`PlainText`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from pagetile.engine import Delta

MOST_PANELS = 8
"""Answers that are shown growing at once; more do not fit a screen."""


def make_display(prompts: Sequence[str], n: int, *, from_file: bool, quiet: bool) -> Display:
    """The display for where the output goes."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    if quiet:
        return Display(prompts, n, out, err)
    if out.is_terminal and len(prompts) * n <= MOST_PANELS:
        return LivePanels(prompts, n, out, err, bar=from_file)
    return PlainText(prompts, n, out, err, bar=from_file or len(prompts) > MOST_PANELS)


class Display:
    """Shows nothing; the base of those that do.

    Attributes:
        texts: for each prompt, each answer's text so far.
        reasons: why each answer ended; None while it runs.
    """

    def __init__(self, prompts: Sequence[str], n: int, out: Console, err: Console) -> None:
        self.prompts = list(prompts)
        self.n = n
        self.out = out
        self.err = err
        self.texts = [[""] * n for _ in prompts]
        self.reasons: list[list[str | None]] = [[None] * n for _ in prompts]

    @contextlib.contextmanager
    def loading(self, _name: str) -> Iterator[None]:
        """While the model is read."""
        yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, number: int, delta: Delta) -> None:
        """Take in what one step added to an answer of prompt ``number``."""
        self.texts[number][delta.index] += delta.text
        self.reasons[number][delta.index] = delta.finish_reason

    def close(self, line: str) -> None:
        """After the last answer."""

    def finished(self, number: int) -> bool:
        """Whether all answers to a prompt have ended."""
        return all(self.reasons[number])


class Speaking(Display):
    """A display with a spinner while the model is read, a progress bar over prompts, and a closing line."""

    def __init__(self, prompts: Sequence[str], n: int, out: Console, err: Console, *, bar: bool) -> None:
        super().__init__(prompts, n, out, err)
        self.progress: Progress | None = None
        if bar:
            columns = (
                TextColumn("prompts"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[tokens]} tokens"),
            )
            self.progress = Progress(*columns, TimeElapsedColumn(), console=err)
            self.task = self.progress.add_task("prompts", total=len(self.prompts), tokens=0)
        self.tokens = 0

    @contextlib.contextmanager
    def loading(self, _name: str) -> Iterator[None]:
        """A spinner on a terminal."""
        if not self.err.is_terminal:
            yield
            return
        with self.err.status(f"loading {_name}"):
            yield

    def show(self, number: int, delta: Delta) -> None:
        """See :meth:`Display.show`."""
        super().show(number, delta)
        self.tokens += len(delta.token_ids)
        if self.progress is not None:
            done = sum(self.finished(i) for i in range(len(self.prompts))) if delta.finish_reason else None
            self.progress.update(self.task, completed=done, tokens=self.tokens)

    def close(self, line: str) -> None:
        """The figures, on standard error."""
        self.err.print(line, style="dim", soft_wrap=True)


class PlainText(Speaking):
    """Answers as text in the order of the prompts, each as soon as it can be printed; a bar on standard error."""

    def __init__(self, prompts: Sequence[str], n: int, out: Console, err: Console, *, bar: bool) -> None:
        super().__init__(prompts, n, out, err, bar=bar and err.is_terminal)
        self.printed = 0

    def __enter__(self) -> Self:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def show(self, number: int, delta: Delta) -> None:
        """See :meth:`Display.show`."""
        super().show(number, delta)
        while self.printed < len(self.prompts) and self.finished(self.printed):
            for index, text in enumerate(self.texts[self.printed]):
                mark = f" [{index + 1} of {self.n}]" if self.n > 1 else ""
                self._write(f"> {self.prompts[self.printed]}{mark}\n{text.strip()}\n")
            self.printed += 1

    def _write(self, text: str) -> None:
        # Through the bar's console when both share a terminal, so that the bar stays below.
        if self.progress is not None and self.out.is_terminal:
            self.progress.console.print(Text(text))
        else:
            self.out.print(Text(text), soft_wrap=True)


class LivePanels(Speaking):
    """A panel for each answer, growing."""

    def __enter__(self) -> Self:
        self.live = Live(console=self.out, get_renderable=self._render, refresh_per_second=12, vertical_overflow="crop")
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.vertical_overflow = "visible"
        self.live.stop()

    def _render(self) -> Group:
        panels = []
        for number, prompt in enumerate(self.prompts):
            for index, text in enumerate(self.texts[number]):
                title = prompt if len(prompt) < 60 else prompt[:57] + "..."
                if self.n > 1:
                    title += f" · {index + 1} of {self.n}"
                reason = self.reasons[number][index]
                ending = {None: None, "stop": None, "length": "cut at max_tokens"}.get(reason, reason)
                panels.append(
                    Panel(
                        Text(text.strip() or "..."),
                        title=Text(title),
                        title_align="left",
                        subtitle=Text(ending) if ending else None,
                        subtitle_align="right",
                        border_style="green" if reason else "dim",
                    )
                )
        return Group(*panels, *([self.progress] if self.progress is not None else []))
