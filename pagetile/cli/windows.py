"""Windows into the machine: one token, one memory instruction, one row of attention."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pagetile.cli.errors import refusing
from pagetile.contracts.errors import ArgumentError

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

MOST_ELEMENTS = 2**20
"""Elements of a span whose instructions are listed; more is no picture."""

MOST_DRAWN = 2**24
"""Elements of K that are drawn at random."""


def register(app: typer.Typer) -> None:
    """Add the windows' commands to the command line, those over a recorded run as well."""
    from pagetile.cli import windows_run

    for command in (explain, coalesce, softmax):
        app.command()(command)
    windows_run.register(app)


def print_json(value: Any) -> None:
    """One JSON document; a number that JSON does not have would be an error here."""
    print(json.dumps(value, indent=2, allow_nan=False))


def _integers(name: str, text: str) -> list[int]:
    """``7,2,9`` as a list; nothing at all is an empty one."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise ArgumentError(f"{name} is {text!r}; give whole numbers with commas between them, like 7,2,9") from None


def _require_blocks(row: list[int]) -> None:
    """Entries that are read name blocks; behind them a row may hold anything."""
    for column, block in enumerate(row):
        if not 0 <= block < 2**31:
            raise ArgumentError(f"--block-table[{column}] is {block}; a block id is 0 to {2**31 - 1}")


def _require_unused(what: str, **options: Any) -> None:
    """Options that the rest of the command line makes meaningless are refused, not ignored."""
    given = ["--" + name.replace("_", "-") for name, value in options.items() if value not in (None, "")]
    if given:
        raise ArgumentError(f"{', '.join(given)} means nothing {what}; leave it away")


@refusing
def explain(
    position: Annotated[int | None, typer.Option(help="Position of the request, from 0.")] = None,
    slot: Annotated[int | None, typer.Option(help="The way back: a slot of the cache.")] = None,
    block_table: Annotated[str, typer.Option(help="The request's row of the block table.")] = "",
    block_size: Annotated[int, typer.Option(help="Slots in a block.")] = 16,
    heads: Annotated[int, typer.Option(help="KV heads of the cache.")] = 8,
    head_size: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of the cache: half, bf16, float, fp8, ...")] = "half",
    source: Annotated[str | None, typer.Option(help="dtype of key and value, when the cache is quantised.")] = None,
    scale: Annotated[str, typer.Option(help="What one scale covers: none, tensor or head.")] = "none",
    tokens: Annotated[int, typer.Option(help="Tokens of the write that is planned.")] = 1,
    head: Annotated[list[int] | None, typer.Option(help="Show these heads only (may be repeated).")] = None,
    as_json: Json = False,
) -> None:
    """Where a token lives: block, offset, slot, byte addresses, and how its write is cut into work."""
    from pagetile.inspect import splits
    from pagetile.inspect.explain import CacheShape, explain_position, explain_slot

    if (position is None) == (slot is None):
        raise ArgumentError("give either --position (with --block-table) or --slot")
    if scale not in ("none", "tensor", "head"):
        raise ArgumentError(f"scale is {scale!r}; it must be none, tensor or head")
    cache = CacheShape(block_size, heads, head_size, dtype)
    row = _integers("--block-table", block_table)
    if not 1 <= tokens < 2**31:
        raise ArgumentError(f"--tokens is {tokens}; a write has 1 to {2**31 - 1} tokens")
    if position is not None:
        found = explain_position(row, position, cache, head)
    else:
        found = explain_slot(slot or 0, row, cache, head)
    cuts = splits.splits(cache, tokens, dtype=source, scale=scale, threads=_threads())  # type: ignore[arg-type]
    if as_json:
        print_json({**found.to_dict(), "write": splits.to_dicts(cuts)})
        return
    if row and found.position is not None:
        print(f"block_table = {row}     block_size = {block_size}")
    print(*_place(found), sep="\n")
    print(f"\nK, bytes from the cache's base ({heads} heads of {head_size} {cache.dtype}; V's are its own):")
    print(f"  {'head':>4}  {'NHD':^29}  {'HND':^29}")
    nhd, hnd = found.addresses["NHD"], found.addresses["HND"]
    for a, b in zip(nhd, hnd, strict=True):
        print(f"  {a.head:>4}  {a.first:>13} .. {a.last:<12}  {b.first:>13} .. {b.last:<12}")
    for layout in ("NHD", "HND"):
        print(f"\nwrite of {tokens} token{'s' if tokens != 1 else ''}, {layout}:")
        for cut in cuts:
            if cut.layout == layout:
                print(f"  {cut.who}: {cut.how}")
                print(*(f"    because {reason}" for reason in cut.why), sep="\n")
                for hazard in cut.hazards:
                    print(f"    HAZARD: {hazard}")


def _place(found: Any) -> list[str]:
    """The lines that follow a token from its position to its slot, or back."""
    block = f"physical block {found.block}"
    slot = f"slot {found.block} * {found.cache.block_size} + {found.offset} = {found.slot}"
    if found.position is None:
        lines = [f"slot {found.slot}  ->  {block}, offset {found.offset}"]
        if found.block_table:
            lines.append(f"block {found.block} is not in the block table {list(found.block_table)}")
        return lines
    logical = f"logical block {found.logical}, offset {found.offset}"
    lines = [f"position {found.position}  ->  {logical}  ->  {block}  ->  {slot}"]
    if found.others:
        lines.append(f"FAULT: the table names block {found.block} again, for positions {list(found.others)}")
    return lines


def _threads() -> int:
    import torch

    return torch.get_num_threads()


@refusing
def coalesce(
    pattern: Annotated[str, typer.Option(help="scalar, pack or scattered.")] = "scalar",
    dtype: Annotated[str, typer.Option(help="Of the elements loaded.")] = "half",
    store: Annotated[str | None, typer.Option(help="dtype of the elements stored; the same by default.")] = None,
    count: Annotated[int | None, typer.Option(help="Elements; a head by default.")] = None,
    head_size: Annotated[int | None, typer.Option(help="Elements of a head (128).")] = None,
    offset: Annotated[int, typer.Option(help="Bytes from a 32-byte boundary to the source.")] = 0,
    store_offset: Annotated[int, typer.Option(help="Bytes from a 32-byte boundary to the target.")] = 0,
    pack: Annotated[int | None, typer.Option(help="Elements of a pack; 16 bytes of the source by default.")] = None,
    at: Annotated[str, typer.Option(help="scattered: byte addresses of the lanes, like 0,64,128.")] = "",
    stride: Annotated[int | None, typer.Option(help="scattered: bytes between the lanes, instead of --at.")] = None,
    lanes: Annotated[int | None, typer.Option(help="scattered with --stride: lanes that take part (32).")] = None,
    as_json: Json = False,
) -> None:
    """What a warp's loads and stores cost in 32-byte sectors, with a picture of each instruction."""
    from pagetile.inspect import coalesce as model
    from pagetile.inspect.explain import ITEM_BYTES, dtype_of

    load_bytes = ITEM_BYTES[dtype_of(dtype)]
    store_bytes = load_bytes if store is None else ITEM_BYTES[dtype_of(store)]
    if not (0 <= offset < 2**63 and 0 <= store_offset < 2**63):
        raise ArgumentError(f"--offset is {offset} and --store-offset is {store_offset}; give bytes, 0 or more")
    if pattern == "scattered":
        where = _lanes(at, stride, 32 if lanes is None and not at else lanes, offset)
        _require_unused("for a scattered access", count=count, head_size=head_size, pack=pack)
        access = model.scattered(where, load_bytes, store_bytes, store_at=store_offset)
    elif pattern in ("scalar", "pack"):
        _require_unused(f"for the pattern {pattern}", at=at, stride=stride, lanes=lanes)
        count = (128 if head_size is None else head_size) if count is None else count
        if not 1 <= count <= MOST_ELEMENTS:
            raise ArgumentError(f"there are {count} elements to move; give 1 to {MOST_ELEMENTS} (--count, --head-size)")
        if pattern == "pack":
            access = model.packed(count, load_bytes, store_bytes, load_at=offset, store_at=store_offset, pack=pack)
        else:
            _require_unused("for the pattern scalar", pack=pack)
            access = model.scalar(count, load_bytes, store_bytes, load_at=offset, store_at=store_offset)
    else:
        raise ArgumentError(f"pattern is {pattern!r}; it must be scalar, pack or scattered")
    if as_json:
        print_json(access.to_dict())
        return
    signs = "█·" if _can_print("█·") else "#."
    for side in ("load", "store"):
        instructions = access.side(side)
        for instruction in instructions:
            print(*model.picture(instruction, signs=signs), sep="\n")
        print(
            f"{side}s in all: instructions {len(instructions)}, sectors {access.sectors(side)}, "
            f"wasted {access.wasted(side)} B\n"
        )


