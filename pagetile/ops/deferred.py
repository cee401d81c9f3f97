"""What kernels found wrong on a device while nobody waited for them."""

from __future__ import annotations

import torch

from pagetile.backends import registry


def raise_deferred(device: torch.device | str | None = None) -> None:
    """Raise the first error that ops on ``device`` (every device by default) have met and not yet reported.

    On a GPU a slot outside the cache is skipped and a block id outside it hidden, and both are kept in an error word of
    the device, in replayed graphs too. This waits for the device, reports the first offender and clears the word. On
    the CPU every value is checked at once, so there is never anything to report.

    Raises:
        SlotError: a write met a slot outside the cache; that row was not stored.
        BlockTableError: an attention met a block id outside the cache; its keys counted as not visible.
    """
    where = None if device is None else torch.device(device)
    for backend in registry.loaded():
        hook = getattr(backend, "raise_deferred", None)
        if hook is not None:
            hook(where)
