"""Attend: each query over the keys it sees, one query at a time.

The whole operation is the loop of :func:`attend`: find the sequence's tokens through its block table, ask
:func:`~pagetile.contracts.visibility.visible_range` which of them a query sees, and take a softmax over exactly
those. What a query does not see is never touched, so it may hold anything, NaN included.

Source: Vaswani et al. 2017; paging after Kwon et al. 2023; order of the score edits, sinks and the log-sum-exp as in
pagetile's contract (``scale``, softcap, ALiBi, sink).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError
from pagetile.contracts.geometry import blocks_for
from pagetile.contracts.state import State
from pagetile.contracts.visibility import visible_range
from pagetile.reference.checks import check_block_table, check_key_starts, check_seq_lens, check_start_loc
from pagetile.reference.quantise import Scale, dequantise, head_scale, kind_of
from pagetile.reference.storage import by_token, gather


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    seq_lens: Tensor | None = None,
    key_start_loc: Tensor | None = None,
    block_table: Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    key_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    kind: str | None = None,
    layout: str = "paged",
) -> State:
    """Attention of packed queries over paged, x-packed or ragged keys and values.

    Args:
        q: ``[T, Hq, D]``; the rows of sequence b are ``query_start_loc[b]`` up to ``query_start_loc[b + 1]``.
        k, v: paged ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]`` (with ``block_table`` and ``seq_lens``), or ragged
            ``[total_k, Hkv, D]`` and ``[total_k, Hkv, Dv]`` (with ``key_start_loc``).
        window: normalised, causality folded in; see :func:`~pagetile.contracts.visibility.normalize_window`.
        key_starts: keys below ``key_starts[b]`` are hidden (left padding); positions do not move.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]``.
        sinks: ``[Hq]``, a logit that joins the denominator only.
        k_scale, v_scale: None, a float, one element, ``[Hkv]``, ``[B, Hkv]`` or ``[NB, BS, Hkv]``.
        kind: what k and v hold, see :func:`pagetile.contracts.dtypes.storage_kind`; None goes by the dtype of k.
        layout: ``paged``, ``xpacked`` or ``ragged``.

    Returns:
        ``out`` ``[query_start_loc[-1], Hq, Dv]`` and ``lse`` ``[Hq, query_start_loc[-1]]``, float64 where q is
        float64, else float32. Query head h reads KV head ``h // (Hq / Hkv)``.

    Raises:
        ArgumentError: starts or lengths that are negative, decrease, or point past a tensor's end.
        BlockTableError: a block id outside the cache, or a table row too short for its sequence.
    """
    check_start_loc("query_start_loc", query_start_loc, "q", len(q))
    check_key_starts(key_starts)
    kind = kind or kind_of(k)
    if layout == "ragged":
        tokens_of = _ragged_tokens(k, key_start_loc)
    else:
        k, v = by_token(k, layout), by_token(v, layout)
        tokens_of = _paged_tokens(k, block_table, seq_lens)

    dtype = compute_dtype(q)
    starts = query_start_loc.tolist()
    state = State(
        out=torch.zeros(starts[-1], q.shape[1], v.shape[-1], dtype=dtype, device=q.device),
        lse=torch.full((q.shape[1], starts[-1]), -torch.inf, dtype=dtype, device=q.device),
    )
    for seq, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        keys, values = (
            dequantise(tokens_of(x, seq), kind, _scale_of(x_scale, seq, tokens_of, q.device)).to(dtype)
            for x, x_scale in ((k, k_scale), (v, v_scale))
        )  # [L, Hkv, D], [L, Hkv, Dv]
        q_len, seq_len = end - start, len(keys)
        first_key = 0 if key_starts is None else int(key_starts[seq])
        slopes = alibi_slopes[seq] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        for i in range(q_len):
            lo, hi = visible_range(i, q_len, seq_len, window, first_key)
            hi = max(lo, hi)
            distance = torch.arange(lo, hi, device=q.device) - (i + seq_len - q_len)
            state.out[start + i], state.lse[:, start + i] = attend_one(
                q[start + i].to(dtype), keys[lo:hi], values[lo:hi], distance, scale, softcap, slopes, sinks
            )
    return state


def attend_one(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    distance: Tensor,
    scale: float,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One query over the keys it sees, which may be none: its output ``[Hq, Dv]`` and log-sum-exp ``[Hq]``.

    Args:
        q: ``[Hq, D]``.
        keys, values: ``[n, Hkv, D]`` and ``[n, Hkv, Dv]``, every one of them visible.
        distance: ``[n]``, each key's position minus the query's.
        slopes, sinks: ``[Hq]`` or None.
    """
    (num_heads, size), (num_keys, num_kv_heads) = q.shape, keys.shape[:2]
    group = num_heads // num_kv_heads
    grouped = q.reshape(num_kv_heads, group, size)  # the heads that share a KV head
    scores = scale * torch.einsum("hrd,nhd->hrn", grouped, keys).reshape(num_heads, num_keys)  # [Hq, n]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype).unsqueeze(-1) * distance.abs()

    # A sink is one more logit, without a value; -inf is the same as none.
    sink = scores.new_full((num_heads,), -torch.inf) if sinks is None else sinks.to(scores.dtype)
    logits = torch.cat([scores, sink.unsqueeze(-1)], dim=-1)
    weights = logits.softmax(dim=-1)[:, :-1].reshape(num_kv_heads, group, num_keys)
    out = torch.einsum("hrn,nhd->hrd", weights, values)
    return out.reshape(num_heads, values.shape[-1]), logits.logsumexp(dim=-1)


TokensOf = Callable[[Tensor, int], Tensor]
"""``(x, b)`` to the tokens of sequence b in order, out of a tensor that is laid out as the keys are."""


def _ragged_tokens(k: Tensor, key_start_loc: Tensor | None) -> TokensOf:
    if key_start_loc is None:
        raise ArgumentError("ragged keys need key_start_loc (int32 [B + 1])")
    check_start_loc("key_start_loc", key_start_loc, "k", len(k))
    starts = key_start_loc.tolist()
    return lambda x, seq: x[starts[seq] : starts[seq + 1]]


def _paged_tokens(k: Tensor, block_table: Tensor | None, seq_lens: Tensor | None) -> TokensOf:
    if block_table is None or seq_lens is None:
        raise ArgumentError("paged keys need block_table (int32 or int64 [B, width]) and seq_lens (int32 [B])")
    num_blocks, block_size = k.shape[:2]
    check_seq_lens(seq_lens, block_table, block_size)
    check_block_table(block_table, seq_lens, num_blocks, block_size)
    lengths = seq_lens.tolist()
    return lambda x, seq: gather(x, block_table[seq, : blocks_for(lengths[seq], block_size)], lengths[seq])


def _scale_of(scale: Scale, seq: int, tokens_of: TokensOf, device: torch.device) -> Tensor:
    """Any granularity of scale, narrowed to one sequence and broadcastable against its tokens."""
    if isinstance(scale, Tensor) and scale.dim() == 3:  # [NB, BS, Hkv]: stored as the tokens are
        scale = tokens_of(scale, seq)
    elif isinstance(scale, Tensor) and scale.dim() == 2:  # [B, Hkv]
        scale = scale[seq]
    return head_scale(scale, device)


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
