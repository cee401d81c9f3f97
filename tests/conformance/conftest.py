from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance_kit import threads


@pytest.fixture(autouse=True)
def one_thread_for_the_truth() -> Iterator[None]:
    with threads(1):
        yield
