from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("numba", reason="the CPU backend needs pagetile[cpu]")


@pytest.fixture(scope="session")
def backend():
    from pagetile.backends.cpu import CpuBackend

    return CpuBackend()


@pytest.fixture(autouse=True)
def keep_thread_count() -> Iterator[None]:
    """Leave torch's number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
