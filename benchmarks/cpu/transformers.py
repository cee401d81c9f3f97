"""Transformers with and without pagetile: SmolLM2-135M-Instruct in float32, the same process, the same threads.

    python -m benchmarks.cpu.transformers capacity    # KV tokens that generate_batch plans for in 8 GiB
    python -m benchmarks.cpu.transformers batch       # generate_batch: 32 requests of 512 tokens of context
    python -m benchmarks.cpu.transformers generate    # generate: 8 prompts of 2048 tokens

The peer is the host as it is: its default attention (sdpa), and its default cache. In ``batch`` both get the same room
and ``--batch-tokens`` tokens a step (left alone the host takes 8192, which is slower here: its mask is as wide as the
batch). In ``capacity`` the configuration is the default one, and nothing is allocated: what is read is the plan.

A pair of runs is a gate first: nothing is printed about time unless all greedy tokens are equal (or differ first where
the model itself is undecided between two tokens, to within ``TIE``). Printed are the times of both, whole and of the
steps after the prompts, and their ratio. Which of the two goes first alternates with ``--round``.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.cpu.generate import gate
from pagetile.engine.loader import load
from pagetile.integrations.transformers import disable, enable

ROOM = 8 * 2**30
"""Bytes, in ``capacity``."""

Run = tuple[list[list[int]], float, float]
"""New tokens of each prompt, seconds in all, seconds of a step after the prompts."""


def main() -> int:
    """One figure."""
    options = parse()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    loaded = load(None)
    model = loaded.model
    if options.figure == "capacity":
        return capacity(model)
    count, length = (options.requests or 32, 512) if options.figure == "batch" else (options.requests or 8, 2048)
    text = loaded.tokenizer(" ".join(topics[name] for name in sorted(topics)))["input_ids"]
    prompts = cut(text, count, length, options.round)
    run = batch if options.figure == "batch" else generate
    print(
        f"{options.figure}: {count} prompts of {length} tokens, {options.new_tokens} new tokens each, "
        f"{torch.get_num_threads()} threads, round {options.round}"
    )
    enable(model)  # compiles, touches memory
    run(model, [prompt[:32] for prompt in prompts[:2]], options)
    disable(model)
    runs: dict[str, Run] = {}
    for name in ("pagetile", "host")[:: 1 if options.round % 2 else -1]:
        if name == "pagetile":
            enable(model)
        runs[name] = run(model, prompts, options)
        disable(model)
    return report(model, prompts, runs)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figure", choices=("capacity", "batch", "generate"))
    parser.add_argument("--round", type=int, default=1, help="chooses the texts, and who goes first")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


def cut(text: list[int], count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens from places that the seed chooses."""
    rng = random.Random(seed)
    return [text[start : start + length] for start in (rng.randrange(len(text) - length) for _ in range(count))]


def batch(model: Any, prompts: list[list[int]], options: argparse.Namespace) -> Run:
    """``generate_batch``."""
    names = ContinuousBatchingConfig.__dataclass_fields__
    page = ContinuousBatchingConfig().page_size if "page_size" in names else ContinuousBatchingConfig().block_size
    needed = sum(-(-(len(prompt) + options.new_tokens) // page) for prompt in prompts)
    began = time.perf_counter()
    out = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=needed, max_batch_tokens=options.batch_tokens),
        record_timestamps=True,
    )
    seconds = time.perf_counter() - began
    errors = [entry.error for entry in out.values() if entry.error]
    if errors or len(out) != len(prompts):
        raise RuntimeError(f"generate_batch answered {len(out)} of {len(prompts)} requests; {errors[:1]}")
    by_prompt = {tuple(entry.prompt_ids): entry for entry in out.values()}
    entries = [by_prompt[tuple(prompt)] for prompt in prompts]
    started = max(entry.timestamps[0] for entry in entries)
    gaps = [after - before for entry in entries for before, after in pairwise(entry.timestamps) if before >= started]
    return [list(entry.generated_tokens) for entry in entries], seconds, statistics.median(gaps)


def generate(model: Any, prompts: list[list[int]], options: argparse.Namespace) -> Run:
    """``generate``."""
    stamps: list[float] = []

    def stop(ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    ids = torch.tensor(prompts)
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[stop],
    )
    seconds = time.perf_counter() - began
    gaps = [after - before for before, after in pairwise(stamps)]
    return out[:, ids.shape[1] :].tolist(), seconds, statistics.median(gaps)


def report(model: Any, prompts: list[list[int]], runs: dict[str, Run]) -> int:
    """The gate, then the times."""
    differing = gate(model, prompts, runs["pagetile"][0], runs["host"][0])
    if differing is None:
        return 1
    print(f"gate: tokens equal for {len(prompts) - differing} of {len(prompts)}", end="")
    print(f", {differing} differ from an undecided token on" if differing else "")
    for name, (_, seconds, step) in runs.items():
        print(f"{name:<9} {seconds:8.2f} s in all, {step * 1e3:8.1f} ms a step after the prompts")
    (_, ours, our_step), (_, theirs, their_step) = runs["pagetile"], runs["host"]
    print(f"ratio     {theirs / ours:8.2f} x in all, {their_step / our_step:8.2f} x a step")
    return 0


class _Planned(Exception):
    """Stops the host before it allocates."""


def capacity(model: Any) -> int:
    """KV tokens that a manager plans for when the host may take ``ROOM`` bytes."""
    from transformers.generation.continuous_batching import cache as host

    planned = {}
    original = host.PagedAttentionMemoryHandler.infer_max_batch_tokens_and_num_sectors
    for name in ("host", "pagetile"):
        if name == "pagetile":
            enable(model)

        def infer(handler: Any, name: str = name) -> Any:
            _, sectors = original(handler)
            planned[name] = sectors * handler.tokens_per_sector
            raise _Planned

        handler = host.PagedAttentionMemoryHandler
        with (
            mock.patch.object(handler, "get_available_memory", return_value=ROOM),
            mock.patch.object(handler, "infer_max_batch_tokens_and_num_sectors", infer),
        ):
            try:
                manager = model.init_continuous_batching(
                    generation_config=GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1)
                )
                manager._create_batch_processor()
            except _Planned:
                pass
        disable(model)
        print(f"{name:<9} {planned[name]:>9,} KV tokens in {ROOM / 2**30:.0f} GiB")
    print(f"ratio     {planned['pagetile'] / planned['host']:.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
