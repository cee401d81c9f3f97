"""The CPU backend."""

from pagetile.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
