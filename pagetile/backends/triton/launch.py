"""Launching a kernel at little host cost.

Triton's public launch path looks at every argument of every call (about 19 microseconds for 17 arguments). A
:class:`Launch` keeps what cannot change between two calls of one shape (the compiled kernel, the integers, the
constants) and reads only the pointers again. The compiled kernel's own launcher is private to Triton, so it is used
behind a probe, in versions it is known in, and only while every pointer is 16-byte aligned as the compiled variant
assumes; every other call takes the public path, which compiles or finds the right variant.
"""

from __future__ import annotations

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

    Args:
        kernel: a ``triton.jit`` function whose pointers come first.
        grid: three integers.
        scalars: the run-time integers and floats, in the order of the signature.
        constants: the ``constexpr`` arguments, in the order of the signature.
        options: ``num_warps`` and the like.
    """

    __slots__ = ("_direct", "_tail", "constants", "grid", "kernel", "options", "scalars")

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], scalars: tuple, constants: dict[str, Any], **options: int
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.scalars = scalars
        self.constants = constants
        self.options = options
        self._tail = (*scalars, *constants.values())
        self._direct: tuple | None = None

    def __call__(self, device: int, *tensors: Tensor) -> None:
        """Launch on the current stream of ``device``, which must be the current device."""
        if not self.direct(device, [t.data_ptr() for t in tensors]):
            self.public(device, tensors)

    def direct(self, device: int, pointers: list[int]) -> bool:
        """Launch through the compiled kernel's own launcher if it is at hand and its assumptions hold."""
        found = self._direct
        if found is None:
            return False
        together = 0
        for pointer in pointers:
            together |= pointer
        if together & 15:
            return False
        run, function, cooperative, dependent, packed = found
        x, y, z = self.grid
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(
            x, y, z, stream, function, cooperative, dependent, None, None, packed, None, None, None,
            *pointers, *self._tail,
        )  # fmt: skip
        return True

    def public(self, device: int, tensors: tuple[Tensor, ...]) -> None:
        """Launch through Triton's public path; remember the variant if the next call can be launched directly."""
        if not direct_launch_known() or any(t.data_ptr() & 15 for t in tensors):
            self.kernel[self.grid](*tensors, *self.scalars, **self.constants, **self.options)
            return
        key = (
            self.kernel.__name__,
            device,
            tuple(self.constants.values()),
            tuple(self.options.items()),
            tuple(t.dtype for t in tensors),
            specialised_by(self.scalars, self.kernel.params[len(tensors) : len(tensors) + len(self.scalars)]),
        )
        self._direct = _variants.get(key)
        if self._direct is not None:
            self.direct(device, [t.data_ptr() for t in tensors])
            return
        compiled = self.kernel[self.grid](*tensors, *self.scalars, **self.constants, **self.options)
        self._direct = _direct_launcher(compiled)
        if self._direct is not None:
            while len(_variants) >= MAX_VARIANTS:
                _variants.pop(next(iter(_variants), None), None)
            _variants[key] = self._direct


def _direct_launcher(compiled: Any) -> tuple | None:
    """What a direct launch passes to Triton's C launcher; None where it needs more than we know to give."""
    try:
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        return (
            launcher.launch,
            compiled.function,
            launcher.launch_cooperative_grid,
            launcher.launch_pdl,
            compiled.packed_metadata,
        )
    except AttributeError:  # another layout of the private launcher: the public path stays
        return None
