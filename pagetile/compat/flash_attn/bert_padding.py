"""Padded batches to packed rows and back: ``flash_attn.bert_padding``.

Every function that packs reads the longest length back to the host, as FlashAttention's does: one synchronisation.
Gradients pass through. Source: the functions of those names in flash_attn 2.8.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``: rows ``[n, ...]`` of ``[total, ...]``, indices int64 ``[n]``."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """``[first_axis_dim, ...]`` of zeros with ``values`` ``[n, ...]`` at the rows ``indices`` ``[n]``."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that count, packed.

    Args:
        hidden_states: ``[B, S, ...]``.
        attention_mask: bool or int ``[B, S]``, 1 where a token is.
        unused_mask: bool or int ``[B, S]``, 1 where there is room that no token uses.

    Returns:
        Packed rows ``[n, ...]``, their indices int64 ``[n]`` in the flattened batch, cu_seqlens int32 ``[B + 1]``, the
        longest length, and the tokens of each sequence without the unused room, int32 ``[B]``.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lens = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _offsets(lens), _longest(lens), attention_mask.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """As :func:`unpad_input`, where a row of the batch holds several sequences end to end.

    Args:
        hidden_states: ``[B, S, ...]``.
        attention_mask_in_length: int ``[B, S]``: the lengths of the sequences in a row, then zeros. ``[2, 3, 0, 0, 0,
            0]`` is a sequence of 2 tokens, one of 3, and one slot of padding.

    Returns:
        Packed rows, their indices, cu_seqlens int32 ``[sequences + 1]``, the longest length.
    """
    total = attention_mask_in_length.sum(dim=-1, keepdim=True)  # [B, 1]
    position = torch.arange(attention_mask_in_length.shape[-1], device=total.device)
    indices = (position < total).flatten().nonzero().flatten()
    lens = attention_mask_in_length.flatten()
    lens = lens[lens.nonzero().flatten()].to(torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _offsets(lens), _longest(lens)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed rows ``[n, ...]`` back to ``[batch, seqlen, ...]``, zeros where no row goes."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _offsets(lens: Tensor) -> Tensor:
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lens: Tensor) -> int:
    return int(lens.max()) if lens.numel() else 0
