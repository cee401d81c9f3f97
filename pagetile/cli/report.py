"""What was done, as a line for people and as a document for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from pagetile.engine import EngineStats, RequestOutput


def closing_line(stats: EngineStats) -> str:
    """Speed, blocks, prefix hits and memory in one line."""
    memory = stats.memory
    parts = [
        f"prefill {stats.prefill_tokens:,} tokens at {stats.prefill_rate:,.0f}/s",
        f"decode {stats.decode_tokens:,} at {stats.decode_rate:,.1f}/s",
        f"blocks {stats.peak_blocks:,} of {stats.total_blocks:,} at the fullest",
        f"prefix hits {stats.prefix_hit_tokens:,} of {stats.prompt_tokens:,} prompt tokens",
        f"K and V {size(memory.paged_bytes)}, {saved(memory.saved_against_max)} contiguous buffers of "
        f"{stats.max_length:,} tokens ({size(memory.contiguous_max_bytes)}) and {saved(memory.saved_against_final)} "
        f"buffers of each final length ({size(memory.contiguous_final_bytes)})",
    ]
    if stats.preemptions:
        parts.append(f"{stats.preemptions} preempted")
    return " · ".join(parts)


def size(num_bytes: int) -> str:
    """Bytes for people.

    >>> size(512), size(46080), size(94371840)
    ('512 B', '46.1 kB', '94.4 MB')
    """
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def saved(share: float) -> str:
    """A share of memory saved, in words.

    >>> saved(0.973), saved(-0.05)
    ('97.3 % less than', '5.0 % more than')
    """
    return f"{abs(share):.1%}".replace("%", " %") + (" less than" if share >= 0 else " more than")


def document(
    source: str, prompts: Sequence[str], outputs: Sequence[RequestOutput | None], stats: EngineStats
) -> dict[str, Any]:
    """Everything as plain values."""
    return {
        "model": source,
        "results": [_result(prompt, output) for prompt, output in zip(prompts, outputs, strict=True) if output],
        "stats": figures(stats),
    }


def write_document(content: dict[str, Any], stream: TextIO) -> None:
    """One JSON document and a newline."""
    json.dump(content, stream, ensure_ascii=False, indent=2)
    stream.write("\n")


def figures(stats: EngineStats) -> dict[str, Any]:
    """The counters of an engine and what follows from them."""
    return asdict(stats) | {
        "prefill_tokens_per_second": stats.prefill_rate,
        "decode_tokens_per_second": stats.decode_rate,
        "memory_saved_against_max_length": stats.memory.saved_against_max,
        "memory_saved_against_final_lengths": stats.memory.saved_against_final,
    }


def _result(prompt: str, output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "prefix_hit_tokens": output.metrics.prefix_hit_tokens,
        "preemptions": output.metrics.preemptions,
        "seed": output.seed,
        "answers": [
            {
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for answer in output.outputs
        ],
    }
