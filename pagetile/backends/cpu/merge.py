"""Merge, from the host. The kernel is :mod:`pagetile.backends.cpu.kernels.merge`."""

from __future__ import annotations

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.kernels.merge import MERGE
from pagetile.backends.cpu.kernels.vector import W
from pagetile.backends.cpu.launch import available_threads, launch
from pagetile.backends.cpu.scratch import MEMORY
from pagetile.backends.cpu.tuning import merge_cut
from pagetile.backends.protocol import MergeCall
from pagetile.contracts.dtypes import dtype_name


def merge(call: MergeCall) -> None:
    """Fill ``out`` and ``out_lse`` with the sum of two states."""
    rows, heads, size = call.out.shape
    if call.query_start_loc is not None:
        rows = min(rows, int(call.query_start_loc[-1]))
    if not rows * heads:
        return
    threads, chunk = merge_cut(rows * heads, size, available_threads())
    memory = MEMORY
    block = memory.integers
    worker_bytes = 2 * (-(-size // W) * W * 4) + 64
    scratch = memory.scratch(threads * worker_bytes)
    block[P.M_TICKET] = 0
    block[P.M_WORKER] = 0
    block[P.M_ROWS] = rows
    block[P.M_HEADS] = heads
    block[P.M_SIZE] = size
    block[P.M_DTYPE] = P.DTYPE_CODES[dtype_name(call.out.dtype)]
    block[P.M_CHUNK] = chunk
    block[P.M_SCRATCH] = scratch.data_ptr()
    block[P.M_SCRATCH_BYTES] = worker_bytes
    _put_state(block, P.M_OUT, call.out, call.out_lse)
    _put_state(block, P.M_A, call.a, call.a_lse)
    _put_state(block, P.M_B, call.b, call.b_lse)
    launch(MERGE, memory.address, threads)


def _put_state(block, first: int, out, lse) -> None:
    """Seven slots: address and strides of an output, then of its log-sum-exp."""
    size = out.element_size()
    row, head, step = out.stride()
    block[first] = out.data_ptr()
    block[first + 1] = row * size
    block[first + 2] = head * size
    block[first + 3] = step * size
    if lse is None:
        block[first + 4] = 0
    else:
        head, row = lse.stride()
        block[first + 4] = lse.data_ptr()
        block[first + 5] = head * 4
        block[first + 6] = row * 4
