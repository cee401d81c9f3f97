"""What a rank raises when another one is gone."""

from __future__ import annotations

from pagetile.contracts.errors import PagetileError


class PeerError(PagetileError, RuntimeError):
    """An exchange did not complete: a rank of the group died, or did not answer within the time limit.

    The group cannot be used any more, since its ranks no longer agree on what they exchange. The caches and everything
    else on this rank are as they were before the exchange.
    """
