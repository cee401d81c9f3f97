"""Files of runs and pools: written whole or not at all, and held to their form before anything is made of them.

A file may be cut off, edited, or somebody else's, so nothing in it is believed: :func:`read` gives a document or says
what the file is instead, :func:`check_run` and :func:`check_pool` name the first entry that cannot be. What can be but
should not (a block outside the pool, a slot written twice) is the audit's to report.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pagetile.contracts.errors import ArgumentError

RELEASED = -1
"""Entry of a block row whose block was given back because it is behind the window."""

MOST = 2**31 - 1
"""Ids, lengths and sizes of the metadata are int32."""

FARTHEST = 2**63 - 1
"""Slots and strides are int64."""

MOST_SLOTS = 2**32
"""Slots of a group's pool that a file may claim; far more than any machine's memory holds."""

_WAY_OUT = "record the run (pagetile trace --save) or save the pool (PoolState.save) again"


def read(path: Path) -> dict[str, Any]:
    """The JSON document of a file, compressed or not.

    Raises:
        ArgumentError: no such file, a damaged one, or no JSON object.
    """
    if not path.is_file():
        raise ArgumentError(f"{path} is not a file; pagetile trace --save FILE records a run")
    raw = path.read_bytes()
    try:
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise ArgumentError(f"{path} is a damaged gzip file ({error}); {_WAY_OUT}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is not JSON ({error}); it may be cut off: {_WAY_OUT}") from None
    if not isinstance(data, dict):
        raise ArgumentError(f"{path} holds {_kind(data)}, not a recorded run or a saved pool; {_WAY_OUT}")
    return data


def require_version(data: Any, key: str, version: int, what: str) -> None:
    """Hold a document to its kind and version.

    Raises:
        ArgumentError: it is something else; the message says what, where it can be told.
    """
    others = {
        "pagetile_run": "a recorded run",
        "pagetile_pool": "a saved pool, which audit and map read",
        "traceEvents": "a Chrome trace (--chrome), which Perfetto reads",
    }
    if not isinstance(data, dict):
        raise ArgumentError(f"this is {_kind(data)}, not {what}; {_WAY_OUT}")
    if key not in data:
        found = next((said for other, said in others.items() if other in data), "something else")
        raise ArgumentError(f"this is no {what}, but {found}; {_WAY_OUT}")
    if data[key] is True or data[key] != version:
        raise ArgumentError(f"this is a {what} of version {data[key]!r}, and version {version} is read; {_WAY_OUT}")


def write(path: Path, content: str | bytes) -> None:
    """Write a file so that it is whole or as it was before; text in UTF-8, with ``?`` for what that cannot hold.

    Raises:
        OSError: it cannot be written there.
    """
    raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a device or a pipe has no before; of a folder this says so
        path.write_bytes(raw)
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(raw)
        if path.exists():
            part.chmod(path.stat().st_mode & 0o7777)
        part.replace(path.resolve() if path.is_symlink() else path)
    finally:
        part.unlink(missing_ok=True)


# One entry ------------------------------------------------------------------------------------------------------------


def whole(value: Any, where: str, least: int = 0, most: int = MOST) -> int:
    """An integer between two bounds, both included."""
    if type(value) is not int or not least <= value <= most:
        raise ArgumentError(f"{where} is {_said(value)}; it must be a whole number of {least} to {most}; {_WAY_OUT}")
    return value


def number(value: Any, where: str) -> float:
    """A finite number of 0 or more: seconds or milliseconds."""
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise ArgumentError(f"{where} is {_said(value)}; it must be a finite number, 0 or more; {_WAY_OUT}")
    return value


def text(value: Any, where: str) -> str:
    """Text that UTF-8 can hold."""
    try:
        if isinstance(value, str) and value.encode() is not None:
            return value
    except UnicodeEncodeError:
        pass
    raise ArgumentError(f"{where} is {_said(value)}; it must be text; {_WAY_OUT}")


def items(value: Any, where: str, count: int | None = None) -> Sequence[Any]:
    """A list, of ``count`` entries if that is given."""
    if not isinstance(value, list | tuple):
        raise ArgumentError(f"{where} is {_said(value)}; it must be a list; {_WAY_OUT}")
    if count is not None and len(value) != count:
        raise ArgumentError(f"{where} has {len(value)} entries; it must have {count}; {_WAY_OUT}")
    return value


def record(value: Any, where: str, needed: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """An object with all of the needed entries and no other than the optional ones."""
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} is {_said(value)}; it must be an object; {_WAY_OUT}")
    missing = [name for name in needed if name not in value]
    strange = [name for name in value if name not in needed and name not in optional]
    if missing or strange:
        what = f"has no {missing[0]!r}" if missing else f"has an entry {_said(strange[0])} that nobody knows"
        raise ArgumentError(f"{where} {what}; {_WAY_OUT}")
    return value


def blocks(value: Any, where: str, least: int = 0) -> Sequence[int]:
    """A list of block ids. Ids past the pool's end are let through: the audit reports them."""
    for at, block in enumerate(items(value, where)):
        whole(block, f"{where}[{at}]", least)
    return value


