"""The three verbs of :class:`pagetile.backends.protocol.Backend` in plain Triton, and the checks of device values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagetile.backends.deferred import error_word, raise_deferred
from pagetile.backends.protocol import AttendCall, MergeCall, WriteCall
from pagetile.backends.triton import available, tuning
from pagetile.backends.verbs import CopyCall, FusedWriteCall, GatherCall
from pagetile.contracts.dtypes import FLOATING, QUANTISED
from pagetile.contracts.problem import (
    AttendProblem,
    CopyProblem,
    FusedWriteProblem,
    GatherProblem,
    MergeProblem,
    Problem,
    WriteProblem,
)

if TYPE_CHECKING:
    from pagetile.backends.triton.calls import AttendLaunches, Kept
    from pagetile.backends.triton.legacy_calls import PackedPlan

MAX_HEAD_SIZE = 576


@functools.cache
def device_facts(index: int) -> tuning.DeviceFacts:
    """The facts of one device; of an H200 where there is no GPU (interpreter)."""
    if not torch.cuda.is_available():
        return tuning.DeviceFacts(fp8=False)
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return tuning.DeviceFacts(
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", 101376),
        capability,
        fp8=torch.version.hip is None and capability >= (8, 9) and not available.interpreted(),
    )


def _is_empty(call: AttendCall) -> bool:
    """No sequence, no query or no head: nothing to launch."""
    problem = call.problem
    sized = problem.num_tokens and problem.max_q_len and problem.num_q_heads
    return not sized or call.query_start_loc.shape[0] < 2


def _other_reasons(problem: Problem, write: WriteProblem | AttendProblem | GatherProblem) -> list[str]:
    """Why a gather, a fused write or an x-packed cache cannot be taken."""
    reasons = []
    most = 256 if isinstance(problem, AttendProblem) else MAX_HEAD_SIZE
    if write.kind not in (*QUANTISED, write.dtype):
        reasons.append(f"a cache of {write.kind} with rows of {write.dtype}: both must have one dtype")
    if isinstance(problem, AttendProblem) and problem.scale == "token_head":
        reasons.append("an x-packed cache has no scales of tokens and heads in Triton; pass one a tensor or head")
    if max(write.head_size, write.head_size_v) > most:
        reasons.append(f"head sizes up to {most} are possible, got {write.head_size}/{write.head_size_v}")
    return reasons


class TritonBackend:
    """Portable GPU kernels. Runs on CUDA tensors, or on CPU tensors under ``TRITON_INTERPRET=1``."""

    name = "triton"

    def __init__(self) -> None:
        self._kept: Kept | None = None

    def why_not(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot take ``problem``; looks at files and versions, compiles nothing."""
        reasons = list(available.machine_reasons())
        if reasons and "triton cannot be imported" in reasons[0]:
            return reasons
        reasons += available.device_reasons(problem.device)
        if isinstance(problem, CopyProblem):
            return reasons
        if problem.dtype not in FLOATING:
            reasons.append(f"{problem.dtype} is not one of {', '.join(FLOATING)}")
        elif not isinstance(problem, WriteProblem) and problem.dtype == "bfloat16" and problem.device == "cpu":
            reasons.append("Triton's interpreter computes with bfloat16 as if it were integers")
        if isinstance(problem, MergeProblem):
            return reasons
        write = problem.write if isinstance(problem, FusedWriteProblem) else problem
        if isinstance(problem, GatherProblem | FusedWriteProblem) or write.layout == "xpacked":
            return reasons + _other_reasons(problem, write)
        if problem.kind in QUANTISED:
            if isinstance(problem, AttendProblem) and problem.layout == "ragged" and problem.scale == "token_head":
                reasons.append("ragged keys have no scales of their own; pass a paged cache")
        elif problem.kind != problem.dtype:
            reasons.append(f"{problem.dtype} queries or tokens over a cache of {problem.kind}: the two must agree")
        if problem.scale != "none" and problem.kind in FLOATING and isinstance(problem, AttendProblem):
            reasons.append(f"{problem.scale} scales over a cache of {problem.kind} are not implemented for Triton")
        if max(problem.head_size, problem.head_size_v) > MAX_HEAD_SIZE:
            reasons.append(
                f"head sizes up to {MAX_HEAD_SIZE} are possible, got {problem.head_size}/{problem.head_size_v}"
            )
        return reasons

    def plan(
        self, problem: Problem, device: int = 0
    ) -> tuning.AttendPlan | tuning.WritePlan | PackedPlan | tuple[int, int, int]:
        """What a problem would launch, with reasons; printable."""
        if isinstance(problem, AttendProblem | WriteProblem) and problem.layout == "xpacked":
            from pagetile.backends.triton.legacy_calls import plan_packed
            from pagetile.backends.triton.legacy_write import plan_packed_write

            facts = device_facts(device)
            if isinstance(problem, WriteProblem):
                return plan_packed_write(problem, facts.fp8)
            return plan_packed(problem, facts, states=False)
        if isinstance(problem, AttendProblem):
            return tuning.plan_attend(problem, device_facts(device))
        if isinstance(problem, WriteProblem):
            return tuning.plan_write(problem, device_facts(device))
        return tuning.plan_merge(problem)

    def write(self, call: WriteCall) -> None:
        """Store keys and values at their slots; negative slots are skipped, slots past the cache too (and reported)."""
        slots = call.slot_mapping
        if not slots.shape[0] or not call.key.shape[1]:
            return
        if call.problem.layout == "xpacked":
            from pagetile.backends.triton.legacy_write import write_packed_launch, write_packed_tensors

            device, error = call.key.device, error_word(call.key.device)
            launch = write_packed_launch(call, device_facts(device.index or 0).fp8)
            self._on(device, launch, *write_packed_tensors(call, error))
            return
        key, value, key_cache, value_cache = call.key, call.value, call.key_cache, call.value_cache
        name = (
            id(call.problem), key.stride(), value.stride(), key_cache.stride(), value_cache.stride(), slots.shape,
            slots.dtype, key_cache.shape, key.device,
            None if call.k_scale is call.v_scale is None else self._scale_key(call),
        )  # fmt: skip
        kept = self._kept or self._prepare()
        found = kept.get(name)
        if found is None:
            from pagetile.backends.triton.calls import write_launch

            plan = tuning.plan_write(call.problem, device_facts(key.device.index or 0))
            found = kept.put(name, (call.problem, write_launch(call, plan)))
        if slots.stride(0) != 1:
            slots = slots.contiguous()
        error = error_word(key.device)
        if call.problem.kind in QUANTISED:
            from pagetile.backends.triton.scales import as_bytes

            caches = (as_bytes(key_cache), as_bytes(value_cache))
            scales = (scale if isinstance(scale, Tensor) else error for scale in (call.k_scale, call.v_scale))
            self._on(key.device, found[1], key, value, *caches, slots, *scales, error)
        else:
            self._on(key.device, found[1], key, value, key_cache, value_cache, slots, error)

    def write_again(self, call: WriteCall) -> Callable[..., None] | None:
        """What a write like this one launches, as a function of its five tensors."""
        slots = call.slot_mapping
        quantised = call.problem.kind not in FLOATING
        if (
            call.problem.layout == "xpacked"
            or quantised
            or not slots.shape[0]
            or not call.key.shape[1]
            or slots.stride(0) != 1
        ):
            return None
        from pagetile.backends.triton.calls import write_launch

        launch = write_launch(call, tuning.plan_write(call.problem))
        index, error = call.key.device.index or 0, error_word(call.key.device)
        error_at = error.data_ptr()

        def run(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
            at = (
                key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(),
                error_at,
            )  # fmt: skip
            if not launch.direct(index, at):
                launch.public(index, (key, value, key_cache, value_cache, slots, error))

        return self._on_device(call.key.device, run)

    def attend(self, call: AttendCall) -> None:
        """Fill ``out`` (and ``lse``): one state over the keys each query sees."""
        if _is_empty(call):
            return
        if call.problem.layout == "xpacked":
            from pagetile.backends.triton.legacy_calls import attend_packed

            device = call.q.device
            facts = device_facts(device.index or 0)
            attend_packed(call, facts, facts.fp8, error_word(device), self._on)
            return
        q = call.q
        launches = self._launches(call)
        index = q.device.index or 0
        error = error_word(q.device)
        if q.is_cuda and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                launches(call, index, error)
        else:
            launches(call, index, error)

    def attend_again(self, call: AttendCall) -> Callable[..., None] | None:
        """What an attention over a paged cache like this one launches, as a function of its tensors."""
        if _is_empty(call) or call.problem.kind not in FLOATING or call.problem.layout == "xpacked":
            return None
        index, error = call.q.device.index or 0, error_word(call.q.device)
        return self._on_device(call.q.device, functools.partial(self._launches(call).run, index, error))

    def workspace_bytes(self, call: AttendCall) -> int:
        """Bytes of ``workspace`` that an attention uses, by shapes and bounds alone."""
        if _is_empty(call) or call.problem.layout == "xpacked":
            return 0
        partials = self._launches(call).partials
        return 4 * partials[2] if partials else 0

    def _launches(self, call: AttendCall) -> AttendLaunches:
        """The launches of an attention, kept under all that they depend on."""
        problem, q, lse = call.problem, call.q, call.lse
        table, slopes = call.block_table, call.alibi_slopes
        name = (
            id(problem), q.stride(), call.k.stride(), call.v.stride(), call.out.stride(),
            None if lse is None else lse.stride(), call.k.shape[0],
            None if table is None else (table.stride(0), table.shape[1], table.dtype), call.scale, call.window,
            call.softcap, None if slopes is None else slopes.stride(), call.sinks is None, call.key_starts is None,
            (call.k.data_ptr() | call.v.data_ptr()) & 15 == 0, q.device,
            None if call.k_scale is call.v_scale is None else self._scale_key(call),
        )  # fmt: skip
        kept = self._kept or self._prepare()
        launches = kept.get(name)
        if launches is None:
            from pagetile.backends.triton.calls import AttendLaunches

            plan = tuning.plan_attend(problem, device_facts(q.device.index or 0))
            launches = kept.put(name, AttendLaunches(call, plan))
        return launches

    @staticmethod
    def _scale_key(call: WriteCall | AttendCall) -> tuple[Hashable, Hashable]:
        """What a launch depends on in the scales of a call."""
        from pagetile.backends.triton.scales import scale_key

        return scale_key(call.k_scale), scale_key(call.v_scale)

    def merge(self, call: MergeCall) -> None:
        """Fill ``out`` (and ``out_lse``): the sum of two states."""
        if not call.out.shape[0] or not call.out.shape[1]:
            return
        out_lse, loc = call.out_lse, call.query_start_loc
        name = (
            id(call.problem), None if loc is None else loc.shape[0], call.out.stride(), call.a.stride(),
            call.b.stride(), call.out.shape,
            None if out_lse is None else out_lse.stride(), call.a_lse.stride(), call.b_lse.stride(),
            call.a.dtype, call.b.dtype, call.out.dtype, call.out.device,
        )  # fmt: skip
        kept = self._kept or self._prepare()
        found = kept.get(name)
        if found is None:
            from pagetile.backends.triton.calls import merge_launch

            found = kept.put(name, (call.problem, merge_launch(call)))
        lse = call.a_lse if out_lse is None else out_lse
        ends = call.a_lse if loc is None else loc
        self._on(call.out.device, found[1], call.out, lse, call.a, call.a_lse, call.b, call.b_lse, ends)

    def slots_on_device(
        self, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, block_size: int, num_tokens: int,
        num_blocks: int = 2**31 - 1, positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """One kernel for :func:`pagetile.contracts.metadata.slots_on_device`, which has the arguments and the rules.

        Args:
            num_blocks: ids from here on become -1 too.
            positions: int32 or int64 ``[num_tokens]``, filled with each row's position (0 in padded rows), or None.
        """
        from pagetile.backends.triton.checks import slots_launch

        slots = torch.empty(num_tokens, dtype=torch.int64, device=block_table.device)
        if num_tokens:
            launch = slots_launch(block_table, block_size, num_tokens, num_blocks, positions is not None)
            where = slots if positions is None else positions
            self._on(slots.device, launch, slots, where, query_start_loc, seq_lens, block_table)
        return slots

    def gather(self, call: GatherCall) -> None:
        """Copy tokens out of the caches; see :mod:`pagetile.backends.triton.gather`."""
        if not call.slots.shape[0] or not call.key.shape[1]:
            return
        from pagetile.backends.triton.gather import gather_launch, gather_tensors

        device = call.key.device
        launch = gather_launch(call, device_facts(device.index or 0).fp8)
        self._on(device, launch, *gather_tensors(call, error_word(device)))

    def copy_blocks(self, call: CopyCall) -> None:
        """Copy blocks; see :mod:`pagetile.backends.triton.blocks`."""
        from pagetile.backends.triton.blocks import copy_blocks

        copy_blocks(call, self._on)

    def fused_write(self, call: FusedWriteCall) -> None:
        """Normalise, rotate and store; see :mod:`pagetile.backends.triton.fused`."""
        if not call.query.shape[0]:
            return
        from pagetile.backends.triton.fused import fused_launch, fused_tensors

        device = call.query.device
        launch = fused_launch(call, device_facts(device.index or 0).fp8)
        self._on(device, launch, *fused_tensors(call, error_word(device)))

    def check(self, call: WriteCall | AttendCall) -> None:
        """``validate=True``: look at every slot or needed block id with a kernel and one synchronisation.

        Raises:
            SlotError, BlockTableError: naming the first offender; nothing has been written.
            UnsupportedError: a CUDA graph is being captured, which cannot wait for an answer.
        """
        from pagetile.backends.triton.checks import check_call

        check_call(call, self._on)

    def raise_deferred(self, device: torch.device | None = None) -> None:
        """``validate="deferred"``: raise what kernels have found so far; see :mod:`.deferred`."""
        raise_deferred(device)

    def forget(self) -> None:
        """Drop built launches and cached launchers."""
        from pagetile.backends.triton import launch

        (self._kept or self._prepare()).clear()
        launch.forget()

    def _prepare(self) -> Kept:
        from pagetile.backends.triton.calls import Kept

        self._kept = self._kept or Kept()
        return self._kept

    @staticmethod
    def _on_device(device: torch.device, run: Callable[..., None]) -> Callable[..., None]:
        """``run`` with the tensors' device as the current one, and the current one restored."""
        if device.type != "cuda":
            return run
        index, current = device.index or 0, torch._C._cuda_getDevice

        def here(*tensors: Tensor | None) -> None:
            if current() == index:
                run(*tensors)
            else:
                with torch.cuda.device(index):
                    run(*tensors)

        return here

    @staticmethod
    def _on(device: torch.device, launch, *tensors: Tensor) -> None:
        """Launch on the tensors' device; the current device is the same afterwards."""
        index = device.index or 0
        if device.type == "cuda" and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                launch(index, *tensors)
        else:
            launch(index, *tensors)