def _lanes(at: str, stride: int | None, lanes: int | None, offset: int) -> list[int]:
    """Byte addresses of the lanes of a scattered access."""
    if bool(at) == (stride is not None):
        raise ArgumentError("a scattered access takes either --at 0,64,128 or --stride 64")
    if at:
        _require_unused("with --at, which names every lane", lanes=lanes)
        return [offset + address for address in _integers("--at", at)]
    if stride is None or lanes is None or not 1 <= lanes <= 32 or not 0 <= stride < 2**58:
        raise ArgumentError(f"--stride is {stride} and --lanes is {lanes}; give bytes, 0 or more, and 1 to 32 lanes")
    return [offset + lane * stride for lane in range(lanes)]


def _can_print(signs: str) -> bool:
    try:
        signs.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


@refusing
def softmax(
    keys: Annotated[int | None, typer.Option(help="Keys of the row, drawn from a seed (37).")] = None,
    head_size: Annotated[int | None, typer.Option(help="Elements of a head (64).")] = None,
    tile: Annotated[int, typer.Option(help="Keys a tile.")] = 16,
    splits: Annotated[int, typer.Option(help="Pieces that the tiles are dealt into.")] = 1,
    visible: Annotated[str, typer.Option(help="First and last visible key, like 5,36; all by default.")] = "",
    block_table: Annotated[str, typer.Option(help="Names the blocks that each tile reads.")] = "",
    block_size: Annotated[int, typer.Option(help="Slots in a block.")] = 16,
    seed: Annotated[int | None, typer.Option(help="Of the random q, K and V (0).")] = None,
    file: Annotated[Path | None, typer.Option(help=".npz or .pt with q [D], k [L, D] and v [L, Dv].")] = None,
    as_json: Json = False,
) -> None:
    """The online softmax of one row, tile by tile, with and without splits, beside the full softmax."""
    from pagetile.contracts.geometry import blocks_for
    from pagetile.inspect import softmax as online

    if file is not None:
        _require_unused("with --file, which brings q, k and v", keys=keys, head_size=head_size, seed=seed)
        q, k, v = _row_from(file)
    else:
        q, k, v = _random_row(37 if keys is None else keys, 64 if head_size is None else head_size, seed or 0)
    limits = _integers("--visible", visible)
    if limits and (len(limits) != 2 or not 0 <= limits[0] <= limits[1] < len(k)):
        raise ArgumentError(
            f"--visible is {visible!r}; give the first and the last visible key, like 5,36; there are {len(k)} keys, "
            "numbered from 0"
        )
    row = _integers("--block-table", block_table)
    if block_size < 1 or (row and len(row) * block_size < len(k)):
        raise ArgumentError(
            f"--block-table has {len(row)} blocks of {block_size}, room for {len(row) * max(0, block_size)} keys, "
            f"but there are {len(k)}"
        )
    _require_blocks(row[: blocks_for(len(k), block_size)])
    walked = online.walk(q, k, v, tile=tile, splits=splits, visible=(limits[0], limits[1] + 1) if limits else None)
    if as_json:
        print_json(walked.to_dict())
        return
    print(*online.table(walked, row, block_size), sep="\n")


