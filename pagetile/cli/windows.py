"""Windows into the machine: one token, one memory instruction, one row of attention, one recorded run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagetile.cli.errors import user_errors
from pagetile.contracts.errors import ArgumentError

if TYPE_CHECKING:
    from pagetile.inspect.run import Run

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the windows' commands to the command line."""
    for command in (explain, coalesce, softmax, trace, audit, map, view):
        app.command()(command)


def _refusing(command: Callable[..., None]) -> Callable[..., None]:
    """What a user can put right is one line on standard error, not a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        with user_errors():
            command(*args, **options)

    return run


def _integers(name: str, text: str) -> list[int]:
    """``7,2,9`` as a list."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ArgumentError(f"{name} is {text!r}; give whole numbers with commas between them, like 7,2,9") from None


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


@_refusing
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


@_refusing
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


@_refusing
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


Prompts = Annotated[list[str] | None, typer.Argument(help="One or more prompts.")]
PromptsFile = Annotated[Path | None, typer.Option("--prompts-file", "-f", help="A file of prompts, one a line.")]
Model = Annotated[str | None, typer.Option(help="Folder of a model, or a .gguf file. Default: SmolLM2-135M-Instruct.")]
Chat = Annotated[bool | None, typer.Option("--chat/--raw", help="Prompts are a user's turn, or plain text.")]
MaxTokens = Annotated[int, typer.Option(help="New tokens at most, for each answer.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.")]
NumBlocks = Annotated[str, typer.Option(help="Blocks in the pool, or auto.")]
BatchTokens = Annotated[int, typer.Option(help="Tokens that one step computes at most.")]
Backend = Annotated[str, typer.Option(help="auto, cpu, triton, hopper or reference.")]


@_refusing
def trace(
    prompts: Prompts = None,
    prompts_file: PromptsFile = None,
    model: Model = None,
    chat: Chat = None,
    max_tokens: MaxTokens = 32,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = "64",
    max_batch_tokens: BatchTokens = 512,
    backend: Backend = "auto",
    save: Annotated[Path | None, typer.Option(help="Keep the run: run.json or run.json.gz.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Chrome trace JSON, for ui.perfetto.dev.")] = None,
    page: Annotated[Path | None, typer.Option(help="The page of pagetile view, FILE.html.")] = None,
    as_json: Json = False,
) -> None:
    """Answer prompts and record it: who owned which block when, what each step wrote and read."""
    from pagetile.inspect import chrome as chrome_json
    from pagetile.inspect import figures
    from pagetile.inspect.view import write_page

    run = _record(prompts, prompts_file, model, chat, max_tokens, block_size, num_blocks, max_batch_tokens, backend)
    if save is not None:
        run.save(save)
    if chrome is not None:
        chrome_json.save(run, chrome)
    if page is not None:
        write_page(run, page)
    if as_json:
        _print_json(figures.summary(run))
        return
    print(*figures.summary_lines(run), sep="\n")
    for path in (save, chrome, page):
        if path is not None:
            print(f"wrote {path} ({figures.size(path.stat().st_size)})")


def _record(
    prompts: list[str] | None,
    prompts_file: Path | None,
    model: str | None,
    chat: bool | None,
    max_tokens: int,
    block_size: int,
    num_blocks: str,
    max_batch_tokens: int,
    backend: str,
) -> Run:
    from pagetile.cli.generate import as_prompt, parse_num_blocks, read_prompts

    texts = read_prompts(prompts or [], prompts_file)
    from pagetile.engine import LLM, SamplingParams
    from pagetile.inspect.recorder import Recorder

    llm = LLM(
        model,
        block_size=block_size,
        num_blocks=parse_num_blocks(num_blocks),  # type: ignore[arg-type]
        max_batch_tokens=max_batch_tokens,
        backend=backend,
    )
    asked = [as_prompt(llm, text, chat) for text in texts]
    with llm, Recorder(llm.engine, title="Paged cache, step by step", model=Path(llm.source).stem) as recorder:
        llm.generate(asked, SamplingParams(max_tokens=max_tokens))
    return recorder.run


