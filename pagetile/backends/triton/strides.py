"""What a kernel needs of a call's tensors beside their addresses: strides and sizes, in the order of its signature."""

from __future__ import annotations

from torch import Tensor

from pagetile.backends.protocol import AttendCall
from pagetile.backends.triton.scales import scale_strides


def query_strides(call: AttendCall) -> tuple[int, ...]:
    return call.q.stride(0), call.q.stride(1)


def cache_strides(x: Tensor) -> tuple[int, int, int]:
    """``(block, token, head)`` strides of K or V; a ragged one has no block stride."""
    return (x.stride(0), x.stride(1), x.stride(2)) if x.dim() == 4 else (0, x.stride(0), x.stride(1))


def result_strides(call: AttendCall) -> tuple[int, ...]:
    lse = (call.lse.stride(0), call.lse.stride(1)) if call.lse is not None else (0, 0)
    return call.out.stride(0), call.out.stride(1), *lse


def sizes(call: AttendCall) -> tuple[int, int, int]:
    """``(columns of the table, blocks of the cache, block size)``."""
    if call.block_table is None:
        return 0, 0, 1
    return call.block_table.shape[1], call.k.shape[0], call.k.shape[1]


def table_strides(call: AttendCall) -> tuple[int, int]:
    table = 0 if call.block_table is None else call.block_table.stride(0)
    slopes = call.alibi_slopes
    return table, slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0


def strides(call: AttendCall) -> tuple[int, ...]:
    return (
        *query_strides(call), *cache_strides(call.k), *cache_strides(call.v), *result_strides(call),
        *table_strides(call), *scale_strides(call.k_scale), *scale_strides(call.v_scale),
    )  # fmt: skip


def log2_block(block_size: int) -> int:
    """The shift of a power-of-two block size, or -1 for division at run time."""
    return block_size.bit_length() - 1 if block_size > 0 and block_size & (block_size - 1) == 0 else -1
