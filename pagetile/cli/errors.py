"""A user's mistake is one line and exit code 2; a defect keeps its traceback."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

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


def refusing(command: Callable[..., None]) -> Callable[..., None]:
    """What a user can put right is one line on standard error, not a traceback.

    A reader that has seen enough (``| head``) is no error worth a line, and a terminal that lacks a character gets
    another in its place.
    """

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        if getattr(sys.stdout, "errors", None) == "strict":
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        left = False
        with user_errors():
            try:
                command(*args, **options)
                sys.stdout.flush()
            except BrokenPipeError:
                left = True
        if left:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
            raise typer.Exit(1)

    return run
