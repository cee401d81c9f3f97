"""The same question asked in another way: alone, at decode, in order, with other strides.

Source: the fixtures Z, H, PERM, ALONE and STRIDE that the cases from the field refer to.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall
from pagetile.contracts.visibility import visible_range
from pagetile.testing.cases import AttendCase
from pagetile.testing.layouts import CACHE_FAMILIES, ROW_FAMILIES
from pagetile.testing.materials import SENTINEL, wanted_key


def uniform_answer(case: AttendCase) -> tuple[Tensor, Tensor]:
    """Fixture Z: the mean position and ``ln(count)`` that each row sees, float64 ``[T]`` each; 0 and -inf for none."""
    means, logs = [], []
    for q_len, i, k_len, first in _rows(case):
        lo, hi = visible_range(i, q_len, k_len, case.problem().window, first)
        means.append((lo + hi - 1) / 2 if hi > lo else 0.0)
        logs.append(math.log(hi - lo) if hi > lo else -math.inf)
    return torch.tensor(means, dtype=torch.float64), torch.tensor(logs, dtype=torch.float64)


def one_hot_answer(case: AttendCase, values: list[Tensor]) -> Tensor:
    """Fixture H: the value of the key each row asks for, ``[T, Hq, Dv]``; every asked key must be visible."""
    group = case.num_q_heads // case.num_kv_heads
    rows = [values[seq][wanted_key(i, k_len)] for seq, (q_len, k_len) in enumerate(case.seqs) for i in range(q_len)]
    return torch.stack(rows).repeat_interleave(group, dim=1)


def alone(call: AttendCall, seq: int) -> AttendCall:
    """One sequence of a batch as a batch of its own, with outputs of its own."""
    start, end = (int(x) for x in call.query_start_loc[seq : seq + 2])
    return _narrow(call, seq, start, end, shorter=0)


def decode_at(call: AttendCall, seq: int, i: int) -> AttendCall:
    """Query i of a causal sequence as a decode step: the keys after its position do not exist yet."""
    start, end = (int(x) for x in call.query_start_loc[seq : seq + 2])
    return _narrow(call, seq, start + i, start + i + 1, shorter=end - start - i - 1)


def with_splits(call: AttendCall, num_splits: int) -> AttendCall:
    """The same call asked for a number of splits, with outputs of its own."""
    return with_new_outputs(replace(call, problem=replace(call.problem, num_splits=num_splits)))


def with_new_outputs(call: AttendCall) -> AttendCall:
    """The same call with sentinel-filled outputs of its own."""
    lse = None if call.lse is None else torch.full_like(call.lse, SENTINEL)
    return replace(call, out=torch.full_like(call.out, SENTINEL), lse=lse)


def stride_family(case: AttendCase) -> list[AttendCase]:
    """Fixture STRIDE: the same values in every storage of the cache, and of the query and output."""
    caches = ROW_FAMILIES if case.layout == "ragged" else CACHE_FAMILIES
    return [replace(case, cache=c) for c in caches] + [
        replace(case, q=q, out=out, lse="transposed")
        for q, out in zip(ROW_FAMILIES, reversed(ROW_FAMILIES), strict=True)
    ]


def _rows(case: AttendCase) -> list[tuple[int, int, int, int]]:
    """``(q_len, i, k_len, first key)`` of every row."""
    return [
        (q_len, i, k_len, case.key_starts[seq] if case.key_starts else 0)
        for seq, (q_len, k_len) in enumerate(case.seqs)
        for i in range(q_len)
    ]


def _narrow(call: AttendCall, seq: int, start: int, end: int, shorter: int) -> AttendCall:
    """Rows ``[start, end)`` of one sequence, its last ``shorter`` keys left out."""
    device = call.q.device
    if call.key_start_loc is None:
        assert call.seq_lens is not None
        length, first_key = int(call.seq_lens[seq]) - shorter, 0
    else:
        first_key = int(call.key_start_loc[seq])
        length = int(call.key_start_loc[seq + 1]) - first_key - shorter
    ragged = call.key_start_loc is not None
    one = slice(seq, seq + 1)
    return replace(
        call,
        problem=replace(call.problem, num_seqs=1, num_tokens=end - start, max_q_len=end - start, max_k_len=length),
        q=call.q[start:end],
        k=call.k[first_key : first_key + length] if ragged else call.k,
        v=call.v[first_key : first_key + length] if ragged else call.v,
        out=torch.full_like(call.out[start:end], SENTINEL),
        lse=None if call.lse is None else torch.full_like(call.lse[:, start:end], SENTINEL),
        query_start_loc=torch.tensor([0, end - start], dtype=torch.int32, device=device),
        seq_lens=None if ragged else torch.tensor([length], dtype=torch.int32, device=device),
        key_start_loc=torch.tensor([0, length], dtype=torch.int32, device=device) if ragged else None,
        block_table=None if call.block_table is None else call.block_table[one],
        key_starts=None if call.key_starts is None else call.key_starts[one],
        alibi_slopes=_of_sequence(call.alibi_slopes, one),
        k_scale=_of_sequence(call.k_scale, one),
        v_scale=_of_sequence(call.v_scale, one),
    )


def _of_sequence(x: Any, one: slice) -> Any:
    """The row of a per-sequence ``[B, Hq or Hkv]`` tensor; everything else as it is."""
    return x[one] if isinstance(x, Tensor) and x.dim() == 2 else x
