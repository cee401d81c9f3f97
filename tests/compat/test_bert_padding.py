"""Padded batches to packed rows and back."""

from __future__ import annotations

import pytest
import torch

from pagetile.compat.flash_attn import pad_input, unpad_input
from pagetile.compat.flash_attn.bert_padding import unpad_input_for_concatenated_sequences

MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])


def test_there_and_back() -> None:
    hidden = torch.arange(3 * 4 * 2.0).view(3, 4, 2)
    packed, indices, offsets, longest, used = unpad_input(hidden, MASK)
    assert indices.tolist() == [1, 2, 3, 4, 5]
    assert torch.equal(packed, hidden.flatten(0, 1)[indices])
    assert (offsets.tolist(), offsets.dtype, longest) == ([0, 3, 5, 5], torch.int32, 3)
    assert (used.tolist(), used.dtype) == ([3, 2, 0], torch.int32)
    assert torch.equal(pad_input(packed, indices, 3, 4), hidden * MASK.unsqueeze(-1))


def test_room_that_no_token_uses() -> None:
    unused = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    packed, indices, offsets, longest, used = unpad_input(torch.rand(3, 4, 2), MASK.bool(), unused.bool())
    assert (len(packed), indices.tolist()) == (7, [0, 1, 2, 3, 4, 5, 7])
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 4, 7, 7], 4, [3, 2, 0])


def test_several_sequences_in_a_row() -> None:
    in_length = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    hidden = torch.arange(18.0).view(3, 6, 1)
    packed, indices, offsets, longest = unpad_input_for_concatenated_sequences(hidden, in_length)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert packed.flatten().tolist() == indices.tolist()
    assert (offsets.tolist(), longest) == ([0, 2, 5, 8, 10, 16], 6)


def test_gradients_pass_through() -> None:
    hidden = torch.rand(3, 4, 2, requires_grad=True)
    packed, indices, *_ = unpad_input(hidden, MASK)
    pad_input(2 * packed, indices, 3, 4).sum().backward()
    assert torch.equal(hidden.grad, 2.0 * MASK.unsqueeze(-1).expand_as(hidden))


def test_an_empty_batch() -> None:
    _, indices, offsets, longest, _ = unpad_input(torch.rand(0, 4, 2), MASK[:0])
    assert (indices.tolist(), offsets.tolist(), longest) == ([], [0], 0)


def test_as_transformers_packs() -> None:
    theirs = pytest.importorskip("transformers.modeling_flash_attention_utils")
    hidden = torch.rand(3, 4, 5, 2)
    ours, their = unpad_input(hidden, MASK), theirs._unpad_input(hidden, MASK)
    for a, b in zip(ours, their, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert torch.equal(pad_input(ours[0], ours[1], 3, 4), theirs._pad_input(ours[0], ours[1], 3, 4))
