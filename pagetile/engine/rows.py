"""Which rows of a packed batch need logits: those that choose a token, and prompt tokens that are scored."""

from __future__ import annotations

from dataclasses import dataclass

from pagetile.engine.request import Request, Sample
from pagetile.engine.scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of a packed batch whose logits are wanted.

    Attributes:
        ready, ready_rows: samples that choose a token in this step, and their rows.
        scored, score_rows: prompt tokens (request, position) whose logarithms were asked for, and the rows before them.
    """

    ready: list[Sample]
    ready_rows: list[int]
    scored: list[tuple[Request, int]]
    score_rows: list[int]

    @classmethod
    def of(cls, plan: StepPlan) -> StepRows:
        """The rows of a plan whose samples have not been committed yet."""
        rows = cls([], [], [], [])
        first = 0
        for sample, count in plan.work:
            if count == sample.seq.num_uncomputed:
                rows.ready.append(sample)
                rows.ready_rows.append(first + count - 1)
            request = sample.request
            if request.prompt_logprobs is not None:
                start = sample.seq.num_computed
                for offset in range(count):
                    position = start + offset + 1
                    if position < len(request.prompt_ids) and request.prompt_logprobs[position] is None:
                        rows.scored.append((request, position))
                        rows.score_rows.append(first + offset)
            first += count
        return rows
