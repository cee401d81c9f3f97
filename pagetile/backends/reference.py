"""The reference as a backend: every problem, every device, no speed.

The truth itself is :mod:`pagetile.reference`; this file only unpacks the calls.
"""

from __future__ import annotations

from pagetile import reference
from pagetile.backends.protocol import AttendCall, MergeCall, WriteCall
from pagetile.contracts.dtypes import FLOATING
from pagetile.contracts.problem import MergeProblem, Problem
from pagetile.reference.checks import check_bound
from pagetile.reference.quantise import is_quantised


class ReferenceBackend:
    """Plain torch, one query at a time. ``num_splits`` changes nothing here: there is one split, whatever was asked."""

    name = "reference"

    def why_not(self, problem: Problem) -> list[str]:
        """Every reason why the reference cannot take the problem; it takes all that the contract allows."""
        reasons = []
        if problem.dtype not in (*FLOATING, "float64"):
            reasons.append(f"dtype {problem.dtype} is not one of {', '.join(FLOATING)}, float64")
        if isinstance(problem, MergeProblem):
            return reasons
        if not is_quantised(problem.kind):
            if problem.kind != problem.dtype:
                reasons.append(f"{problem.dtype} with a cache of {problem.kind}; both must have one dtype")
            if problem.scale != "none":
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
        call.out.copy_(state.out)
        if call.out_lse is not None:
            call.out_lse.copy_(state.lse)
