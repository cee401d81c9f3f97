"""How far from the truth is allowed: computed for each case, never set by hand.

The truth is the reference in float64. The yardstick is what a user would get from plain torch in the same dtypes:
matmul, float32 softmax, matmul, each rounded to its dtype. A kernel may be off by twice what the yardstick is off by,
plus one rounding step of each of the two sums. Steps are taken where the sum is: a score rounds relative to
``scale * sum |q||k|`` in float32, an output relative to ``sum p |v|`` in its own dtype, row by row and head by head,
so that a loud row does not hide a quiet one and a cancelling sum is not asked for digits it cannot have. The order
of a sum is nobody's promise, so the yardstick is taken in a few orders of channels and keys and its largest error
counts: one order alone is sometimes right by luck.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pagetile import reference
from pagetile.contracts.state import State
from pagetile.contracts.visibility import visible_range
from pagetile.testing.build import BuiltAttend, BuiltMerge

ORDERS = 2
"""Orders of summation in which the yardstick is taken."""

EPS32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Yardstick:
    """Plain torch in the same dtypes, row for row.

    Attributes:
        state: its output and float32 log-sum-exp.
        magnitude: float64 ``[T, Hq, Dv]``, ``sum p |v|``: what an output is a sum of.
        sums: float64 ``[Hq, T]``, the largest ``scale * sum |q||k|`` that a row sees: what a score is a sum of.
    """

    state: State
    magnitude: Tensor
    sums: Tensor


def truth(built: BuiltAttend) -> State:
    """The answer in float64, from the tokens themselves: no block table, no cache."""
    call, case = built.call, built.case
    lengths = [len(k) for k in built.keys]
    rows = case.num_rows
    return reference.attend(
        call.q[:rows].cpu().double(),
        _joined(built.keys, case.num_kv_heads, case.head_size),
        _joined(built.values, case.num_kv_heads, case.value_size),
        call.query_start_loc.cpu(),
        key_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        layout="ragged",
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        key_starts=_cpu(call.key_starts),
        alibi_slopes=_cpu(call.alibi_slopes),
        sinks=_cpu(call.sinks),
    )


def yardstick(built: BuiltAttend, order: int = 0) -> Yardstick:
    """Unfused attention in the case's dtypes: matmul, float32 softmax, matmul.

    Args:
        order: 0 sums channels and keys as they come, any other number in a shuffle of its own.
    """
    rng = torch.Generator().manual_seed(order)
    call, case = built.call, built.case
    dtype, group = call.q.dtype, case.num_q_heads // case.num_kv_heads
    starts = call.query_start_loc.tolist()
    parts = []
    for seq, (start, end) in enumerate(pairwise(starts)):
        channels, keys = (
            torch.randperm(n, generator=rng) if order else torch.arange(n)
            for n in (case.head_size, len(built.keys[seq]))
        )
        q = call.q[start:end].cpu().transpose(0, 1)[..., channels]  # [Hq, n, D]
        k, v = (
            x[keys].to(dtype).transpose(0, 1).repeat_interleave(group, dim=0)
            for x in (built.keys[seq][..., channels], built.values[seq])
        )
        logits = (q @ k.mT).float() * call.scale  # [Hq, n, L]
        if call.softcap:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        position = torch.arange(end - start)[:, None] + k.shape[1] - (end - start)
        if call.alibi_slopes is not None:
            slopes = call.alibi_slopes.cpu()[seq] if call.alibi_slopes.dim() == 2 else call.alibi_slopes.cpu()
            logits = logits - slopes[:, None, None] * (keys - position).abs()
        logits = logits.masked_fill(~visible_mask(built, seq)[:, keys], -torch.inf)
        sink = torch.full((len(q),), -torch.inf) if call.sinks is None else call.sinks.cpu()
        logits = torch.cat([logits, sink[:, None, None].expand(-1, end - start, 1)], dim=-1)
        weights = logits.softmax(dim=-1)[..., :-1].nan_to_num(0.0)  # a row that sees nothing
        out = weights.to(dtype) @ v
        magnitude = weights.double() @ v.double().abs()
        sums = call.scale * (q.double().abs() @ k.double().abs().mT) * visible_mask(built, seq)[:, keys]
        sums = torch.cat([sums, sink[:, None, None].expand(-1, end - start, 1).abs().nan_to_num(posinf=0)], dim=-1)
        parts.append((out.transpose(0, 1), logits.logsumexp(-1), magnitude.transpose(0, 1), sums.amax(-1)))
    if not parts:
        empty = torch.zeros(0, case.num_q_heads, case.value_size)
        none = torch.zeros(case.num_q_heads, 0)
        return Yardstick(State(empty.to(dtype), none), empty.double(), none.double())
    out, lse, magnitude, sums = zip(*parts, strict=True)
    return Yardstick(State(torch.cat(out), torch.cat(lse, 1)), torch.cat(magnitude), torch.cat(sums, 1))


def visible_mask(built: BuiltAttend, seq: int) -> Tensor:
    """``[q_len, L]``: True where a query of the sequence sees a key."""
    q_len, k_len = built.case.seqs[seq]
    first = built.case.key_starts[seq] if built.case.key_starts else 0
    mask = torch.zeros(q_len, k_len, dtype=torch.bool)
    for i in range(q_len):
        lo, hi = visible_range(i, q_len, k_len, built.call.window, first)
        mask[i, lo : max(lo, hi)] = True
    return mask


def assert_attend(built: BuiltAttend, roundings: int = 1) -> None:
    """What the call left in ``out`` and ``lse`` is right: empty rows exactly, the others within tolerance.

    Args:
        roundings: how often the output was rounded to its dtype on the way; more than once when states were merged.
    """
    rows, case = built.case.num_rows, built.case
    right, plains = truth(built), [yardstick(built, order) for order in range(ORDERS)]
    out = built.call.out[:rows].cpu().double()
    if not rows:
        return
    empty = ~torch.cat([visible_mask(built, seq).any(1) for seq in range(len(case.seqs))])
    assert (out[empty] == 0).all(), f"a row that sees no key is not 0\n{case}"

    dtype = built.call.out.dtype
    magnitude = plains[0].magnitude.clamp(min=torch.finfo(dtype).tiny)
    allowed = 2 * max(((p.state.out.double() - right.out).abs() / magnitude).max() for p in plains)
    steps = torch.finfo(dtype).eps + EPS32 * plains[0].sums.T.unsqueeze(-1)
    _within("out", out, right.out, (allowed + roundings * steps) * magnitude, case)
    if built.call.lse is None:
        return
    lse = built.call.lse[:, :rows].cpu().double()
    nothing = torch.full_like(lse, -torch.inf) if built.call.sinks is None else built.call.sinks.cpu().double()[:, None]
    assert (lse == nothing)[:, empty].all(), (
        f"the log-sum-exp of a row that sees no key is neither -inf nor the sink\n{case}"
    )
    seen = ~empty
    step = (
        roundings * EPS32 * torch.stack([right.lse.abs(), plains[0].sums, torch.ones_like(right.lse)]).amax(0)[:, seen]
    )
    if seen.any():
        step += 2 * max((p.state.lse.double() - right.lse)[:, seen].abs().max() for p in plains)
    _within("lse", lse[:, seen], right.lse[:, seen], step, case)


def assert_merge(built: BuiltMerge) -> None:
    """The call's result is right: bit for bit where one side is empty, within tolerance elsewhere."""
    call = built.call
    a, a_lse, b, b_lse = (x.cpu() for x in (built.a, built.a_lse, built.b, built.b_lse))
    right = reference.merge(a.double(), a_lse.double(), b.double(), b_lse.double())
    plain = _plain_merge(a, a_lse, b, b_lse)
    a_gone, b_gone = (x.isinf() for x in (a_lse, b_lse))
    out = call.out.cpu()
    for gone, other in ((a_gone & ~b_gone, b), (b_gone & ~a_gone, a), (a_gone & b_gone, torch.zeros_like(a))):
        assert torch.equal(out[gone.T], other[gone.T]), f"the empty state is not the identity\n{built.case}"
    both = ~(a_gone | b_gone)
    if both.any():
        share = torch.stack([a_lse, b_lse]).double().softmax(0).mT.unsqueeze(-1)
        scale = (share[0] * a.double().abs() + share[1] * b.double().abs()).clamp(min=torch.finfo(a.dtype).tiny)
        error = ((plain.out.double() - right.out).abs() / scale)[both.T].max()
        allowed = (2 * error + torch.finfo(a.dtype).eps) * scale
        _within("out", out.double()[both.T], right.out[both.T], allowed[both.T], built.case)
    if call.out_lse is None:
        return
    lse = call.out_lse.cpu().double()
    exact = torch.where(b_gone, a_lse, b_lse).masked_fill(a_gone & b_gone, -torch.inf).double()
    assert torch.equal(lse[~both], exact[~both]), f"the log-sum-exp of a merge with the empty state\n{built.case}"
    error = (plain.lse.double() - right.lse)[both].abs()
    step = EPS32 * torch.stack([right.lse.abs(), torch.ones_like(right.lse)]).amax(0)[both]
    _within("lse", lse[both], right.lse[both], 2 * error.max() + step if error.numel() else step, built.case)


def _plain_merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> State:
    """The formula as it is printed, in float32."""
    lse = torch.logaddexp(a_lse, b_lse)
    shares = [(x - lse).exp().T.unsqueeze(-1) for x in (a_lse, b_lse)]
    return State((a.float() * shares[0] + b.float() * shares[1]).to(a.dtype), lse)


def _within(name: str, got: Tensor, right: Tensor, allowed: Tensor, case: object) -> None:
    error = (got - right).abs()
    bad = ~(error <= allowed)  # NaN is bad
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{name} at {list(at)} of {list(got.shape)} is {got[at].item()!r}, right is {right[at].item()!r}: "
            f"off by {error[at].item():.3g}, allowed {allowed[at].item():.3g}; {int(bad.sum())} are off in all\n{case}"
        )


def _joined(tokens: list[Tensor], heads: int, size: int) -> Tensor:
    return torch.cat(tokens).double() if tokens else torch.zeros(0, heads, size, dtype=torch.float64)


def _cpu(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.cpu()
