"""A scale on its way through an operator schema, which has no type for "a tensor or a float"."""

from __future__ import annotations

from torch import Tensor

from pagetile.backends.protocol import Scale


def split_scale(scale: Scale) -> tuple[Tensor | None, float | None]:
    """``(tensor, float)``, at most one of them given."""
    if scale is None or isinstance(scale, Tensor):
        return scale, None
    return None, scale


def join_scale(tensor: Tensor | None, number: float | None) -> Scale:
    """The inverse of :func:`split_scale`."""
    return number if tensor is None else tensor
