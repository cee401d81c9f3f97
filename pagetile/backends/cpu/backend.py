"""The CPU backend: numba kernels with explicit vectors, for caches addressed by strides.

Nothing heavy is imported until the first call: :meth:`CpuBackend.why_not` answers without numba.
"""

from __future__ import annotations

import importlib.util

from pagetile.backends.cpu.warmup import Compiled, warmup
from pagetile.backends.protocol import AttendCall, MergeCall, WriteCall
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


class CpuBackend:
    """Write, attend and merge on the CPU.

    Results do not depend on the batch, on splits or on the number of threads: ``batch_invariant=True`` is what it does
    anyway. All arithmetic is float32, whatever the dtype of the cache; only products of bfloat16 by bfloat16 are taken
    in that dtype, and summed in float32, where the machine has instructions for it (see ``isa``). Quantised caches are
    widened on their way into the products: the scale of K goes into the score, that of V into the sum.
    """

    name = "cpu"

    def why_not(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot take the problem; empty when it can."""
        reasons = [
            f"the package {package} is not installed; pip install 'pagetile[cpu]'"
            for package in ("numba", "llvmlite")
            if importlib.util.find_spec(package) is None
        ]
        if problem.device != "cpu":
            reasons.append(f"the tensors are on {problem.device}, not on the CPU")
        if isinstance(problem, CopyProblem):
            return reasons
        if problem.dtype not in FLOATING:
            reasons.append(f"dtype {problem.dtype} is not one of {', '.join(FLOATING)}")
        if isinstance(problem, MergeProblem):
            return reasons
        if isinstance(problem, GatherProblem | FusedWriteProblem):
            if problem.kind not in (*QUANTISED, problem.dtype):
                reasons.append(f"a cache of {problem.kind} with rows of {problem.dtype}; both must have one dtype")
            return reasons
        if problem.layout == "xpacked":
            return reasons + _xpacked_reasons(problem)
        if problem.kind in QUANTISED:
            if isinstance(problem, AttendProblem) and problem.layout == "ragged" and problem.scale == "token_head":
                reasons.append("a scale for each token needs a paged cache: it has the cache's blocks")
            return reasons
        if problem.kind != problem.dtype:
            reasons.append(
                f"a cache of another dtype ({problem.kind}) under {problem.dtype} is not implemented on the CPU"
            )
        if problem.scale != "none":
            reasons.append(f"a scale (of granularity {problem.scale}) over a cache of {problem.kind}, which has none")
        return reasons

    def write(self, call: WriteCall) -> None:
        """Store keys and values at their slots.

        See :func:`pagetile.backends.cpu.write.write`; for quantised caches
        :func:`pagetile.backends.cpu.quantise.write_quantised`.
        """
        if call.problem.layout == "xpacked":
            from pagetile.backends.cpu.legacy_write import write_xpacked

            write_xpacked(call)
            return
        if call.problem.kind in QUANTISED:
            from pagetile.backends.cpu.quantise import write_quantised

            write_quantised(call)
            return
        from pagetile.backends.cpu.write import write

        write(call)

    def attend(self, call: AttendCall) -> None:
        """Fill ``out`` and ``lse``; see :func:`pagetile.backends.cpu.attend.attend`."""
        if call.problem.layout == "xpacked":
            from pagetile.backends.cpu.legacy import attend_xpacked

            attend_xpacked(call)
            return
        from pagetile.backends.cpu.attend import attend

        attend(call)

    def merge(self, call: MergeCall) -> None:
        """Fill ``out`` and ``out_lse``; see :func:`pagetile.backends.cpu.merge.merge`."""
        from pagetile.backends.cpu.merge import merge

        merge(call)

    def gather(self, call: GatherCall) -> None:
        """Copy tokens out of the caches; see :func:`pagetile.backends.cpu.gather.gather`."""
        from pagetile.backends.cpu.gather import gather

        gather(call)

    def copy_blocks(self, call: CopyCall) -> None:
        """Copy blocks; see :func:`pagetile.backends.cpu.blocks.copy_blocks`."""
        from pagetile.backends.cpu.blocks import copy_blocks

        copy_blocks(call)

    def fused_write(self, call: FusedWriteCall) -> None:
        """Normalise, rotate and store; see :func:`pagetile.backends.cpu.fused.fused_write`."""
        from pagetile.backends.cpu.fused import fused_write

        fused_write(call)

    def warmup(self) -> list[Compiled]:
        """Compile every kernel now; see :func:`pagetile.backends.cpu.warmup.warmup`."""
        return warmup()

    def workspace_bytes(self, call: AttendCall) -> int:
        """Bytes of ``workspace`` that an attention uses, by shapes and bounds alone."""
        if call.problem.layout == "xpacked":
            return 0
        from pagetile.backends.cpu.attend import scratch_bytes

        return scratch_bytes(call) if call.q.shape[1] else 0

    def plan(self, call: WriteCall | AttendCall):
        """The printable plan of a call: how it will be cut, and why."""
        if call.problem.layout == "xpacked":
            from pagetile.backends.cpu import legacy, legacy_write

            return legacy_write.plan_for(call) if isinstance(call, WriteCall) else legacy.plan_for(call)
        if isinstance(call, WriteCall) and call.problem.kind in QUANTISED:
            from pagetile.backends.cpu.quantise import plan_for

            return plan_for(call)
        if isinstance(call, WriteCall):
            from pagetile.backends.cpu.write import plan_for

            return plan_for(call)
        from pagetile.backends.cpu.attend import plan_for

        return plan_for(call)


def _xpacked_reasons(problem: WriteProblem | AttendProblem) -> list[str]:
    """Why an x-packed cache cannot be taken."""
    reasons = []
    if problem.kind not in (*QUANTISED, problem.dtype):
        reasons.append(f"an x-packed cache of {problem.kind} under {problem.dtype} is not implemented on the CPU")
    if problem.scale == "token_head":
        reasons.append("scales of tokens and heads of an x-packed cache are not implemented on the CPU")
    return reasons
