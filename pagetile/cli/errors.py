"""A user's mistake is one line and exit code 2; a defect keeps its traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from pagetile.contracts.errors import PagetileError


class UsageError(PagetileError):
    """The command line asks for something that does not make sense."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn what a user can put right into one line on standard error and exit code 2."""
    try:
        yield
    except (PagetileError, ImportError, OSError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"pagetile: {line}", err=True)
        raise typer.Exit(2) from error
