"""Compile every kernel now, instead of at its first use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel that is ready.

    Attributes:
        name: of the kernel.
        seconds: that it took to compile or to load.
        from_cache: it was read from the cache.
    """

    name: str
    seconds: float
    from_cache: bool


def warmup() -> list[Compiled]:
    """Compile all kernels of this backend, or load them from the cache; takes a minute or so when cold."""
    from pagetile.backends.cpu.kernels.attend import ATTEND
    from pagetile.backends.cpu.kernels.merge import MERGE
    from pagetile.backends.cpu.kernels.prepare import PREPARE
    from pagetile.backends.cpu.kernels.quantise import CHUNKS as QUANTISE_CHUNKS
    from pagetile.backends.cpu.kernels.quantise import SERIAL as QUANTISE_SERIAL
    from pagetile.backends.cpu.kernels.score import SCORE
    from pagetile.backends.cpu.kernels.value import ADD
    from pagetile.backends.cpu.kernels.weigh import WEIGH
    from pagetile.backends.cpu.kernels.write import CHECK, CHUNKS, SERIAL, STREAMS

    kernels = [
        SERIAL,
        CHECK,
        CHUNKS,
        STREAMS,
        QUANTISE_SERIAL,
        QUANTISE_CHUNKS,
        PREPARE,
        ATTEND,
        *dict.fromkeys(WEIGH.values()),
        *SCORE.values(),
        *ADD.values(),
        MERGE,
        *_kernels_beside(),
    ]
    for kernel in kernels:
        kernel.compile()
    return [Compiled(kernel.name, kernel.seconds, kernel.from_cache) for kernel in kernels]


def _kernels_beside():
    """Of gathers, copies of blocks, fused writes and the x-packed layout."""
    from pagetile.backends.cpu.kernels import legacy
    from pagetile.backends.cpu.kernels.blocks import COPY
    from pagetile.backends.cpu.kernels.fused import FUSED
    from pagetile.backends.cpu.kernels.gather import GATHER
    from pagetile.backends.cpu.kernels.legacy_write import XPACKED

    packed = (XPACKED, legacy.PARTITIONS, legacy.ADD, *legacy.SCORE.values(), *legacy.WEIGH.values())
    return [GATHER, COPY, FUSED, *packed]
