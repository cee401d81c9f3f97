"""The CPU kernels' addresses, as the kernels compute them, are those of the geometry and of a trace's derivation.

Two probes: the kernels' own address helper is called and what it stores is read; and the write kernel runs over memory
whose every byte is watched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

import pagetile
from pagetile.backends import registry
from pagetile.contracts.geometry import CacheStrides, slot_of
from pagetile.contracts.metadata import build_metadata
from pagetile.contracts.visibility import visible_range
from pagetile.inspect import derive
from pagetile.inspect.tracer import Tracer

pytest.importorskip("numba")

HEADS, SIZE, SIZE_V, LENGTH = 3, 8, 4, 29
LAYOUTS = ["NHD", "HND", "interleaved", "halves"]
SIZES = [1, 3, 16, 24]


def storage(layout: str, size: int, blocks: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V: a tensor each, or views of one buffer (pages in turn, or halves of the last axis)."""
    if layout == "interleaved":
        return tuple(torch.zeros(blocks, 2, size, HEADS, SIZE).unbind(1))  # type: ignore[return-value]
    if layout == "halves":
        both = torch.zeros(blocks, HEADS, size, SIZE + SIZE_V).transpose(1, 2)
        return both[..., :SIZE], both[..., SIZE:]
    if layout == "HND":
        return tuple(torch.zeros(blocks, HEADS, size, d).transpose(1, 2) for d in (SIZE, SIZE_V))  # type: ignore
    return torch.zeros(blocks, size, HEADS, SIZE), torch.zeros(blocks, size, HEADS, SIZE_V)


def strides(tensor: torch.Tensor) -> CacheStrides:
    return CacheStrides(*tensor.stride()[:3])


@functools.cache
def probes() -> tuple[Callable, Callable]:
    """The kernels' helpers, compiled to be called from here: addresses of keys, and the range a query sees."""
    import numba

    from pagetile.backends.cpu.kernels.address import fill_addresses, visible

    @numba.njit
    def addresses(block, seq, start, first, last, keys, values):
        fill_addresses(block, seq, start, first, last, keys, values)

    @numba.njit
    def visible_keys(block, seq, token, q_len, seq_len):
        return visible(block, seq, token, q_len, seq_len)

    return addresses, visible_keys


