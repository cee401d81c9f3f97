"""Options of the whole test run."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backends",
        default="",
        help="comma-separated backends for the conformance and field suites; default: every one that loads here",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Read where the suites are collected, see pagetile.testing.machine.
    if config.getoption("--backends"):
        os.environ["PAGETILE_TEST_BACKENDS"] = config.getoption("--backends")
