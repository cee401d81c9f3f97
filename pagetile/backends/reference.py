"""The reference as a backend: every problem, every device, no speed.

The truth itself is :mod:`pagetile.reference`; this file only unpacks the calls.
"""

from __future__ import annotations

from dataclasses import replace

from pagetile import reference
from pagetile.backends.protocol import AttendCall, MergeCall, WriteCall
from pagetile.backends.verbs import PARTITION_KEYS, CopyCall, FusedWriteCall, GatherCall, PartitionedCall
from pagetile.contracts.dtypes import FLOATING
from pagetile.contracts.problem import CopyProblem, FusedWriteProblem, MergeProblem, Problem
from pagetile.reference.blocks import copy_levels
from pagetile.reference.checks import check_bound
from pagetile.reference.gather import gather_rows
from pagetile.reference.legacy import add_partitions, attend_partitions
from pagetile.reference.quantise import is_quantised
from pagetile.reference.rope import normalise_and_rotate


class ReferenceBackend:
    """Plain torch, one query at a time. ``num_splits`` changes nothing here: there is one split, whatever was asked."""

    name = "reference"

    def why_not(self, problem: Problem) -> list[str]:
        """Every reason why the reference cannot take the problem; it takes all that the contract allows."""
        reasons = []
        if isinstance(problem, CopyProblem):
            return reasons
        if problem.dtype not in (*FLOATING, "float64"):
            reasons.append(f"dtype {problem.dtype} is not one of {', '.join(FLOATING)}, float64")
        if isinstance(problem, MergeProblem):
            return reasons
        if not is_quantised(problem.kind):
            if problem.kind != problem.dtype:
                reasons.append(f"{problem.dtype} with a cache of {problem.kind}; both must have one dtype")
            scale = problem.write.scale if isinstance(problem, FusedWriteProblem) else problem.scale
            if scale != "none":
                reasons.append(f"a scale with a cache of {problem.kind}; only fp8 and int8 caches have scales")
        return reasons

    def write(self, call: WriteCall) -> None:
        """Store keys and values at their slots; see :func:`pagetile.reference.write`."""
        reference.write(
            call.key,
            call.value,
            call.key_cache,
            call.value_cache,
            call.slot_mapping,
            kind=call.problem.kind,
            layout=call.problem.layout,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
            fill_token_head_scales=call.problem.scale == "token_head",
        )

    def attend(self, call: AttendCall) -> None:
        """Fill ``out`` and ``lse``; see :func:`pagetile.reference.attend`."""
        if isinstance(call, PartitionedCall):
            self._attend_partitions(call)
            return
        state = reference.attend(
            call.q,
            call.k,
            call.v,
            call.query_start_loc,
            scale=call.scale,
            seq_lens=call.seq_lens,
            key_start_loc=call.key_start_loc,
            block_table=call.block_table,
            window=call.window,
            softcap=call.softcap,
            key_starts=call.key_starts,
            alibi_slopes=call.alibi_slopes,
            sinks=call.sinks,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
            kind=call.problem.kind,
            layout=call.problem.layout,
        )
        # Other backends lay out their work by these bounds; nothing has been written yet.
        check_bound("queries", call.query_start_loc.diff(), "max_q_len", call.problem.max_q_len)
        keys = call.seq_lens if call.key_start_loc is None else call.key_start_loc.diff()
        if keys is not None:
            check_bound("keys", keys, "max_k_len", call.problem.max_k_len)
        rows = len(state.out)  # the ones past query_start_loc[-1] belong to nobody and stay as they are
        call.out[:rows].copy_(state.out)
        if call.lse is not None:
            call.lse[:, :rows].copy_(state.lse)

    def merge(self, call: MergeCall) -> None:
        """Fill ``out`` and ``out_lse``; see :func:`pagetile.reference.merge`."""
        state = reference.merge(call.a, call.a_lse, call.b, call.b_lse)
        rows = len(state.out) if call.query_start_loc is None else int(call.query_start_loc[-1])
        call.out[:rows].copy_(state.out[:rows])
        if call.out_lse is not None:
            call.out_lse[:, :rows].copy_(state.lse[:, :rows])

    def _attend_partitions(self, call: PartitionedCall) -> None:
        """See :func:`pagetile.reference.legacy.attend_partitions`."""
        exp_sums, max_logits, tmp_out = call.exp_sums, call.max_logits, call.tmp_out
        assert call.block_table is not None
        assert call.seq_lens is not None
        assert exp_sums is not None
        assert max_logits is not None
        assert tmp_out is not None
        check_bound("keys", call.seq_lens, "max_k_len", call.problem.max_k_len)
        made = attend_partitions(
            call.q,
            call.k,
            call.v,
            call.block_table,
            call.seq_lens,
            scale=call.scale,
            size=PARTITION_KEYS,
            count=exp_sums.shape[2],
            alibi_slopes=call.alibi_slopes,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
            kind=call.problem.kind,
            layout=call.problem.layout,
        )
        exp_sums.copy_(made.exp_sums)
        max_logits.copy_(made.max_logits)
        tmp_out.copy_(made.tmp_out)
        call.out.copy_(add_partitions(exp_sums, max_logits, tmp_out))

    def gather(self, call: GatherCall) -> None:
        """Copy tokens out of the caches; see :func:`pagetile.reference.gather.gather_rows`."""
        gather_rows(
            call.key_cache,
            call.value_cache,
            call.slots,
            call.key,
            call.value,
            kind=call.problem.kind,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
        )

    def copy_blocks(self, call: CopyCall) -> None:
        """Copy blocks; see :func:`pagetile.reference.blocks.copy_levels`."""
        copy_levels(call.sources, call.caches, call.spares, call.levels)

    def fused_write(self, call: FusedWriteCall) -> None:
        """Normalise, rotate and store; see :func:`pagetile.reference.rope.normalise_and_rotate`."""
        how = {"interleaved": call.problem.interleaved, "eps": call.eps}
        turn = (call.positions, call.cos, call.sin)
        write = call.write
        query = normalise_and_rotate(call.query, *turn, weight=call.q_weight, **how)
        key = normalise_and_rotate(write.key, *turn, weight=call.k_weight, **how)
        self.write(replace(write, key=key))
        call.query_out.copy_(query)
        if call.key_out is not None:
            call.key_out.copy_(key)
