"""Context parallelism: one sequence's keys on several ranks, every rank's queries over its own, the states added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import pagetile.ops as ops
from pagetile.backends.protocol import Backend, Scale
from pagetile.contracts.errors import ArgumentError, ShapeError, UnsupportedError
from pagetile.contracts.shapes import require_tensor
from pagetile.distributed.exchange import Exchange, synchronised
from pagetile.distributed.heads import shares
from pagetile.distributed.local import LocalBatch
from pagetile.distributed.states import MODES, State, start_combine
from pagetile.distributed.tokens import TokenSplit
from pagetile.ops.arguments import fold_window


class ContextParallel:
    """The ranks that hold the tokens of the same KV heads.

    A step, on every rank of the group alike::

        cp = ContextParallel(group, interleave=16)
        batch = build_local_batch(my_blocks, seq_lens, query_lens, block_size, cp.split)     # once a step
        reshape_and_cache_flash(key, value, key_cache, value_cache, batch.slot_mapping)      # each layer
        out, lse = cp.attend(query, key_cache, value_cache, batch)                           # my share of the heads

    Every rank has the queries, keys and values of all new tokens, for all heads of the group (:meth:`gather_heads` of
    projections that are split by head), and stores the keys that are its own. Keys split by head on top of that are
    other groups' business, see :class:`~pagetile.distributed.RankGrid`.

    Args:
        group: a process group, a DeviceMesh of one axis, or None: the default group, or a single rank without one.
        interleave: tokens in a chunk.
        mode: how states are exchanged: ``all_to_all``, ``reduce_scatter`` or ``all_gather``, see
            :mod:`pagetile.distributed.states`.
        timeout: seconds to wait for a collective; None is the group's own limit. See
            :mod:`pagetile.distributed.exchange`.

    Raises:
        ArgumentError: a mode that is none, a mesh of several axes, a group that this rank is not in.
    """

    def __init__(
        self, group: Any = None, *, interleave: int = 1, mode: str = "all_to_all", timeout: float | None = None
    ) -> None:
        if mode not in MODES:
            raise ArgumentError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
        self.exchange = Exchange(group, timeout)
        self.split = TokenSplit(self.exchange.size, self.exchange.rank, interleave)
        self.mode = mode

    def heads(self, num_heads: int) -> range:
        """The query heads whose results this rank gets, of ``num_heads`` that the group computes."""
        return range(num_heads) if self.mode == "all_gather" else shares(num_heads, self.split.size)[self.split.rank]

    def attend(self, q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: LocalBatch, **options: Any) -> State:
        """Attention over all ranks' tokens: :meth:`start_attend`, waited for."""
        return self.start_attend(q, key_cache, value_cache, batch, **options)()

    def start_attend(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: LocalBatch,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
        causal: bool = True,
        softmax_scale: float | None = None,
        window_size: Sequence[int] | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        s_aux: Tensor | None = None,
        k_descale: Scale = None,
        v_descale: Scale = None,
        kv_cache_dtype: str = "auto",
        backend: str | Backend = "auto",
    ) -> Callable[[], State]:
        """Attend to this rank's tokens and start the exchange; what is returned waits for it and adds the states.

        Between the two the caller may do what does not need the result, such as the next layer's weights. Every rank
        makes the same calls in the same order.

        Args:
            q: ``[T, H, D]``, all heads of the group; key_cache ``[NB, BS, Hkv, D]``, value_cache ``[NB, BS, Hkv, Dv]``:
                this rank's, with the new tokens written at ``batch.slot_mapping``.
            batch: see :func:`~pagetile.distributed.build_local_batch`.
            key, value: ``[T, Hkv, D]`` and ``[T, Hkv, Dv]``, the new tokens, as they were written. With them a prefill
                runs as one attention over the shard and one over the new tokens, tile by tile; without, or under a
                window, every query walks the shard by itself, which is right for any batch and fast for decoding.
                Quantised caches: these keys are not, so results differ by what quantising does to them.
            causal, softmax_scale, window_size, softcap, k_descale, v_descale, kv_cache_dtype, backend: see
                :func:`pagetile.flash_attn_varlen_func`. Scales per sequence are not taken.
            s_aux: ``[H]``, sinks, the same on every rank; they count once.
            alibi_slopes: not implemented.

        Returns:
            A function without arguments, for ``out`` ``[T, h, Dv]`` and lse float32 ``[h, T]``: the heads
            :meth:`heads` says, over all ranks' tokens.

        Raises:
            PeerError: here or from what is returned, a rank that is gone.
            UnsupportedError: ALiBi; and as :func:`pagetile.flash_attn_varlen_func`.
        """
        if alibi_slopes is not None:
            raise UnsupportedError("alibi_slopes is given, but distances between split tokens are not implemented")
        if (key is None) != (value is None):
            raise ArgumentError("one of key and value is given without the other; pass both, or neither")
        if batch.split != self.split:
            raise ArgumentError(f"batch was built for {batch.split}, but this group splits tokens as {self.split}")
        _check_scales(k_descale=k_descale, v_descale=v_descale)
        window = fold_window(window_size, causal)
        apart = key is not None and batch.max_query_len > 1 and window == (-1, 0)
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "backend": backend}
        cache = {"k_descale": k_descale, "v_descale": v_descale, "kv_cache_dtype": kv_cache_dtype}
        sinks_here = None if apart or self.split.rank else s_aux
        caches = (key_cache, value_cache)
        if apart:
            assert key is not None
            assert value is not None
            state = _shard(q, *caches, batch, **options, **cache)
            # In float32 until the new tokens are added, so that the result is rounded once.
            finish = start_combine(self.exchange, *state, self.mode, backend, dtype=torch.float32)
            # The exchange is under way while the new tokens are attended to, by each rank for its own heads.
            new = _new_tokens(q, key, value, batch, self.heads(q.shape[1]), s_aux, **options)
            return lambda: _added(finish(), new, backend)
        state = _rows(q, *caches, batch, window, s_aux=sinks_here, **options, **cache)
        return start_combine(self.exchange, *state, self.mode, backend)

    def combine(self, out: Tensor, lse: Tensor, *, backend: str | Backend = "auto") -> State:
        """Add the ranks' own states: ``out`` ``[T, H, Dv]``, lse float32 ``[H, T]``, to the heads of :meth:`heads`.

        Raises:
            PeerError: a rank that is gone.
        """
        return start_combine(self.exchange, out, lse, self.mode, backend)()

    def gather_heads(self, x: Tensor, num_heads: int) -> Tensor:
        """Every rank's heads side by side: ``[T, h, D]`` of each to ``[T, num_heads, D]`` on all.

        The inverse of the split in :meth:`heads`, for queries before and outputs after.

        Raises:
            ShapeError: ``x`` does not have this rank's share of the heads.
            PeerError: a rank that is gone.
        """
        size, parts = self.split.size, shares(num_heads, self.split.size)
        mine = parts[self.split.rank]
        if require_tensor("x", x).dim() != 3 or x.shape[1] != len(mine):
            raise ShapeError(
                f"x is {list(x.shape)}, but rank {self.split.rank} of {size} has {len(mine)} of {num_heads} heads; "
                f"pass [T, {len(mine)}, D]"
            )
        if size == 1:
            return x
        if x.shape[0] == 0:  # nothing to exchange, which every rank knows
            return x.new_empty((0, num_heads, x.shape[2]))
        widest = max(map(len, parts))
        sent = synchronised(x)
        if len(mine) < widest:
            sent = x.new_zeros((x.shape[0], widest, x.shape[2]))
            sent[:, : len(mine)] = x
        received, pending = self.exchange.all_gather(sent)
        pending.wait()
        return torch.cat([piece[:, : len(part)] for part, piece in zip(parts, received, strict=True)], dim=1)


