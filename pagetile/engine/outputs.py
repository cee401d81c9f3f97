"""From a request's samples to what its caller gets."""

from __future__ import annotations

import time

from pagetile.engine.request import CompletionOutput, Request, RequestOutput, Sample


def request_output(request: Request) -> RequestOutput:
    """The request as it stands, finished or not; its text must be settled."""
    if request.finished and request.metrics.finished is None:
        request.metrics.finished = time.perf_counter()
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_ids,
        outputs=[_completion(sample) for sample in request.samples],
        seed=request.seed,
        metrics=request.metrics,
        prompt_logprobs=request.prompt_logprobs,
    )


def _completion(sample: Sample) -> CompletionOutput:
    reported = sample.request.params.logprobs is not None
    return CompletionOutput(
        index=sample.index,
        token_ids=sample.generated,
        text=None if sample.text is None else sample.text.text,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        logprobs=sample.logprobs if reported else None,
        cumulative_logprob=sum(token.logprob for token in sample.logprobs) if reported else None,
    )
