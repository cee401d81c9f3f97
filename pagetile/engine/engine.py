"""The engine: admit -> reserve blocks -> metadata -> model forward -> sample, a step at a time."""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pagetile.cache.defragment import Moves, defragment
from pagetile.cache.scales import CacheScales, rescale, used_blocks
from pagetile.cache.sequences import SequenceTable
from pagetile.cache.store import Loaded, load_prefixes, save_prefixes
from pagetile.contracts.dtypes import QUANTISED
from pagetile.contracts.errors import ArgumentError
from pagetile.engine import attention
from pagetile.engine.detokenize import TextStream
from pagetile.engine.identity import weights_identity
from pagetile.engine.outputs import request_output
from pagetile.engine.probe import inspect_model
from pagetile.engine.request import Delta, Request, RequestOutput, Sample, SamplingParams
from pagetile.engine.rows import StepRows
from pagetile.engine.runner import Kernels, ModelRunner
from pagetile.engine.sampling import Choice, choose, require_finite, score_prompt
from pagetile.engine.scheduler import Scheduler, StepPlan
from pagetile.engine.sizing import EngineConfig, eos_ids, longest, make_cache, make_host
from pagetile.engine.stats import EngineStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Engine:
    """Runs requests over one model, a step at a time. Not safe to use from several threads at once.

    The caller's model object is used as it is and changed only inside :meth:`step`.

    Args:
        model: a Transformers decoder in evaluation mode.
        tokenizer: for text and stop strings; None works on token ids alone.

    Raises:
        UnsupportedModelError: a layer of the model cannot be driven over a paged cache; the message names it.
        ArgumentError: sizes below 1, or a memory that holds no block.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any | None = None, config: EngineConfig | None = None
    ) -> None:
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        attention.register()
        self.spec = inspect_model(model)
        self.max_length = longest(self.spec, self.config)
        self.cache = make_cache(model, self.spec, self.config, self.max_length)
        self.table = SequenceTable.for_cache(self.cache, prefix_cache=self.config.prefix_cache)
        kernels = Kernels(self.config.backend, self.config.batch_invariant)
        self.runner: ModelRunner | None = ModelRunner(model, self.spec, self.cache, kernels)
        self.host = make_host(self.table, self.cache, self.config)
        self.scheduler = Scheduler(self.table, self.config.max_batch_tokens, self.config.max_num_seqs, self.host)
        self.eos_ids = eos_ids(model)
        self._requests: dict[str, Request] = {}
        self._names = itertools.count()
        self._stats = EngineStats()

    # Requests -------------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        live: bool = True,
    ) -> str:
        """Queue a prompt.

        Args:
            prompt: text, or token ids.
            params: None is :class:`SamplingParams` as it stands: greedy, 128 tokens.
            request_id: unique among the unfinished; None makes one up.
            live: whether the deltas of :meth:`step` carry text as it comes; False decodes the text once, at the end.

        Returns:
            The request's id.

        Raises:
            ArgumentError: an empty prompt, an id in use, tokens outside the vocabulary, a request that can never fit
                (with both numbers), stop strings without a tokenizer. Nothing was queued then.
        """
        self._require_open()
        params = params or SamplingParams()
        request_id = self._new_id(request_id)
        text = prompt if isinstance(prompt, str) else None
        ids = self._prompt_ids(prompt, request_id)
        request = Request(
            request_id=request_id,
            prompt_ids=ids,
            params=params,
            max_tokens=self._max_tokens(ids, params, request_id),
            prompt=text,
            end_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids),
            live=live,
        )
        if params.stop and self.tokenizer is None:
            raise ArgumentError(f"stop is {params.stop!r}, but the engine has no tokenizer; use stop_token_ids")
        self.scheduler.require_fits(request_id, len(ids), request.max_tokens, params.n)
        sample = Sample(request, 0, self.table.add(ids, take_hits=False), self._text(request))
        request.samples.append(sample)
        self._requests[request_id] = request
        self.scheduler.add(sample)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and give its blocks back; what it has so far, or None if it is not (or no longer) there."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for sample in request.samples:
            if sample.finish_reason is None:
                self.scheduler.remove(sample)
                self._end_text(sample)
                sample.finish_reason = "abort"
        request.aborted = True
        return request_output(request)

    def request(self, request_id: str) -> Request:
        """An unfinished request as it stands. The object stays valid after its end.

        Raises:
            ArgumentError: there is no such request, or it has ended.
        """
        found = self._requests.get(request_id)
        if found is None:
            raise ArgumentError(f"there is no unfinished request {request_id!r}")
        return found

    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._requests)

    def __iter__(self) -> Iterator[Delta]:
        """Step until everything is finished, yielding what each step adds. Requests may be added meanwhile."""
        while self.has_unfinished():
            yield from self.step()

    # Between steps --------------------------------------------------------------------------------------------------

    def save_prefix_cache(self, path: str | os.PathLike) -> int:
        """Write what later prompts could hit to a file, see :func:`pagetile.cache.save_prefixes`.

        Returns:
            Blocks that were saved.
        """
        return save_prefixes(self.table, self.cache, path, identity=self._identity())

    def load_prefix_cache(self, path: str | os.PathLike) -> Loaded:
        """Read a file of :meth:`save_prefix_cache` into free blocks, see :func:`pagetile.cache.load_prefixes`.

        Raises:
            CacheFileError: the file is damaged, or is for another model, geometry, dtype or layout.
        """
        return load_prefixes(self.table, self.cache, path, identity=self._identity())

    def rescale(self, scales: CacheScales) -> None:
        """Store everything in use under other scales, in place; see :func:`pagetile.cache.rescale`.

        Raises:
            ArgumentError: the cache is not quantised, each token has its own scale, or the scales are for another
                cache. Nothing has changed then.
        """
        rescale(self.cache, scales, {name: used_blocks(pool) for name, pool in self.table.pools.items()})
        if self.host is not None:
            rescale(self.host.cache, scales, {name: used_blocks(pool) for name, pool in self.host.pools.items()})

    def defragment(self) -> Moves:
        """Move the blocks in use to the lowest ids, see :func:`pagetile.cache.defragment`."""
        return defragment(self.table, self.cache)

    def close(self) -> None:
        """Abort everything and let go of the model and the cache. Closing twice is fine."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self.runner = None

    # A step ---------------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Compute one batch: what it added to each answer. Empty when there is nothing to do.

        Raises:
            Exception: whatever the forward raised; the batch's requests are queued again, to be computed anew.
        """
        runner = self._require_open()
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        if not plan.work:
            if self._requests:
                raise RuntimeError(f"{len(self._requests)} requests are unfinished and none can run; this is a defect")
            return []
        self._stats.peak_blocks = max(self._stats.peak_blocks, sum(p.num_live for p in self.table.pools.values()))
        decode = sum(1 for sample, count in plan.work if count == 1 and sample.num_generated)
        prefill = sum(count for _, count in plan.work) - decode
        try:
            deltas = self._compute(runner, plan)
        except BaseException:
            self.scheduler.undo(plan)
            raise
        self.scheduler.settle()
        self._stats.add_step(prefill, decode, len(deltas), time.perf_counter() - began)
        return deltas

    @property
    def stats(self) -> EngineStats:
        """Figures up to now."""
        return replace(
            self._stats,
            preemptions=self.table.stats.preemptions,
            swaps=0 if self.host is None else self.host.num_swaps,
            total_blocks=sum(pool.num_blocks for pool in self.table.pools.values()),
            block_size=self.cache.block_size,
            max_length=self.max_length,
            memory=self.table.memory_figures(self.max_length),
        )

    # Inside a step --------------------------------------------------------------------------------------------------

    def _compute(self, runner: ModelRunner, plan: StepPlan) -> list[Delta]:
        """Forward, commit, sample: what a plan adds to its answers."""
        rows = StepRows.of(plan)
        logits = self._forward(runner, plan, rows)
        for sample, count in plan.work:
            self.table.commit(sample.seq, count)
        ready, logits = self._fork(rows.ready, logits)
        choices = choose(logits, ready) if ready else []
        return [self._take(sample, choice) for sample, choice in zip(ready, choices, strict=True)]

    def _forward(self, runner: ModelRunner, plan: StepPlan, rows: StepRows) -> Tensor:
        """Logits of the rows that choose a token; scores prompt tokens on the way. Nothing is committed."""
        self._move(plan)
        batch = self.table.batch([(sample.seq, count) for sample, count in plan.work], device=runner.device)
        logits = runner.forward(batch, rows.ready_rows + rows.score_rows)
        chosen = logits[: len(rows.ready)]
        require_finite(chosen, rows.ready)
        scored = iter(logits[len(rows.ready) :])
        for request, position in rows.scored:
            (request.prompt_logprobs or [])[position] = score_prompt(
                next(scored)[None], [request.prompt_ids[position]], request.params.prompt_logprobs or 0
            )[0]
        return chosen

    def _move(self, plan: StepPlan) -> None:
        """Copy the blocks that a plan moves: out before their places are written, in before the model reads them."""
        if self.host is not None:
            self.host.send(plan.sends)
        self.cache.run_copies(plan.copies)
        if self.host is not None:
            self.host.fetch(transfer for transfers in plan.fetches.values() for transfer in transfers)

    def _fork(self, ready: list[Sample], logits: Tensor) -> tuple[list[Sample], Tensor]:
        """Let the siblings of samples whose prompt is now computed come to life; each chooses from the same row."""
        samples: list[Sample] = []
        rows: list[int] = []
        for row, sample in enumerate(ready):
            request = sample.request
            family = [sample]
            if not request.forked:
                family += [
                    Sample(request, index, self.table.fork(sample.seq), self._text(request))
                    for index in range(1, request.params.n)
                ]
                request.samples = family
                self.scheduler.add_forks(family[1:], sample)
            samples += family
            rows += [row] * len(family)
        return samples, logits if len(rows) == len(ready) else logits[rows]

    def _take(self, sample: Sample, choice: Choice) -> Delta:
        """Add the chosen token to its sample, and end the sample if it ends there."""
        request, params = sample.request, sample.request.params
        if request.metrics.first_token is None:
            request.metrics.first_token = time.perf_counter()
            self._stats.prompt_tokens += len(request.prompt_ids)
            self._stats.prefix_hit_tokens += request.metrics.prefix_hit_tokens
        self.table.append(sample.seq, choice.token_id)
        if choice.logprobs is not None:
            sample.logprobs.append(choice.logprobs)
        if choice.token_id in request.end_ids:
            sample.finish_reason, sample.stop_reason = "stop", choice.token_id
        elif sample.text is not None:
            search = sample.num_generated >= params.min_tokens
            sample.stop_reason = sample.text.append(choice.token_id, search)
            sample.finish_reason = "stop" if sample.stop_reason else None
        if sample.finish_reason is None and sample.num_generated >= request.max_tokens:
            sample.finish_reason = "length"
        if sample.finish_reason is not None:
            self.scheduler.remove(sample)
            self._end_text(sample)
        output = None
        if request.finished:
            del self._requests[request.request_id]
            output = request_output(request)
        final = sample.finish_reason is not None
        text = sample.text.release(final) if sample.text is not None else ""
        return Delta(request.request_id, sample.index, [choice.token_id], text, sample.finish_reason, output)

    def _end_text(self, sample: Sample) -> None:
        """Settle the last characters; they may complete a stop string."""
        if sample.text is not None and (stop := sample.text.finish()) is not None:
            sample.finish_reason, sample.stop_reason = "stop", stop

    def _identity(self) -> str:
        identity = weights_identity(self._require_open().model)
        return f"{identity}, {self.cache.identity}" if self.cache.kind in QUANTISED else identity

    def _text(self, request: Request) -> TextStream | None:
        if self.tokenizer is None:
            return None
        params = request.params
        return TextStream(self.tokenizer, params.stop, params.skip_special_tokens, request.live)

    # Inside a request -----------------------------------------------------------------------------------------------

    def _new_id(self, asked: str | None) -> str:
        if asked is None:
            return next(name for n in self._names if (name := f"request-{n}") not in self._requests)
        if asked in self._requests:
            raise ArgumentError(f"request id {asked!r} is in use by an unfinished request; choose another")
        return asked

    def _prompt_ids(self, prompt: str | Sequence[int], request_id: str) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ArgumentError(f"request {request_id!r} is text, but the engine has no tokenizer; give token ids")
            ids = list(self.tokenizer(prompt)["input_ids"])
        else:
            ids = [operator.index(token) for token in prompt]
        if not ids:
            raise ArgumentError(f"the prompt of request {request_id!r} is empty; give at least one token")
        wrong = next((i for i, token in enumerate(ids) if not 0 <= token < self.spec.vocab_size), None)
        if wrong is not None:
            raise ArgumentError(
                f"token {wrong} of the prompt of request {request_id!r} is {ids[wrong]}; the model's vocabulary has "
                f"{self.spec.vocab_size} ids, from 0"
            )
        return ids

    def _max_tokens(self, ids: list[int], params: SamplingParams, request_id: str) -> int:
        """New tokens at most: what was asked, within the context; what the blocks hold, if nothing was asked."""
        room = self.max_length - len(ids)
        if room < 1:
            raise ArgumentError(
                f"the prompt of request {request_id!r} has {len(ids)} tokens, and prompt and answer may have "
                f"{self.max_length} together; shorten it, or raise max_length if the model allows it"
            )
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        whole = [self.table.pools[g.name].num_blocks for g in self.table.groups if g.window is None]
        fits = min((blocks * self.cache.block_size - len(ids) + 1 for blocks in whole), default=room)
        return max(1, min(room, fits))

    def _require_open(self) -> ModelRunner:
        if self.runner is None:
            raise RuntimeError("the engine is closed; make a new one")
        return self.runner
