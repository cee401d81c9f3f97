"""Which backend takes a problem, and why the others do not.

The device of the tensors decides who is asked, most preferred first (``pagetile.backends.registry``). ``"auto"``
takes the first that has no reason against; a name runs that backend or raises with every reason it has.
"""

from __future__ import annotations

import logging

from pagetile.backends import registry
from pagetile.backends.protocol import Backend
from pagetile.contracts.errors import ArgumentError, BackendError
from pagetile.contracts.problem import Problem
from pagetile.ops.spans import spanned

log = logging.getLogger("pagetile")

_MAX_SAID = 256
_said: dict[tuple[str, str], None] = {}  # what has been logged, so that it is said once


def select(problem: Problem, backend: str | Backend = "auto") -> Backend:
    """The backend that takes ``problem``.

    Args:
        problem: the question, without tensors; ``problem.device`` is where they live.
        backend: ``"auto"``, one of ``hopper``, ``triton``, ``cpu``, ``reference``, or a backend object (a tracer, a
            kernel of your own). Under ``torch.compile`` it must be a name, since it is part of the graph.

    Raises:
        ArgumentError: there is no backend of that name.
        BackendError: the backend asked for cannot take the problem, or (``auto``) none can. ``reasons`` has them all.
    """
    if not isinstance(backend, str):
        why = backend.why_not(problem)
        if why:
            raise BackendError(f"backend {backend.name!r} cannot {problem}: {'; '.join(why)}", {backend.name: why})
        return spanned(backend)
    if backend != "auto":
        if backend not in registry.BACKENDS:
            raise ArgumentError(f"backend is {backend!r}; it must be auto or one of {', '.join(registry.BACKENDS)}")
        found, why = ask(backend, problem)
        if found is None:
            raise BackendError(
                f"backend={backend!r} cannot {problem}: {'; '.join(why)}. "
                "Pass backend='auto' to take the first one that can",
                {backend: why},
            )
        return spanned(found)

    reasons: dict[str, list[str]] = {}
    for name in registry.candidates(problem.device):
        found, why = ask(name, problem)
        if found is not None:
            if reasons:
                _say(problem, name, reasons)
            return spanned(found)
        reasons[name] = why
    raise BackendError(f"no backend can {problem}: {_all(reasons)}", reasons)


def ask(name: str, problem: Problem) -> tuple[Backend | None, list[str]]:
    """The backend called ``name`` and no reasons, or None and every reason why it cannot take ``problem``."""
    found = registry.load(name)
    if isinstance(found, str):
        devices = registry.BACKENDS[name].devices
        if devices and problem.device not in devices:
            return None, [f"the tensors are on {problem.device}, and {name} takes {' or '.join(devices)}", found]
        return None, [found]
    why = found.why_not(problem)
    return (None, why) if why else (found, [])


def reasons(problem: Problem) -> dict[str, list[str]]:
    """Every backend with its reasons against ``problem``; an empty list means that it can take it."""
    return {name: ask(name, problem)[1] for name in registry.BACKENDS}


def forget() -> None:
    """Say everything once more, and load every backend anew."""
    _said.clear()
    registry.forget()


def _say(problem: Problem, taken: str, reasons: dict[str, list[str]]) -> None:
    """Log once that a preferred backend was passed over: a warning where only the slow truth is left."""
    key = (taken, _all(reasons))
    if key in _said:
        return
    if len(_said) >= _MAX_SAID:
        _said.clear()
    _said[key] = None
    level = logging.WARNING if taken == "reference" else logging.INFO
    log.log(level, "%s takes %s, because %s", taken, problem, key[1])


def _all(reasons: dict[str, list[str]]) -> str:
    return "; ".join(f"{name}: {' and '.join(why)}" for name, why in reasons.items())
