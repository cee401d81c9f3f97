"""Windows over a run or a pool: record it, audit it, draw it, play it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagetile.cli.errors import refusing
from pagetile.cli.windows import Json, print_json
from pagetile.contracts.errors import ArgumentError

if TYPE_CHECKING:
    from pagetile.inspect.run import Run


MOST_WIDTH = 10_000
"""Blocks of a line of the map."""


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (trace, audit, map, view):
        app.command()(command)


Prompts = Annotated[list[str] | None, typer.Argument(help="One or more prompts.")]
PromptsFile = Annotated[Path | None, typer.Option("--prompts-file", "-f", help="A file of prompts, one a line.")]
Model = Annotated[str | None, typer.Option(help="Folder of a model, or a .gguf file. Default: SmolLM2-135M-Instruct.")]
Chat = Annotated[bool | None, typer.Option("--chat/--raw", help="Prompts are a user's turn, or plain text.")]
MaxTokens = Annotated[int, typer.Option(help="New tokens at most, for each answer.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.")]
NumBlocks = Annotated[str, typer.Option(help="Blocks in the pool, or auto.")]
BatchTokens = Annotated[int, typer.Option(help="Tokens that one step computes at most.")]
Backend = Annotated[str, typer.Option(help="auto, cpu, triton, hopper or reference.")]


@refusing
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

    _require_places({"--save": save, "--chrome": chrome, "--page": page})
    run = _record(prompts, prompts_file, model, chat, max_tokens, block_size, num_blocks, max_batch_tokens, backend)
    if save is not None:
        run.save(save)
    if chrome is not None:
        chrome_json.save(run, chrome)
    if page is not None:
        write_page(run, page)
    if as_json:
        print_json(figures.summary(run))
        return
    print(*figures.summary_lines(run), sep="\n")
    for path in (save, chrome, page):
        if path is not None:
            print(f"wrote {path} ({figures.size(path.stat().st_size)})")


def _require_places(files: dict[str, Path | None]) -> None:
    """Files can be written where they are asked for: said before a model runs, not after."""
    seen: dict[Path, str] = {}
    for name, path in files.items():
        if path is None:
            continue
        what = ""
        if path.is_dir():
            what = "is a folder; name a file"
        elif not path.parent.is_dir():
            what = f"cannot be written: {path.parent} is no folder"
        elif not os.access(path.parent, os.W_OK):
            what = f"cannot be written: {path.parent} is not yours to write in"
        if what:
            raise ArgumentError(f"{name} {path} {what}")
        if (other := seen.setdefault(path.resolve(), name)) != name:
            raise ArgumentError(f"{other} and {name} are both {path}; give each a file of its own")


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
    for number, text in enumerate(texts):
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ArgumentError(f"prompt {number} is {text!a}, which is not UTF-8; give it as UTF-8 text")
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


@refusing
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
        print_json([asdict(finding) for finding in found])
    elif found:
        print(*found, sep="\n")
    else:
        what = f"{len(run.steps)} steps" if run is not None else f"{sum(len(g.refs) for g in pool.groups)} blocks"
        print(f"nothing is wrong in {what}")
    if found:
        raise typer.Exit(1)


@refusing
def map(
    file: Annotated[Path, typer.Argument(help="A run (pagetile trace --save) or a pool (PoolState.save).")],
    step: Annotated[
        int | None, typer.Option(help="Of a run, the last by default; negative counts from the end.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Group of layers; the first by default.")] = None,
    width: Annotated[int, typer.Option(help="Blocks a line.")] = 64,
    as_json: Json = False,
) -> None:
    """Draw the pool: one character a block, a letter for who holds it."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.text import Text

    if not 1 <= width <= MOST_WIDTH:
        raise ArgumentError(f"--width is {width}; a line has 1 to {MOST_WIDTH} blocks")
    drawn = _drawn(file, step, group)
    if as_json:
        print_json(asdict(drawn))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    digits = len(str(max(0, len(drawn.cells) - 1)))
    console.print(drawn.title, soft_wrap=True)
    for at in range(0, len(drawn.cells), width):
        line = Text(f"{at:>{digits}}  ")
        for sign, owner in zip(drawn.cells[at : at + width], drawn.owner[at : at + width], strict=True):
            line.append(sign, style=_style(owner))
        console.print(line, soft_wrap=True)
    for letter, what in drawn.legend:
        console.print(Text.assemble((letter, "bold"), f"  {what}"), soft_wrap=True)


