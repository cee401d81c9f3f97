"""Block tables, page sizes, and what lies past the last token of a page: the wrong page, or out of bounds."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from field_kit import attend, deal, each_backend, ints, only_on_cpu, randn, scatter, table_of, zero_query

from pagetile.contracts.errors import BlockTableError, SlotError
from pagetile.ops import reshape_and_cache_flash
from pagetile.testing import first_difference, same_bits
from pagetile.testing.machine import Subject


@each_backend()
def test_wrong_page_onnxruntime_32391(subject: Subject) -> None:
    """Table ids past the cache: never block 0 instead, and bad writes never land (microsoft/onnxruntime#32391)."""
    only_on_cpu(subject)
    k, v = (randn(3, 4, 1, 8, seed=s) for s in (0, 1))
    before = k.clone(), v.clone()
    q = randn(1, 1, 8, seed=2)
    with pytest.raises(BlockTableError, match=r"block_table\[0, 0\] is 99.*3 blocks"):
        attend(subject, q, k, v, ints([[99, 1]], subject), [8], [1])
    with pytest.raises(SlotError, match=r"slot_mapping\[0\] is 396"):
        reshape_and_cache_flash(q, q, k, v, ints([99 * 4], subject, torch.int64), backend=subject.name)
    assert same_bits(k, before[0])
    assert same_bits(v, before[1])


TABLE_AT_THE_END = """
import ctypes, mmap, sys
import torch
from pagetile.ops import flash_attn_varlen_func

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(start + page), page, 0) == 0  # touching a byte past the table is a crash
table = torch.frombuffer(memory, dtype=torch.int32, count=6, offset=page - 24).view(2, 3)
table.copy_(torch.tensor([[4, 1, 2**31 - 1], [0, 3, 2]]))
k = torch.randn(5, 16, 2, 64); v = torch.randn(5, 16, 2, 64); q = torch.randn(7, 4, 64)
lens = torch.tensor([17, 33], dtype=torch.int32)
for dtype in (torch.float32, torch.bfloat16):
    args = [x.to(dtype) for x in (q, k, v)]
    for starts, causal in (([0, 1, 2], False), ([0, 3, 7], True)):
        loc = torch.tensor(starts, dtype=torch.int32)
        how = dict(seqused_k=lens, causal=causal, backend=sys.argv[1])
        out, safe = (flash_attn_varlen_func(*args, 4, loc, 33, block_table=t, **how) for t in (table, table.clone()))
        assert torch.equal(out[: starts[-1]], safe[: starts[-1]]), dtype
print("alive")
"""


@each_backend()
def test_read_past_the_table_flash_attention_42(subject: Subject) -> None:
    """The table ends where the mapping ends: nothing reads past its rows (vllm-project/flash-attention#42)."""
    only_on_cpu(subject)
    command = [sys.executable, "-X", "faulthandler", "-c", TABLE_AT_THE_END, subject.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "alive", done.stderr


@each_backend()
def test_last_tile_fewer_pages_flash_attention_42(subject: Subject) -> None:
    """Lengths 17 and 33 in pages of 16: the last tile covers fewer pages than it has room for."""
    out, lse = zero_query(subject, [17, 33])
    assert out.flatten().tolist() == [8.0, 16.0]
    assert lse.flatten().tolist() == pytest.approx([math.log(17), math.log(33)])


@each_backend()
def test_page_256_flashinfer_4347(subject: Subject) -> None:
    """Page size 256: only the first 4096 tokens and the last page attended (flashinfer-ai/flashinfer#4347)."""
    out, lse = zero_query(subject, [6144], block_size=256, num_q_heads=4, head_size=256)
    assert out.flatten().tolist() == pytest.approx([3071.5] * 4, rel=1e-6)
    assert lse.flatten().tolist() == pytest.approx([math.log(6144)] * 4)


@each_backend()
def test_page_32_from_17_tokens_vllm_57614(subject: Subject) -> None:
    """Block size 32 wrong from 17 tokens on (vllm-project/vllm#57614)."""
    for length in (15, 16, 17, 31, 32, 33):
        out, _ = zero_query(subject, [length], block_size=32)
        assert out.item() == pytest.approx((length - 1) / 2), length


@each_backend()
def test_where_the_pages_sit_pytorch_182593(subject: Subject) -> None:
    """The output depends on where the pages sit (pytorch/pytorch#182593)."""
    length, size = 2048, 128
    k, v = (randn(length, 2, size, seed=s) for s in (0, 1))
    q = randn(3, 4, size, seed=2).to(subject.device)
    results = []
    for first in (1, 130):
        blocks = [first + (17 * i) % 128 for i in range(128)]
        caches = (scatter([x], [blocks], 16, 260, math.nan).to(subject.device) for x in (k, v))
        results.append(
            attend(subject, q, *caches, table_of([blocks], subject), [length], [3], causal=True, window_size=(511, 0))
        )
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b), first_difference(a, b)


@each_backend()
def test_fewer_keys_than_a_page_pytorch_160861(subject: Subject) -> None:
    """64 keys in a block of 128: the tail unmasked (pytorch/pytorch#160861)."""
    assert zero_query(subject, [64], block_size=128)[0].item() == pytest.approx(31.5)


@each_backend()
def test_causal_decode_vllm_xpu_kernels_181(subject: Subject) -> None:
    """``causal=True`` on a one-token decode adds positions past the length (vllm-project/vllm-xpu-kernels#181)."""
    k, v = (scatter([randn(5, 1, 8, seed=s)], [[0]], 16, 1, 1e4).to(subject.device) for s in (0, 1))
    q = randn(1, 1, 8, seed=2).to(subject.device)
    results = [attend(subject, q, k, v, ints([[0]], subject), [5], [1], causal=causal) for causal in (True, False)]
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])
    assert results[0][0].abs().max() < 10


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 17, 24, 32, 48, 64, 128, 256, 544])
@each_backend()
def test_every_page_size_vllm_42510(subject: Subject, block_size: int) -> None:
    """Block sizes offered as valid that crash (vllm-project/vllm#42510, #41363): here all of them work."""
    lens = [1, block_size, block_size + 1, 3 * block_size - 1, 700]
    out, lse = zero_query(subject, lens, block_size=block_size, num_q_heads=2)
    assert out[:, 0].tolist() == pytest.approx([(n - 1) / 2 for n in lens], rel=1e-6)
    assert lse[1].tolist() == pytest.approx([math.log(n) for n in lens], abs=1e-6)


