"""The question a call asks, without its tensors.

A problem is what dispatch, tuning, generated tests, benchmark rows and error messages are keyed by, and they all
print it the same way. It holds host facts only (shapes, dtypes, flags), never a value that lives in device memory,
so the same problem comes out under CUDA-graph capture and under fake tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Granularity = Literal["none", "tensor", "head", "sequence_head", "token_head"]
"""What one scale covers: nothing, the tensor, a KV head, a sequence's KV head, a token's KV head."""


@dataclass(frozen=True, slots=True)
class WriteProblem:
    """Store the new tokens' keys and values at their slots.

    Attributes:
        device: ``cpu``, ``cuda``, ...
        dtype: of key and value.
        kind: what the cache holds, see :func:`pagetile.contracts.dtypes.storage_kind`.
        layout: ``paged`` for ``[NB, BS, Hkv, D]`` by strides, ``xpacked`` for the layout of ``paged_attention_v1``.
        num_tokens: rows to store, an upper bound (negative slots are skipped).
        aligned: every base and stride is a multiple of 16 bytes.
        heads_contiguous: the heads of one token are one contiguous span, in source and cache, for K and for V.
        scale: granularity of the scales.
    """

    device: str
    dtype: str
    kind: str
    layout: Literal["paged", "xpacked"]
    num_tokens: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    block_size: int
    aligned: bool = True
    heads_contiguous: bool = True
    scale: Granularity = "none"

    def __str__(self) -> str:
        return (
            f"write {self.num_tokens} tokens, {self.num_kv_heads} heads of {_size(self)}, {self.dtype} into "
            f"{self.kind} {self.layout} blocks of {self.block_size} on {self.device}"
        )


@dataclass(frozen=True, slots=True)
class AttendProblem:
    """Attend from ragged queries to paged (or ragged) keys and values.

    Attributes:
        device: ``cpu``, ``cuda``, ...
        dtype: of the query and the output.
        kind: what K and V hold, see :func:`pagetile.contracts.dtypes.storage_kind`.
        layout: ``paged``, ``ragged`` or ``xpacked``.
        num_seqs, num_tokens: B and T, as the tensors' shapes have them (rows may be padding).
        max_q_len, max_k_len: host upper bounds.
        block_size: of the cache; 0 when the keys are ragged.
        window: normalised ``(left, right)``, causality folded in.
        num_splits: as asked; 0 leaves the choice to the backend.
        scale: granularity of the K and V scales.
        aligned: every base and stride of K and V is a multiple of 16 bytes.
    """

    device: str
    dtype: str
    kind: str
    layout: Literal["paged", "ragged", "xpacked"]
    num_seqs: int
    num_tokens: int
    max_q_len: int
    max_k_len: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    block_size: int
    window: tuple[int, int] = (-1, -1)
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    key_starts: bool = False
    num_splits: int = 0
    batch_invariant: bool = False
    scale: Granularity = "none"
    aligned: bool = True

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.num_q_heads // self.num_kv_heads

    def __str__(self) -> str:
        extras = [
            f"window {self.window}" if self.window != (-1, -1) else "",
            *(name for name in ("softcap", "alibi", "sinks", "lse", "batch_invariant") if getattr(self, name)),
        ]
        cache = f"{self.layout} {self.kind}" + (f" blocks of {self.block_size}" if self.block_size else "")
        return ", ".join(
            [
                f"attend {self.num_tokens} queries of {self.num_seqs} sequences",
                f"up to {self.max_q_len} x {self.max_k_len}",
                f"{self.num_q_heads}/{self.num_kv_heads} heads of {_size(self)}",
                f"{self.dtype} over {cache} on {self.device}",
                *filter(None, extras),
            ]
        )


@dataclass(frozen=True, slots=True)
class MergeProblem:
    """Add two states."""

    device: str
    dtype: str
    num_tokens: int
    num_heads: int
    head_size: int

    def __str__(self) -> str:
        heads = f"{self.num_heads} heads of {self.head_size}"
        return f"merge {self.num_tokens} rows, {heads}, {self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class GatherProblem:
    """Copy tokens out of a paged cache into rows that lie together, dequantised: a write the other way round.

    Attributes:
        device: ``cpu``, ``cuda``, ...
        dtype: of the rows.
        kind: what the cache holds, see :func:`pagetile.contracts.dtypes.storage_kind`.
        num_tokens: rows to fill, an upper bound (negative slots are skipped).
        scale: granularity of the scales; ``token_head`` is a scale for each row and head.
    """

    device: str
    dtype: str
    kind: str
    num_tokens: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    block_size: int
    scale: Granularity = "none"

    def __str__(self) -> str:
        return (
            f"gather {self.num_tokens} tokens, {self.num_kv_heads} heads of {_size(self)}, {self.kind} blocks of "
            f"{self.block_size} into {self.dtype} on {self.device}"
        )


@dataclass(frozen=True, slots=True)
class CopyProblem:
    """Copy whole blocks inside caches.

    Attributes:
        device: ``cpu``, ``cuda``, ...
        num_caches: tensors that each copy is done in (layers, K and V).
        block_bytes: of one block of one of them.
    """

    device: str
    num_caches: int
    block_bytes: int

    def __str__(self) -> str:
        return f"copy blocks of {self.block_bytes} bytes in {self.num_caches} caches on {self.device}"


@dataclass(frozen=True, slots=True)
class FusedWriteProblem:
    """Normalise and rotate queries and keys, and store keys and values, in one pass.

    Attributes:
        write: the write at the end of it.
        num_q_heads: query heads.
        rotary_size: channels that are rotated, the first ones of each head.
        interleaved: neighbours are a pair; else channel i and ``i + rotary_size / 2``.
        norm: queries and keys have a root-mean-square norm before.
    """

    write: WriteProblem
    num_q_heads: int
    rotary_size: int
    interleaved: bool
    norm: bool

    @property
    def device(self) -> str:
        """Of the tensors."""
        return self.write.device

    @property
    def dtype(self) -> str:
        """Of queries, keys and values."""
        return self.write.dtype

    @property
    def kind(self) -> str:
        """What the cache holds."""
        return self.write.kind

    def __str__(self) -> str:
        pairs = "interleaved" if self.interleaved else "half-split"
        return (
            f"{'normalise, ' if self.norm else ''}rotate {self.rotary_size} channels ({pairs}) of {self.num_q_heads} "
            f"query heads, and {self.write}"
        )


Problem = WriteProblem | AttendProblem | MergeProblem | GatherProblem | CopyProblem | FusedWriteProblem


def _size(problem: WriteProblem | AttendProblem | GatherProblem) -> str:
    if problem.head_size == problem.head_size_v:
        return str(problem.head_size)
    return f"{problem.head_size}/{problem.head_size_v}"
