"""Launching a kernel with tensor maps at little host cost.

Triton's public path encodes every map and looks at every argument of every call. A :class:`Launch` keeps what cannot
change between two calls of one shape, maps by address among it, and reads only pointers again. The compiled kernel's
own launcher is private to Triton, so it is used behind a probe, in versions it is known in, and only while every
pointer is 16-byte aligned as the compiled variant assumes; every other call takes the public path.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from pagetile.backends.hopper import maps
from pagetile.backends.hopper.maps import Box, Encoder

KNOWN_VERSIONS = ("3.6",)
"""Triton versions whose compiled kernels are launched directly."""

MAX_VARIANTS = 1024
_variants: dict[tuple, tuple] = {}  # what a variant is specialised by -> what a direct launch needs


def variants() -> list[str]:
    """The compiled variants that are launched directly, one line each."""
    return sorted(f"{key[0]} on device {key[1]}, {len(key[2])} constants" for key in _variants)


def forget() -> None:
    """Drop every cached launcher."""
    _variants.clear()


def specialised_by(scalars: tuple, parameters: list) -> tuple:
    """What Triton 3.6 compiles another variant for: the type of an integer and, unless told not to, being 1 or 16n."""
    found = []
    for value, parameter in zip(scalars, parameters, strict=True):
        if isinstance(value, int):
            wide = not -(2**31) <= value < 2**31
            found.append(wide if parameter.do_not_specialize else (wide, value == 1, value % 16 == 0))
    return tuple(found)


class Launch:
    """One kernel, one grid, one set of boxes, integers and constants; called with the tensors of the moment.

    Args:
        kernel: a ``gluon.jit`` function of maps, then pointers, then numbers, then constants.
        programs: of the grid.
        boxes: of the maps, in the order of the signature.
        scalars, constants: in the order of the signature.
        options: ``num_warps``, ``maxnreg``, ``launch_pdl``.
    """

    __slots__ = ("_direct", "_encoders", "_tail", "boxes", "constants", "kernel", "options", "programs", "scalars")

    def __init__(
        self, kernel: Any, programs: int, boxes: tuple[Box, ...], scalars: tuple, constants: dict[str, Any],
        **options: Any,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.programs = programs
        self.boxes = boxes
        self.scalars = scalars
        self.constants = constants
        self.options = options
        self._tail = (*scalars, *constants.values())
        self._direct: tuple | None = None
        self._encoders: list[Encoder] = []

    def direct(self, stream: int, mapped: tuple[Tensor, ...], pointers: list[int]) -> bool:
        """Launch through the compiled kernel's own launcher if it is at hand and its assumptions hold.

        ``mapped`` tensors have the shapes and strides of the first call's.
        """
        if self._direct is None:
            return False
        together = 0
        for pointer in pointers:
            together |= pointer
        if together & 15:
            return False
        run, function, cooperative, dependent, packed = self._direct[:5]
        arguments: list[Any] = []
        for tensor, encoder in zip(mapped, self._encoders, strict=True):
            arguments += encoder(tensor)
        run(
            self.programs, 1, 1, stream, function, cooperative, dependent, None, None, packed, None, None, None,
            *arguments, *pointers, *self._tail,
        )  # fmt: skip
        return True

    def public(self, device: int, stream: int, mapped: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> None:
        """Launch through Triton's own path, on ``stream`` of ``device``, which must be the current ones; remembers the
        variant if the next call can be launched directly."""
        first = len(self.boxes) + len(tensors)
        pointers = [t.data_ptr() for t in tensors]
        aligned = not any(pointer & 15 for pointer in pointers)
        known = aligned and ".".join(triton.__version__.split(".")[:2]) in KNOWN_VERSIONS
        key = (
            self.kernel.__name__,
            device,
            tuple(self.constants.values()),
            tuple(self.options.items()),
            self.boxes,
            tuple(t.dtype for t in (*mapped, *tensors)),
            specialised_by(self.scalars, self.kernel.params[first : first + len(self.scalars)]),
        )
        self._take(_variants.get(key) if known else None)
        if self.direct(stream, mapped, pointers):
            return
        descriptors = [maps.descriptor(tensor, box) for tensor, box in zip(mapped, self.boxes, strict=True)]
        compiled = self.kernel[(self.programs, 1, 1)](
            *descriptors, *tensors, *self.scalars, **self.constants, **self.options
        )
        self._take(_direct_launcher(compiled, len(self.boxes)) if known else None)
        if self._direct is not None:
            while len(_variants) >= MAX_VARIANTS:
                _variants.pop(next(iter(_variants), None), None)
            _variants[key] = self._direct

    def _take(self, found: tuple | None) -> None:
        self._direct = found
        if found is not None:
            metas, encode, types = found[5:]
            self._encoders = [Encoder(meta, encode, types) for meta in metas]


def _direct_launcher(compiled: Any, num_maps: int) -> tuple | None:
    """What a direct launch passes to Triton's C launcher; None where it needs more than we know to give."""
    try:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        launcher = compiled.run
        metas = tuple(compiled.metadata.tensordesc_meta)
        if launcher.global_scratch_size or launcher.profile_scratch_size or len(metas) != num_maps:
            return None
        if any(meta is None or meta["fp4_padded"] for meta in metas):
            return None
        # The launcher that encodes maps wraps the one that takes them encoded.
        inner = [cell.cell_contents for cell in launcher.launch.__closure__ or ()]
        [run] = [thing for thing in inner if callable(thing)]
        encode = triton.runtime.driver.active.utils.fill_tma_descriptor
        return (
            run,
            compiled.function,
            launcher.launch_cooperative_grid,
            launcher.launch_pdl,
            compiled.packed_metadata,
            metas,
            encode,
            TMA_DTYPE_DEVICE_TO_HOST,
        )
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):  # another private launcher: the public path
        return None
