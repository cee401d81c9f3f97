"""``merge_attn_states``: the sum of two states, of any strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import flash_attn_varlen_func, merge_attn_states

INF = float("inf")


def states(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 4, 8, generator=g).to(dtype) for _ in range(2))
    a_lse, b_lse = (torch.randn(4, 5, generator=g) for _ in range(2))
    return a, a_lse, b, b_lse


def test_natural_logarithms(backend: str) -> None:
    """flashinfer-ai/flashinfer#2113, sgl-project/sglang#35045: 1 and 3 with weights 1 and 3 are 2.5, their sum ln 4."""
    out, lse = torch.empty(1, 1, 8), torch.empty(1, 1)
    a, b = torch.full((1, 1, 8), 1.0), torch.full((1, 1, 8), 3.0)
    merge_attn_states(out, a, torch.zeros(1, 1), b, torch.tensor([[3.0]]).log(), lse, backend=backend)
    torch.testing.assert_close(out, torch.full((1, 1, 8), 2.5))
    torch.testing.assert_close(lse, torch.tensor([[4.0]]).log())


def test_two_halves_are_the_whole(batch: Any, backend: str) -> None:
    arguments = {**batch.attend_arguments(), "return_softmax_lse": True, "backend": backend}
    whole, whole_lse = flash_attn_varlen_func(**arguments)
    first = {**arguments, "seqused_k": torch.tensor([4, 4, 0], dtype=torch.int32)}
    rest = {**arguments, "seqused_k": batch.seqused_k - first["seqused_k"], "block_table": batch.block_table[:, 1:]}
    rest["block_table"] = rest["block_table"].clone()
    rest["block_table"][2, 0] = 11
    a, a_lse = flash_attn_varlen_func(**first)
    b, b_lse = flash_attn_varlen_func(**rest)
    out, lse = torch.empty_like(a), torch.empty_like(a_lse)
    merge_attn_states(out, a, a_lse, b, b_lse, lse, backend=backend)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("empty", [-INF, INF])
def test_the_empty_state_changes_no_bit(backend: str, dtype: torch.dtype, empty: float) -> None:
    """flashinfer-ai/flashinfer#4051; and FlashAttention 2 marks empty rows with +inf."""
    a, a_lse, _, _ = states(dtype)
    nothing, nothing_lse = torch.zeros_like(a), torch.full_like(a_lse, empty)
    for left, right in (((a, a_lse), (nothing, nothing_lse)), ((nothing, nothing_lse), (a, a_lse))):
        out, lse = torch.empty_like(a), torch.empty_like(a_lse)
        merge_attn_states(out, *left, *right, lse, backend=backend)
        assert torch.equal(out, a)
        assert torch.equal(lse, a_lse)
    merge_attn_states(out, nothing, nothing_lse, nothing, nothing_lse, lse, backend=backend)
    assert not out.any()
    assert torch.equal(lse, torch.full_like(a_lse, -INF))


def test_strides(backend: str) -> None:
    """vllm-project/vllm#22003: a transposed log-sum-exp is not read as if it were contiguous."""
    a, a_lse, b, b_lse = states()
    expected, expected_lse = torch.empty_like(a), torch.empty_like(a_lse)
    merge_attn_states(expected, a, a_lse, b, b_lse, expected_lse, backend=backend)

    out = torch.zeros(5, 4, 20)[..., 3:11]
    lse = torch.zeros(5, 4).T
    strange = (
        a.transpose(0, 1).contiguous().transpose(0, 1),
        a_lse.T.contiguous().T,
        torch.cat((b, b), dim=-1)[..., 8:],
        torch.cat((b_lse, b_lse), dim=1)[:, :5],
    )
    merge_attn_states(out, *strange, lse, backend=backend)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("which", [0, 2])
def test_in_place_of_either_input(backend: str, which: int) -> None:
    arguments = list(states())
    expected = torch.empty_like(arguments[0])
    merge_attn_states(expected, *arguments, backend=backend)
    merge_attn_states(arguments[which], *arguments, arguments[which + 1], backend=backend)
    assert torch.equal(arguments[which], expected)


def test_validate_and_backend_are_checked() -> None:
    arguments = (torch.empty(5, 4, 8), *states())
    merge_attn_states(*arguments, validate=True)
    with pytest.raises(pagetile.ArgumentError, match=r"validate is 1\.5"):
        merge_attn_states(*arguments, validate=1.5)
    with pytest.raises(pagetile.ArgumentError, match="backend is 'numba'"):
        merge_attn_states(*arguments, backend="numba")
