"""Windows into the machine: one token, one memory instruction, one row of attention, one recorded run."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pagetile.contracts.errors import ArgumentError, PagetileError

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the windows' commands to the command line."""
    for command in (explain, coalesce, softmax):
        app.command()(command)


def _says_why(command: Callable[..., None]) -> Callable[..., None]:
    """A refusal is a message on standard error and exit code 2, not a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except PagetileError as error:
            print(f"pagetile: {error}", file=sys.stderr)
            raise typer.Exit(2) from None

    return run


def _integers(name: str, text: str) -> list[int]:
    """``7,2,9`` as a list."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ArgumentError(f"{name} is {text!r}; give whole numbers with commas between them, like 7,2,9") from None


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


@_says_why
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
    if position is not None:
        found = explain_position(row, position, cache, head)
    else:
        found = explain_slot(slot or 0, row, cache, head)
    cuts = splits.splits(cache, tokens, dtype=source, scale=scale, threads=_threads())  # type: ignore[arg-type]
    if as_json:
        _print_json({**found.to_dict(), "write": splits.to_dicts(cuts)})
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


@_says_why
def coalesce(
    pattern: Annotated[str, typer.Option(help="scalar, pack or scattered.")] = "scalar",
    dtype: Annotated[str, typer.Option(help="Of the elements loaded.")] = "half",
    store: Annotated[str | None, typer.Option(help="dtype of the elements stored; the same by default.")] = None,
    count: Annotated[int | None, typer.Option(help="Elements; a head by default.")] = None,
    head_size: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    offset: Annotated[int, typer.Option(help="Bytes from a 32-byte boundary to the source.")] = 0,
    store_offset: Annotated[int, typer.Option(help="Bytes from a 32-byte boundary to the target.")] = 0,
    pack: Annotated[int | None, typer.Option(help="Elements of a pack; 16 bytes of the source by default.")] = None,
    at: Annotated[str, typer.Option(help="scattered: byte addresses of the lanes, like 0,64,128.")] = "",
    stride: Annotated[int | None, typer.Option(help="scattered: bytes between the lanes, instead of --at.")] = None,
    lanes: Annotated[int, typer.Option(help="scattered with --stride: lanes that take part.")] = 32,
    as_json: Json = False,
) -> None:
    """What a warp's loads and stores cost in 32-byte sectors, with a picture of each instruction."""
    from pagetile.inspect import coalesce as model
    from pagetile.inspect.explain import ITEM_BYTES, dtype_of

    load_bytes = ITEM_BYTES[dtype_of(dtype)]
    store_bytes = load_bytes if store is None else ITEM_BYTES[dtype_of(store)]
    count = head_size if count is None else count
    if pattern == "scalar":
        access = model.scalar(count, load_bytes, store_bytes, load_at=offset, store_at=store_offset)
    elif pattern == "pack":
        access = model.packed(count, load_bytes, store_bytes, load_at=offset, store_at=store_offset, pack=pack)
    elif pattern == "scattered":
        if bool(at) == (stride is not None):
            raise ArgumentError("a scattered access takes either --at 0,64,128 or --stride 64")
        where = _integers("--at", at) if at else [offset + lane * (stride or 0) for lane in range(lanes)]
        access = model.scattered(where, load_bytes, store_bytes)
    else:
        raise ArgumentError(f"pattern is {pattern!r}; it must be scalar, pack or scattered")
    if as_json:
        _print_json(access.to_dict())
        return
    for side in ("load", "store"):
        instructions = access.side(side)
        for instruction in instructions:
            print(*model.picture(instruction), sep="\n")
        print(
            f"{side}s in all: instructions {len(instructions)}, sectors {access.sectors(side)}, "
            f"wasted {access.wasted(side)} B\n"
        )


@_says_why
def softmax(
    keys: Annotated[int, typer.Option(help="Keys of the row, drawn from a seed.")] = 37,
    head_size: Annotated[int, typer.Option(help="Elements of a head.")] = 64,
    tile: Annotated[int, typer.Option(help="Keys a tile.")] = 16,
    splits: Annotated[int, typer.Option(help="Pieces that the tiles are dealt into.")] = 1,
    visible: Annotated[str, typer.Option(help="First and last visible key, like 5,36; all by default.")] = "",
    block_table: Annotated[str, typer.Option(help="Names the blocks that each tile reads.")] = "",
    block_size: Annotated[int, typer.Option(help="Slots in a block.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the random q, K and V.")] = 0,
    file: Annotated[Path | None, typer.Option(help=".npz or .pt with q [D], k [L, D] and v [L, Dv].")] = None,
    as_json: Json = False,
) -> None:
    """The online softmax of one row, tile by tile, with and without splits, beside the full softmax."""
    from pagetile.inspect import softmax as online

    q, k, v = _random_row(keys, head_size, seed) if file is None else _row_from(file)
    limits = _integers("--visible", visible)
    if limits and len(limits) != 2:
        raise ArgumentError(f"--visible is {visible!r}; give the first and the last visible key, like 5,36")
    seen = (limits[0], limits[1] + 1) if limits else None
    row = _integers("--block-table", block_table)
    if row and len(row) * block_size < len(k):
        raise ArgumentError(
            f"--block-table has {len(row)} blocks of {block_size}, room for {len(row) * block_size} keys, "
            f"but there are {len(k)}"
        )
    walked = online.walk(q, k, v, tile=tile, splits=splits, visible=seen)
    if as_json:
        _print_json(walked.to_dict())
        return
    print(*online.table(walked, row, block_size), sep="\n")


def _random_row(keys: int, head_size: int, seed: int) -> tuple[Any, Any, Any]:
    import torch

    if keys < 0 or head_size < 1:
        raise ArgumentError(f"--keys is {keys} and --head-size is {head_size}; at least 0 and 1")
    make = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=make, dtype=torch.float64)
    return draw(head_size), draw(keys, head_size), draw(keys, head_size)


def _row_from(file: Path) -> tuple[Any, Any, Any]:
    """q, k and v of a file. Only arrays are read: no pickled object is ever run."""
    import numpy as np
    import torch

    if not file.is_file():
        raise ArgumentError(f"--file is {file}; there is no such file")
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    elif file.suffix == ".pt":
        found = torch.load(file, map_location="cpu", weights_only=True)
    else:
        raise ArgumentError(f"--file is {file}; it must end in .npz or .pt")
    missing = [name for name in "qkv" if name not in found]
    if missing:
        raise ArgumentError(f"{file} has {sorted(found)}, and no {' and no '.join(missing)}")
    return found["q"], found["k"], found["v"]
