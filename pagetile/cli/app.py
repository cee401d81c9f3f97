"""The commands, by name."""

from __future__ import annotations

from typing import Annotated

import typer

from pagetile.cli.bench.command import bench
from pagetile.cli.doctor import doctor
from pagetile.cli.generate import generate
from pagetile.cli.warmup import warmup
from pagetile.cli.windows import register as register_windows

app = typer.Typer(
    name="pagetile",
    help="A paged KV cache and paged attention for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(doctor)
app.command()(bench)
app.command()(warmup)
register_windows(app)


def _version(show: bool) -> None:
    if show:
        from pagetile import __version__

        typer.echo(f"pagetile {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """A paged KV cache and paged attention for PyTorch."""
