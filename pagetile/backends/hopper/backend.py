"""Attention for Hopper behind :class:`pagetile.backends.protocol.Backend`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from pagetile.backends.deferred import error_word, raise_deferred
from pagetile.backends.hopper import available, tuning
from pagetile.backends.protocol import AttendCall, MergeCall, WriteCall
from pagetile.contracts.errors import BackendError, BlockTableError, UnsupportedError
from pagetile.contracts.geometry import blocks_held
from pagetile.contracts.problem import AttendProblem, Problem

if TYPE_CHECKING:
    from pagetile.backends.hopper.calls import AttendLaunches

MAX_HEAD_SIZE = 256
MAX_GROUP = 64
MAX_KEYS = 1 << 30
MAX_KEPT = 1024
DTYPES = ("float16", "bfloat16")


@functools.cache
def device_facts(index: int) -> tuning.DeviceFacts:
    """The facts of one device."""
    properties = torch.cuda.get_device_properties(index)
    return tuning.DeviceFacts(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def problem_reasons(problem: Problem) -> list[str]:
    """Every reason why these kernels cannot take ``problem``, on any machine."""
    if not isinstance(problem, AttendProblem):
        return ["it only attends: writes and merges move memory, which the triton backend does at its speed already"]
    reasons = []
    if problem.layout != "paged":
        reasons.append(f"the keys are {problem.layout}; the copy engine is used on caches [NB, BS, Hkv, D] only")
    if problem.dtype not in DTYPES:
        reasons.append(f"{problem.dtype} is not one of {', '.join(DTYPES)}")
    if problem.kind != problem.dtype:
        reasons.append(f"{problem.dtype} queries over a cache of {problem.kind} are not implemented for Hopper")
    if not problem.aligned:
        reasons.append("the copy engine needs bases and strides of K and V that are multiples of 16 bytes")
    if problem.layout == "paged" and problem.block_size % 8:
        reasons.append(f"block sizes are multiples of 8, the rows of a swizzle; got {problem.block_size}")
    if max(problem.head_size, problem.head_size_v) > MAX_HEAD_SIZE:
        sizes = f"{problem.head_size}/{problem.head_size_v}"
        reasons.append(f"head sizes up to {MAX_HEAD_SIZE} fit beside their accumulators, got {sizes}")
    if problem.num_kv_heads and problem.group > MAX_GROUP:
        reasons.append(f"up to {MAX_GROUP} query heads a KV head fit in a tile, got {problem.group}")
    if problem.batch_invariant:
        reasons.append("batch_invariant takes one kernel for every query length, which is the triton backend's")
    if problem.num_splits:
        reasons.append("keys are shared out evenly over the device; there is no number of splits to ask for")
    if problem.max_k_len > MAX_KEYS:
        reasons.append(f"sequences of up to {MAX_KEYS} keys are possible, got {problem.max_k_len}")
    return reasons


class HopperBackend:
    """Gluon kernels for compute capability 9.0."""

    name = "hopper"

    def __init__(self) -> None:
        self._kept: dict[tuple, AttendLaunches] = {}

    def why_not(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot take ``problem``; looks at files and versions, compiles nothing."""
        elsewhere = [f"the tensors are on {problem.device}, and hopper takes cuda"] if problem.device != "cuda" else []
        return [*elsewhere, *available.machine_reasons(), *problem_reasons(problem)]

    def plan(self, problem: AttendProblem, device: int = 0) -> tuning.AttendPlan:
        """What a problem would launch, with reasons; printable."""
        return tuning.plan_attend(problem, device_facts(device))

    def write(self, call: WriteCall) -> NoReturn:
        """Not implemented; :meth:`why_not` says so.

        Raises:
            BackendError: always.
        """
        raise _refused(call.problem)

    def merge(self, call: MergeCall) -> NoReturn:
        """Not implemented; :meth:`why_not` says so.

        Raises:
            BackendError: always.
        """
        raise _refused(call.problem)

    def attend(self, call: AttendCall) -> None:
        """Fill ``out`` (and ``lse``): one state over the keys each query sees.

        Neither waits nor plans; a captured graph replays for any lengths up to the bounds. A query that is not
        aligned to 16 bytes is copied first. A value that is not finite reaches the rows of its sequence that share a
        tile with one that sees it.
        """
        if _is_empty(call):
            return
        launches = self._launches(call)
        index = call.q.device.index or 0
        error = error_word(call.q.device)
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                launches(call, index, error)
        else:
            launches(call, index, error)

    def workspace_bytes(self, call: AttendCall) -> int:
        """Bytes of ``workspace`` that an attention uses, by shapes and bounds alone."""
        return 0 if _is_empty(call) else 4 * self._launches(call).state_floats

    def check(self, call: WriteCall | AttendCall) -> None:
        """``validate=True``: look at every block id that is needed, with one synchronisation.

        Raises:
            BlockTableError: naming the first offender; nothing has been written.
            UnsupportedError: a CUDA graph is being captured, which cannot wait for an answer.
        """
        if isinstance(call, WriteCall):
            raise _refused(call.problem)
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "validate=True waits for the device, which cannot be done while a CUDA graph is captured; "
                "pass validate=False or validate='deferred'"
            )
        if call.block_table is not None and call.seq_lens is not None:
            _check_blocks(call.block_table, call.seq_lens, call.k.shape[0], call.k.shape[1])

    def raise_deferred(self, device: torch.device | None = None) -> None:
        """``validate="deferred"``: raise what kernels have found so far; see :mod:`pagetile.backends.deferred`."""
        raise_deferred(device)

    def forget(self) -> None:
        """Drop built launches, cached launchers, tensor maps and counters."""
        self._kept.clear()
        if not available.machine_reasons():
            from pagetile.backends.hopper import launch, scratch

            launch.forget()
            scratch.forget()

    def _launches(self, call: AttendCall) -> AttendLaunches:
        """The launches of an attention, kept under all that they depend on."""
        lse, table, slopes = call.lse, call.block_table, call.alibi_slopes
        name = (
            id(call.problem), call.q.shape, call.q.stride(), call.k.shape, call.k.stride(), call.v.stride(),
            call.out.stride(), None if lse is None else lse.stride(),
            None if table is None else (table.stride(0), table.shape[1], table.dtype), call.scale, call.window,
            call.softcap, None if slopes is None else slopes.stride(), call.sinks is None, call.key_starts is None,
            call.q.device,
        )  # fmt: skip
        found = self._kept.get(name)
        if found is None:
            from pagetile.backends.hopper.calls import AttendLaunches

            found = AttendLaunches(call, self.plan(call.problem, call.q.device.index or 0))
            while len(self._kept) >= MAX_KEPT:
                self._kept.pop(next(iter(self._kept), ()), None)
            self._kept[name] = found
        return found


