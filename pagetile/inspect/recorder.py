"""Recording an engine: its backend is wrapped by a tracer, its scheduler by a watcher, for the time of a ``with``.

    with Recorder(engine) as recorder:
        for delta in engine: ...
    recorder.run.save(Path("run.json"))

Before and after, the engine has its own objects; nothing of it is patched. The watcher notes what the scheduler
decided (who runs, what they hold, who lost their blocks), the tracer what the ops were asked.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from pagetile.backends.cpu.tuning import CHUNK
from pagetile.contracts.errors import ArgumentError
from pagetile.engine.engine import Engine
from pagetile.engine.request import Sample
from pagetile.engine.scheduler import Scheduler, StepPlan
from pagetile.inspect.run import (
    Run,
    RunGroup,
    RunRequest,
    RunRow,
    RunStep,
    change,
    derived_slots,
)
from pagetile.inspect.saved import RELEASED
from pagetile.inspect.tracer import Tracer, layers_of, store_of


class Watched:
    """A scheduler that says what it decides; everything else goes through to the real one."""

    def __init__(self, scheduler: Scheduler, recorder: Recorder) -> None:
        self._scheduler = scheduler
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule(self) -> StepPlan:
        """Close the step before, decide, and note the decision."""
        self._recorder.end_step()
        began = time.perf_counter()
        before = list(self._scheduler.running)
        plan = self._scheduler.schedule()
        if plan.work:
            self._recorder.begin_step(began, before, plan)
        return plan

    def remove(self, sample: Sample) -> None:
        """Note the end of a sample."""
        self._recorder.finish(sample)
        self._scheduler.remove(sample)


class Recorder:
    """Records an engine's run.

    Args:
        engine: with nothing running.
        title, model: what the run is called.

    Attributes:
        run: what was recorded; complete after the ``with``.
        tracer: in place of the engine's backend.
    """

    def __init__(self, engine: Engine, title: str = "", model: str = "") -> None:
        if engine.runner is None:
            raise ArgumentError("the engine is closed; there is nothing to record")
        self.engine = engine
        cache = engine.cache
        kernels = engine.runner.kernels
        self.tracer = Tracer(kernels.backend, layers_of(cache))
        self.run = Run(
            title=title or "A recorded run",
            model=model or type(engine.runner.model).__name__,
            backend=kernels.backend if isinstance(kernels.backend, str) else kernels.backend.name,
            block_size=cache.block_size,
            dtype=str(cache.dtype).removeprefix("torch."),
            itemsize=cache.dtype.itemsize,
            layout=cache.layout,
            num_q_heads=max(layer.num_q_heads for layer in engine.spec.layers),
            tile=CHUNK,
            groups=[_group(cache, g) for g in cache.groups],
            trace=self.tracer.trace,
        )
        for name, pool in engine.table.pools.items():
            if warm := [b for b in range(pool.num_blocks) if pool.prefix(b) is not None]:
                self.run.warm[name] = warm
        self._numbers: dict[int, int] = {}  # id of a sample -> its request in the run
        self._samples: list[Sample] = []
        self._held: dict[str, dict[int, bytes]] = {g.name: {} for g in cache.groups}
        self._rows: dict[str, dict[int, list[int]]] = {g.name: {} for g in cache.groups}
        self._loose: dict[str, set[int]] = {g.name: set() for g in cache.groups}  # touched, and nobody's now
        for name, warm in self.run.warm.items():
            self._loose[name] |= set(warm)
        self._cached: dict[str, set[int]] = {g.name: set() for g in cache.groups}
        self._late: list[tuple[str, int, Any]] = []  # events between two steps
        self._zero = time.perf_counter()
        self._open: RunStep | None = None

    def __enter__(self) -> Recorder:
        runner = self.engine.runner
        assert runner is not None
        self._own = self.engine.scheduler, runner.kernels
        self.engine.scheduler = Watched(self.engine.scheduler, self)  # type: ignore[assignment]
        runner.kernels = replace(runner.kernels, backend=self.tracer)  # type: ignore[arg-type]
        self._zero = self.run.zero = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.end_step()
        self.engine.scheduler, kernels = self._own
        if self.engine.runner is not None:
            self.engine.runner.kernels = kernels
        self._complete()

    # Called by the watcher ------------------------------------------------------------------------------------------

    def begin_step(self, began: float, before: list[Sample], plan: StepPlan) -> None:
        """Note a decision: rows, blocks, who came and who had to go."""
        self.tracer.begin_step()
        step = RunStep(began - self._zero)
        for sample in before:
            self._number(sample)  # forks that came to life in the step before say so first
        step.events, self._late = self._late, []
        running = self.engine.scheduler.running
        now, then = {id(s) for s in running}, {id(s) for s in before}
        step.events += [("preempt", self._number(s), 0) for s in before if id(s) not in now]
        step.events += [("admit", self._number(s), s.seq.num_hit) for s in running if id(s) not in then]
        for sample, count in plan.work:
            seq = sample.seq
            skip = max(0, min(count, seq.num_stored - seq.num_computed))
            step.rows.append(RunRow(self._number(sample), seq.num_computed, count, skip))
        step.copies = [(c.group, c.src, c.dst) for c in plan.copies]
        for group in self._held:
            self._note_blocks(step, group)
        self.run.steps.append(step)
        self._open = step

    def end_step(self) -> None:
        """Note when the step ended; its samples' forks are known from now on."""
        if self._open is not None:
            self._open.ended = time.perf_counter() - self._zero
            self._open = None

    def finish(self, sample: Sample) -> None:
        """Note the end of a sample."""
        number = self._number(sample)
        request = self.run.requests[number]
        request.finished = time.perf_counter() - self._zero
        request.finish_reason = sample.finish_reason or "abort"
        self._late.append(("finish", number, request.finish_reason))

    # Inside ---------------------------------------------------------------------------------------------------------

    def _number(self, sample: Sample) -> int:
        found = self._numbers.get(id(sample))
        if found is None:
            found = self._numbers[id(sample)] = len(self.run.requests)
            self._samples.append(sample)
            request = sample.request
            self.run.requests.append(
                RunRequest(
                    id=request.request_id,
                    sample=sample.index,
                    prompt_tokens=len(request.prompt_ids),
                    tokens=[],
                    arrived=max(0.0, request.metrics.arrived - self._zero),
                )
            )
            if sample.index:
                family = [s for s in request.samples if s.index == 0 and id(s) in self._numbers]
                self._late.append(("fork", found, self._numbers[id(family[0])] if family else -1))
        return found

    def _note_blocks(self, step: RunStep, group: str) -> None:
        """Rows of blocks that changed since the last step, and the blocks that became cached or are no longer."""
        held, rows, loose = self._held[group], self._rows[group], self._loose[group]
        changes = []
        seen = set()
        for sample in self.engine.scheduler.running:
            number, seq = self._number(sample), sample.seq
            seen.add(number)
            blocks = seq.blocks[group]
            raw = blocks.tobytes() + seq.released[group].to_bytes(4, "little")
            if held.get(number) != raw:
                new = [RELEASED] * seq.released[group] + blocks[seq.released[group] :].tolist()
                if (made := change(number, rows.get(number, []), new)) is not None:
                    changes.append(made)
                loose |= set(rows.get(number, ()))
                held[number], rows[number] = raw, new
        for number in [n for n in rows if n not in seen]:
            loose |= set(rows.pop(number))
            held.pop(number, None)
            changes.append(change(number, [0], []))
        if changes:
            step.blocks[group] = [c for c in changes if c is not None]
        loose.discard(RELEASED)
        pool, before = self.engine.table.pools[group], self._cached[group]
        cached = {b for b in loose if pool.ref(b) == 0 and pool.prefix(b) is not None}
        if cached != before:
            step.cached[group] = sorted(cached - before), sorted(before - cached)
            self._cached[group] = cached

    def _complete(self) -> None:
        """What need not be done while the engine runs: tokens, texts, times in the ops, slots held to the rows."""
        run, tokenizer = self.run, self.engine.tokenizer
        run.trace = self.tracer.trace
        if self._late and run.steps:
            run.steps[-1].events += self._late
        for request, sample in zip(run.requests, self._samples, strict=True):
            request.tokens = sample.seq.token_ids.tolist()
            if tokenizer is not None:
                request.texts = [tokenizer.decode([t], skip_special_tokens=False) for t in request.tokens]
        for state in run.states():
            if state.index >= len(run.trace.steps):
                break
            traced = run.trace.steps[state.index]
            for timing in traced.timings:
                ms = (timing.ended - timing.began) / 1e6
                op = traced.calls[timing.call].op
                state.step.write_ms += ms if op == "write" else 0.0
                state.step.attend_ms += ms if op == "attend" else 0.0
            for call in traced.find("write"):
                name = next((run.trace.stores[s].group for s in call.stores), None)
                if name is not None and call.slots is not None:
                    derived = derived_slots(state, name, run.block_size)
                    if call.slots.tolist() != derived.tolist():
                        state.step.slots[name] = call.slots.tolist()


def _group(cache: Any, g: Any) -> RunGroup:
    store = store_of(cache.key(g.layers[0]), cache.value(g.layers[0]))
    return RunGroup(
        name=g.name,
        layers=list(g.layers),
        window=g.window,
        num_blocks=store.num_blocks,
        num_kv_heads=store.num_kv_heads,
        head_size=store.head_size,
        head_size_v=store.head_size_v,
        k_strides=[store.k_strides.block, store.k_strides.token, store.k_strides.head],
        v_strides=[store.v_strides.block, store.v_strides.token, store.v_strides.head],
    )
