"""Figures of an engine: tokens, seconds, blocks, hits."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagetile.cache.figures import MemoryFigures


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made.

    A step that computes both prompts and next tokens splits its time between them in proportion to their tokens.

    Attributes:
        prefill_tokens: tokens of prompts (and of preempted samples' answers) that went through the model.
        decode_tokens: rows computed one at a time to choose a next token.
        generated_tokens: tokens chosen.
        prefill_seconds, decode_seconds: of the steps, sampling and bookkeeping included.
        prompt_tokens: tokens of the prompts of requests that got their first token.
        prefix_hit_tokens: of those, found in the prefix cache.
        preemptions: samples that lost their blocks.
        swaps: of those, samples whose blocks waited in host memory; the others were computed again.
        peak_blocks, total_blocks: live blocks at the fullest step, and all blocks, summed over the groups of layers.
        memory: bytes at the fullest step, beside contiguous buffers for the same sequences.
        max_length: tokens of a contiguous buffer of the maximum length.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    peak_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    max_length: int = 0
    memory: MemoryFigures = field(default_factory=lambda: MemoryFigures(0, 0, 0, 0))

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Next tokens a second."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def add_step(self, prefill: int, decode: int, generated: int, seconds: float) -> None:
        """Account for one step."""
        share = prefill / (prefill + decode)
        self.steps += 1
        self.prefill_tokens += prefill
        self.decode_tokens += decode
        self.generated_tokens += generated
        self.prefill_seconds += seconds * share
        self.decode_seconds += seconds * (1 - share)
