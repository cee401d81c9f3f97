"""Small pictures for notebooks, as HTML text: what ``_repr_html_`` of the objects above is made of.

Colours follow the surrounding page (``currentColor``), so they suit light and dark. Every text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MAX_CELLS = 1024
"""Blocks that are drawn; the rest is counted."""

_BOX = (
    "display:inline-block;width:.8em;height:.8em;margin:1px;"
    "border:1px solid color-mix(in srgb,currentColor 35%,transparent);"
)
_KINDS = {
    "live": "background:color-mix(in srgb,#1f7a68 62%,transparent)",
    "shared": "background:color-mix(in srgb,#8a3fa8 62%,transparent)",
    "cached": "background:repeating-linear-gradient(135deg,color-mix(in srgb,currentColor 35%,transparent) 0 2px,"
    "transparent 2px 5px)",
    "free": "",
}


def cells(title: str, kinds: Sequence[tuple[str, str]]) -> str:
    """A row of squares, one for each ``(kind, tip)``; kinds are ``live``, ``shared``, ``cached`` and ``free``.

    >>> cells("pool", [("live", "block 0"), ("free", "block 1")]).count("<span title=")
    2
    """
    drawn = "".join(
        f'<span title="{escape(tip, quote=True)}" style="{_BOX}{_KINDS[kind]}"></span>'
        for kind, tip in kinds[:MAX_CELLS]
    )
    more = f"<div>and {len(kinds) - MAX_CELLS} more</div>" if len(kinds) > MAX_CELLS else ""
    return (
        f'<div style="line-height:1;max-width:62em"><div style="margin:.3em 0">{escape(title)}</div>{drawn}{more}</div>'
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a line of text above it."""
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f"<div>{escape(title)}</div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def some(values: Sequence[object], limit: int = 12) -> str:
    """Values with commas; the middle of a long list is left out.

    >>> some(range(100), limit=4)
    '0, 1, ..., 98, 99'
    """
    if len(values) <= limit:
        return ", ".join(map(str, values))
    half = limit // 2
    return ", ".join([*map(str, values[:half]), "...", *map(str, values[-half:])])
