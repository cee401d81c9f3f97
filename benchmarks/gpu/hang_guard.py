"""A pytest plugin for machines on lease: a test that hangs on the device ends its process instead of the lease.

    python -m pytest -p benchmarks.gpu.hang_guard -n 14 ...

A process that waits for a kernel answers no signal, so a thread of its own ends it after ``HANG_S`` seconds (60);
under pytest-xdist the other workers go on, and the test is reported as a crash.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    faulthandler.dump_traceback_later(float(os.environ.get("HANG_S", "60")), exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
