"""From logits to tokens.

One number is drawn for each token, from (seed, sample, position) alone, and inverts the cumulative distribution. So a
request's tokens do not depend on its neighbours, nor on having been preempted: there is no state to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagetile.engine.request import Sample, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Choice:
    """The token chosen for one sample, and its logarithms when they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def choose(logits: Tensor, samples: Sequence[Sample]) -> list[Choice]:
    """The next token of each sample.

    Args:
        logits: ``[rows, vocabulary]``, any floating dtype; row i belongs to ``samples[i]``. Not written to.
        samples: as many as rows.
    """
    logits = logits.float()
    reported = _report_rows(logits, samples)
    logits = _forbid_ends(logits, samples)
    tokens = logits.argmax(-1).tolist()
    for row, sample in enumerate(samples):
        params = sample.request.params
        if not params.greedy:
            draw = uniform(sample.request.seed, sample.index, sample.num_generated)
            tokens[row] = draw_token(logits[row], params, draw)
    return [Choice(token, None if reported[row] is None else reported[row](token)) for row, token in enumerate(tokens)]


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its three arguments. Philox, a counter-based generator."""
    bits = np.random.Philox(key=np.array([seed, sample], np.uint64), counter=[position, 0, 0, 0])
    return float(np.random.Generator(bits).random())


def draw_token(logits: Tensor, params: SamplingParams, draw: float) -> int:
    """The token at quantile ``draw`` of the distribution that temperature, top-k and top-p leave, in this order.

    Tokens that top-k or top-p rank are laid out from the likeliest down, all others by id; ties go to the lower id.
    """
    scaled = logits / params.temperature if params.temperature != 1 else logits
    ids: Tensor | None = None
    if 0 < params.top_k < scaled.numel():
        ids = _largest(scaled, scaled.topk(params.top_k).values)
        scaled = scaled[ids]
    probabilities = torch.softmax(scaled.double(), -1)
    if params.top_p < 1:
        probabilities, order = _nucleus(probabilities, params.top_p)
        ids = order if ids is None else ids[order]
    cumulative = probabilities.cumsum(-1)
    # Strictly above the draw, so that a token of probability 0 is never taken, whatever the draw.
    at = int(torch.searchsorted(cumulative, draw * cumulative[-1].item(), right=True))
    at = min(at, int(probabilities.nonzero()[-1]))
    return int(ids[at]) if ids is not None else at


def _nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest tokens that reach ``top_p``, likeliest first, with their places. At least one.

    Sorting a vocabulary costs more than a decode step's share of it, so the likeliest few are tried first.
    """
    few = min(256, probabilities.numel())
    values = probabilities.topk(few).values
    if few < probabilities.numel() and float(values.sum()) < top_p:
        values = probabilities.sort(descending=True).values
    kept = max(1, int((values.cumsum(-1) - values < top_p).sum()))
    ids = _largest(probabilities, values[:kept])
    ranked = probabilities[ids].sort(descending=True, stable=True)
    return ranked.values, ids[ranked.indices]


def _largest(values: Tensor, sorted_largest: Tensor) -> Tensor:
    """Ids of the largest values, of which the second argument is the sorted list; ascending, but for ties at the end:
    neither topk nor sort says which of two equals it takes, here it is the lower id."""
    floor = sorted_largest[-1]
    above, equal = (values > floor).nonzero()[:, 0], (values == floor).nonzero()[:, 0]
    return torch.cat([above, equal[: sorted_largest.numel() - above.numel()]])


def score_prompt(logits: Tensor, next_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Logarithms of ``next_ids[i]`` after row i of ``logits`` ``[rows, vocabulary]``."""
    logprobs = torch.log_softmax(logits.float(), -1)
    return [_token_logprobs(row, token, top) for row, token in zip(logprobs, next_ids, strict=True)]


def _report_rows(logits: Tensor, samples: Sequence[Sample]):
    """For each row, a function of the chosen token, or None; taken before anything is forbidden or scaled."""
    reports = []
    for row, sample in enumerate(samples):
        asked = sample.request.params.logprobs
        if asked is None:
            reports.append(None)
            continue
        logprobs = torch.log_softmax(logits[row], -1)
        reports.append(lambda token, logprobs=logprobs, asked=asked: _token_logprobs(logprobs, token, asked))
    return reports


def _token_logprobs(logprobs: Tensor, token: int, top: int) -> TokenLogprobs:
    best = logprobs.topk(min(top, logprobs.numel()))
    pairs = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), pairs)


def _forbid_ends(logits: Tensor, samples: Sequence[Sample]) -> Tensor:
    early = [row for row, s in enumerate(samples) if s.num_generated < s.request.params.min_tokens]
    if early:
        logits = logits.clone()
        for row in early:
            logits[row, list(samples[row].request.end_ids)] = float("-inf")
    return logits


def require_finite(logits: Tensor, samples: Sequence[Sample]) -> None:
    """Refuse rows from which nothing can be chosen.

    Raises:
        RuntimeError: a row holds NaN or +inf, or no finite logit.
    """
    best = logits.amax(-1)  # NaN if any is NaN
    bad = (~torch.isfinite(best)).nonzero()[:, 0].tolist()
    if bad:
        sample = samples[bad[0]]
        raise RuntimeError(
            f"the logits for request {sample.request.request_id!r} after {len(sample.seq)} tokens are not finite "
            f"(largest: {float(best[bad[0]])}); check the weights and the dtype (float16 overflows where bfloat16 does "
            "not)"
        )
