"""Dense attention in float64, written apart from the library: what FlashAttention's functions have to return."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    first_key: int = 0,
) -> tuple[Tensor, Tensor]:
    """``out [Sq, Hq, Dv]`` and ``lse [Hq, Sq]`` of one sequence: q ``[Sq, Hq, D]``, k ``[Sk, Hkv, D]``."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (i - j).abs()
    left, right = window
    hidden = (j < first_key).expand(len(i), -1).clone()
    if causal or right >= 0:
        hidden |= j > i + (0 if causal else right)
    if left >= 0:
        hidden |= j < i - left
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1), lse


def close(got: Tensor, right: Tensor) -> None:
    """float32 against float64: a few dozen keys, so a few dozen rounding steps."""
    torch.testing.assert_close(got.double(), right, atol=2e-6, rtol=2e-5)


def paged(tokens: list[Tensor], block_size: int, num_blocks: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A cache ``[NB, BS, H, D]`` of NaN with the tokens of each sequence in shuffled blocks, and its int32 table.

    Entries past a sequence's blocks are -1, a block that is not there, and another sequence's.
    """
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    heads, size = tokens[0].shape[1:]
    cache = torch.full((num_blocks, block_size, heads, size), torch.nan, dtype=tokens[0].dtype)
    needed = [-(-len(x) // block_size) for x in tokens]
    table = torch.full((len(tokens), max(needed, default=0) + 3), -1, dtype=torch.int32)
    table[:, -1], table[:, -2] = num_blocks, 2**31 - 1
    for row, x in enumerate(tokens):
        blocks = [order.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for at, block in enumerate(blocks):
            part = x[at * block_size : (at + 1) * block_size]
            cache[block, : len(part)] = part
    return cache, table