def _drawn(file: Path, step: int | None, group: str | None) -> Any:
    from pagetile.inspect.poolmap import map_of_pool, map_of_run

    run, pool = _load(file)
    if run is None:
        if step is not None:
            raise ArgumentError(f"--step is {step}, but {file} is a saved pool, which has no steps; leave --step away")
        names = [g.name for g in pool.groups]
        if group is not None and group not in names:
            raise ArgumentError(f"--group is {group!r}; the pool has {names}")
        return map_of_pool(pool.groups[names.index(group) if group is not None else 0], pool.block_size)
    if not run.steps:
        raise ArgumentError(f"{file} is a run without steps; there is nothing to draw")
    step = -1 if step is None else step
    index = step + len(run.steps) if step < 0 else step
    if not 0 <= index < len(run.steps):
        raise ArgumentError(
            f"--step is {step}; the run has steps 0 to {len(run.steps) - 1} (or -1 to {-len(run.steps)} from the end)"
        )
    return next(map_of_run(run, s, run.group(group).name) for s in run.states() if s.index == index)


def _style(owner: int | None) -> str:
    colours = ("cyan", "yellow", "green", "magenta", "blue", "red")
    return "dim" if owner is None else "bold reverse" if owner < 0 else colours[owner % len(colours)]


def _load(file: Path) -> tuple[Any, Any]:
    """A run and None, or None and a pool."""
    from pagetile.inspect import saved
    from pagetile.inspect.poolstate import PoolState
    from pagetile.inspect.run import Run

    data = saved.read(file)
    if "pagetile_pool" in data:
        return None, PoolState.read(file, data)
    return Run.read(file, data), None


@refusing
def view(
    file: Annotated[Path, typer.Argument(help="The page to write, FILE.html.")],
    prompts: Prompts = None,
    run: Annotated[Path | None, typer.Option(help="A run that pagetile trace saved; else prompts are run now.")] = None,
    prompts_file: PromptsFile = None,
    model: Model = None,
    chat: Chat = None,
    max_tokens: Annotated[int | None, typer.Option(help="New tokens at most, for each answer (32).")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a block (16).")] = None,
    num_blocks: Annotated[str | None, typer.Option(help="Blocks in the pool, or auto (64).")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens that one step computes at most (512).")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, cpu, triton, hopper or reference (auto).")] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained page that plays a recorded run."""
    from pagetile.inspect.figures import size, summary
    from pagetile.inspect.run import Run
    from pagetile.inspect.view import write_page

    _require_places({"FILE": file})
    if run is not None:
        _require_unset(
            ("prompts", prompts or None),
            ("--prompts-file", prompts_file),
            ("--model", model),
            ("--chat/--raw", chat),
            ("--max-tokens", max_tokens),
            ("--block-size", block_size),
            ("--num-blocks", num_blocks),
            ("--max-batch-tokens", max_batch_tokens),
            ("--backend", backend),
        )
        recorded = Run.load(run)
    else:
        recorded = _record(
            prompts,
            prompts_file,
            model,
            chat,
            32 if max_tokens is None else max_tokens,
            16 if block_size is None else block_size,
            "64" if num_blocks is None else num_blocks,
            512 if max_batch_tokens is None else max_batch_tokens,
            "auto" if backend is None else backend,
        )
    write_page(recorded, file)
    written = file.stat().st_size
    if as_json:
        print_json({"file": str(file), "bytes": written, **summary(recorded)})
        return
    steps = len(recorded.steps)
    print(f"wrote {file} ({size(written)}, {steps} step{'' if steps == 1 else 's'})")


def _require_unset(*options: tuple[str, Any]) -> None:
    given = [name for name, value in options if value is not None]
    if given:
        raise ArgumentError(
            f"give either --run or prompts: --run has a run already, and {', '.join(given)} would make one"
        )
