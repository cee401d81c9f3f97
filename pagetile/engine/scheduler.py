"""Who computes what in a step: admit, budget, preempt. It touches no tensor and no clock.

Samples run in the order in which their requests came. A step gives every running sample the tokens it has left, within
a budget of tokens; when blocks run out, the youngest sample loses its own and waits: to be computed again (preemption
by recompute), or for its blocks to come back from the host (preemption by swap). A waiting sample is admitted when its
whole sequence fits beside one more block for everybody who runs, so that an admission does not cost somebody else's
work in the next step; and when nobody is computing its next block already: then it waits for the hit.

The oldest sample can take the blocks of all others, and alone it fits (:meth:`Scheduler.require_fits`), so every step
makes progress.

Source: continuous batching, Orca (Yu et al. 2022); chunked prefill, Sarathi (Agrawal et al. 2023); vLLM's scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagetile.cache.groups import LayerGroup
from pagetile.cache.offload import HostBlocks, Transfer
from pagetile.cache.reservation import BlockCopy
from pagetile.cache.sequences import SequenceTable
from pagetile.contracts.errors import ArgumentError, OutOfBlocksError
from pagetile.contracts.geometry import blocks_for
from pagetile.engine.request import Sample

WORTH_WAITING = 16
"""A sample waits a step for a hit of this many tokens or more: computing them costs more than waiting, and a step that
runs short of work costs little, since decoding is bound by reading the weights."""


@dataclass(slots=True)
class StepPlan:
    """What one step computes.

    Attributes:
        work: samples with the number of their new tokens, in the order of the packed rows.
        sends: device blocks to copy to the host, before anything else.
        copies: blocks to copy before anything is written.
        fetches: host blocks to copy back, before the model runs.
    """

    work: list[tuple[Sample, int]] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    fetches: dict[int, list[Transfer]] = field(default_factory=dict)
    """By the id of the sequence that comes back."""


class Scheduler:
    """The queues of an engine.

    Args:
        table: sequences and their blocks.
        max_batch_tokens: tokens that one step computes at most.
        max_num_seqs: samples that run at once at most.
        host: where preempted samples keep their blocks; None computes them again.

    Attributes:
        running: oldest first.
        waiting: next first; preempted samples go to the front.
    """

    def __init__(
        self, table: SequenceTable, max_batch_tokens: int, max_num_seqs: int, host: HostBlocks | None = None
    ) -> None:
        for name, value in (("max_batch_tokens", max_batch_tokens), ("max_num_seqs", max_num_seqs)):
            if value < 1:
                raise ArgumentError(f"{name} is {value}; it must be at least 1")
        self.table = table
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.host = host
        self.running: list[Sample] = []
        self.waiting: deque[Sample] = deque()
        self._blocked = False  # the first waiting sample did not fit, and no block has come back since

    # Queues ---------------------------------------------------------------------------------------------------------

    def require_fits(self, request_id: str, num_prompt: int, max_tokens: int, n: int) -> None:
        """Refuse a request that could never run to its end, even alone.

        Raises:
            ArgumentError: with what it needs and what there is.
        """
        if n > self.max_num_seqs:
            raise ArgumentError(
                f"request {request_id!r} asks for n={n} answers, but at most {self.max_num_seqs} sequences run at "
                "once; raise max_num_seqs or ask for fewer"
            )
        length = num_prompt + max_tokens - 1  # the last token's keys and values are never needed
        for group in self.table.groups:
            needed, have = self._held_at_most(group, length, 1), self.table.pools[group.name].num_blocks
            if needed > have:
                raise ArgumentError(
                    f"request {request_id!r} needs {needed} blocks of {self.table.block_size} ({num_prompt} prompt "
                    f"tokens and up to {max_tokens} new ones), but group {group.name!r} has {have}; give more blocks "
                    "(num_blocks), or ask for fewer tokens (max_tokens)"
                )

    def add(self, sample: Sample) -> None:
        """Queue a sample behind all others. It holds no blocks while it waits."""
        self.waiting.append(sample)

    def add_forks(self, samples: Iterable[Sample], parent: Sample) -> None:
        """Let the forks of a running sample run too, right behind it: their places were kept."""
        at = self.running.index(parent) + 1
        self.running[at:at] = list(samples)

    def remove(self, sample: Sample) -> None:
        """Take a sample out, running or waiting, and give its blocks back."""
        if sample in self.running:
            self.running.remove(sample)
        else:
            self.waiting.remove(sample)
        if self.host is not None:
            self.host.forget(sample.seq)
        self.table.free(sample.seq)
        self._blocked = False

    def preempt(self, sample: Sample, plan: StepPlan | None = None) -> None:
        """Send a running sample back to the front of the queue, without its blocks.

        With the plan of the step that needs them, what is worth it goes to the host first; without, what the blocks
        hold is not to be trusted.
        """
        self.running.remove(sample)
        if plan is None or not self._park(sample, plan):
            self.table.preempt(sample.seq)
        self.waiting.appendleft(sample)
        sample.request.metrics.preemptions += 1
        self._blocked = False

    def _park(self, sample: Sample, plan: StepPlan) -> bool:
        """Whether a sample's blocks go to the host, or are there still."""
        if self.host is None:
            return False
        if plan.fetches.pop(sample.seq.id, None) is not None:  # it came back in this very step
            self.host.cancel(sample.seq)
            return True
        if sample.seq.num_computed <= sample.seq.num_hit:
            return False  # the prefix cache has it all
        try:
            plan.sends += self.host.park(sample.seq)
        except OutOfBlocksError:
            return False
        return True

    # A step ---------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Choose the next step's work and reserve its blocks. An empty plan: nothing is running or waiting."""
        if any(group.window is not None for group in self.table.groups):
            self._blocked = False  # the last step may have moved a window on
        plan = StepPlan()
        budget = self.max_batch_tokens
        preempted = False
        decodes_left = sum(sample.seq.num_uncomputed == 1 for sample in self.running)
        position = 0
        while position < len(self.running) and budget > 0:
            sample = self.running[position]
            position += 1
            left = sample.seq.num_uncomputed
            decodes_left -= left == 1
            # A long prompt leaves room for the younger samples that only need one token.
            count = min(left, max(1, budget - decodes_left))
            before = len(self.running)
            count = self._reserve(plan, sample, count)
            preempted |= len(self.running) < before
            budget -= count
        if not preempted:
            self._admit(plan, budget)
        return plan

    def undo(self, plan: StepPlan) -> None:
        """After a step that failed: its samples, and the forks it made, start again; who knows what was written."""
        if self.host is not None:
            for sample in [*self.waiting, *self.running]:
                self.host.cancel(sample.seq)
        planned = [sample for sample, _ in plan.work]
        for sample in reversed(list(self.running)):
            if sample in planned or sample.seq.num_uncomputed == 0:
                self.preempt(sample)

    def settle(self) -> None:
        """After a step that worked: what it moved to the host and back counts."""
        if self.host is not None:
            self.host.settle(sample.seq for sample in [*self.waiting, *self.running])

    def _reserve(self, plan: StepPlan, sample: Sample, count: int) -> int:
        """Reserve up to ``count`` tokens, at the cost of younger samples; how many, 0 if it lost its own blocks."""
        while True:
            try:
                copies = self.table.reserve(sample.seq, count)
            except OutOfBlocksError:
                youngest = self.running[-1]
                if youngest is not sample:
                    self.preempt(youngest, plan)
                elif sample is self.running[0] and count > 1:
                    count = (count + 1) // 2  # alone: a shorter piece lets the window release blocks in between
                elif sample is self.running[0]:
                    raise  # require_fits promised that this cannot happen
                else:
                    self.preempt(sample, plan)
                    return 0
            else:
                plan.work.append((sample, count))
                plan.copies += copies
                return count

    def _admit(self, plan: StepPlan, budget: int) -> None:
        slots = sum(sample.slots for sample in self.running)
        for sample in list(self.waiting):
            if budget <= 0 or self._blocked or slots + sample.slots > self.max_num_seqs:
                return
            parked = self.host is not None and sample.seq in self.host
            if not parked and self._takes_hits(sample):
                if self._in_flight(plan, sample):
                    continue
                self.table.take_hits(sample.seq)
            if self.running and not self._room_for(sample):
                self.table.preempt(sample.seq)  # what it took for a hit
                self._blocked = True
                return
            if parked and not self._unpark(sample, plan):
                self._blocked = True
                return
            self.waiting.remove(sample)
            self.running.append(sample)
            count = self._reserve(plan, sample, min(budget, sample.seq.num_uncomputed))
            if count == 0:
                self._blocked = True
                return
            if sample.request.metrics.preemptions == 0:
                sample.request.metrics.prefix_hit_tokens = sample.seq.num_hit
            slots += sample.slots
            budget -= count

    def _takes_hits(self, sample: Sample) -> bool:
        """Prompt logprobs need every token of the prompt computed, the first time."""
        return self.table.prefix_cache and (sample.request.prompt_logprobs is None or sample.num_generated > 0)

    def _in_flight(self, plan: StepPlan, sample: Sample) -> bool:
        """Whether this step computes tokens that begin the sample as well: in the next step they will be a hit."""
        tokens, size = sample.seq.token_ids, self.table.block_size
        for other, count in plan.work:
            seq = other.seq
            end = blocks_for(seq.num_computed + WORTH_WAITING, size) * size
            if end <= min(seq.num_computed + count, len(tokens)) and seq.token_ids[:end] == tokens[:end]:
                return True
        return False

    def _unpark(self, sample: Sample, plan: StepPlan) -> bool:
        """Whether a sample has its blocks back."""
        assert self.host is not None
        try:
            plan.fetches[sample.seq.id] = self.host.unpark(sample.seq)
        except OutOfBlocksError:
            if self.running:
                return False
            self.host.forget(sample.seq)  # nobody else is there to wait for: computed again, in pieces that fit
        return True

    def _room_for(self, sample: Sample) -> bool:
        """Whether all its tokens fit, and everybody who runs can take one more block."""
        seq = sample.seq
        for group in self.table.groups:
            row = len(seq.blocks[group.name]) - seq.released[group.name]
            needed = self._held_at_most(group, len(seq), self.max_batch_tokens) - row
            if self.table.pools[group.name].num_available < needed + len(self.running):
                return False
        return True

    def _held_at_most(self, group: LayerGroup, length: int, step: int) -> int:
        """Blocks that a sequence of ``length`` tokens holds at once, when it is computed ``step`` tokens at a time."""
        size = self.table.block_size
        if group.window is None:
            return blocks_for(length, size)
        # From the first key that the step's first query sees to the step's last token, wherever a block begins.
        return min(blocks_for(length, size), blocks_for(group.window - 1 + step + size - 1, size))
