"""What a quantised cache costs in quality: perplexity and token agreement on a shipped text, by dtype and granularity.

    python -m benchmarks.quantised [--text docs/tour.md] [--calibrate README.md] [--tokens 1024] [--model PATH]

The model (SmolLM2-135M by default, float32) reads the text once for each cache, through the engine. Scales for the
tensor and for each head come from a run over another text. Agreement is the share of positions at which the likeliest
next token is that of the cache that is not quantised. Prints a table in Markdown; nothing is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from pathlib import Path

from pagetile.cache import CacheScales
from pagetile.contracts.dtypes import QUANTISED
from pagetile.engine import LLM, SamplingParams, calibrate
from pagetile.engine.loader import load

READ = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, ignore_eos=True)


def read(model, ids: list[int], **options) -> tuple[list[float], list[int], LLM]:
    """Logarithm of each token's probability but the first's, the likeliest token at each place, and the engine."""
    llm = LLM(model, num_blocks=len(ids) // 16 + 2, max_num_seqs=1, prefix_cache=False, **options)
    [output] = llm.generate([ids], READ)
    entries = [entry for entry in output.prompt_logprobs or [] if entry is not None]
    return [entry.logprob for entry in entries], [next(iter(entry.top)) for entry in entries], llm


def main() -> None:
    """Read the text with every cache and print the table."""
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("--text", type=Path, default=Path("docs/tour.md"))
    parse.add_argument("--calibrate", type=Path, default=Path("README.md"))
    parse.add_argument("--tokens", type=int, default=1024)
    parse.add_argument("--model", default=None)
    asked = parse.parse_args()

    loaded = load(asked.model)
    assert loaded.tokenizer is not None
    ids, other = (
        list(loaded.tokenizer(path.read_text(encoding="utf-8"))["input_ids"])[: asked.tokens]
        for path in (asked.text, asked.calibrate)
    )
    right, likeliest, plain = read(loaded.model, ids)
    maxima = calibrate(plain, [other], SamplingParams(max_tokens=1, temperature=0))
    digest = hashlib.sha256(asked.text.read_bytes()).hexdigest()[:12]
    print(
        f"{Path(loaded.source).name}, {len(ids)} tokens of {asked.text} ({digest}), calibrated on {asked.calibrate}\n"
    )
    print("| cache | scales | bytes a token | perplexity | against unquantised | same likeliest token |")
    print("|---|---|---|---|---|---|")
    base = row(plain, "none", right, likeliest, right, likeliest)
    print(base, flush=True)
    for kind in QUANTISED:
        forms: list[tuple[str, CacheScales | str | None]] = [
            ("1", None if kind != "int8" else ones(maxima.scales(kind))),
            ("tensor", maxima.scales(kind, "tensor")),
            ("KV head", maxima.scales(kind, "head")),
            ("token and head", "token_head"),
        ]
        for name, scales in forms:
            found, top, llm = read(loaded.model, ids, kv_cache_dtype=kind, kv_scales=scales)
            print(row(llm, name, found, top, right, likeliest), flush=True)


def ones(scales: CacheScales) -> CacheScales:
    """1 in place of every scale."""
    keys, values = ({i: s * 0 + 1 for i, s in part.items()} for part in (scales.keys, scales.values))
    return CacheScales(scales.kind, keys, values)


def row(llm: LLM, name: str, found: list[float], top: list[int], right: list[float], likeliest: list[int]) -> str:
    """One line of the table."""
    perplexity, before = (math.exp(-sum(x) / len(x)) for x in (found, right))
    same = sum(a == b for a, b in zip(top, likeliest, strict=True)) / len(top)
    cache = llm.engine.cache
    return (
        f"| {cache.kind} | {name} | {cache.bytes_per_token} | {perplexity:.3f} | {perplexity / before - 1:+.2%} | "
        f"{same:.1%} |"
    )


if __name__ == "__main__":
    main()
