"""Which vector instructions the kernels are written for.

One number follows from it: ``width``, the floats in a vector. Kernels are explicit LLVM vectors of that width, so an
AVX2 machine and an AVX-512 machine run the same source.

==========  =====  ==============================================================================
name        width  taken when
==========  =====  ==============================================================================
avx512         16  x86 with avx512f, avx512bw, avx512vl and fma
avx2            8  x86 with avx2, fma and f16c
generic         4  everything else (128-bit vectors: NEON, SSE2); half precision by integer operations
==========  =====  ==============================================================================

``PAGETILE_CPU_ISA`` forces a narrower one, for tests and comparisons. It must be set before anything is compiled: it
then also takes the wider instructions away from numba, for the whole process.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from pagetile.contracts.errors import ArgumentError

ENV = "PAGETILE_CPU_ISA"
WIDTHS = {"avx512": 16, "avx2": 8, "generic": 4}
_NEEDS = {"avx512": ("avx512f", "avx512bw", "avx512vl", "fma", "f16c"), "avx2": ("avx2", "fma", "f16c"), "generic": ()}


@dataclass(frozen=True, slots=True)
class Isa:
    """A choice of vectors.

    Attributes:
        name: see the table above.
        width: floats in a vector.
        native_half: the machine converts float16; otherwise integer operations do.
        features: what numba may use, in LLVM's ``+a,-b`` form; None leaves numba's own choice (the host).
    """

    name: str
    width: int
    native_half: bool
    features: str | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.width} floats a vector)"


def choose_isa(features: dict[str, bool], forced: str | None = None) -> Isa:
    """The widest vectors that ``features`` (LLVM's names) allow, or the forced ones.

    Raises:
        ArgumentError: ``forced`` is not a name, or the machine lacks what it needs.
    """
    if forced and forced not in WIDTHS:
        raise ArgumentError(f"{ENV} is {forced!r}; it must be one of {', '.join(WIDTHS)}")
    fits = [name for name, needs in _NEEDS.items() if all(features.get(f) for f in needs)]
    if not forced:
        return _isa(fits[0])
    if forced not in fits:
        missing = [f for f in _NEEDS[forced] if not features.get(f)]
        raise ArgumentError(
            f"{ENV}={forced} needs {', '.join(missing)}, which this CPU lacks; it can run {', '.join(fits)}"
        )
    if forced == fits[0]:
        return _isa(forced)
    return _isa(forced, _without_avx512(features))


@functools.cache
def host_isa() -> Isa:
    """The choice for this process: the host's features and ``PAGETILE_CPU_ISA``."""
    import llvmlite.binding as llvm

    try:
        features = dict(llvm.get_host_cpu_features())
    except RuntimeError:  # LLVM does not know this host: take nothing for granted
        features = {}
    return choose_isa(features, os.environ.get(ENV, "").strip().lower() or None)


def _isa(name: str, features: str | None = None) -> Isa:
    return Isa(name, WIDTHS[name], native_half=name != "generic", features=features)


def _without_avx512(features: dict[str, bool]) -> str:
    wide = ("avx512", "avx10", "evex512")
    return ",".join(f"{'+' if on and not f.startswith(wide) else '-'}{f}" for f, on in sorted(features.items()))
