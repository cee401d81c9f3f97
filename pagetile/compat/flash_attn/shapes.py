"""From FlashAttention's ways to say where keys are to those of the ops: dense batches, ragged keys with room, words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pagetile.backends.protocol import Backend, Scale
from pagetile.contracts.errors import ArgumentError, PagetileError, UnsupportedError
from pagetile.contracts.shapes import Sizes, require_dtype, require_tensor
from pagetile.contracts.visibility import FARTHEST
from pagetile.ops import flash_attn_varlen_func, flash_attn_with_kvcache
from pagetile.ops.bind_attention import KVCACHE, KVCACHE_ROWS, AttendArgs
from pagetile.ops.checks import host_bound


@contextmanager
def speaking(**names: str) -> Iterator[None]:
    """Errors from inside speak of what the caller passed: ``speaking(k_cache="k")`` turns one word into the other."""
    try:
        yield
    except PagetileError as error:
        error.rename(names)
        raise


def refuse(**unsupported: tuple[Any, Any, str]) -> None:
    """Raise for the first argument that was given and is not implemented.

    Args:
        unsupported: argument -> (its value, the only value that is possible, why).

    Raises:
        UnsupportedError: naming the argument, what was asked and what is possible.
    """
    for name, (value, possible, why) in unsupported.items():
        if value is possible or (possible is not None and not isinstance(value, Tensor) and value == possible):
            continue
        shown = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise UnsupportedError(f"{name} is {shown}, but {why}; pass {name}={possible!r}")


def rows(name: str, x: Any) -> Tensor:
    """``x`` with elements side by side along its last axis; copied where they are not, as FlashAttention does."""
    require_tensor(name, x)
    return x if x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def starts(batch: int, length: int, device: torch.device) -> Tensor:
    """int32 ``[B + 1]``: where each of ``batch`` sequences of one length starts, and the end."""
    if length == 0:
        return torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def blocks_of_one(k: Tensor, v: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged keys with room behind each sequence, as a cache whose blocks hold one token.

    Args:
        k, v: ``[total_k, Hkv, D]`` and ``[total_k, Hkv, Dv]``.
        cu_seqlens_k: int32 ``[B + 1]``, where the room of each sequence starts.
        max_seqlen_k: host upper bound of the keys that are used of any sequence.

    Returns:
        The two as ``[total_k, 1, Hkv, D]`` views, and an int32 block table ``[B, max_seqlen_k]``. Entries past the
        keys in use may point anywhere; nothing dereferences them.
    """
    within = torch.arange(max_seqlen_k, dtype=torch.int32, device=cu_seqlens_k.device)
    return k.unsqueeze(1), v.unsqueeze(1), cu_seqlens_k[:-1].unsqueeze(1) + within


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int | None] | None,
    softcap: float,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    k_descale: Scale = None,
    v_descale: Scale = None,
    s_aux: Tensor | None = None,
    backend: str | Backend = "auto",
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a dense batch: q ``[B, Sq, Hq, D]``, k ``[B, Sk, Hkv, D]``, v ``[B, Sk, Hkv, Dv]``, any strides.

    Keys whose batch and length are one span of rows are ragged keys; other ones (``[B, H, S, D]`` transposed) are a
    cache with one block a sequence, so that no key is ever copied.

    Returns:
        ``out`` ``[B, Sq, Hq, Dv]``, and the log-sum-exp float32 ``[B, Hq, Sq]`` or None.
    """
    q, k, v = rows("q", q), rows("k", k), rows("v", v)
    sizes = Sizes()
    sizes.bind("q", q, "B Sq Hq D")
    sizes.bind("k", k, "B Sk Hkv D")
    sizes.bind("v", v, "B Sk Hkv Dv")
    batch, num_queries, num_keys = sizes["B"], sizes["Sq"], sizes["Sk"]
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "num_splits": num_splits,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "s_aux": s_aux,
        "backend": backend,
        "return_softmax_lse": with_lse,
    }
    if not (_one_span(k) and _one_span(v)):
        with speaking(k_cache="k", v_cache="v"):
            result = flash_attn_with_kvcache(q, k, v, **options)
        return result if isinstance(result, tuple) else (result, None)
    result = flash_attn_varlen_func(
        q.flatten(0, 1),
        k.view(batch * num_keys, *k.shape[2:]),
        v.view(batch * num_keys, *v.shape[2:]),
        max_seqlen_q=num_queries,
        cu_seqlens_q=starts(batch, num_queries, q.device),
        max_seqlen_k=num_keys,
        cu_seqlens_k=starts(batch, num_keys, q.device),
        **options,
    )
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out.view(batch, num_queries, *out.shape[1:])
    if lse is None:
        return out, None
    return out, lse.view(lse.shape[0], batch, num_queries).transpose(0, 1).contiguous()


def packed_over_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    table: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int | None,
) -> AttendArgs:
    """Packed queries over a cache, with the words and the defaults of the dense function."""
    require_tensor("k_cache", k_cache)
    require_tensor("cu_seqlens_q", cu_seqlens_q)
    Sizes().bind("k_cache", k_cache, "NB BS Hkv D")
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q.dim() else 0
    if table is not None and cache_batch_idx is not None:
        raise ArgumentError("page_table and cache_batch_idx are both given; the table already says where each row is")
    names = KVCACHE if table is not None else KVCACHE_ROWS
    if table is None:
        rows_of = (
            torch.arange(batch, dtype=torch.int32, device=q.device) if cache_batch_idx is None else cache_batch_idx
        )
        table = rows_of.unsqueeze(1)
    room = min(table.shape[-1] * k_cache.shape[1], FARTHEST)
    if not isinstance(cache_seqlens, Tensor):
        length = room if cache_seqlens is None else host_bound("cache_seqlens", cache_seqlens)
        cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    require_dtype("cache_seqlens", cache_seqlens, (torch.int32,))
    return AttendArgs(
        out=None,
        lse=None,
        q=q,
        k=k_cache,
        v=v_cache,
        query_start_loc=cu_seqlens_q,
        seq_lens=cache_seqlens.contiguous(),
        key_start_loc=None,
        block_table=table,
        max_q_len=q.shape[0] if max_seqlen_q is None else host_bound("max_seqlen_q", max_seqlen_q),
        max_k_len=room,
        scale=1.0,
        window=(-1, -1),
        caller=names.caller,
    )


def _one_span(x: Tensor) -> bool:
    """Whether ``[B, S, ..]`` is ``B * S`` rows at one distance, so that it can be viewed as them."""
    return x.shape[0] <= 1 or x.shape[1] <= 1 or x.stride(0) == x.shape[1] * x.stride(1)
