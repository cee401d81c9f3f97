"""A prefix read once for all sequences gives what plain attention over all their keys gives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conformance_kit import SUBJECTS, THREADS, attended, each_of, each_subject, threads
from torch import Tensor

from pagetile import flash_attn_varlen_func, shared_prefix_attention
from pagetile.testing import AttendCase, BuiltAttend, assert_attend, build_attend, same_bits
from pagetile.testing.machine import Subject

BLOCK = 4


@dataclass
class Shared:
    """A case whose sequences share their first tokens, and the tensors of the call that knows it."""

    built: BuiltAttend
    k: Tensor
    v: Tensor
    prefix_table: Tensor
    own_table: Tensor
    own_lens: Tensor
    prefix_len: int

    def run(self, subject: Subject, **other: object) -> Tensor | tuple[Tensor, Tensor]:
        call, case = self.built.call, self.built.case
        arguments = {
            "q": call.q,
            "k_cache": self.k,
            "v_cache": self.v,
            "cu_seqlens_q": call.query_start_loc,
            "max_seqlen_q": max(q for q, _ in case.seqs),
            "prefix_table": self.prefix_table,
            "prefix_len": self.prefix_len,
            "block_table": self.own_table,
            "seqused_k": self.own_lens,
            "max_seqlen_k": max(k for _, k in case.seqs) - self.prefix_len,
            "softmax_scale": call.scale,
            "causal": case.causal,
            "softcap": call.softcap,
            "return_softmax_lse": case.with_lse,
            "out": call.out,
            "num_splits": case.num_splits,
            "s_aux": call.sinks,
            "batch_invariant": case.batch_invariant,
            "backend": subject.backend,
        }
        with threads(1 if subject.name == "reference" else THREADS):
            got = shared_prefix_attention(**{**arguments, **other})
        if isinstance(got, tuple):
            assert call.lse is not None
            rows = case.num_rows
            call.lse[:, :rows] = got[1][:, :rows]
        return got


def share(case: AttendCase, prefix_len: int, device: str) -> Shared:
    """Give all sequences of a case the first tokens of the first, and store the prefix and the rest apart."""
    built = build_attend(case, device)
    size = case.block_size
    for parts in (built.keys, built.values):
        first = max(parts, key=len)[:prefix_len]
        parts[:] = [torch.cat([first, tokens[prefix_len:]]) for tokens in parts]
    own = [len(tokens) - prefix_len for tokens in built.keys]
    need = [-(-n // size) for n in (prefix_len, *own)]
    ids = torch.randperm(sum(need) + 2, generator=torch.Generator().manual_seed(case.seed)).to(torch.int32)
    caches = [
        torch.full((len(ids), size, case.num_kv_heads, d), torch.nan, dtype=built.call.q.dtype)
        for d in (case.head_size, case.value_size)
    ]
    prefix, *tables = ids[: sum(need)].split(need)
    for tokens, cache in zip((built.keys, built.values), caches, strict=True):
        for table, row in zip(
            (prefix, *tables), (tokens[0][:prefix_len], *(t[prefix_len:] for t in tokens)), strict=True
        ):
            slots = torch.arange(len(row))
            cache[table.long()[slots // size], slots % size] = row.to(cache.dtype)
    own_table = torch.full((len(own), max(need[1:]) + 1), 2**31 - 1, dtype=torch.int32)
    for row, table in zip(own_table, tables, strict=True):
        row[: len(table)] = table
    prefix_table = torch.cat([prefix, torch.tensor([-7], dtype=torch.int32)])
    lens = torch.tensor(own, dtype=torch.int32)
    return Shared(built, *(x.to(device) for x in (*caches, prefix_table, own_table, lens)), prefix_len)


def seqs(prefix_len: int) -> tuple[tuple[int, int], ...]:
    """Decode, a chunk, a sequence without queries, and one that has no keys of its own."""
    return (1, prefix_len + 3), (5, prefix_len + 9), (0, prefix_len + 2), (1, prefix_len), (2, prefix_len + 2)


EDGES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 21]
CASES = [
    *(AttendCase(seqs=seqs(n), block_size=BLOCK, spare_rows=2, dtype="float32", seed=n) for n in EDGES),
    AttendCase(seqs=seqs(37), block_size=BLOCK, dtype="float16", sinks=True, softcap=2.0),
    AttendCase(seqs=seqs(37), block_size=BLOCK, dtype="bfloat16", sinks=True, with_lse=False),
    AttendCase(
        seqs=seqs(70), block_size=BLOCK, num_q_heads=6, num_kv_heads=2, num_splits=3, out="transposed", spare_rows=1
    ),
    AttendCase(
        seqs=((1, 22), (3, 24)), block_size=BLOCK, head_size=24, head_size_v=40, causal=False, batch_invariant=True
    ),
]


@pytest.mark.parametrize("as_tensor", [False, True])
@each_of(*CASES)
def test_right(subject: Subject, case: AttendCase, as_tensor: bool) -> None:
    prefix_len = min(k for _, k in case.seqs)
    shared = share(case, prefix_len, subject.device)
    how = {}
    if as_tensor:
        how = {"prefix_len": torch.tensor([prefix_len], dtype=torch.int32, device=subject.device)}
    shared.run(subject, **how)
    # A state of each part is rounded, and so is their sum.
    assert_attend(shared.built, roundings=3)
    for canary in shared.built.canaries:
        assert not canary.broken(), canary.broken()


@each_subject()
def test_no_prefix_is_plain_attention_bit_for_bit(subject: Subject) -> None:
    case = AttendCase(seqs=((1, 7), (4, 9)), block_size=BLOCK)
    shared = share(case, 0, subject.device)
    out, lse = shared.run(subject)
    call = shared.built.call
    with threads(1 if subject.name == "reference" else THREADS):
        right = flash_attn_varlen_func(
            call.q, shared.k, shared.v, 4, call.query_start_loc, 9, seqused_k=shared.own_lens,
            block_table=shared.own_table, causal=True, softmax_scale=call.scale, return_softmax_lse=True,
            backend=subject.backend,
        )  # fmt: skip
    assert same_bits(out, right[0])
    assert same_bits(lse, right[1])


@each_subject()
def test_run_to_run_and_in_place_of_the_query(subject: Subject) -> None:
    case = AttendCase(seqs=seqs(9), block_size=BLOCK, seed=3)
    results = []
    for _ in range(2):
        shared = share(case, 9, subject.device)
        results.append(shared.run(subject)[0].clone())
    shared = share(case, 9, subject.device)
    results.append(shared.run(subject, out=shared.built.call.q)[0])
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@each_subject()
def test_a_row_does_not_depend_on_the_batch_when_it_must_not(subject: Subject) -> None:
    case = AttendCase(seqs=((1, 30), (3, 40), (2, 25)), block_size=BLOCK, batch_invariant=True)
    shared = share(case, 21, subject.device)
    together = shared.run(subject)[0].clone()
    call = shared.built.call
    alone = shared.run(
        subject, q=call.q[1:4], cu_seqlens_q=call.query_start_loc[:2] * 3, block_table=shared.own_table[1:2],
        seqused_k=shared.own_lens[1:2], out=None, return_softmax_lse=False,
    )  # fmt: skip
    assert same_bits(together[1:4], alone)


def test_the_kit_shares() -> None:
    """The plain attention of the built case, whose sequences share nothing, is not what is asked for."""
    case = AttendCase(seqs=((1, 9), (1, 12)), block_size=BLOCK)
    shared = share(case, 8, "cpu")
    assert torch.equal(shared.built.keys[0][:8], shared.built.keys[1][:8])
    plain = attended(next(s for s in SUBJECTS if s.device == "cpu"), case)
    with pytest.raises(AssertionError, match="out at"):
        assert_attend(BuiltAttend(case, plain.call, shared.built.keys, shared.built.values, []))