@each_backend()
def test_each_sequence_alone_sglang_jax_20(subject: Subject) -> None:
    """Locations padded for the batch, not for each request: from the second on wrong (sgl-project/sglang-jax#20)."""
    assert zero_query(subject, [3, 5, 9], block_size=4)[0].flatten().tolist() == pytest.approx([1.0, 2.0, 4.0])
    for length in (3, 5, 9):
        assert zero_query(subject, [length], block_size=4)[0].item() == pytest.approx((length - 1) / 2)


@each_backend()
def test_prefix_hit_through_the_table_ssd_23(subject: Subject) -> None:
    """Prefill after a prefix hit reads the cache as if it were contiguous (tanishqkumar/ssd#22): table [7, 2, 9]."""
    length, size = 37, 64
    k = torch.eye(size)[:length].unsqueeze(1)
    v = randn(length, 1, size, seed=1)
    caches = (scatter([x], [[7, 2, 9]], 16, 10, math.nan).to(subject.device) for x in (k, v))
    k_cache, v_cache = caches
    asked = [20, 0, 15, 16, 32]
    q = 100 * size**0.5 * k[asked].to(subject.device)
    out, _ = attend(subject, q, k_cache, v_cache, table_of([[7, 2, 9]], subject), [length], [5], causal=True)
    assert torch.equal(out.cpu(), v[asked])
    assert torch.equal(out[0].cpu(), v_cache[2, 4].cpu()), "position 20 is block 2, offset 4"


@each_backend()
def test_page_wider_than_the_tile_flashinfer_4570(subject: Subject) -> None:
    """Head size 512 with pages of 32: the page step becomes 0 (flashinfer-ai/flashinfer#4570)."""
    out, _ = zero_query(subject, [100], block_size=32, head_size=512)
    assert out.item() == pytest.approx(49.5, rel=1e-6)


@each_backend()
def test_blocks_by_permutation(subject: Subject) -> None:
    """Fixture PERM over a mixed batch."""
    lens, q_lens = [40, 3, 65], [2, 1, 5]
    tokens = [[randn(n, 2, 16, seed=10 * s + i) for i, n in enumerate(lens)] for s in (0, 1)]
    q = randn(sum(q_lens), 4, 16, seed=5).to(subject.device)
    results = []
    for seed in (None, 3, 4):
        blocks, num_blocks = deal(lens, 8, seed)
        caches = (scatter(t, blocks, 8, num_blocks, math.nan).to(subject.device) for t in tokens)
        results.append(attend(subject, q, *caches, table_of(blocks, subject, lens, 8, num_blocks, 2), lens, q_lens))
    for other in results[1:]:
        assert same_bits(results[0][0], other[0])
        assert same_bits(results[0][1], other[1])
