"""What runs where: interpreted tests need ``TRITON_INTERPRET=1``, compiled ones need it unset, GPU ones a device."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def kernel_device() -> str:
    """Where kernels can run here: the CPU under the interpreter, else a GPU; skips where neither is possible."""
    pytest.importorskip("triton")
    if INTERPRETED:
        import numpy as np

        if tuple(int(x) for x in np.__version__.split(".")[:2]) >= (2, 4):
            pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4 (loop bounds as one-element arrays)")
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    return "cuda"


@pytest.fixture
def backend(kernel_device: str):  # noqa: ARG001 - skips first
    """The backend, fit to run on ``kernel_device``."""
    from pagetile.backends.triton import TritonBackend

    return TritonBackend()