def _random_row(keys: int, head_size: int, seed: int) -> tuple[Any, Any, Any]:
    import torch

    if keys < 0 or head_size < 1 or keys * head_size > MOST_DRAWN:
        raise ArgumentError(
            f"--keys is {keys} and --head-size is {head_size}; give at least 0 and 1, and {MOST_DRAWN} elements at most"
        )
    if not 0 <= seed < 2**63:
        raise ArgumentError(f"--seed is {seed}; give a whole number of 0 to {2**63 - 1}")
    make = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=make, dtype=torch.float64)
    return draw(head_size), draw(keys, head_size), draw(keys, head_size)


def _row_from(file: Path) -> tuple[Any, Any, Any]:
    """q, k and v of a file. Only arrays are read: no pickled object is ever run."""
    import torch

    if not file.is_file():
        raise ArgumentError(f"--file is {file}; there is no such file")
    if file.suffix not in (".npz", ".pt"):
        raise ArgumentError(f"--file is {file}; it must end in .npz or .pt")
    try:
        found = _arrays(file)
    except Exception as error:  # the readers raise nearly anything over a damaged file
        reason = str(error).split("\n")[0].split(". ")[0]
        raise ArgumentError(
            f"{file} cannot be read as arrays alone ({type(error).__name__}: {reason}); save q, k and v with "
            "numpy.savez or torch.save({'q': q, 'k': k, 'v': v}, file)"
        ) from None
    if not isinstance(found, dict) or any(name not in found for name in "qkv"):
        has = sorted(map(str, found)) if isinstance(found, dict) else f"one {type(found).__name__}"
        raise ArgumentError(f"{file} has {has}; it must have q, k and v by name")
    for name in "qkv":
        if not isinstance(found[name], torch.Tensor) or found[name].layout is not torch.strided:
            raise ArgumentError(f"{name} in {file} is no plain tensor ({type(found[name]).__name__})")
    return found["q"], found["k"], found["v"]


def _arrays(file: Path) -> Any:
    import numpy as np
    import torch

    if file.suffix == ".pt":
        return torch.load(file, map_location="cpu", weights_only=True)
    arrays = np.load(file, allow_pickle=False)
    if isinstance(arrays, np.ndarray):
        return arrays
    with arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