@_refusing
def audit(
    file: Annotated[Path, typer.Argument(help="A run (pagetile trace --save) or a pool (PoolState.save).")],
    as_json: Json = False,
) -> None:
    """Look for faults: double owners, leaks, duplicate slots, NaN in live slots, dead slots that were read."""
    from dataclasses import asdict

    from pagetile.inspect.audit import audit_pool, audit_run

    run, pool = _load(file)
    found = audit_run(run) if run is not None else audit_pool(pool)
    if as_json:
        _print_json([asdict(finding) for finding in found])
    elif found:
        print(*found, sep="\n")
    else:
        what = f"{len(run.steps)} steps" if run is not None else f"{sum(len(g.refs) for g in pool.groups)} blocks"
        print(f"nothing is wrong in {what}")
    if found:
        raise typer.Exit(1)


@_refusing
def map(
    file: Annotated[Path, typer.Argument(help="A run (pagetile trace --save) or a pool (PoolState.save).")],
    step: Annotated[int, typer.Option(help="Of a run; negative counts from the end.")] = -1,
    group: Annotated[str | None, typer.Option(help="Group of layers; the first by default.")] = None,
    width: Annotated[int, typer.Option(help="Blocks a line.")] = 64,
) -> None:
    """Draw the pool: one character a block, a letter for who holds it."""
    from rich.console import Console
    from rich.text import Text

    from pagetile.inspect.poolmap import map_of_pool, map_of_run

    if width < 1:
        raise ArgumentError(f"--width is {width}; a line has at least 1 block")
    run, pool = _load(file)
    if run is not None:
        index = step + len(run.steps) if step < 0 else step
        if not 0 <= index < len(run.steps):
            raise ArgumentError(f"--step is {step}, and the run has {len(run.steps)} steps")
        drawn = next(map_of_run(run, s, run.group(group).name) for s in run.states() if s.index == index)
    else:
        names = [g.name for g in pool.groups]
        if group is not None and group not in names:
            raise ArgumentError(f"--group is {group!r}; the pool has {names}")
        drawn = map_of_pool(pool.groups[names.index(group) if group else 0], pool.block_size)
    console = Console(highlight=False, width=max(80, width + 12))
    digits = len(str(max(0, len(drawn.cells) - 1)))
    console.print(drawn.title)
    for at in range(0, len(drawn.cells), width):
        line = Text(f"{at:>{digits}}  ")
        for sign, owner in zip(drawn.cells[at : at + width], drawn.owner[at : at + width], strict=True):
            line.append(sign, style=_style(owner))
        console.print(line)
    for letter, what in drawn.legend:
        console.print(Text.assemble((letter, "bold"), f"  {what}"))


def _style(owner: int | None) -> str:
    colours = ("cyan", "yellow", "green", "magenta", "blue", "red")
    return "dim" if owner is None else "bold reverse" if owner < 0 else colours[owner % len(colours)]


def _load(file: Path) -> tuple[Any, Any]:
    """A run and None, or None and a pool."""
    from pagetile.inspect.poolstate import PoolState
    from pagetile.inspect.run import Run

    if file.is_file() and file.suffix != ".gz" and file.read_bytes()[:32].find(b'"pagetile_pool"') >= 0:
        return None, PoolState.load(file)
    return Run.load(file), None


@_refusing
def view(
    file: Annotated[Path, typer.Argument(help="The page to write, FILE.html.")],
    prompts: Prompts = None,
    run: Annotated[Path | None, typer.Option(help="A run that pagetile trace saved; else prompts are run now.")] = None,
    prompts_file: PromptsFile = None,
    model: Model = None,
    chat: Chat = None,
    max_tokens: MaxTokens = 32,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = "64",
    max_batch_tokens: BatchTokens = 512,
    backend: Backend = "auto",
) -> None:
    """Write one self-contained page that plays a recorded run."""
    from pagetile.inspect.figures import size
    from pagetile.inspect.run import Run
    from pagetile.inspect.view import write_page

    if run is not None and (prompts or prompts_file):
        raise ArgumentError("give either --run or prompts")
    recorded = (
        Run.load(run)
        if run is not None
        else _record(prompts, prompts_file, model, chat, max_tokens, block_size, num_blocks, max_batch_tokens, backend)
    )
    write_page(recorded, file)
    print(f"wrote {file} ({size(file.stat().st_size)}, {len(recorded.steps)} steps)")
