"""Whether this machine can run the Hopper kernels at all, and what is missing if not.

Looks at files and versions only: nothing is compiled, no device is initialised beyond asking what it is.
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
CAPABILITY = (9, 0)


def compiler_reasons() -> list[str]:
    """What Triton needs at its first launch and does not find: it builds a small C module."""
    reasons = []
    named = os.environ.get("CC")
    if not (named and shutil.which(named)) and not any(map(shutil.which, ("gcc", "clang"))):
        reasons.append("Triton builds a small C launcher at its first call, and there is no C compiler: install gcc")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        reasons.append(f"Triton builds a small C launcher at its first call, and {headers}/Python.h is absent")
    return reasons


@functools.cache
def machine_reasons() -> tuple[str, ...]:
    """Every reason why no kernel can run here; empty on a machine whose every GPU is a Hopper."""
    try:
        import triton
    except ImportError as error:
        return (f"triton cannot be imported ({error}); pip install 'pagetile[triton]'",)
    version = tuple(int(x) for x in triton.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        return (f"triton is {triton.__version__}; Gluon with tensor maps needs {OLDEST[0]}.{OLDEST[1]} or newer",)
    if triton.knobs.runtime.interpret:
        return ("Gluon kernels have no interpreter; unset TRITON_INTERPRET",)
    if not torch.cuda.is_available():
        return ("torch sees no CUDA device (pip install a CUDA build of torch, check the driver)",)
    if torch.version.hip is not None:
        return ("the devices are AMD's; these kernels are for NVIDIA GPUs of compute capability 9.0",)
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    if found != {CAPABILITY}:
        shown = ", ".join(f"{major}.{minor}" for major, minor in sorted(found))
        return (f"compute capability 9.0 is needed (H100, H200, H20), and devices here have {shown}",)
    return tuple(compiler_reasons())
