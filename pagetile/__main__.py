"""``pagetile`` and ``python -m pagetile``: the command line, or the name of what is missing for it."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line; exit code 2 with one line when its extra is not installed."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"pagetile: the command line needs {' and '.join(missing)}: pip install 'pagetile[cli]'\n")
        raise SystemExit(2)
    from pagetile.cli.app import app

    app()


if __name__ == "__main__":
    main()