def _by_group(value: Any, where: str, names: Collection[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} is {_said(value)}; it must be an object; {_WAY_OUT}")
    for name in value:
        if name not in names:
            raise ArgumentError(f"{where} names group {_said(name)}; the groups are {list(names)}; {_WAY_OUT}")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def _said(value: Any) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


# Whole documents ------------------------------------------------------------------------------------------------------

_RUN_TEXTS = ("title", "model", "backend", "dtype", "layout")
_RUN_SIZES = ("block_size", "itemsize", "num_q_heads", "tile")
_GROUP_SIZES = ("num_blocks", "num_kv_heads", "head_size", "head_size_v")
_EVENTS = ("admit", "preempt", "finish", "fork")


def check_run(data: dict[str, Any]) -> None:
    """Hold the document of a run to the form that :meth:`pagetile.inspect.run.Run.to_dict` gives it.

    Raises:
        ArgumentError: the first entry that cannot be.
    """
    record(data, "the run", ("pagetile_run", *_RUN_TEXTS, *_RUN_SIZES, "groups", "requests", "steps"), ("warm",))
    for name in _RUN_TEXTS:
        text(data[name], name)
    for name in _RUN_SIZES:
        whole(data[name], name, 1)
    names: list[str] = []
    for at, g in enumerate(items(data["groups"], "groups")):
        names.append(_check_group(g, f"groups[{at}]", data["block_size"]))
    if not names or len(set(names)) != len(names):
        raise ArgumentError(f"groups are {names}; there must be one or more, each with a name of its own; {_WAY_OUT}")
    lengths = [_check_request(r, f"requests[{at}]") for at, r in enumerate(items(data["requests"], "requests"))]
    for name, warm in _by_group(data.get("warm", {}), "warm", names).items():
        blocks(warm, f"warm[{name!r}]")
    for at, step in enumerate(items(data["steps"], "steps")):
        _check_step(step, f"steps[{at}]", names, lengths)


def _check_group(g: Any, where: str, block_size: int) -> str:
    record(g, where, ("name", "layers", "window", *_GROUP_SIZES, "k_strides", "v_strides"))
    for name in _GROUP_SIZES:
        whole(g[name], f"{where}.{name}", 1)
    if g["num_blocks"] * block_size > MOST_SLOTS:
        raise ArgumentError(f"{where} has {g['num_blocks']} blocks of {block_size}, which no memory holds; {_WAY_OUT}")
    blocks(g["layers"], f"{where}.layers")
    if not g["layers"]:
        raise ArgumentError(f"{where}.layers is empty; a group has at least one layer; {_WAY_OUT}")
    if g["window"] is not None:
        whole(g["window"], f"{where}.window", 1)
    for name in ("k_strides", "v_strides"):
        for at, stride in enumerate(items(g[name], f"{where}.{name}", 3)):
            whole(stride, f"{where}.{name}[{at}]", 0, FARTHEST)
    return text(g["name"], f"{where}.name")


def _check_request(r: Any, where: str) -> int:
    optional = ("texts", "arrived", "finished", "finish_reason")
    record(r, where, ("id", "sample", "prompt_tokens", "tokens"), optional)
    text(r["id"], f"{where}.id")
    whole(r["sample"], f"{where}.sample")
    whole(r["prompt_tokens"], f"{where}.prompt_tokens")
    for at, token in enumerate(items(r["tokens"], f"{where}.tokens")):
        whole(token, f"{where}.tokens[{at}]", 0, FARTHEST)
    length = len(r["tokens"])
    texts = items(r.get("texts", []), f"{where}.texts")
    items(texts, f"{where}.texts", length if texts else 0)
    for at, part in enumerate(texts):
        text(part, f"{where}.texts[{at}]")
    number(r.get("arrived", 0.0), f"{where}.arrived")
    if r.get("finished") is not None:
        number(r["finished"], f"{where}.finished")
    if r.get("finish_reason") is not None:
        text(r["finish_reason"], f"{where}.finish_reason")
    return length


def _check_step(step: Any, where: str, names: list[str], lengths: list[int]) -> None:
    record(step, where, ("t", "rows"), ("blocks", "cached", "copies", "events", "slots"))
    for at, value in enumerate(items(step["t"], f"{where}.t", 4)):
        number(value, f"{where}.t[{at}]")
    last = len(lengths) - 1
    for at, row in enumerate(items(step["rows"], f"{where}.rows")):
        here = f"{where}.rows[{at}]"
        request, first, count, skip = items(row, here, 4)
        whole(request, f"{here}[0] (request)", 0, last)
        whole(first, f"{here}[1] (first position)", 0, lengths[request] - 1)
        whole(count, f"{here}[2] (new tokens)", 1, lengths[request] - first)
        whole(skip, f"{here}[3] (not stored)", 0, count)
    for name, changes in _by_group(step.get("blocks", {}), f"{where}.blocks", names).items():
        for at, change in enumerate(items(changes, f"{where}.blocks[{name!r}]")):
            here = f"{where}.blocks[{name!r}][{at}]"
            request, first, ids, length = items(change, here, 4)
            whole(request, f"{here}[0] (request)", 0, last)
            whole(first, f"{here}[1] (first column)")
            blocks(ids, f"{here}[2]", RELEASED)
            whole(length, f"{here}[3] (length)")
    for name, both in _by_group(step.get("cached", {}), f"{where}.cached", names).items():
        for at, ids in enumerate(items(both, f"{where}.cached[{name!r}]", 2)):
            blocks(ids, f"{where}.cached[{name!r}][{at}]")
    for at, copy in enumerate(items(step.get("copies", []), f"{where}.copies")):
        name, source, target = items(copy, f"{where}.copies[{at}]", 3)
        _by_group({text(name, f"{where}.copies[{at}][0]"): None}, f"{where}.copies[{at}]", names)
        blocks([source, target], f"{where}.copies[{at}]")
    for at, event in enumerate(items(step.get("events", []), f"{where}.events")):
        _check_event(event, f"{where}.events[{at}]", last)
    for name, slots in _by_group(step.get("slots", {}), f"{where}.slots", names).items():
        for at, slot in enumerate(items(slots, f"{where}.slots[{name!r}]")):
            whole(slot, f"{where}.slots[{name!r}][{at}]", -FARTHEST, FARTHEST)


def _check_event(event: Any, where: str, last: int) -> None:
    kind, request, value = items(event, where, 3)
    if kind not in _EVENTS:
        raise ArgumentError(f"{where} is {_said(kind)}; it must be one of {', '.join(_EVENTS)}; {_WAY_OUT}")
    whole(request, f"{where}[1] (request)", 0, last)
    if kind == "finish":
        text(value, f"{where}[2] (reason)")
    else:
        whole(value, f"{where}[2]", -1, last if kind == "fork" else MOST)


def check_pool(data: dict[str, Any]) -> None:
    """Hold the document of a pool to the form that :meth:`pagetile.inspect.poolstate.PoolState.save` gives it.

    Raises:
        ArgumentError: the first entry that cannot be.
    """
    record(data, "the pool", ("pagetile_pool", "block_size", "groups"))
    whole(data["block_size"], "block_size", 1)
    names = []
    for at, g in enumerate(items(data["groups"], "groups")):
        where = f"groups[{at}]"
        record(g, where, ("name", "refs", "prefixes", "rows", "stored", "holds", "not_finite"))
        names.append(text(g["name"], f"{where}.name"))
        for block, refs in enumerate(items(g["refs"], f"{where}.refs")):
            whole(refs, f"{where}.refs[{block}]")
        for n, block in enumerate(items(g["prefixes"], f"{where}.prefixes")):
            whole(block, f"{where}.prefixes[{n}]", 0, len(g["refs"]) - 1)
        for name, row in _numbered(g["rows"], f"{where}.rows").items():
            blocks(row, f"{where}.rows[{name}]", RELEASED)
        for name in ("stored", "holds"):
            for key, value in _numbered(g[name], f"{where}.{name}").items():
                whole(value, f"{where}.{name}[{key}]")
        for n, bad in enumerate(items(g["not_finite"], f"{where}.not_finite")):
            here = f"{where}.not_finite[{n}]"
            numbers = ("layer", "sequence", "position", "block", "offset")
            record(bad, here, ("tensor", "heads", *numbers))
            text(bad["tensor"], f"{here}.tensor")
            for name in numbers:
                whole(bad[name], f"{here}.{name}")
            blocks(bad["heads"], f"{here}.heads")
    if not names or len(set(names)) != len(names):
        raise ArgumentError(f"groups are {names}; there must be one or more, each with a name of its own; {_WAY_OUT}")


def _numbered(value: Any, where: str) -> dict[str, Any]:
    """An object whose keys are whole numbers as text."""
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} is {_said(value)}; it must be an object; {_WAY_OUT}")
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 19):
            raise ArgumentError(f"{where} has an entry {_said(key)}; they go by number; {_WAY_OUT}")
    return value
