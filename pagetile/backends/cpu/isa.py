"""Which vector instructions the kernels are written for.

Two facts follow from it: ``width``, the floats in a vector, and ``dot``, what multiplies bfloat16. Kernels are explicit
LLVM vectors of that width, so an AVX2 machine and an AVX-512 machine run the same source.

==========  =====  ====  ==========================================================================
name        width  dot   taken when
==========  =====  ====  ==========================================================================
amx            16  amx   as avx512bf16, with amx-tile and amx-bf16, on Linux, which must hand out the tiles
avx512bf16     16  bf16  as avx512, with avx512bf16
avx512         16        x86 with avx512f, avx512bw, avx512vl and fma
avx2            8        x86 with avx2, fma and f16c
generic         4        everything else (128-bit vectors: NEON, SSE2); half precision by integer operations
==========  =====  ====  ==========================================================================

With a ``dot``, bfloat16 queries meet bfloat16 keys in products of pairs, summed in float32, and weights are rounded to
bfloat16 before they meet values; without one, both are widened to float32. One of the two is used for every length of
query, so a decode is a row of the prefill on any machine.

``PAGETILE_CPU_ISA`` forces a narrower one, for tests and comparisons. It must be set before anything is compiled: it
then also takes the wider instructions away from numba, for the whole process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from dataclasses import dataclass
from typing import Literal

from pagetile.contracts.errors import ArgumentError

Dot = Literal["", "bf16", "amx"]
"""What multiplies bfloat16: nothing, vdpbf16ps, or tiles."""

ENV = "PAGETILE_CPU_ISA"
WIDTHS = {"amx": 16, "avx512bf16": 16, "avx512": 16, "avx2": 8, "generic": 4}
_DOTS: dict[str, Dot] = {"amx": "amx", "avx512bf16": "bf16"}
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "fma", "f16c")
_NEEDS = {
    "amx": (*_AVX512, "avx512bf16", "amx-tile", "amx-bf16"),
    "avx512bf16": (*_AVX512, "avx512bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma", "f16c"),
    "generic": (),
}


@dataclass(frozen=True, slots=True)
class Isa:
    """A choice of vectors.

    Attributes:
        name: see the table above.
        width: floats in a vector.
        native_half: the machine converts float16; otherwise integer operations do.
        dot: what multiplies bfloat16.
        features: what numba may use, in LLVM's ``+a,-b`` form; None leaves numba's own choice (the host).
    """

    name: str
    width: int
    native_half: bool
    dot: Dot = ""
    features: str | None = None

    def __str__(self) -> str:
        dots = {"": "", "bf16": ", bfloat16 by vdpbf16ps", "amx": ", bfloat16 by tiles"}
        return f"{self.name} ({self.width} floats a vector{dots[self.dot]})"


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
    if (
        forced == fits[0] or WIDTHS[forced] == 16
    ):  # vectors as wide: nothing to take away, products choose for themselves
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
    if features.get("amx-tile") and not _tiles_granted():
        features["amx-tile"] = False
    return choose_isa(features, os.environ.get(ENV, "").strip().lower() or None)


def _tiles_granted() -> bool:
    """Ask Linux to let this process use the tile registers (arch_prctl, ARCH_REQ_XCOMP_PERM of XTILEDATA)."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).syscall(158, 0x1023, 18) == 0
    except (OSError, AttributeError):
        return False


def _isa(name: str, features: str | None = None) -> Isa:
    return Isa(name, WIDTHS[name], name != "generic", _DOTS.get(name, ""), features)


def _without_avx512(features: dict[str, bool]) -> str:
    wide = ("avx512", "avx10", "evex512", "amx")
    return ",".join(f"{'+' if on and not f.startswith(wide) else '-'}{f}" for f, on in sorted(features.items()))
