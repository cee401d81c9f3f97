"""Answering ``import flash_attn`` while asked to: entries in ``sys.modules``, and none before :func:`install`.

Names and what stands behind them:

==========================  ============================================================================
``flash_attn``              FlashAttention 2, with ``flash_attn_interface`` and ``bert_padding`` in it
``flash_attn_interface``    FlashAttention 3
``vllm_flash_attn``         vLLM's fork (the distribution of its own, not the copy inside vLLM)
``sgl_kernel``              ``sgl_kernel.flash_attn`` alone; the rest of an installed sgl_kernel stays as it is
==========================  ============================================================================
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from pagetile.compat.flash_attn import bert_padding, fa2, fa3, vllm
from pagetile.contracts.errors import ArgumentError

VERSION = "2.8.4"
"""The FlashAttention whose surface this is; what ``flash_attn.__version__`` says."""

DEFAULT = ("flash_attn", "flash_attn_interface")
NAMES = (*DEFAULT, "vllm_flash_attn", "sgl_kernel")
_DISTRIBUTIONS = {"flash_attn": "flash-attn", "flash_attn_interface": "flash-attn-3"}

_replaced: dict[str, ModuleType | None] = {}
"""Entries of ``sys.modules`` that are ours now -> what stood there before."""


def install(*names: str, metadata: bool = False, replace: bool = False) -> None:
    """Have ``import flash_attn`` (and ``flash_attn_interface``) mean these functions, in this process.

    Import it before the program that needs it; what a module has imported already stays what it was::

        import pagetile.compat.flash_attn
        pagetile.compat.flash_attn.install()
        import nanovllm

    Args:
        names: which of :data:`NAMES`; none means ``flash_attn`` and ``flash_attn_interface``.
        metadata: also answer ``importlib.metadata`` for the distributions ``flash-attn`` and ``flash-attn-3``, which is
            what Transformers looks for; it keeps the answer, so install before it is imported. On machines without CUDA
            it takes no FlashAttention anyway.
        replace: put aside an installed package of that name that has been imported already.

    Calling again adds names. :func:`uninstall` puts everything back.

    Raises:
        ArgumentError: a name that is not one of :data:`NAMES`, or a package that has been imported already. Nothing has
            been changed.
    """
    chosen = names or DEFAULT
    for name in chosen:
        if name not in NAMES:
            raise ArgumentError(f"name is {name!r}; it must be one of {', '.join(NAMES)}")
    modules = {entry: module for name in chosen for entry, module in _modules(name) if entry not in _replaced}
    for entry in modules:
        there = sys.modules.get(entry)
        if there is not None and not replace:
            raise ArgumentError(
                f"{entry} is imported already, from {getattr(there, '__file__', None)}; call install() before anything "
                "imports it, or pass replace=True (what has been imported from it stays in use)"
            )
    for entry, module in modules.items():
        _replaced[entry] = sys.modules.get(entry)
        sys.modules[entry] = module
    if metadata:
        _FINDER.serve(name for name in chosen if name in _DISTRIBUTIONS)


def uninstall() -> None:
    """Undo every :func:`install`. Functions that a module has taken stay with it, and work."""
    for entry, before in _replaced.items():
        if before is None:
            sys.modules.pop(entry, None)
        else:
            sys.modules[entry] = before
    _replaced.clear()
    _FINDER.stop()


@contextmanager
def installed(*names: str, metadata: bool = False, replace: bool = False) -> Iterator[None]:
    """:func:`install` for the length of a ``with`` block, around the import of a program.

    Raises:
        ArgumentError: see :func:`install`; also when some names are installed already, which this would take away.
    """
    if _replaced:
        raise ArgumentError(f"{', '.join(_replaced)} are installed already; call uninstall() first")
    install(*names, metadata=metadata, replace=replace)
    try:
        yield
    finally:
        uninstall()


def _modules(name: str) -> Iterable[tuple[str, ModuleType]]:
    """The entries of ``sys.modules`` that stand for one name."""
    if name == "flash_attn_interface":
        return [(name, _module(name, fa3))]
    if name == "sgl_kernel":
        inside = _module("sgl_kernel.flash_attn", fa3)
        if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
            return [("sgl_kernel.flash_attn", inside)]
        return [(name, _module(name, None, flash_attn=inside)), ("sgl_kernel.flash_attn", inside)]
    surface = fa2 if name == "flash_attn" else vllm
    inside = {"flash_attn_interface": _module(f"{name}.flash_attn_interface", surface)}
    if name == "flash_attn":
        inside["bert_padding"] = _module("flash_attn.bert_padding", bert_padding)
    top = _module(name, surface, __version__=VERSION, **inside)
    return [(name, top), *((f"{name}.{part}", module) for part, module in inside.items())]


def _module(name: str, surface: ModuleType | None, **more: Any) -> ModuleType:
    """A module of that name with the public functions of ``surface``; a package where it has modules inside."""
    module = ModuleType(name, f"pagetile's {name}; see pagetile.compat.flash_attn.")
    package = any(isinstance(value, ModuleType) for value in more.values())
    module.__spec__ = ModuleSpec(name, None, origin="pagetile.compat.flash_attn", is_package=package)
    if package:
        module.__path__ = []
    module.__dict__.update(more)
    if surface is not None:
        home = surface.__name__
        functions = {k: v for k, v in vars(surface).items() if getattr(v, "__module__", "") == home and k[0].islower()}
        module.__dict__.update(functions)
        module.__dict__["__all__"] = sorted(functions)
    return module


class _Distribution(importlib.metadata.Distribution):
    """What pip would have written for a package that is not there."""

    def __init__(self, module: str) -> None:
        self._files = {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: {_DISTRIBUTIONS[module]}\nVersion: {VERSION}\n"
                "Summary: answered by pagetile.compat.flash_attn, on request\n"
            ),
            "top_level.txt": f"{module}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: a distribution of pagetile.compat.flash_attn has no files")


class _Finder(importlib.metadata.DistributionFinder):
    """Distributions by name, on ``sys.meta_path`` while it serves some. It finds no modules."""

    def __init__(self) -> None:
        self._served: dict[str, _Distribution] = {}

    def serve(self, modules: Iterable[str]) -> None:
        self._served |= {_DISTRIBUTIONS[module]: _Distribution(module) for module in modules}
        if self._served and self not in sys.meta_path:
            sys.meta_path.append(self)

    def stop(self) -> None:
        self._served.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, *asked: Any) -> None:
        del asked

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        asked = getattr(context, "name", None)
        if asked is None:
            return list(self._served.values())
        asked = asked.lower().replace("_", "-")
        return [distribution for name, distribution in self._served.items() if name == asked]


_FINDER = _Finder()
