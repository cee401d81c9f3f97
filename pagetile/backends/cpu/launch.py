"""Running a compiled kernel on several threads: torch's own OpenMP team, entered directly.

``GOMP_parallel(function, argument, threads, flags)`` is what a compiler emits for ``#pragma omp parallel``. It is
looked up through ``libtorch_cpu``, so it belongs to whichever runtime torch was linked to, and no second team is
created beside torch's. Several Python threads may launch at once; each has its own team.

One thread is used after a fork (the runtime's team does not survive it, and torch's own operators hang there too),
and where the symbol does not exist (macOS, Windows).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

from pagetile.backends.cpu.jit import Kernel

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def openmp() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel`` of torch's OpenMP runtime; None where it has none of that name."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        mode = ctypes.DEFAULT_MODE | getattr(os, "RTLD_NOLOAD", 0)
        function = ctypes.CDLL(str(library), mode=mode).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


def available_threads() -> int:
    """Threads that a launch may use now: torch's number, or 1."""
    if _forked or openmp() is None:
        return 1
    return torch.get_num_threads()


def launch(kernel: Kernel, block: int, threads: int) -> None:
    """Run ``kernel(block)`` on ``threads`` threads at once, and return when all have returned.

    A kernel takes its work from tickets in the block, so it is right for any number of threads that really come.
    """
    team = openmp() if threads > 1 else None
    if team is None:
        kernel(block)
    else:
        team(kernel.address, block, threads, 0)
