"""Which backends there are, loaded when first asked for; one that cannot be loaded is a reason, not an error.

Importing this file imports no backend, so neither numba nor triton. A backend's module is imported by
:func:`load`, once; what went wrong is kept as the text that ``pagetile doctor`` and :class:`BackendError` print.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from pagetile.backends.protocol import Backend


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a backend lives and what it needs.

    Attributes:
        module, attribute: the class to construct, without arguments.
        devices: device types whose tensors it takes; empty for every device.
        extras: package -> the extra of pagetile that installs it.
        by_name_only: ``"auto"`` passes it over.
    """

    module: str
    attribute: str
    devices: tuple[str, ...]
    extras: tuple[tuple[str, str], ...] = ()
    by_name_only: bool = False


BACKENDS = {
    # by_name_only goes once its kernels have passed the conformance suite on a GPU.
    "hopper": Entry("pagetile.backends.hopper", "HopperBackend", ("cuda",), (("triton", "triton"),), by_name_only=True),
    "triton": Entry("pagetile.backends.triton", "TritonBackend", ("cuda",), (("triton", "triton"),)),
    "cpu": Entry("pagetile.backends.cpu", "CpuBackend", ("cpu",), (("numba", "cpu"), ("llvmlite", "cpu"))),
    "reference": Entry("pagetile.backends.reference", "ReferenceBackend", ()),
}
"""Every backend by name, most preferred first."""

_loaded: dict[str, Backend | str] = {}


def candidates(device: str) -> list[str]:
    """Names that ``"auto"`` tries for a device type, most preferred first; the reference is always the last.

    >>> candidates("cuda")
    ['triton', 'reference']
    """
    fit = {name: entry for name, entry in BACKENDS.items() if not entry.devices or device in entry.devices}
    return [name for name, entry in fit.items() if not entry.by_name_only]


def load(name: str) -> Backend | str:
    """The backend called ``name`` (one of :data:`BACKENDS`), or the reason why it cannot be loaded."""
    found = _loaded.get(name)
    if found is None:
        found = _loaded[name] = _load(BACKENDS[name])
    return found


def loaded() -> list[Backend]:
    """The backends that have been loaded so far."""
    return [found for found in list(_loaded.values()) if not isinstance(found, str)]


def forget() -> None:
    """Load every backend anew at the next call (after installing a missing extra, or in a test)."""
    _loaded.clear()


def _load(entry: Entry) -> Backend | str:
    try:
        module = import_module(entry.module)
        if not hasattr(module, entry.attribute):
            return f"{entry.module} has no {entry.attribute}"
        return getattr(module, entry.attribute)()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        for package, extra in entry.extras:
            if missing == package:
                return f"the package {package} is not installed; pip install 'pagetile[{extra}]'"
        if missing == "pagetile":
            return f"{error.name} is not part of this installation of pagetile"
        return f"{entry.module} cannot be imported: {error}"
    except Exception as error:  # a broken numba or triton may raise anything; the reason is what the user needs
        return f"{entry.module} cannot be loaded: {type(error).__name__}: {error}"
