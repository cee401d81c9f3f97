"""One self-contained page that plays a recorded run: no network, no build step, plain JavaScript.

The page is put together from the files beside this one; the run is embedded as JSON and played back in the browser by
the rules of :mod:`pagetile.inspect.run` (``play.js`` is their twin, and a test compares the two).
"""

from __future__ import annotations

import html
import json
from pathlib import Path

from pagetile.inspect import saved
from pagetile.inspect.run import Run

HERE = Path(__file__).resolve().parent
SCRIPTS = ("play.js", "explain.js", "sides.js", "pool.js", "figures.js", "main.js")


def page(run: Run) -> str:
    """The page as text."""
    data = json.dumps(run.to_dict(), separators=(",", ":"), ensure_ascii=False)
    parts = {
        "TITLE": html.escape(f"{run.title} · {run.model}" if run.model else run.title),
        "STYLE": (HERE / "style.css").read_text(encoding="utf-8"),
        # Inside a script element only "<" can end it, and only these two can end a JavaScript line unseen.
        "RUN": data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        "SCRIPT": "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    text = (HERE / "page.html").read_text(encoding="utf-8")
    head, *rest = text.split("@@")
    pieces = [head]
    for name, after in zip(rest[::2], rest[1::2], strict=True):
        pieces += [parts[name], after]
    return "".join(pieces)


def write_page(run: Run, path: Path) -> None:
    """Write :func:`page` to a file."""
    saved.write(path, page(run))
