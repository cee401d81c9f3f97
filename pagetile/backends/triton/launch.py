"""Launching a kernel at little host cost.

Triton's public launch path looks at every argument of every call (about 19 microseconds for 17 arguments). A
:class:`Launch` keeps what cannot change between two calls of one shape (the compiled kernel, the integers, the
constants) and reads only the pointers again. The compiled kernel's own launcher is private to Triton, so it is used
behind a probe, in versions it is known in, and only for pointers aligned as the compiled variant assumes (there is one
for each pattern that is met); every other call takes the public path, which compiles or finds the right variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from pagetile.backends.triton.available import interpreted

KNOWN_VERSIONS = ("3.6",)
"""Triton versions whose compiled kernels are launched directly."""

MAX_VARIANTS = 4096
_variants: dict[tuple, tuple] = {}  # what a variant is specialised by -> its launcher; printed and cleared below
_probed: bool | None = None


def variants() -> list[str]:
    """The compiled variants that are launched directly, one line each."""
    return sorted(f"{key[0]} on device {key[1]}, {len(key[2])} constants" for key in _variants)


def forget() -> None:
    """Drop every cached launcher; the next call of each goes through Triton's public path."""
    _variants.clear()


def specialised_by(scalars: tuple, parameters: list) -> tuple:
    """What Triton 3.6 compiles another variant for: the type of an integer and, unless told not to, being 1 or 16n."""
    found = []
    for value, parameter in zip(scalars, parameters, strict=True):
        if isinstance(value, int):
            wide = not -(2**31) <= value < 2**31
            found.append(wide if parameter.do_not_specialize else (wide, value == 1, value % 16 == 0))
    return tuple(found)


def direct_launch_known() -> bool:
    """Whether this Triton's private launcher is one we know: by version, NVIDIA, not interpreted."""
    global _probed
    if _probed is None:
        known = ".".join(triton.__version__.split(".")[:2]) in KNOWN_VERSIONS
        _probed = known and not interpreted() and torch.version.cuda is not None
    return _probed


class Launch:
    """One kernel, one grid, one set of integers and constants; called with the tensors of the moment.

    A compiled kernel assumes of each pointer either that it is a multiple of 16 bytes or nothing, so there is one
    variant for each pattern of alignment that is met.

    Args:
        kernel: a ``triton.jit`` function whose pointers come first.
        grid: three integers.
        scalars: the run-time integers and floats, in the order of the signature.
        constants: the ``constexpr`` arguments, in the order of the signature.
        options: ``num_warps`` and the like.
    """

    __slots__ = ("_aligned", "_tail", "_unaligned", "constants", "grid", "kernel", "options", "scalars")

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], scalars: tuple, constants: dict[str, Any], **options: int
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.scalars = scalars
        self.constants = constants
        self.options = options
        self._tail = (*scalars, *constants.values())
        self._aligned: tuple | None = None
        self._unaligned: dict[tuple, tuple] = {}

    def __call__(self, device: int, *tensors: Tensor) -> None:
        """Launch on the current stream of ``device``, which must be the current device."""
        if not self.direct(device, [t.data_ptr() for t in tensors]):
            self.public(device, tensors)

    def direct(self, device: int, pointers: Sequence[int]) -> bool:
        """Launch through the compiled kernel's own launcher if it is at hand for pointers so aligned."""
        together = 0
        for pointer in pointers:
            together |= pointer
        found = self._unaligned.get(alignment(pointers)) if together & 15 else self._aligned
        if found is None:
            return False
        run, middle, packed = found
        run(
            *self.grid, torch._C._cuda_getCurrentRawStream(device), *middle, packed, None, None, None, *pointers,
            *self._tail,
        )  # fmt: skip
        return True

    def public(self, device: int, tensors: tuple[Tensor, ...]) -> None:
        """Launch through Triton's public path; remember the variant if the next call can be launched directly."""
        if not direct_launch_known():
            self.kernel[self.grid](*tensors, *self.scalars, **self.constants, **self.options)
            return
        pattern = alignment([t.data_ptr() for t in tensors])
        key = (
            self.kernel.__name__,
            device,
            tuple(self.constants.values()),
            tuple(self.options.items()),
            tuple(t.dtype for t in tensors),
            pattern,
            specialised_by(self.scalars, self.kernel.params[len(tensors) : len(tensors) + len(self.scalars)]),
        )
        found = _variants.get(key)
        if found is None:
            compiled = self.kernel[self.grid](*tensors, *self.scalars, **self.constants, **self.options)
            found = _direct_launcher(compiled)
            if found is not None:
                while len(_variants) >= MAX_VARIANTS:
                    _variants.pop(next(iter(_variants), None), None)
                _variants[key] = found
                self._remember(pattern, found)
            return
        self._remember(pattern, found)
        self.direct(device, [t.data_ptr() for t in tensors])

    def _remember(self, pattern: tuple, found: tuple) -> None:
        if any(pattern):
            self._unaligned[pattern] = found
        else:
            self._aligned = found


def alignment(pointers: Sequence[int]) -> tuple[int, ...]:
    """For each pointer, 0 where it is a multiple of 16 bytes and 1 where it is not."""
    return tuple([1 if pointer & 15 else 0 for pointer in pointers])


def _direct_launcher(compiled: Any) -> tuple | None:
    """What a direct launch passes to Triton's C launcher; None where it needs more than we know to give."""
    try:
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        middle = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
        return launcher.launch, middle, compiled.packed_metadata
    except AttributeError:  # another layout of the private launcher: the public path stays
        return None
