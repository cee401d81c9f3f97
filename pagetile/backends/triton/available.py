"""Whether this machine can run Triton kernels at all, and what is missing if not.

Looks at files and versions only: nothing is compiled, no device is initialised beyond asking whether there is one.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from pathlib import Path

import torch

OLDEST = (3, 6)
"""The oldest Triton these kernels are held to."""


def compiler_reasons(environment: dict[str, str] | None = None, include: str | None = None) -> list[str]:
    """What Triton needs at its first launch on NVIDIA and does not find: it builds a small C module in Python.

    Triton 3.6 takes ``$CC``, else gcc or clang from the path, and Python's own headers.
    """
    env = os.environ if environment is None else environment
    reasons = []
    named = env.get("CC")
    found = shutil.which(named, path=env.get("PATH")) if named else None
    found = found or next((c for c in ("gcc", "clang") if shutil.which(c, path=env.get("PATH"))), None)
    if not found:
        reasons.append(
            "Triton builds a small C launcher at its first call, and there is no C compiler: install gcc or clang, "
            "or name one in $CC"
        )
    headers = Path(include or sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        reasons.append(
            f"Triton builds a small C launcher at its first call, and {headers}/Python.h is absent: install Python's "
            "development headers (python3-dev on Debian and Ubuntu)"
        )
    return reasons


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on CPU tensors."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def machine_reasons() -> tuple[str, ...]:
    """Every reason why no kernel can run here; empty on a machine with a GPU, or under Triton's interpreter."""
    try:
        import triton
    except ImportError as error:
        return (f"triton cannot be imported ({error}); pip install 'pagetile[triton]'",)
    version = tuple(int(x) for x in triton.__version__.split("+")[0].split(".")[:2])
    reasons = []
    if version < OLDEST:
        reasons.append(
            f"triton is {triton.__version__}; these kernels need {OLDEST[0]}.{OLDEST[1]} or newer "
            "(pip install -U triton)"
        )
    if interpreted():
        return tuple(reasons)
    if not torch.cuda.is_available():
        return (*reasons, "torch sees no CUDA device (pip install a CUDA build of torch, check the driver)")
    if torch.version.hip is None:
        reasons += compiler_reasons()
    return tuple(reasons)


def device_reasons(device: str) -> list[str]:
    """Why tensors on this type of device cannot be taken."""
    if interpreted():
        return [] if device == "cpu" else [f"under TRITON_INTERPRET=1 tensors live on the cpu, these are on {device}"]
    return [] if device == "cuda" else [f"the tensors are on {device}; Triton kernels run on cuda"]
