"""``pagetile generate``: prompts in, answers out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pagetile.cli.display import make_display
from pagetile.cli.errors import UsageError, refusing
from pagetile.cli.report import closing_line, document, write_document

if TYPE_CHECKING:
    from pagetile.engine import LLM, RequestOutput


@refusing
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="One or more prompts.")] = None,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts-file", "-f", help="A file of prompts, one a line; - is standard input.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder of a model, or a .gguf file. Default: SmolLM2-135M-Instruct.")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="Name of a GGUF file in the model folder.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Prompts are a user's turn, or plain text. Default: chat, if the model can."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most, for each answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Smallest set of tokens that reaches this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0 is all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    n: Annotated[int, typer.Option("--n", help="Answers to each prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an answer; may be given several times.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 16,
    num_blocks: Annotated[str, typer.Option(help="Blocks in the pool, or auto: what fits in memory.")] = "auto",
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens that one step computes at most.")] = 512,
    max_num_seqs: Annotated[int, typer.Option(help="Answers in the making at once, at most.")] = 64,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a prompt and its answer at most.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Share blocks between prompts that begin alike.")] = True,
    prefix_file: Annotated[
        Path | None,
        typer.Option(
            help="Prefixes that earlier runs computed: read if it is there, written at the end.", dir_okay=False
        ),
    ] = None,
    preemption: Annotated[
        str, typer.Option(help="When blocks run out: recompute, or swap (wait in host memory).")
    ] = "recompute",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="What the cache stores: auto (as the model), fp8_e4m3, fp8_e5m2 or int8.")
    ] = "auto",
    kv_scales: Annotated[
        str | None,
        typer.Option(
            help="Of a quantised cache: a file of calibrated scales, or token_head. Default: 1, int8 token_head."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    backend: Annotated[str, typer.Option(help="auto, cpu, triton, hopper or reference.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")] = False,
) -> None:
    """Answer prompts over a paged KV cache."""
    texts = read_prompts(prompts or [], prompts_file)
    from pagetile.engine import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        n=n,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    blocks = parse_num_blocks(num_blocks)
    display = make_display(texts, n, from_file=prompts_file is not None, quiet=json)
    with display.loading(model or "SmolLM2-135M-Instruct"):
        llm = LLM(
            model,
            gguf_file=gguf_file,
            dtype=dtype,
            device=device,
            block_size=block_size,
            num_blocks=blocks,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            max_length=max_length,
            prefix_cache=prefix_cache,
            preemption=preemption,  # type: ignore[arg-type]  # checked by the engine
            kv_cache_dtype=kv_cache_dtype,
            kv_scales=kv_scales,
            backend=backend,
        )
    with llm:
        if prefix_file is not None and prefix_file.exists():
            llm.load_prefix_cache(prefix_file)
        asked = [as_prompt(llm, text, chat) for text in texts]
        outputs: list[RequestOutput | None] = [None for _ in asked]
        with display:
            for number, delta in llm.stream(asked, params):
                display.show(number, delta)
                if delta.output is not None:
                    outputs[number] = delta.output
        stats = llm.stats
        if prefix_file is not None:
            llm.save_prefix_cache(prefix_file)
        if json:
            write_document(document(llm.source, texts, outputs, stats), sys.stdout)
        else:
            display.close(closing_line(stats))


def read_prompts(arguments: list[str], file: Path | None) -> list[str]:
    """The prompts from the arguments, a file or standard input; blank lines of a file are skipped."""
    if file is not None and arguments:
        raise UsageError("prompts are given both as arguments and as --prompts-file; choose one")
    if arguments:
        found = [prompt for prompt in arguments if prompt.strip()]
    elif file is not None and str(file) != "-":
        found = file.read_text(encoding="utf-8").splitlines()
    elif file is not None or not sys.stdin.isatty():
        found = sys.stdin.read().splitlines()
    else:
        raise UsageError("no prompt; give one as an argument, in a file (--prompts-file), or on standard input")
    found = [line for line in found if line.strip()]
    if not found:
        raise UsageError("there is no prompt in what was given; every line is blank")
    for number, line in enumerate(found, 1):
        if any("\ud800" <= character <= "\udfff" for character in line):
            raise UsageError(f"prompt {number} is not UTF-8; give it as UTF-8 text")
    return found


def parse_num_blocks(text: str) -> int | Literal["auto"]:
    """``auto``, or a number of blocks."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--num-blocks is {text!r}; it must be auto or a number of blocks") from None


def as_prompt(llm: LLM, text: str, chat: bool | None) -> str | list[dict[str, str]]:
    """The text as it is, or as the user's turn of a chat."""
    if chat is False or (chat is None and not llm.has_chat_template):
        return text
    return [{"role": "user", "content": text}]
