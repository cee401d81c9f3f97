"""What is left to do of an attention whose like has been run before: read the addresses, and launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall, Backend
from pagetile.contracts.errors import PagetileError
from pagetile.contracts.problem import AttendProblem
from pagetile.ops.bind_attention import AttendArgs
from pagetile.ops.checks import bump_version
from pagetile.ops.plans import PLANS, Plan

Run = Callable[..., None]
"""Takes ``q, k, v, out, lse, query_start_loc, seq_lens, block_table``."""


def settle_attend(question: Hashable, args: AttendArgs, plan: Plan[AttendProblem]) -> None:
    """Keep an attention over a paged cache that has just been run, so that the next like it is found by its guard.

    ``args`` has nothing but the tensors of :data:`Run`, and numbers that ``question`` holds too.
    """
    q, k, v, out, lens, table = args.q, args.k, args.v, args.out, args.seq_lens, args.block_table
    if lens is None or table is None or (out is not None and out.stride(2) != 1):
        return
    tensors = (q, k, v, args.query_start_loc, lens, table)
    again = _again(plan, args, _run(plan.backend, args, plan.problem))
    PLANS.settled.put(question, tensors if out is None else (*tensors, out), again)


def _again(plan: Plan[AttendProblem], args: AttendArgs, run: Run) -> Callable[..., object]:
    problem, apart, names = plan.problem, plan.apart, args.names
    words = ("out", names.q, names.k, names.v, "lse")
    aligned = not (args.k.data_ptr() | args.v.data_ptr()) & 15
    rows, heads, size = problem.num_tokens, problem.num_q_heads, problem.head_size_v
    with_lse = args.with_lse

    def again(
        q: Tensor, k: Tensor, v: Tensor, loc: Tensor, lens: Tensor, table: Tensor, given: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        k_at, v_at = k.data_ptr(), v.data_ptr()
        if (not (k_at | v_at) & 15) is not aligned:
            return None
        lse = torch.empty((heads, rows), dtype=torch.float32, device=q.device) if with_lse else None
        if given is None:
            out = q.new_empty(rows, heads, size)
        else:
            out = given
            at = (out.data_ptr(), q.data_ptr(), k_at, v_at, 0)
            if at not in apart.seen:
                apart.check(at, (out, q, k, v, None), words)
        run(q, k, v, out, lse, loc, lens, table)
        if given is not None and torch.is_grad_enabled():
            bump_version(out)
        return out if lse is None else (out, lse)

    return again


def _run(backend: Backend, args: AttendArgs, problem: AttendProblem) -> Run:
    scale, window, softcap, words = args.scale, args.window, args.softcap, args.names.words()

    def call_of(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *meta: Tensor) -> AttendCall:
        loc, lens, table = meta
        return AttendCall(problem, q, k, v, out, lse, loc, lens, None, table, scale, window, softcap)

    prepare = getattr(backend, "attend_again", None)
    if prepare is not None:
        out, lse = args.out, None
        if out is None:
            out = args.q.new_empty(problem.num_tokens, problem.num_q_heads, problem.head_size_v)
        if args.with_lse:
            lse = args.q.new_empty((problem.num_q_heads, problem.num_tokens), dtype=torch.float32)
        assert args.seq_lens is not None
        assert args.block_table is not None
        run = prepare(call_of(args.q, args.k, args.v, out, lse, args.query_start_loc, args.seq_lens, args.block_table))
        if run is not None:
            return run
    attend = backend.attend

    def run_call(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, loc: Tensor, lens: Tensor, table: Tensor
    ) -> None:
        try:
            attend(AttendCall(problem, q, k, v, out, lse, loc, lens, None, table, scale, window, softcap))
        except PagetileError as error:
            error.rename(words)
            raise

    return run_call
