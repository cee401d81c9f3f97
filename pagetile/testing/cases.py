"""Descriptions of calls: frozen, printable, seeded. :mod:`pagetile.testing.build` turns one into tensors.

A case is everything about a call but its tensors, the storages included, so a failing test prints what it takes to
run it again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pagetile.contracts.geometry import blocks_for
from pagetile.contracts.problem import AttendProblem, Granularity, MergeProblem, WriteProblem
from pagetile.contracts.visibility import normalize_window

ScaleForm = Literal["none", "float", "0d", "one", "head", "sequence_head", "token_head"]
"""How a scale is passed: None, a Python float, a 0-d tensor, ``[1]``, ``[Hkv]``, ``[B, Hkv]``, ``[NB, BS, Hkv]``."""


def granularity(form: ScaleForm) -> Granularity:
    """The granularity a problem states for a form of scale."""
    return "tensor" if form in ("float", "0d", "one") else form


@dataclass(frozen=True)
class _Printable:
    """``str`` is the fields that differ from their defaults: short, and enough to build the case again."""

    def __str__(self) -> str:
        own = vars(self)
        return "-".join(f"{f.name}={_short(own[f.name])}" for f in fields(type(self)) if own[f.name] != f.default)


@dataclass(frozen=True, kw_only=True)
class AttendCase(_Printable):
    """One attention.

    Attributes:
        seqs: ``(q_len, k_len)`` of each sequence, any of them 0.
        kind: of the cache; empty is the dtype.
        alibi: slopes for each ``head``, for each ``sequence`` and head, or none.
        key_starts: first visible key of each sequence, or empty.
        scale: how the K and V scales are passed (quantised kinds).
        cache, q, out, lse: storage families, see :mod:`pagetile.testing.layouts`.
        spare_rows: rows of q and out past ``query_start_loc[-1]``, which belong to nobody.
        tokens: what the tensors hold. ``random``: normal values. ``uniform`` (fixture Z): q = 0 and V[j] = j, so that
            the output is the mean position a query sees and the log-sum-exp the logarithm of how many. ``one_hot``
            (fixture H, k_len <= D): keys are orthogonal and each query asks for one of them.
        gain: factor on q, which makes the softmax flatter or steeper.
        poison: NaN in every slot nobody owns, garbage in the block table past each sequence.
    """

    seqs: tuple[tuple[int, int], ...] = ((1, 37),)
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    head_size_v: int = 0
    block_size: int = 16
    dtype: str = "float32"
    kind: str = ""
    layout: Literal["paged", "ragged", "xpacked"] = "paged"
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: Literal["", "head", "sequence"] = ""
    sinks: bool = False
    with_lse: bool = True
    key_starts: tuple[int, ...] = ()
    num_splits: int = 0
    batch_invariant: bool = False
    scale: ScaleForm = "none"
    cache: str = "nhd"
    q: str = "contiguous"
    out: str = "contiguous"
    lse: str = "contiguous"
    table_dtype: str = "int32"
    spare_rows: int = 0
    tokens: Literal["random", "uniform", "one_hot"] = "random"
    gain: float = 1.0
    poison: bool = True
    seed: int = 0

    @property
    def num_rows(self) -> int:
        """Rows that belong to a sequence."""
        return sum(q_len for q_len, _ in self.seqs)

    @property
    def value_size(self) -> int:
        """Dv."""
        return self.head_size_v or self.head_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache: the ones in use and three more."""
        return sum(blocks_for(k_len, self.block_size) for _, k_len in self.seqs) + 3

    def problem(self, device: str = "cpu", aligned: bool = True) -> AttendProblem:
        """The question this case asks."""
        return AttendProblem(
            device=device,
            dtype=self.dtype,
            kind=self.kind or self.dtype,
            layout=self.layout,
            num_seqs=len(self.seqs),
            num_tokens=self.num_rows + self.spare_rows,
            max_q_len=max((q for q, _ in self.seqs), default=0),
            max_k_len=max((k for _, k in self.seqs), default=0),
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.value_size,
            block_size=0 if self.layout == "ragged" else self.block_size,
            window=normalize_window(self.window, self.causal),
            softcap=self.softcap > 0,
            alibi=bool(self.alibi),
            sinks=self.sinks,
            lse=self.with_lse,
            key_starts=bool(self.key_starts),
            num_splits=self.num_splits,
            batch_invariant=self.batch_invariant,
            scale=granularity(self.scale),
            aligned=aligned,
        )


@dataclass(frozen=True, kw_only=True)
class WriteCase(_Printable):
    """One write.

    Attributes:
        num_tokens: rows of key and value.
        num_slots: entries of ``slot_mapping``; the rows past it are NaN and must not be read. -1 is ``num_tokens``.
        skip: one row in ``skip`` has a negative slot (not only -1); 0 is none.
        loud: values that saturate, infinities and NaN are among the ones to store.
        cache, source: storage families, see :mod:`pagetile.testing.layouts`.
    """

    num_tokens: int = 7
    num_slots: int = -1
    num_kv_heads: int = 2
    head_size: int = 16
    head_size_v: int = 0
    block_size: int = 16
    dtype: str = "float32"
    kind: str = ""
    layout: Literal["paged", "xpacked"] = "paged"
    scale: ScaleForm = "none"
    cache: str = "nhd"
    source: str = "contiguous"
    slot_dtype: str = "int64"
    skip: int = 0
    loud: bool = False
    seed: int = 0

    @property
    def value_size(self) -> int:
        """Dv."""
        return self.head_size_v or self.head_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache: twice as many slots as tokens, and one block."""
        return blocks_for(2 * self.num_tokens, self.block_size) + 1

    def problem(self, device: str = "cpu", aligned: bool = True, heads_contiguous: bool = True) -> WriteProblem:
        """The question this case asks."""
        return WriteProblem(
            device=device,
            dtype=self.dtype,
            kind=self.kind or self.dtype,
            layout=self.layout,
            num_tokens=self.num_tokens if self.num_slots < 0 else self.num_slots,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.value_size,
            block_size=self.block_size,
            aligned=aligned,
            heads_contiguous=heads_contiguous,
            scale=granularity(self.scale),
        )


@dataclass(frozen=True, kw_only=True)
class MergeCase(_Printable):
    """One merge; rows where the first, the second or both states are empty, or NaN under an empty log-sum-exp, cycle.

    Attributes:
        empty: how an empty state is marked, ``-inf`` or, as FlashAttention 2 does, ``+inf``; 0 has no empty rows.
        into: where the result goes: a new tensor, or one of the inputs.
        rows, lse: storage families.
        spread: standard deviation of the log-sum-exps.
    """

    num_tokens: int = 9
    num_heads: int = 3
    head_size: int = 16
    dtype: str = "float32"
    empty: float = float("-inf")
    into: Literal["new", "a", "b"] = "new"
    with_lse: bool = True
    rows: str = "contiguous"
    lse: str = "contiguous"
    spread: float = 3.0
    seed: int = 0

    def problem(self, device: str = "cpu") -> MergeProblem:
        """The question this case asks."""
        return MergeProblem(
            device=device,
            dtype=self.dtype,
            num_tokens=self.num_tokens,
            num_heads=self.num_heads,
            head_size=self.head_size,
        )


Case = AttendCase | WriteCase | MergeCase


def _short(value: object) -> str:
    return str(value).replace(" ", "").replace("(", "[").replace(")", "]").replace(",]", "]")
