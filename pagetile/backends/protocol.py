"""What a backend is: three verbs, and a list of reasons why it cannot take a problem.

``ops`` validates and normalises; a backend receives calls whose shapes, dtypes, devices and strides already agree
(the rules are in the docstrings of :mod:`pagetile.ops`), and on the CPU it checks the values (slots, block ids,
lengths) itself, before it writes a byte. Calls are plain records: a backend may be driven without ``ops`` in a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pagetile.contracts.problem import AttendProblem, MergeProblem, Problem, WriteProblem

Scale = Tensor | float | None
"""None (1.0), a float, a 0-d or ``[1]`` tensor, ``[Hkv]``, ``[B, Hkv]`` or ``[NB, BS, Hkv]``, float32."""


@dataclass(slots=True, eq=False)
class WriteCall:
    """Tensors of one write. ``key`` ``[T, Hkv, D]``, ``value`` ``[T, Hkv, Dv]``, caches ``[NB, BS, Hkv, D or Dv]``,
    ``slot_mapping`` int32 or int64 ``[T']`` with ``T' <= T``; any strides, last dimension of the first four contiguous.
    """

    problem: WriteProblem
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    k_scale: Scale = None
    v_scale: Scale = None


@dataclass(slots=True, eq=False)
class AttendCall:
    """Tensors of one attention.

    Attributes:
        q: ``[T, Hq, D]``, last dimension contiguous.
        k, v: paged ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``, or ragged ``[total_k, Hkv, D]`` and ``[.., Dv]``;
            any strides, each its own, last dimension contiguous.
        out: ``[T, Hq, Dv]``, last dimension contiguous; rows past ``query_start_loc[-1]`` stay untouched.
        lse: float32 ``[Hq, T]`` of any strides, or None.
        query_start_loc: int32 ``[B + 1]``, contiguous: the rows of sequence b are ``[loc[b], loc[b + 1])``.
        seq_lens: int32 ``[B]``, contiguous, keys of each sequence (paged); None when ragged.
        key_start_loc: int32 ``[B + 1]``, contiguous (ragged); None when paged.
        block_table: int32 or int64 ``[B, width]``, last dimension contiguous (paged); None when ragged.
        key_starts: int32 ``[B]`` or None: keys below it are hidden (left padding); positions do not move.
        window: normalised, causality folded in.
        softcap: 0 is off.
        alibi_slopes: float32 ``[Hq]`` or ``[B, Hq]``, or None.
        sinks: float32 ``[Hq]``, or None.
        k_scale, v_scale: see :data:`Scale`.
        workspace: scratch the caller passes, or None.
    """

    problem: AttendProblem
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    query_start_loc: Tensor
    seq_lens: Tensor | None
    key_start_loc: Tensor | None
    block_table: Tensor | None
    scale: float
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    key_starts: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Scale = None
    v_scale: Scale = None
    workspace: Tensor | None = None


@dataclass(slots=True, eq=False)
class MergeCall:
    """Tensors of one merge: ``out`` and both inputs ``[T, H, D]``, log-sum-exps float32 ``[H, T]``, any strides.

    ``out`` may be one of the inputs. ``out_lse`` may be None. ``query_start_loc``: int32 ``[B + 1]``, contiguous, or
    None; with it, rows from its last element on belong to nobody and stay as they are.
    """

    problem: MergeProblem
    out: Tensor
    out_lse: Tensor | None
    a: Tensor
    a_lse: Tensor
    b: Tensor
    b_lse: Tensor
    query_start_loc: Tensor | None = None


class Backend(Protocol):
    """Three verbs over one storage.

    A backend may have more, and ``ops`` asks for each by name:

    ``workspace_bytes(call: AttendCall) -> int``
        Bytes of ``call.workspace`` that :meth:`attend` uses, by shapes and bounds alone; a smaller workspace raises
        before anything is written. Without it, a workspace is taken as large enough.
    ``check(call: WriteCall | AttendCall) -> None``
        ``validate=True`` away from the CPU: look at the values, wait, raise. Without it, that argument raises.
    ``attend_again(call: AttendCall) -> Callable | None``, ``write_again(call: WriteCall) -> Callable | None``
        A function of ``q, k, v, out, lse, query_start_loc, seq_lens, block_table`` or of ``key, value, key_cache,
        value_cache, slot_mapping`` that does what the verb does for tensors that differ from those of ``call`` in
        their values and addresses alone (``aligned`` of the problem included). Without it, or where it returns None,
        the verb is called.
    ``raise_deferred(device: torch.device | None) -> None``
        Report what kernels have found wrong since; see :func:`pagetile.raise_deferred`.
    """

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot take the problem; empty when it can. Never raises, never compiles."""
        ...

    def write(self, call: WriteCall) -> None:
        """Store keys and values at their slots; negative slots are skipped."""
        ...

    def attend(self, call: AttendCall) -> None:
        """Fill ``out`` (and ``lse``): one state over the keys each query sees."""
        ...

    def merge(self, call: MergeCall) -> None:
        """Fill ``out`` (and ``out_lse``): the sum of two states."""
        ...
