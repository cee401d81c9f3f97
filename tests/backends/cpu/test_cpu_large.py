"""Addresses beyond 2**31 elements, in memory that is reserved and hardly touched."""

from __future__ import annotations

import pytest
import torch
from cpu_kit import attend_call, write_call


def reserve(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:
        pytest.skip("this machine does not hand out that much address space")


def check_block(backend, k: torch.Tensor, v: torch.Tensor, block: int, heads: int, size: int) -> None:
    """Write a token at a block's last slot, read it back through the table, compare with the same at block 0."""
    block_size = k.shape[1]
    token = torch.randn(1, heads, size).to(k.dtype), torch.randn(1, heads, size).to(k.dtype)
    outs = []
    for home in (0, block):
        slot = torch.tensor([home * block_size + block_size - 1])
        k[home], v[home] = 0.25, 0.5
        backend.write(write_call(*token, k, v, slot))
        assert torch.equal(k[home, -1], token[0][0])
        assert torch.equal(v[home, -1], token[1][0])
        call = attend_call([1], [block_size], heads=heads, size=size, block_size=block_size, dtype=k.dtype)
        call.k, call.v, call.block_table = k, v, torch.tensor([[home]], dtype=torch.int32)
        backend.attend(call)
        outs.append(call.out.clone())
    assert torch.equal(*outs)


def test_blocks_past_2_to_the_31_elements(backend) -> None:
    """64000 blocks of 16 x 32 x 128 (vllm-project/vllm#1486): the last block starts at element 4.19e9."""
    k, v = (reserve(64000, 16, 32, 128) for _ in range(2))
    check_block(backend, k, v, 63999, heads=32, size=128)


def test_keys_and_values_in_halves_of_one_large_buffer(backend) -> None:
    """K and V interleaved, so that the strides double (vllm-project/vllm#50427)."""
    both = reserve(65537, 8, 16, 256).transpose(1, 2)
    check_block(backend, both[..., :128], both[..., 128:], 65536, heads=8, size=128)


def test_many_blocks_of_one_token(backend) -> None:
    """More than 8.39 million pages of size 1 (ROCm/aiter#2517)."""
    k, v = (reserve(8401239, 1, 8, 64) for _ in range(2))
    check_block(backend, k, v, 8401238, heads=8, size=64)


def test_queries_and_outputs_past_2_to_the_31_elements(backend) -> None:
    """Rows so far apart that the last one starts at element 2**31 (sgl-project/sglang#20389)."""
    near = attend_call([17], [20], dtype=torch.bfloat16)
    far = attend_call([17], [20], dtype=torch.bfloat16)
    heads, size = near.q.shape[1:]
    far.q, far.out = (reserve(17 * 2**27).as_strided((17, heads, size), (2**27, size, 1)) for _ in range(2))
    far.q.copy_(near.q)
    backend.attend(near)
    backend.attend(far)
    assert torch.equal(far.out, near.out)


@pytest.mark.parametrize("length", [16385, 32769, 70000])
def test_long_contexts(backend, length: int) -> None:
    """q = 0 and V[j] = j: the mean of the keys, and ln of their number (ROCm/vllm#22, vllm-project/vllm#905)."""
    call = attend_call([1], [length], heads=1, group=1, size=16, window=(-1, 0))
    call.q.zero_()
    position = torch.arange(length)
    call.v[call.block_table[0, position // 16].long(), position % 16] = position.float().view(-1, 1, 1)
    backend.attend(call)
    assert call.out.double().sub((length - 1) / 2).abs().max() < length * 2e-6
    assert call.lse.double().sub(torch.tensor(float(length)).double().log()).abs().max() < 2e-6