def _shard(q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: LocalBatch, **options: Any) -> State:
    """Every query over this rank's tokens before the new ones, all of which it sees."""
    result = ops.flash_attn_varlen_func(
        q,
        key_cache,
        value_cache,
        max_seqlen_q=batch.max_query_len,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_k=batch.max_local_len,
        seqused_k=batch.context_lens,
        block_table=batch.block_table,
        return_softmax_lse=True,
        **options,
    )
    return _empty_rest(result, batch)


def _rows(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: LocalBatch,
    window: tuple[int, int],
    *,
    s_aux: Tensor | None,
    **options: Any,
) -> State:
    """Every query a sequence of its own, over the tokens of this rank that it sees."""
    lens, starts = batch.row_bounds(window)
    if starts is not None:  # keys before the window are hidden as left padding is
        out, lse = ops.flash_attn_with_kvcache(
            q.unsqueeze(1),
            key_cache,
            value_cache,
            cache_seqlens=lens,
            cache_leftpad=starts,
            block_table=batch.table_of_rows(),
            return_softmax_lse=True,
            s_aux=s_aux,
            **options,
        )
        return out.squeeze(1), lse.squeeze(-1).T
    out, lse = ops.flash_attn_varlen_func(
        q,
        key_cache,
        value_cache,
        max_seqlen_q=1,
        cu_seqlens_q=batch.row_loc,
        max_seqlen_k=batch.max_local_len,
        seqused_k=lens,
        block_table=batch.table_of_rows(),
        return_softmax_lse=True,
        s_aux=s_aux,
        **options,
    )
    return out, lse


