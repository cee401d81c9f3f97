"""Where it was; it ships with ``pagetile bench`` now."""

from pagetile.cli.bench.contenders import (
    MAKERS,
    Contender,
)

__all__ = ["MAKERS", "Contender"]
