"""Every 16-bit number there is, written into a quantised cache: the bytes are the same on every device.

``golden.json`` beside this file holds a digest of the bytes for each dtype, kind and scale, so that a machine with
another device can be held to the CPU's bytes without having them::

    for key in golden():
        call = pattern_call(key, "cuda")
        backend.write(call)
        assert digest(call.key_cache) == golden()[key]

``python -m pagetile.testing.patterns`` writes the file anew, from the CPU backend.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from pagetile.backends.protocol import Scale, WriteCall
from pagetile.contracts.dtypes import QUANTISED
from pagetile.contracts.problem import WriteProblem
from pagetile.reference.quantise import STORED_AS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SCALES = (1.0, 0.3, 0.0078125, 7.0, 1e-30, 3e30)
"""None, one that rounds, a power of two, one that leaves subnormals, two near the ends of float32's range."""

HEADS, SIZE = 4, 64
GOLDEN = Path(__file__).with_name("golden.json")


@functools.cache
def golden() -> dict[str, str]:
    """``"dtype kind scale"`` -> SHA-256 of the 65536 bytes, by pattern from 0 on."""
    return json.loads(GOLDEN.read_text())


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65536 numbers of a 16-bit dtype by their bits, ``[256, HEADS, SIZE]``."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).roll(2**15).to(torch.int16)
    return bits.view(dtype).view(-1, HEADS, SIZE)


def pattern_call(key: str, device: str = "cpu", per_head: bool = False) -> WriteCall:
    """The write of a key of :func:`golden`; V is K in reverse order.

    Args:
        per_head: pass the scale for each KV head (all equal) instead of as a number.
    """
    dtype, kind, number = key.split()
    rows = every_pattern(DTYPES[dtype]).to(device)
    caches = [torch.zeros(16, 16, HEADS, SIZE, dtype=STORED_AS[kind], device=device) for _ in "kv"]
    scale: Scale = torch.full((HEADS,), float(number), device=device) if per_head else float(number)
    problem = WriteProblem(
        torch.device(device).type, dtype, kind, "paged", len(rows), HEADS, SIZE, SIZE, 16,
        scale="head" if per_head else "tensor",
    )  # fmt: skip
    slots = torch.arange(len(rows), device=device)
    return WriteCall(problem, rows, rows.flip(0), caches[0], caches[1], slots, scale, scale)


def digest(cache: Tensor) -> str:
    """SHA-256 of a cache's bytes, in the order of its slots."""
    return hashlib.sha256(cache.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def keys() -> list[str]:
    """Every dtype, kind and scale."""
    return [f"{dtype} {kind} {scale}" for dtype in DTYPES for kind in QUANTISED for scale in SCALES]


def main() -> None:
    """Write :data:`GOLDEN` from the bytes of the CPU backend."""
    from pagetile.backends.cpu import CpuBackend

    found = {}
    for key in keys():
        call = pattern_call(key)
        CpuBackend().write(call)
        found[key] = digest(call.key_cache)
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
