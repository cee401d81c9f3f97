"""The main job beside Transformers: 32 requests with SmolLM2-135M-Instruct in float32, on the same threads.

    python -m benchmarks.cpu.generate [--rounds 3] [--peer-batch-tokens 512] [--profile] ...

Prompts of 16 to 512 tokens are cut from the texts that ``help()`` ships with Python, other ones in every round (so that
no prefix cache helps anybody), with 64 new tokens each. The peer is ``model.generate_batch``, Transformers' continuous
batching, with its default attention. It gets room for as many tokens as pagetile has (left alone it takes 60 % of the
memory) and, unless ``--peer-batch-tokens`` says otherwise, as many tokens a step (left alone it takes 8192, which is
slower here: its mask is as wide as the batch). Its manager is made once and kept, and its first round is not counted.

First a gate: all greedy tokens of one round must be equal (or differ first where the model itself is undecided between
two tokens to within ``TIE``). Then rounds, each system in turn in one process; printed are the ratios and their spread.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import random
import statistics
import sys
import time
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from pagetile.engine import LLM, SamplingParams
from pagetile.engine.loader import load

BLOCKS, BLOCK_SIZE, BATCH_TOKENS = 2048, 16, 512
"""Room for 32,768 tokens, of which a step computes 512."""

TIE = 1e-3
"""Two largest logits closer than this may swap places when sums are rounded in another order."""


def main() -> int:
    """Gate, then rounds."""
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    loaded = load(None)
    ours = Ours(loaded, options.new_tokens)
    peer = Peer(loaded.model, options.new_tokens, options.peer_batch_tokens)
    text = loaded.tokenizer(" ".join(topics[name] for name in sorted(topics)))["input_ids"]
    prompts = cut(text, options.requests, seed=0)
    print(
        f"{options.requests} requests, prompts of {len(prompts[0])} to {len(prompts[-1])} tokens "
        f"({sum(map(len, prompts))} in all), {options.new_tokens} new tokens each, {torch.get_num_threads()} threads"
    )
    if options.profile:
        return profile(ours, prompts)
    ours.run(cut(text, 2, seed=-1))  # compiles, touches memory
    differing = gate(loaded.model, prompts, ours.run(prompts), peer.run(prompts))
    if differing is None:
        return 1
    print(f"gate: tokens equal for {options.requests - differing} of {options.requests} requests", end="")
    print(f", {differing} differ from an undecided token on" if differing else "")
    rounds = []
    for number in range(1, options.rounds + 1):
        prompts = cut(text, options.requests, seed=number)
        pair = [(ours, timed(ours, prompts)), (peer, timed(peer, prompts))] if number % 2 else None
        if pair is None:
            later = timed(peer, prompts)
            pair = [(ours, timed(ours, prompts)), (peer, later)]
        rounds.append(tuple(seconds for _, seconds in pair))
        print(f"round {number}: pagetile {rounds[-1][0]:.2f} s, generate_batch {rounds[-1][1]:.2f} s")
    report(rounds, options.requests * options.new_tokens)
    print(f"pagetile's own figures: {ours.figures()}")
    peer.close()
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--peer-batch-tokens", type=int, default=BATCH_TOKENS, help="0 is its own default")
    parser.add_argument("--profile", action="store_true", help="profile one round of pagetile and stop")
    return parser.parse_args()


def cut(text: list[int], count: int, seed: int) -> list[list[int]]:
    """``count`` prompts of evenly spread lengths from 16 to 512, from places that the seed chooses."""
    rng = random.Random(seed)
    lengths = [16 + (512 - 16) * i // max(1, count - 1) for i in range(count)]
    starts = [rng.randrange(len(text) - 512) for _ in lengths]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


class Ours:
    """pagetile."""

    def __init__(self, loaded: Any, new_tokens: int) -> None:
        self.llm = LLM(
            loaded.model,
            tokenizer=loaded.tokenizer,
            max_length=1024,
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            max_batch_tokens=BATCH_TOKENS,
        )
        self.params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)

    def run(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy tokens."""
        return [output.outputs[0].token_ids for output in self.llm.generate(prompts, self.params)]

    def figures(self) -> str:
        """Speed of prompts and of next tokens."""
        stats = self.llm.stats
        return f"prefill {stats.prefill_rate:,.0f} tokens/s, decode {stats.decode_rate:,.1f} tokens/s"


class Peer:
    """Transformers' continuous batching, as its users call it."""

    def __init__(self, model: Any, new_tokens: int, batch_tokens: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.model = model
        page = ContinuousBatchingConfig().page_size
        self.batching = ContinuousBatchingConfig(
            num_blocks=BLOCKS * BLOCK_SIZE // page, max_batch_tokens=batch_tokens or None
        )
        # -1 is how it is told to go on after the end token.
        self.config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy tokens."""
        out = self.model.generate_batch(
            prompts,
            generation_config=self.config,
            continuous_batching_config=self.batching,
            persistent_manager=True,
        )
        errors = [entry.error for entry in out.values() if entry.error]
        if errors or len(out) != len(prompts):
            raise RuntimeError(f"generate_batch answered {len(out)} of {len(prompts)} requests; {errors[:1]}")
        by_prompt = {tuple(entry.prompt_ids): list(entry.generated_tokens) for entry in out.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    def close(self) -> None:
        """Stop the manager's thread."""
        self.model.destroy_cached_continuous_batching_manager()


def gate(model: Any, prompts: list, ours: list, theirs: list) -> int | None:
    """How many requests differ from an undecided token on; None (and a line) if one differs elsewhere."""
    differing = 0
    for number, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + a[:at]]), logits_to_keep=1).logits[0, -1]
        best = logits.topk(2).values
        if len(a) != len(b) or float(best[0] - logits[[a[at], b[at]]].min()) > TIE:
            print(f"gate: request {number} differs at token {at}: {a[at : at + 4]} and {b[at : at + 4]}; not timed")
            return None
        differing += 1
    return differing


def timed(system: Ours | Peer, prompts: list[list[int]]) -> float:
    """Seconds of one run."""
    began = time.perf_counter()
    system.run(prompts)
    return time.perf_counter() - began


def report(rounds: list[tuple[float, float]], new_tokens: int) -> None:
    """Medians and the spread of the ratios."""
    ratios = sorted(theirs / ours for ours, theirs in rounds)
    ours, theirs = (statistics.median(side) for side in zip(*rounds, strict=True))
    print(f"pagetile        {new_tokens / ours:8.1f} new tokens/s (median of {len(rounds)})")
    print(f"generate_batch  {new_tokens / theirs:8.1f} new tokens/s")
    print(f"ratio           {statistics.median(ratios):8.2f} x (from {ratios[0]:.2f} to {ratios[-1]:.2f})")


def profile(ours: Ours, prompts: list[list[int]]) -> int:
    """Where pagetile's own time goes."""
    ours.run(prompts[:2])
    profiler = cProfile.Profile()
    profiler.runcall(ours.run, prompts)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    return 0


if __name__ == "__main__":
    sys.exit(main())
