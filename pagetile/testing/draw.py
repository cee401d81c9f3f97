"""Cases that a backend declares it can take: a short curated list, then seeded draws.

A backend is asked through ``why_not`` and nothing else, so what it declares is what it is held to.
Source: generating tests from declared capability is how xFormers tests its operators.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from pagetile.backends.protocol import Backend
from pagetile.contracts.dtypes import FLOATING
from pagetile.testing.cases import AttendCase, Case, MergeCase, WriteCase
from pagetile.testing.layouts import CACHE_FAMILIES, ROW_FAMILIES

QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8")
BLOCK_SIZES = (1, 2, 3, 4, 8, 16, 17, 24, 32, 48, 64, 128, 256, 544)
HEAD_SIZES = (1, 3, 8, 16, 33, 40, 64, 80, 96, 128, 192, 256, 320)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16)

_T = TypeVar("_T", AttendCase, WriteCase, MergeCase)

_RAGGED_BATCH = ((1, 37), (5, 37), (0, 9), (1, 0), (3, 3), (4, 2), (2, 130))
"""Decode, prefill with a prefix, no query, no key, pure prefill, more queries than keys, several blocks."""

ATTEND = (
    AttendCase(),
    AttendCase(seqs=_RAGGED_BATCH),
    AttendCase(seqs=_RAGGED_BATCH, dtype="bfloat16", block_size=3, table_dtype="int64"),
    AttendCase(seqs=_RAGGED_BATCH, dtype="float16", block_size=1, spare_rows=3),
    AttendCase(seqs=_RAGGED_BATCH, layout="ragged"),
    AttendCase(seqs=_RAGGED_BATCH, layout="ragged", cache="packed", q="packed", causal=False),
    AttendCase(seqs=_RAGGED_BATCH, window=(4, 0)),
    AttendCase(seqs=_RAGGED_BATCH, window=(0, 0)),
    AttendCase(seqs=_RAGGED_BATCH, window=(3, 2), causal=False),
    AttendCase(seqs=_RAGGED_BATCH, window=(-1, 3), causal=False),
    AttendCase(seqs=_RAGGED_BATCH, causal=False),
    AttendCase(seqs=_RAGGED_BATCH, softcap=1.5, gain=4.0),
    AttendCase(seqs=_RAGGED_BATCH, alibi="head"),
    AttendCase(seqs=_RAGGED_BATCH, alibi="sequence", causal=False),
    AttendCase(seqs=_RAGGED_BATCH, sinks=True),
    AttendCase(seqs=_RAGGED_BATCH, sinks=True, window=(5, 0), softcap=2.0, alibi="head", block_size=17),
    AttendCase(seqs=_RAGGED_BATCH, key_starts=(0, 3, 9, 0, 1, 1, 129)),
    AttendCase(seqs=_RAGGED_BATCH, with_lse=False),
    AttendCase(seqs=((0, 0),) * 4),
    AttendCase(seqs=((0, 50), (0, 0))),
    AttendCase(seqs=()),
    AttendCase(seqs=((1, 0),) * 3, sinks=True),
    AttendCase(seqs=((1, 1),), num_q_heads=1, num_kv_heads=1, head_size=1, block_size=1),
    AttendCase(seqs=((1, 300), (2, 70)), num_q_heads=71, num_kv_heads=1, head_size=64),
    AttendCase(seqs=((1, 60), (7, 61)), num_q_heads=15, num_kv_heads=3, head_size=80, block_size=24),
    AttendCase(seqs=((1, 40),), num_q_heads=2, num_kv_heads=1, head_size=576, head_size_v=512),
    AttendCase(seqs=((2, 40),), head_size=192, head_size_v=128, block_size=64),
    AttendCase(seqs=((3, 20),), head_size=5, head_size_v=9, cache="halves"),
    AttendCase(seqs=((1, 700), (1, 513)), num_splits=4),
    AttendCase(seqs=((1, 700), (3, 65)), num_splits=64, window=(100, 0), sinks=True),
    AttendCase(seqs=((1, 700), (6, 40)), batch_invariant=True),
    AttendCase(seqs=((40, 90), (1, 90)), dtype="bfloat16", head_size=64),
    AttendCase(seqs=((70, 70),), window=(15, 0), head_size=32),
    AttendCase(seqs=((2, 30),), gain=30.0),
    AttendCase(seqs=((1, 37), (2, 20)), tokens="one_hot", head_size=64, causal=False),
    AttendCase(seqs=_RAGGED_BATCH, tokens="uniform"),
    *(AttendCase(seqs=((1, 33), (4, 20)), kind=kind, scale="float") for kind in QUANTISED),
    *(AttendCase(seqs=((1, 33), (4, 20)), kind="fp8_e4m3", scale=form) for form in ("none", "0d", "one", "head")),
    *(AttendCase(seqs=((1, 33), (4, 20)), kind=kind, scale="token_head") for kind in ("fp8_e5m2", "int8")),
    AttendCase(seqs=((1, 33), (4, 20)), kind="int8", scale="sequence_head", dtype="bfloat16"),
    AttendCase(seqs=((1, 33), (4, 20)), layout="xpacked"),
    AttendCase(seqs=((1, 33), (4, 20)), layout="xpacked", dtype="float16", kind="fp8_e5m2", scale="one"),
)

WRITE = (
    WriteCase(),
    WriteCase(num_tokens=0),
    WriteCase(num_tokens=9, num_slots=4),
    WriteCase(num_tokens=9, num_slots=0),
    WriteCase(num_tokens=12, skip=3, slot_dtype="int32"),
    WriteCase(num_tokens=12, skip=1),
    WriteCase(num_tokens=8, head_size=192, head_size_v=128, dtype="bfloat16"),
    WriteCase(num_tokens=8, head_size=5, head_size_v=3, dtype="float16", block_size=1),
    WriteCase(num_tokens=9, loud=True, dtype="bfloat16"),
    WriteCase(num_tokens=70, num_kv_heads=8, head_size=64, block_size=3),
    *(WriteCase(source=source, cache="hnd") for source in ROW_FAMILIES),
    *(WriteCase(cache=cache, source="packed", dtype="float16") for cache in CACHE_FAMILIES),
    *(WriteCase(kind=kind, scale="head", loud=True) for kind in QUANTISED),
    *(WriteCase(kind=kind, scale="float", loud=True, dtype="bfloat16", cache="padded") for kind in QUANTISED),
    *(WriteCase(kind=kind, scale="token_head", loud=True) for kind in QUANTISED),
    *(WriteCase(kind="fp8_e5m2", scale=form, dtype="float16") for form in ("none", "0d", "one")),
    WriteCase(layout="xpacked", skip=4),
    WriteCase(layout="xpacked", kind="fp8_e4m3", scale="one", dtype="bfloat16"),
)

MERGE = (
    MergeCase(),
    MergeCase(num_tokens=0),
    MergeCase(dtype="bfloat16", empty=float("inf")),
    MergeCase(dtype="float16", empty=0.0, spread=300.0),
    MergeCase(into="a", lse="transposed"),
    MergeCase(into="b", rows="padded", head_size=33),
    MergeCase(rows="transposed", lse="transposed", dtype="bfloat16"),
    MergeCase(with_lse=False, num_heads=1, head_size=1),
    MergeCase(num_tokens=130, num_heads=9, head_size=64),
)


def attend_cases(backend: Backend, seed: int = 0, count: int = 50, device: str = "cpu") -> Iterator[AttendCase]:
    """The curated attentions the backend takes, then ``count`` drawn ones that it takes."""
    yield from _taken(backend, device, ATTEND, _attend, seed, count)


def write_cases(backend: Backend, seed: int = 0, count: int = 25, device: str = "cpu") -> Iterator[WriteCase]:
    """The curated writes the backend takes, then ``count`` drawn ones that it takes."""
    yield from _taken(backend, device, WRITE, _write, seed, count)


def merge_cases(backend: Backend, seed: int = 0, count: int = 10, device: str = "cpu") -> Iterator[MergeCase]:
    """The curated merges the backend takes, then ``count`` drawn ones that it takes."""
    yield from _taken(backend, device, MERGE, _merge, seed, count)


def takes(backend: Backend, case: Case, device: str = "cpu") -> bool:
    """Whether the backend declares that it takes a case."""
    return not backend.why_not(case.problem(device))


def _taken(
    backend: Backend, device: str, curated: tuple[_T, ...], draw: Callable[[random.Random], _T], seed: int, count: int
) -> Iterator[_T]:
    yield from (case for case in curated if takes(backend, case, device))
    rng = random.Random(seed)
    for _ in range(20 * count):  # a backend that refuses almost everything gets fewer
        if not count:
            return
        case = draw(rng)
        if takes(backend, case, device):
            count -= 1
            yield case


def _attend(rng: random.Random) -> AttendCase:
    case = _attend_shape(rng)
    kind, layout = "", rng.choices(("paged", "ragged", "xpacked"), (16, 3, 1))[0]
    if rng.random() < 0.25 and layout != "ragged":
        kind = rng.choice(QUANTISED)
    forms = ("none", "float", "0d", "one", "head", "sequence_head", "token_head")
    if layout == "xpacked":  # one pack is 16 bytes, and a per-token scale has no place in it
        pack = 16 if kind else 8
        case = replace(case, head_size=-(-case.head_size // pack) * pack, head_size_v=0)
        forms = forms[:5]
    return replace(
        case,
        kind=kind,
        layout=layout,
        scale=rng.choice(forms) if kind else "none",
        cache=rng.choice(ROW_FAMILIES if layout == "ragged" else CACHE_FAMILIES),
        seed=rng.randrange(1 << 30),
    )


def _attend_shape(rng: random.Random) -> AttendCase:
    block_size = rng.choice(BLOCK_SIZES)
    seqs = tuple((_q_len(rng), _k_len(rng, block_size)) for _ in range(rng.choice((1, 1, 2, 3, 6))))
    heads = rng.choice((1, 2, 3, 4))
    head_size = rng.choice(HEAD_SIZES)
    window = rng.choice(((-1, -1), (-1, -1), (rng.randrange(60), 0), (rng.randrange(9), rng.randrange(9)), (-1, 2)))
    return AttendCase(
        seqs=seqs,
        num_q_heads=heads * rng.choice(GROUPS),
        num_kv_heads=heads,
        head_size=head_size,
        head_size_v=rng.choice((0, 0, 0, rng.choice(HEAD_SIZES))),
        block_size=block_size,
        dtype=rng.choice(FLOATING),
        causal=rng.random() < 0.7,
        window=window,
        softcap=rng.choice((0.0, 0.0, 0.0, 1.0, 30.0)),
        alibi=rng.choice(("", "", "", "head", "sequence")),
        sinks=rng.random() < 0.25,
        with_lse=rng.random() < 0.8,
        key_starts=tuple(rng.randrange(k + 2) for _, k in seqs) if rng.random() < 0.15 else (),
        num_splits=rng.choice((0, 0, 0, 1, 2, 5, 64)),
        batch_invariant=rng.random() < 0.3,
        q=rng.choice(ROW_FAMILIES),
        out=rng.choice(ROW_FAMILIES),
        lse=rng.choice(("contiguous", "transposed")),
        table_dtype=rng.choice(("int32", "int64")),
        spare_rows=rng.choice((0, 0, 2)),
        gain=rng.choice((0.3, 1.0, 1.0, 8.0)),
    )


def _q_len(rng: random.Random) -> int:
    return rng.choice((0, 1, 1, 1, 1, 2, 4, 5, 9, 17, 33))


def _k_len(rng: random.Random, block_size: int) -> int:
    some = rng.choice((1, 2, 5, 20)) * block_size + rng.choice((-1, 0, 1))
    return rng.choice((0, 1, 2, rng.randrange(1, 160), max(0, min(some, 600))))


def _write(rng: random.Random) -> WriteCase:
    tokens = rng.choice((0, 1, 2, 7, 33, 90))
    kind = rng.choice(("", "", *QUANTISED))
    layout = rng.choices(("paged", "xpacked"), (7, 1))[0]
    size = rng.choice(HEAD_SIZES)
    forms = ("none", "float", "0d", "one", "head") + (("token_head",) if layout == "paged" else ())
    return WriteCase(
        num_tokens=tokens,
        num_slots=rng.choice((-1, -1, tokens // 2)),
        num_kv_heads=rng.choice((1, 2, 3, 8)),
        head_size=size if layout == "paged" else -(-size // 16) * 16,
        head_size_v=rng.choice((0, 0, rng.choice(HEAD_SIZES))) if layout == "paged" else 0,
        block_size=rng.choice(BLOCK_SIZES),
        dtype=rng.choice(FLOATING),
        kind=kind,
        layout=layout,
        scale=rng.choice(forms) if kind else "none",
        cache=rng.choice(CACHE_FAMILIES),
        source=rng.choice(ROW_FAMILIES),
        slot_dtype=rng.choice(("int32", "int64")),
        skip=rng.choice((0, 1, 2, 5)),
        loud=rng.random() < 0.3,
        seed=rng.randrange(1 << 30),
    )


def _merge(rng: random.Random) -> MergeCase:
    return MergeCase(
        num_tokens=rng.choice((1, 4, 33, 200)),
        num_heads=rng.choice((1, 2, 9, 32)),
        head_size=rng.choice(HEAD_SIZES),
        dtype=rng.choice(FLOATING),
        empty=rng.choice((0.0, float("-inf"), float("inf"))),
        into=rng.choice(("new", "a", "b")),
        with_lse=rng.random() < 0.8,
        rows=rng.choice(ROW_FAMILIES),
        lse=rng.choice(("contiguous", "transposed")),
        spread=rng.choice((0.1, 3.0, 100.0)),
        seed=rng.randrange(1 << 30),
    )