def _is_empty(call: AttendCall) -> bool:
    """No sequence, no query or no head: nothing to launch."""
    problem = call.problem
    sized = problem.num_tokens and problem.max_q_len and problem.num_q_heads and problem.head_size_v
    return not sized or call.query_start_loc.shape[0] < 2


def _refused(problem: Problem) -> BackendError:
    why = problem_reasons(problem)
    return BackendError(f"backend 'hopper' cannot {problem}: {'; '.join(why)}", {"hopper": why})


def _check_blocks(table: Tensor, lens: Tensor, num_blocks: int, block_size: int) -> None:
    """Raise for the first table entry, in reading order, that a sequence needs and that names no block."""
    needed = (lens.long().clamp(min=0) + block_size - 1) // block_size
    column = torch.arange(table.shape[1] + 1, device=table.device)
    wide = torch.nn.functional.pad(table.long(), (0, 1), value=-1)  # the row's end
    bad = (column < needed[:, None]) & ((wide < 0) | (wide >= num_blocks))
    where = bad.flatten().nonzero()[:1].tolist()
    if not where:
        return
    row, at = divmod(where[0][0], table.shape[1] + 1)
    tokens = int(lens[row])
    if at == table.shape[1]:
        raise BlockTableError(
            f"seq_lens[{row}] is {tokens}, but block_table[{row}] has {at} columns of {block_size} tokens, so at most "
            f"{at * block_size}; widen block_table or shorten the sequence"
        )
    raise BlockTableError(
        f"block_table[{row}, {at}] is {int(table[row, at])}, but {blocks_held(num_blocks)}; sequence {row} has "
        f"{tokens} tokens (block size {block_size})"
    )
