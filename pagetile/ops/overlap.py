"""Do two tensors of a call share memory in a way that gives silently wrong results?

Host facts only: addresses, shapes and strides. Addresses that a plan has not seen are compared range by range. Where
two ranges meet, as they do for K and V caches that are views of one buffer, it is worked out once whether any element
is in both, and remembered in the plan under the distance between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pagetile.contracts.errors import ArgumentError

_MAX_KNOWN = 1024
_MAX_WORK = 100_000
"""Steps of the search for a shared element; undecided pairs are taken as apart: only what is known wrong is refused."""

Pair = tuple[int, int, bool]
"""Two places in the list of tensors, and whether they may be the same view (an update in place)."""


def span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last; 0 where it has none."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return (last + 1) * tensor.element_size()


class Apart:
    """The pairs of a plan that must not share memory.

    Args:
        tensors: as in the call that was planned; their shapes and strides are those of every call of the plan.
        pairs: which of them must be apart.

    Attributes:
        seen: addresses that have been found apart, and need not be checked.
    """

    __slots__ = ("_known", "_pairs", "_spans", "seen")

    def __init__(self, tensors: Sequence[Tensor | None], pairs: Sequence[Pair]) -> None:
        self._spans = [0 if tensor is None else span(tensor) for tensor in tensors]
        self._pairs = [pair for pair in pairs if self._spans[pair[0]] and self._spans[pair[1]]]
        self._known: set[tuple[int, int, int]] = set()
        self.seen: set[tuple[int, ...]] = set()

    def check(self, addresses: tuple[int, ...], tensors: Sequence[Tensor | None], names: Sequence[str]) -> None:
        """Hold this call's tensors to memory of their own.

        Args:
            addresses: of ``tensors``, each at the same place; anything where the tensor is None.

        Raises:
            ArgumentError: two of them share an element, and are not the same view of it where that is allowed.
        """
        if addresses in self.seen:
            return
        spans = self._spans
        for i, j, may_be_same in self._pairs:
            here, there = addresses[i], addresses[j]
            if here < there + spans[j] and there < here + spans[i]:
                known = (i, j, here - there)
                if known not in self._known:
                    self._work_out(known, tensors, names, may_be_same)
        if len(self.seen) >= _MAX_KNOWN:
            self.seen.clear()
        self.seen.add(addresses)

    def _work_out(
        self, known: tuple[int, int, int], tensors: Sequence[Tensor | None], names: Sequence[str], may_be_same: bool
    ) -> None:
        i, j, distance = known
        a, b = tensors[i], tensors[j]
        assert a is not None
        assert b is not None
        if not (may_be_same and distance == 0 and _same_steps(a, b)) and shares_memory(a, b):
            raise ArgumentError(
                f"{names[i]} and {names[j]} share memory, so that writing to one changes the other; pass "
                f"{f'the very same view for both, or {names[j]}.clone()' if may_be_same else f'{names[j]}.clone()'}"
            )
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(known)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether any byte belongs to both, by their addresses; on any device, nothing is read."""
    try:
        return np.shares_memory(_array(a), _array(b), max_work=_MAX_WORK)  # pyright: ignore[reportArgumentType] (the stub knows the two special values only)
    except np.exceptions.TooHardError:
        return False


def _same_steps(a: Tensor, b: Tensor) -> bool:
    """One dtype and shape, and one stride along each axis that has steps."""
    steps = zip(a.shape, a.stride(), b.stride(), strict=True) if a.shape == b.shape else None
    return steps is not None and a.dtype == b.dtype and all(n <= 1 or x == y for n, x, y in steps)


class _Memory:
    """The addresses of a tensor, in the form that NumPy reasons about."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


def _array(tensor: Tensor) -> np.ndarray:
    return np.asarray(_Memory(tensor))
