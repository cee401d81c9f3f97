"""What recording a run costs: 32 requests of 64 new tokens, with and without a recorder, turn about in one process.

    python -m benchmarks.recording [--requests 32] [--tokens 64] [--rounds 3] [--model PATH] [--page run.html]

Prints the medians of wall and processor time and their ratios, and the size of the page. The model is SmolLM2-135M by
default; the prefix cache is off, so that every turn computes the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from pagetile.engine import LLM, SamplingParams
from pagetile.inspect.recorder import Recorder
from pagetile.inspect.run import Run
from pagetile.inspect.view import page, write_page

SENTENCES = (
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a library at night.",
    "Name three uses of a paper clip.",
    "Tell a story about a fox and a river that met in the spring.",
)


def main() -> None:
    """Run the turns and print the figures."""
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("--requests", type=int, default=32)
    parse.add_argument("--tokens", type=int, default=64)
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--model", default=None)
    parse.add_argument("--page", type=Path, default=None, help="where to write the page of the last recorded run")
    asked = parse.parse_args()

    llm = LLM(asked.model, num_blocks=asked.requests * 16, max_num_seqs=asked.requests, prefix_cache=False)
    prompts = [f"{SENTENCES[i % len(SENTENCES)]} Answer number {i}." for i in range(asked.requests)]
    params = SamplingParams(max_tokens=asked.tokens, ignore_eos=True)
    llm.generate(prompts[:2], SamplingParams(max_tokens=4))  # compiles what is to be compiled

    times: dict[str, list[tuple[float, float]]] = {"plain": [], "recorded": []}
    run: Run | None = None
    for turn in range(2 * asked.rounds):
        recorded = bool((turn + turn // 2) % 2)  # plain, recorded, recorded, plain, ...
        recorder = Recorder(llm.engine, model="SmolLM2-135M") if recorded else None
        wall, cpu = time.perf_counter(), time.process_time()
        if recorder is None:
            llm.generate(prompts, params)
        else:
            with recorder:
                llm.generate(prompts, params)
            run = recorder.run
        times["recorded" if recorded else "plain"].append((time.perf_counter() - wall, time.process_time() - cpu))
        print(f"turn {turn}: {'recorded' if recorded else 'plain':<8} {times['recorded' if recorded else 'plain'][-1]}")

    medians = {
        name: [statistics.median(column) for column in zip(*pairs, strict=True)] for name, pairs in times.items()
    }
    for at, what in enumerate(("wall", "processor")):
        plain, with_recorder = medians["plain"][at], medians["recorded"][at]
        print(f"{what:>9}: plain {plain:.2f} s, recorded {with_recorder:.2f} s, ratio {with_recorder / plain:.3f}")
    if run is not None:
        print(f"page: {len(page(run).encode()) / 1e6:.3f} MB for {len(run.steps)} steps")
        if asked.page is not None:
            write_page(run, asked.page)


if __name__ == "__main__":
    main()
