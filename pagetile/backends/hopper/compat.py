"""Gluon under one set of names: what Triton renamed between 3.6 and 3.9, and nothing else.

Every kernel file of this backend takes its Gluon names from here. 3.6 says ``_reinterpret``, ``thread_barrier`` and
``async_copy_global_to_shared``; newer versions say ``reinterpret``, ``barrier`` and ``async_load``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "TensorDescriptor",
    "barrier",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "load_box",
    "mbarrier",
    "reinterpret",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""``(map, coordinates, barrier, target)``: start one copy; it counts its bytes on the barrier."""

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""All threads of the partition."""

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same bytes of shared memory in another shape and layout."""
        return buffer.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same bytes of shared memory in another shape and layout."""
        return buffer._reinterpret(dtype, shape, layout)