def table_row(size: int) -> list[int]:
    """7, 2, 9 and as many more as the length needs, in no order."""
    return [7, 2, 9, *np.random.default_rng(0).permutation(np.arange(10, 40)).tolist()][: -(-LENGTH // size)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
def test_addresses_of_the_attend_kernels(layout: str, size: int, wide: bool) -> None:
    from pagetile.backends.cpu import params as P
    from pagetile.backends.cpu.tuning import SCORE_PAD

    k, v = storage(layout, size)
    row = table_row(size)
    # The row before belongs to somebody else and the entries after it are garbage: neither is to be read.
    table = torch.full((2, len(row) + 3), 2**31 - 1, dtype=torch.int64 if wide else torch.int32)
    table[1, : len(row)] = torch.tensor(row)
    block = np.zeros(P.ATTEND_SLOTS, dtype=np.int64)
    block[P.A_K], block[P.A_V] = k.data_ptr(), v.data_ptr()
    for tensor, at_block, at_token in ((k, P.A_K_BLOCK, P.A_K_TOKEN), (v, P.A_V_BLOCK, P.A_V_TOKEN)):
        block[at_block], block[at_token] = (s * 4 for s in tensor.stride()[:2])
    block[P.A_BLOCK_SIZE], block[P.A_NUM_BLOCKS] = size, len(k)
    block[P.A_TABLE], block[P.A_TABLE_WIDE] = table.data_ptr(), int(wide)
    block[P.A_TABLE_ROW] = table.stride(0) * table.element_size()

    first, last = 2, LENGTH  # keys before the first are not looked up
    found = np.zeros((2, LENGTH + SCORE_PAD), dtype=np.int64)
    probes()[0](block.ctypes.data, 1, 0, first, last, found[0].ctypes.data, found[1].ctypes.data)
    for tensor, addresses in ((k, found[0]), (v, found[1])):
        expected = [
            strides(tensor).element(slot_of(row, position, size), 0, size) * 4 for position in range(first, last)
        ]
        assert (addresses[first:last] - tensor.data_ptr()).tolist() == expected
    assert not found[:, :first].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_the_derivation_has_the_kernels_addresses(layout: str, size: int) -> None:
    """The same numbers by the third way: what a trace of the op says it reads."""
    k, v = storage(layout, size)
    row = table_row(size)
    meta = build_metadata([row], [LENGTH], [1], size)
    tracer = Tracer("reference")
    pagetile.flash_attn_varlen_func(
        torch.rand(1, HEADS, SIZE),
        k,
        v,
        1,
        meta.query_start_loc,
        LENGTH,
        seqused_k=meta.seq_lens,
        block_table=meta.block_table,
        backend=tracer,
    )
    for name, tensor in (("key_cache", k), ("value_cache", v)):
        derived = [a for a in derive.accesses(tracer.trace, 0, 0) if a.tensor == name]
        expected = [
            strides(tensor).element(slot_of(row, position, size), head, size) * 4
            for position in range(LENGTH)
            for head in range(HEADS)
        ]
        assert [a.address for a in derived] == expected
        assert {a.bytes for a in derived} == {tensor.shape[3] * 4}


def test_visible_ranges_of_the_attend_kernels() -> None:
    from pagetile.backends.cpu import params as P

    block = np.zeros(P.ATTEND_SLOTS, dtype=np.int64)
    for window in ((-1, -1), (-1, 0), (7, 0), (3, 5), (0, 0)):
        block[P.A_LEFT], block[P.A_RIGHT] = window
        for q_len, seq_len in ((1, 1), (1, 37), (5, 37), (5, 2), (0, 9)):
            for i in range(q_len):
                lo, hi = probes()[1](block.ctypes.data, 0, i, q_len, seq_len)
                expected = visible_range(i, q_len, seq_len, window)
                assert (lo, hi) == expected or (lo >= hi and expected[0] >= expected[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_the_write_kernel(layout: str, size: int, dtype: torch.dtype) -> None:
    """Every byte that the kernel changed is one that the derivation names, and each of those was changed."""
    if isinstance(registry.load("cpu"), str):
        pytest.skip("the CPU backend cannot be loaded here")
    k, v = (
        torch.empty_strided(t.shape, t.stride(), dtype=dtype) if layout in ("NHD", "HND") else None
        for t in storage(layout, size)
    )
    if k is None or v is None:
        whole = torch.zeros(40, 2, size, HEADS, SIZE, dtype=dtype)
        k, v = whole.unbind(1)
        if layout == "halves":
            whole = torch.zeros(40, HEADS, size, SIZE + SIZE_V, dtype=dtype)
            both = whole.transpose(1, 2)
            k, v = both[..., :SIZE], both[..., SIZE:]
    meta = build_metadata([table_row(size)], [LENGTH], [11], size, skip=[[(20, 22)]], pad_tokens=13)
    key, value = (torch.rand(13, HEADS, t.shape[3]).to(dtype) + 1 for t in (k, v))
    k.zero_(), v.zero_()
    tracer = Tracer("cpu")
    pagetile.reshape_and_cache_flash(key, value, k, v, meta.slot_mapping, backend=tracer)
    named = [a for a in derive.accesses(tracer.trace, 0, 0) if a.head is not None]
    for name, tensor in (("key_cache", k), ("value_cache", v)):
        itemsize = tensor.element_size()
        expected = {b for a in named if a.tensor == name for b in range(a.address, a.address + a.bytes, itemsize)}
        places = torch.tensor(tensor.stride()) * torch.nonzero(tensor)
        assert set((places.sum(1) * itemsize).tolist()) == expected
        assert len(expected) == 9 * HEADS * tensor.shape[3]
