"""Compiling and caching: the one place that decorates.

A kernel is a cached ``cfunc`` of int64 arguments, the first of which is the address of a block of named 64-bit slots
(see :mod:`pagetile.backends.cpu.params`). A kernel may call another one by an address that stands in the block, which
is how one driver serves every element dtype. Helpers that a kernel inlines are marked :func:`inlined`.

Numba does not notice that an inlined helper in another file was edited, and would go on running the old machine code.
So the cache directory carries a digest over every source file of this package, the versions of numba, llvmlite and
Python, and the vectors chosen: an edit changes the path, and nothing stale can be found there.

``fastmath`` is never set: NaN must propagate, and sums keep the order they are written in.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import llvmlite
import numba
from numba import cfunc, types
from numba.extending import register_jitable

from pagetile.backends.cpu.isa import host_isa

log = logging.getLogger("pagetile")

PACKAGE = Path(__file__).resolve().parent
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_lock = threading.RLock()
_announced = False


def inlined(function: Callable) -> Callable:
    """Decorator of a helper that kernels call: compiled into each of them, once for each set of types.

    Unlike ``njit``, which would compile it again for every literal that some call passes.
    """
    return register_jitable(no_cfunc_wrapper=True, **_OPTIONS)(function)


def source_digest(package: Path = PACKAGE) -> str:
    """Digest of everything that machine code depends on."""
    digest = hashlib.sha256()
    for version in (numba.__version__, llvmlite.__version__, sys.version, host_isa().name):
        digest.update(version.encode())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_root() -> Path:
    """``$PAGETILE_CACHE_DIR``, or ``$XDG_CACHE_HOME/pagetile``, or ``~/.cache/pagetile``."""
    if own := os.environ.get("PAGETILE_CACHE_DIR"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pagetile"


@functools.cache
def cache_dir() -> Path | None:
    """Where this process keeps compiled kernels; None if nothing can be written there."""
    try:
        path = cache_root() / f"cpu-{source_digest()}"
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, RuntimeError):  # read-only, no space, no home directory
        return None
    return path


class Kernel:
    """A function ``void(int64, ...)``, compiled at its first use, or read from the cache."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.name = function.__name__
        self._arguments = function.__code__.co_argcount
        self._function = function
        self._compiled = None
        self._call = None
        self._address = 0
        self.seconds = 0.0
        self.from_cache = False

    @property
    def address(self) -> int:
        """Machine address, for :func:`pagetile.backends.cpu.launch.launch`."""
        if not self._address:
            self.compile()
        return self._address

    def __call__(self, *arguments: int) -> None:
        """Run once on this thread; the GIL is released meanwhile."""
        if self._call is None:
            self.compile()
        self._call(*arguments)

    def compile(self) -> None:
        """Compile, or load from the cache. Idempotent, safe from several threads."""
        with _lock:
            if self._address:
                return
            _take_features()
            where = cache_dir()
            cached = where is not None and any(where.rglob(f"*.{self.name}-*.nbi"))
            if not cached:
                _announce(where)
            start = time.perf_counter()
            try:
                compiled = self._build(where)
            except OSError:  # the cache directory filled up or vanished: do without it
                compiled = self._build(None)
            self.seconds = time.perf_counter() - start
            self.from_cache = compiled.cache_hits > 0
            self._compiled = compiled
            self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self._arguments)(compiled.address)
            self._address = compiled.address

    def assembly(self) -> str:
        """Machine code as text, for tests; empty if it came from the cache."""
        self.compile()
        return "" if self.from_cache else self._compiled._library.get_asm_str()

    def _build(self, where: Path | None):
        decorate = cfunc(types.void(*[types.int64] * self._arguments), cache=where is not None, **_OPTIONS)
        config = numba.config
        # The cache's place is read while decorating. A locator class set by the user would ignore it.
        before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(where or ""), ""
        try:
            return decorate(self._function)
        finally:
            config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


def _announce(where: Path | None) -> None:
    global _announced
    if _announced:
        return
    _announced = True
    place = f"kept in {where}" if where else f"not kept: {cache_root()} cannot be written (set PAGETILE_CACHE_DIR)"
    log.warning("pagetile: compiling CPU kernels for %s, once, %s", host_isa(), place)


@functools.cache
def _take_features() -> None:
    """Keep numba to the instructions of a forced, narrower choice."""
    isa = host_isa()
    if isa.features is None:
        return
    numba.config.CPU_FEATURES = isa.features
    from numba.core.registry import cpu_target

    used = str(cpu_target.target_context.codegen().magic_tuple())
    if "+avx512" in used:
        log.warning(
            "pagetile: PAGETILE_CPU_ISA=%s came too late: numba already compiles for this host's full features; "
            "set the variable before the process compiles anything",
            isa.name,
        )
