"""``pagetile warmup``: compile the CPU kernels now rather than at the first call."""

from __future__ import annotations

import time

import typer

from pagetile.cli.errors import UsageError, user_errors


def warmup() -> None:
    """Compile the CPU kernels; they are cached on disk for the next process."""
    with user_errors():
        from pagetile.backends import registry

        backend = registry.load("cpu")
        if isinstance(backend, str):
            raise UsageError(f"the cpu backend is not available: {backend}")
        began = time.perf_counter()
        compile_all = getattr(backend, "warmup", None) or _module_warmup()
        if compile_all is None:
            raise UsageError("the cpu backend of this version has no warm-up; its kernels compile at their first call")
        compile_all()
        typer.echo(f"the CPU kernels are ready ({time.perf_counter() - began:.1f} s)", err=True)


def _module_warmup():
    from pagetile.backends import cpu

    return getattr(cpu, "warmup", None)
