"""Verbs beyond the three of :mod:`pagetile.backends.protocol`, for backends that have them.

A backend says by :meth:`~pagetile.backends.protocol.Backend.why_not` whether it takes a
:class:`~pagetile.contracts.problem.GatherProblem`, a :class:`~pagetile.contracts.problem.CopyProblem` or a
:class:`~pagetile.contracts.problem.FusedWriteProblem`. One that was written before them, or by somebody else, may lack
the method: :func:`verb_of` says so as every other refusal is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pagetile.backends.protocol import AttendCall, Backend, WriteCall
from pagetile.contracts.errors import BackendError
from pagetile.contracts.problem import CopyProblem, FusedWriteProblem, GatherProblem

PARTITION_KEYS = 512
"""Keys of a partition of ``paged_attention_v2``, at absolute multiples."""


@dataclass(slots=True, eq=False)
class PartitionedCall(AttendCall):
    """An attention of one query a sequence that also leaves the state of each partition of the keys.

    ``out`` is what the three buffers add up to. A partition of which the query sees nothing has the maximum -inf, the
    sum 0 and the output 0.

    Attributes:
        exp_sums: float32 ``[B, Hq, P]``, contiguous: sum of ``exp(score - maximum)``.
        max_logits: float32 ``[B, Hq, P]``, contiguous: the largest score, in natural units.
        tmp_out: ``[B, Hq, P, Dv]``, contiguous, dtype of the query: output over the partition's keys alone.
    """

    exp_sums: Tensor | None = None
    max_logits: Tensor | None = None
    tmp_out: Tensor | None = None


@dataclass(slots=True, eq=False)
class GatherCall:
    """Tensors of one gather.

    Attributes:
        key_cache, value_cache: ``[NB, BS, Hkv, D]`` and ``[.., Dv]``, any strides, last dimension contiguous.
        slots: int64 ``[T]``, contiguous. A negative one leaves its rows as they are; one past the cache gives rows of 0
            (and is reported) where a device cannot raise.
        key, value: the rows, ``[T', Hkv, D]`` and ``[T', Hkv, Dv]`` with ``T' >= T``, last dimension contiguous.
        k_scale, v_scale: float32 ``[1]``, ``[Hkv]`` or ``[T, Hkv]``, or None (1).
    """

    problem: GatherProblem
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    key: Tensor
    value: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(slots=True, eq=False)
class CopyCall:
    """Tensors of one copy of blocks, all on one device.

    Attributes:
        sources, caches: tensors of one shape behind the first axis, which is the block, and of one dtype; sources have
            one set of strides, caches another. For copies inside caches both are the same list.
        spares: for each cache a tensor of its block's shape and strides, with as many blocks as there are cycles; ids
            from the number of blocks on name them. Empty where there is no cycle.
        levels: int64 ``[n, 2]`` each on the host, (source, destination) pairs of one level: no destination is also a
            source, and none comes twice. A level sees what the ones before it did.
    """

    problem: CopyProblem
    sources: list[Tensor]
    caches: list[Tensor]
    spares: list[Tensor]
    levels: list[Tensor]


@dataclass(slots=True, eq=False)
class FusedWriteCall:
    """Tensors of one fused write.

    Attributes:
        write: key, value, caches, slots and scales; ``key`` as it is before the norm and the rotation.
        query: ``[T, Hq, D]``, any strides, last dimension contiguous.
        query_out: like ``query``; may be ``query``.
        positions: int32 or int64 ``[T]``.
        cos, sin: ``[rows, rotary_size / 2]`` of a floating dtype, last dimension contiguous.
        q_weight, k_weight: ``[D]`` of the norms, or None.
        eps: of the norms.
        key_out: like ``key``, filled with the keys as they are stored, or None; may be ``key``.
    """

    problem: FusedWriteProblem
    write: WriteCall
    query: Tensor
    query_out: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6
    key_out: Tensor | None = None


def verb_of(backend: Backend, verb: str, problem: Any) -> Callable[[Any], None]:
    """The method ``verb`` of a backend.

    Raises:
        BackendError: it has none.
    """
    found = getattr(backend, verb, None)
    if found is None:
        why = f"it has no verb {verb!r}"
        raise BackendError(f"backend {backend.name!r} cannot {problem}: {why}", {backend.name: [why]})
    return found


__all__ = [
    "PARTITION_KEYS",
    "CopyCall",
    "FusedWriteCall",
    "GatherCall",
    "PartitionedCall",
    "verb_of",
]
