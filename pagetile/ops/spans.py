"""Spans in a ``torch.profiler`` trace, named by the problem: off until asked for.

A span wraps the verb of the backend, so it covers the launches and, on the CPU, the work. While spans are off nothing
of this is on the path of a call.
"""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

from pagetile.backends.protocol import AttendCall, Backend, MergeCall, WriteCall
from pagetile.contracts.problem import Problem
from pagetile.ops.plans import PLANS

_SHORT_WAYS = ("attend_again", "write_again")
_on = False


class Spanned:
    """A backend whose verbs run inside a span ``pagetile: <backend>: <problem>``; everything else is its own."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.name = backend.name

    def why_not(self, problem: Problem) -> list[str]:
        """The backend's reasons."""
        return self.backend.why_not(problem)

    def write(self, call: WriteCall) -> None:
        """The backend's write, in a span."""
        with record_function(f"pagetile: {self.name}: {call.problem}"):
            self.backend.write(call)

    def attend(self, call: AttendCall) -> None:
        """The backend's attention, in a span."""
        with record_function(f"pagetile: {self.name}: {call.problem}"):
            self.backend.attend(call)

    def merge(self, call: MergeCall) -> None:
        """The backend's merge, in a span."""
        with record_function(f"pagetile: {self.name}: {call.problem}"):
            self.backend.merge(call)

    def __getattr__(self, name: str) -> Any:
        if name in _SHORT_WAYS:  # they would go round the verbs
            raise AttributeError(name)
        return getattr(self.backend, name)


def profile_spans(enabled: bool = True) -> None:
    """Put a span named by the problem around every write, attention and merge in traces of ``torch.profiler``.

    Off by default: a span costs a microsecond or two a call, and calls with spans do not take the short way of calls
    that were settled before. Holds for the whole process until it is called with ``False``.
    """
    global _on
    _on = bool(enabled)
    PLANS.clear()  # a plan names the backend that runs it


def spanned(backend: Backend) -> Backend:
    """``backend``, in spans where they are on."""
    return Spanned(backend) if _on and not isinstance(backend, Spanned) else backend
