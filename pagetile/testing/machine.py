"""Who is to be tested here: every backend that loads on this machine, on every device it takes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from pagetile.backends import registry
from pagetile.backends.protocol import Backend

ENV = "PAGETILE_TEST_BACKENDS"
"""Comma-separated names; when set, only these backends are tested."""


@dataclass(frozen=True)
class Subject:
    """A backend on a device. ``str`` is its name, and the device where it is not the CPU."""

    backend: Backend
    device: str

    @property
    def name(self) -> str:
        """Of the backend."""
        return self.backend.name

    def __str__(self) -> str:
        return self.name if self.device == "cpu" else f"{self.name}@{self.device}"


def subjects() -> list[Subject]:
    """Every backend that loads, most preferred first. Triton runs on CPU tensors under ``TRITON_INTERPRET=1``."""
    wanted = [name for name in os.environ.get(ENV, "").split(",") if name] or list(registry.BACKENDS)
    found = []
    for name in wanted:
        for device in _devices(name):
            backend = registry.load(name)
            if not isinstance(backend, str):
                found.append(Subject(backend, device))
    return found


def _devices(name: str) -> list[str]:
    takes = registry.BACKENDS[name].devices or ("cuda", "cpu")
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        return ["cpu"]
    return [d for d in takes if d == "cpu" or (d == "cuda" and torch.cuda.is_available())]