def _new_tokens(
    q: Tensor, key: Tensor, value: Tensor, batch: LocalBatch, heads: range, s_aux: Tensor | None, **options: Any
) -> State:
    """The new tokens among themselves, for the query heads that come out on this rank."""
    group = q.shape[1] // max(1, key.shape[1])
    key, value = (_kv_for(heads, group, x) for x in (key, value))
    result = ops.flash_attn_varlen_func(
        q[:, heads.start : heads.stop],
        key,
        value,
        max_seqlen_q=batch.max_query_len,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_k=batch.max_query_len,
        cu_seqlens_k=batch.query_start_loc,
        causal=True,
        return_softmax_lse=True,
        s_aux=None if s_aux is None else s_aux[heads.start : heads.stop],
        **options,
    )
    return _empty_rest(result, batch)


def _kv_for(heads: range, group: int, x: Tensor) -> Tensor:
    """The KV heads ``[T, h, D]`` that serve some query heads, one for equally many of them."""
    first, last = min(heads.start // group, x.shape[1] - 1), -(-heads.stop // group)
    whole = heads.start % group == 0 and heads.stop % group == 0
    if whole or last - first <= 1:
        return x[:, first : max(last, first + 1)]
    return x[:, torch.arange(heads.start, heads.stop, device=x.device) // group]


def _empty_rest(result: Any, batch: LocalBatch) -> State:
    """Rows that belong to no sequence are left unwritten by the op, and are exchanged: they become empty states."""
    out, lse = result
    if batch.positions.shape[0]:
        nobody = batch.positions < 0
        out.masked_fill_(nobody[:, None, None], 0)
        lse.masked_fill_(nobody, -torch.inf)
    return out, lse


def _added(context: State, new: State, backend: str | Backend) -> State:
    out, lse = (x.float().contiguous() for x in context)
    ops.merge_attn_states(out, out, lse, new[0].float(), new[1], lse, backend=backend)
    return out.to(new[0].dtype), lse


def _check_scales(**scales: Scale) -> None:
    for name, scale in scales.items():
        if isinstance(scale, Tensor) and scale.dim() == 2:
            raise UnsupportedError(
                f"{name} is {list(scale.shape)}: scales of a sequence and head are not taken here, where every query "
                "may be a sequence; pass a float, [1] or [Hkv]"
            )
