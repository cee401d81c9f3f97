from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """The cases are tiny; torch's own threads would only wait for each other. Two keep the kernels' splits honest."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)
