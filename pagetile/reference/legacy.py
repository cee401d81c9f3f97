"""The partitions of ``paged_attention_v2``, and the way from a strided cache to the x-packed one and back.

Source: vLLM 0.24 ``csrc/attention/attention_kernels.cuh``, ``paged_attention_v2_kernel`` and its reduction, without
the 1e-6 that those add to a denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagetile.contracts.geometry import blocks_for
from pagetile.reference.attend import compute_dtype
from pagetile.reference.checks import check_block_table, check_seq_lens
from pagetile.reference.quantise import Scale, dequantise, head_scale, kind_of
from pagetile.reference.storage import by_token, gather


@dataclass(frozen=True, slots=True)
class Partitions:
    """States of the partitions of each sequence's keys.

    Attributes:
        exp_sums, max_logits: ``[B, Hq, P]``.
        tmp_out: ``[B, Hq, P, Dv]``.
    """

    exp_sums: Tensor
    max_logits: Tensor
    tmp_out: Tensor


def attend_partitions(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    size: int,
    count: int,
    alibi_slopes: Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    kind: str | None = None,
    layout: str = "xpacked",
) -> Partitions:
    """One query a sequence over its whole context, cut in partitions of ``size`` keys at absolute multiples.

    Args:
        query: ``[B, Hq, D]``.
        count: P, enough for the longest sequence.
        k_scale, v_scale: None, a float, one element, ``[Hkv]`` or ``[B, Hkv]``.

    Returns:
        The maximum of a partition's scores in natural units, the sum of ``exp(score - maximum)``, and the output over
        the partition alone; -inf, 0 and 0 where it has no keys. float64 where the query is float64, else float32.
    """
    keys, values = by_token(key_cache, layout), by_token(value_cache, layout)
    num_blocks, block_size = keys.shape[:2]
    check_seq_lens(seq_lens, block_table, block_size)
    check_block_table(block_table, seq_lens, num_blocks, block_size)
    kind, dtype = kind or kind_of(key_cache), compute_dtype(query)
    (num_seqs, num_heads, size_q), num_kv_heads = query.shape, keys.shape[2]
    size_v = value_cache.shape[2] if layout == "xpacked" else value_cache.shape[-1]
    made = Partitions(
        torch.zeros(num_seqs, num_heads, count, dtype=dtype),
        torch.full((num_seqs, num_heads, count), -torch.inf, dtype=dtype),
        torch.zeros(num_seqs, num_heads, count, size_v, dtype=dtype),
    )
    for seq, length in enumerate(seq_lens.tolist()):
        blocks = block_table[seq, : blocks_for(length, block_size)]
        k, v = (
            dequantise(gather(x, blocks, length), kind, head_scale(_of(s, seq), query.device)).to(dtype)
            for x, s in ((keys, k_scale), (values, v_scale))
        )
        grouped = query[seq].to(dtype).reshape(num_kv_heads, -1, size_q)
        for part, start in enumerate(range(0, length, size)):
            here = slice(start, min(start + size, length))
            scores = scale * torch.einsum("hrd,nhd->hrn", grouped, k[here]).reshape(num_heads, -1)
            if alibi_slopes is not None:
                slopes = alibi_slopes[seq] if alibi_slopes.dim() == 2 else alibi_slopes
                distance = torch.arange(here.start, here.stop) - (length - 1)
                scores = scores - slopes.to(dtype).unsqueeze(-1) * distance.abs()
            largest = scores.amax(-1, keepdim=True)
            weights = (scores - largest).exp()
            total = weights.sum(-1, keepdim=True)
            shares = (weights / total).reshape(num_kv_heads, -1, here.stop - here.start)
            made.max_logits[seq, :, part], made.exp_sums[seq, :, part] = largest[:, 0], total[:, 0]
            made.tmp_out[seq, :, part] = torch.einsum("hrn,nhd->hrd", shares, v[here]).reshape(num_heads, size_v)
    return made


def add_partitions(exp_sums: Tensor, max_logits: Tensor, tmp_out: Tensor) -> Tensor:
    """The output ``[B, Hq, Dv]`` over all partitions; 0 where there are no keys."""
    dtype = compute_dtype(tmp_out)
    largest = max_logits.amax(-1, keepdim=True)
    weights = exp_sums * (max_logits - largest.masked_fill(largest.isneginf(), 0)).exp()  # [B, Hq, P]
    total = weights.sum(-1, keepdim=True)
    shares = weights / total.masked_fill(total == 0, 1)
    return torch.einsum("bhp,bhpd->bhd", shares.to(dtype), tmp_out.to(dtype))


def _of(scale: Scale, seq: int) -> Scale:
    """A scale for each sequence, narrowed to one of them."""
    return scale[seq] if isinstance(scale, Tensor) and scale.dim() == 2 else scale


def to_xpacked(key_cache: Tensor, value_cache: Tensor, pack: int) -> tuple[Tensor, Tensor]:
    """``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]`` as ``[NB, Hkv, D / pack, BS, pack]`` and ``[NB, Hkv, Dv, BS]``,
    contiguous copies of the same elements; ``pack`` divides D."""
    packed = key_cache.unflatten(3, (-1, pack)).permute(0, 2, 3, 1, 4)
    return packed.contiguous(), value_cache.permute(0, 2, 3, 1).contiguous()


def from_xpacked(key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`to_xpacked`: contiguous ``[NB, BS, Hkv, D]`` and ``[NB, BS, Hkv, Dv]``."""
    keys = by_token(key_cache, "xpacked").flatten(3)
    return keys.contiguous(), by_token(value_cache, "xpacked").contiguous()
