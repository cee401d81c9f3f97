from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def few_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two threads keep the kernels' splits honest; the reference's tensors are so tiny that two would only wait."""
    parameters = getattr(request.node, "callspec", None)
    reference = parameters is not None and str(parameters.params.get("subject")) == "reference"
    before = torch.get_num_threads()
    torch.set_num_threads(1 if reference else min(2, before))
    yield
    torch.set_num_threads(before)
