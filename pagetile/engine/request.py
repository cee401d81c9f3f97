"""What is asked of the engine and what it answers: plain records, no tensors.

A :class:`Request` is one prompt. It becomes ``params.n`` :class:`Sample` s that share the prompt's blocks; a sample is
what the scheduler runs, preempts and finishes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Literal

from pagetile.cache.sequences import Sequence
from pagetile.contracts.errors import ArgumentError
from pagetile.engine.detokenize import TextStream

FinishReason = Literal["stop", "length", "abort"]
"""``stop``: an end token, a stop id or a stop string. ``length``: ``max_tokens`` or the model's longest context."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the answer to a prompt is chosen and where it ends.

    Attributes:
        max_tokens: new tokens at most; None is as many as the model's context holds.
        min_tokens: end tokens and stop ids cannot be chosen, and stop strings are not looked for, before this many.
        temperature: 0 is greedy: the largest logit.
        top_k: only the k largest logits; 0 is all.
        top_p: only the smallest set of tokens whose probability reaches p, after temperature and top-k.
        seed: the draw of token i of sample s depends on (seed, s, i) alone: not on the batch, nor on preemption.
            None takes a fresh seed, which the output reports.
        n: answers to the same prompt; they share the prompt's blocks.
        stop: strings that end the answer, and are not part of it; they may span several tokens.
        stop_token_ids: ids that end the answer, as the model's own end tokens do; the id is part of ``token_ids``.
        ignore_eos: the model's own end tokens do not end the answer.
        logprobs: None, or how many of the likeliest tokens to report beside the chosen one (0: the chosen one only).
            Natural logarithms of the model's own distribution, before temperature, top-k and top-p.
        prompt_logprobs: the same for each prompt token but the first.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: str | List[str] = ()
    stop_token_ids: List[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        limits = [
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature < float("inf"), "finite and at least 0 (0 is greedy)"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is all)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "from 0 to 2**64 - 1, or None"),
            ("n", self.n >= 1, "at least 1"),
            ("stop", all(isinstance(s, str) and s for s in stop), "a string, or strings, none of them empty"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0, or None"),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= 0, "at least 0, or None"),
        ]
        for name, fits, allowed in limits:
            if not fits:
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ArgumentError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logarithms at one position: of the token that stands there, and of the likeliest ones.

    Attributes:
        token_id, logprob: the token that was chosen (or stands in the prompt), natural logarithm.
        top: ``{token id: logprob}``, likeliest first; as many as were asked for.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: 0 to n - 1.
        token_ids: new tokens, an end token included when it was the reason to stop.
        text: None when the engine has no tokenizer.
        finish_reason: None while it runs.
        stop_reason: the stop string or the token id that ended it.
        cumulative_logprob: sum over the chosen tokens, None unless ``logprobs`` was asked for.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Where a request's time and tokens went. Times are ``time.perf_counter`` seconds.

    Attributes:
        prefix_hit_tokens: prompt tokens found in the prefix cache when the request was first admitted.
        preemptions: how often a sample of it lost its blocks and was computed again.
    """

    arrived: float
    first_token: float | None = None
    finished: float | None = None
    prefix_hit_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A finished (or aborted) request: its prompt and ``n`` answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one answer; the unit of streaming.

    Attributes:
        text: text that became certain in this step. It may lag behind the tokens, while a character is incomplete
            or a stop string may be beginning; the texts of all deltas of an answer add up to its ``text``.
        finish_reason: set in the last delta of an answer.
        output: the whole request, in the last delta of its last answer.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None


@dataclass(eq=False, slots=True)
class Request:
    """A prompt on its way through the engine.

    Attributes:
        max_tokens: new tokens at most, a number in any case.
        seed: the caller's, or one drawn for this request.
        end_ids: ids that end an answer: stop ids, and the model's own end tokens unless they are ignored.
        live: text is decoded as tokens come, because somebody reads along or stop strings are looked for.
        aborted: ended by its caller.
        samples: those that exist: the first, and after its prompt is computed all n.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    prompt: str | None = None
    end_ids: frozenset[int] = frozenset()
    live: bool = True
    aborted: bool = False
    seed: int = 0
    samples: list[Sample] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.perf_counter()))

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None for _ in self.prompt_ids]

    @property
    def forked(self) -> bool:
        """Whether all samples exist."""
        return len(self.samples) == self.params.n

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return self.aborted or (self.forked and all(sample.finish_reason for sample in self.samples))


@dataclass(eq=False, slots=True)
class Sample:
    """One answer in the making: what the scheduler runs.

    Attributes:
        seq: its tokens and blocks; after the end, its tokens.
        text: grows with the tokens; None without a tokenizer.
    """

    request: Request
    index: int
    seq: Sequence
    text: TextStream | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_generated(self) -> int:
        """Tokens chosen so far."""
        return len(self.seq) - len(self.request.prompt_ids)

    @property
    def generated(self) -> list[int]:
        """The tokens chosen so far."""
        return list(self.seq.token_ids[len(self.request.prompt_ids) :])

    @property
    def slots(self) -> int:
        """Places it takes among the running sequences: its unborn siblings' too."""
        return 1 if self.request.forked else self.request.params.n
