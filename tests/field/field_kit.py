"""What the cases from the field share: small caches by hand, the zero-query fixture, memory that is only reserved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagetile.backends.registry import BACKENDS
from pagetile.contracts.geometry import blocks_for
from pagetile.ops import flash_attn_varlen_func
from pagetile.testing import AttendCase, takes
from pagetile.testing.machine import Subject, subjects
from pagetile.testing.poison import garbage_tails

SUBJECTS = [s for s in subjects() if s.device in (BACKENDS[s.name].devices or (s.device,))]
"""Backends that the public ops hand these tensors to (an interpreted Triton takes them only when called itself)."""


def each_backend() -> pytest.MarkDecorator:
    """Parametrise over the backends of this machine."""
    return pytest.mark.parametrize("subject", SUBJECTS, ids=str)


def fast_backends() -> pytest.MarkDecorator:
    """Parametrise over all but the reference, which takes a loop step for each of hundreds of thousands of rows."""
    fast = [s for s in SUBJECTS if s.name != "reference"]
    return pytest.mark.parametrize("subject", fast, ids=str)


def ints(values: Sequence[Any], subject: Subject, dtype: torch.dtype = torch.int32) -> Tensor:
    """Integers on the subject's device."""
    return torch.tensor(values, dtype=dtype, device=subject.device)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Seeded normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def loc(lengths: Sequence[int], subject: Subject) -> Tensor:
    """Cumulative starts."""
    return ints(np.cumsum([0, *lengths]).tolist(), subject)


def attend(
    subject: Subject,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lens: Sequence[int],
    q_lens: Sequence[int],
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """Paged attention through the public op, with its log-sum-exp."""
    return flash_attn_varlen_func(
        q,
        k,
        v,
        max(q_lens, default=0),
        loc(q_lens, subject),
        max(lens, default=0),
        seqused_k=ints(lens, subject),
        block_table=table,
        return_softmax_lse=True,
        backend=subject.name,
        **how,
    )


def scatter(
    tokens: Sequence[Tensor], blocks: Sequence[Sequence[int]], block_size: int, num_blocks: int, fill: float
) -> Tensor:
    """Each sequence's tokens ``[L, H, D]`` in its blocks, everything else ``fill``."""
    cache = tokens[0].new_full((num_blocks, block_size, *tokens[0].shape[1:]), fill)
    for own, row in zip(tokens, blocks, strict=True):
        for position, token in enumerate(own):
            cache[row[position // block_size], position % block_size] = token
    return cache


def deal(lens: Sequence[int], block_size: int, seed: int | None = 0, spare: int = 2) -> tuple[list[list[int]], int]:
    """Blocks for each sequence, shuffled unless ``seed`` is None, and how many blocks the cache has."""
    total = sum(blocks_for(n, block_size) for n in lens) + spare
    order = (
        list(range(total))
        if seed is None
        else torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    )
    free = iter(order)
    return [[next(free) for _ in range(blocks_for(n, block_size))] for n in lens], total


def table_of(
    blocks: Sequence[Sequence[int]],
    subject: Subject,
    lens: Sequence[int] | None = None,
    block_size: int = 0,
    num_blocks: int = 0,
    extra: int = 0,
) -> Tensor:
    """A block table; with ``lens``, what lies past each sequence is garbage."""
    width = max((len(row) for row in blocks), default=0) + extra
    table = torch.zeros(len(blocks), width, dtype=torch.int32)
    for i, row in enumerate(blocks):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    if lens is not None:
        garbage_tails(table, lens, block_size, num_blocks)
    return table.to(subject.device)


def zero_query(
    subject: Subject,
    lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    *,
    block_size: int = 16,
    num_q_heads: int = 1,
    num_kv_heads: int = 1,
    head_size: int = 8,
    dtype: torch.dtype = torch.float32,
    order: int | None = 0,
    poison: bool = True,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """Fixture Z: q = 0, ``V[token j] = j``. Output (mean of the visible j) ``[T, Hq]`` and log-sum-exp ``[Hq, T]``.

    Unused slots are NaN and the table's tail is garbage, unless ``poison`` is off.
    """
    q_lens = [1] * len(lens) if q_lens is None else q_lens
    blocks, num_blocks = deal(lens, block_size, order)
    fill = math.nan if poison else 0.0
    k_tokens = [randn(n, num_kv_heads, head_size, seed=7 + i, dtype=dtype) for i, n in enumerate(lens)]
    v_tokens = [torch.arange(n, dtype=dtype)[:, None, None].expand(n, num_kv_heads, head_size) for n in lens]
    k, v = (scatter(t, blocks, block_size, num_blocks, fill).to(subject.device) for t in (k_tokens, v_tokens))
    tail = (lens, block_size, num_blocks, 3) if poison else ()
    table = table_of(blocks, subject, *tail)
    q = torch.zeros(sum(q_lens), num_q_heads, head_size, dtype=dtype, device=subject.device)
    out, lse = attend(subject, q, k, v, table, lens, q_lens, **how)
    assert (out == out[..., :1]).all(), "every channel of V is the same"
    return out[..., 0].float().cpu(), lse.cpu()


def reserve(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Zeros that cost memory only where they are touched; skips where the system does not overcommit."""
    whole = {torch.float16: np.uint16, torch.bfloat16: np.uint16, torch.int8: np.int8, torch.uint8: np.uint8}[dtype]
    try:
        flat = torch.from_numpy(np.zeros(math.prod(shape), dtype=whole))
    except MemoryError:
        size = math.prod(shape) * dtype.itemsize / 2**30
        pytest.skip(f"this system refuses to reserve {size:.1f} GiB without backing (vm.overcommit_memory)")
    return flat.view(dtype).view(shape)


def only_on_cpu(subject: Subject) -> None:
    """Skip where the memory cannot be reserved without being had."""
    if subject.device != "cpu":
        pytest.skip("a GPU has no memory that is reserved but not there")


def quantised_backends(kind: str) -> pytest.MarkDecorator:
    """Parametrise over the backends that declare that they take a quantised cache."""
    taking = [s for s in SUBJECTS if takes(s.backend, AttendCase(kind=kind, scale="head"), s.device)]
    return pytest.mark.parametrize("subject", taking, ids=str)
