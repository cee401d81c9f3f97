"""What the files of the conformance suite share: who is tested, on which cases, and how a call is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from pagetile.backends.protocol import AttendCall, MergeCall, WriteCall
from pagetile.testing import AttendCase, BuiltAttend, build_attend, takes
from pagetile.testing.cases import Case
from pagetile.testing.machine import Subject, subjects

SUBJECTS = subjects()
THREADS = torch.get_num_threads()


def each_subject() -> pytest.MarkDecorator:
    """Parametrise over the backends of this machine."""
    return pytest.mark.parametrize("subject", SUBJECTS, ids=str)


def each_case(draw: Callable[..., Iterator[Case]], seed: int = 0, count: int = 0) -> pytest.MarkDecorator:
    """Parametrise over the backends, and for each over the cases that it says it takes."""
    pairs = [
        pytest.param(subject, case, id=f"{subject}-{i}")
        for subject in SUBJECTS
        for i, case in enumerate(draw(subject.backend, seed, count, subject.device))
    ]
    return pytest.mark.parametrize(("subject", "case"), pairs)


def each_of(*cases: AttendCase) -> pytest.MarkDecorator:
    """Parametrise over the backends and the given cases, as far as they are taken."""
    pairs = [
        pytest.param(subject, case, id=f"{subject}-{i}")
        for subject in SUBJECTS
        for i, case in enumerate(cases)
        if takes(subject.backend, case, subject.device)
    ]
    return pytest.mark.parametrize(("subject", "case"), pairs)


def run(subject: Subject, call: AttendCall | WriteCall | MergeCall) -> None:
    """Run a call on all threads; everything round it runs on one (tiny tensors, and machines that are shared)."""
    verb = {AttendCall: "attend", WriteCall: "write", MergeCall: "merge"}[type(call)]
    why = subject.backend.why_not(call.problem)
    if why and isinstance(call, AttendCall) and not subject.backend.why_not(replace(call.problem, aligned=True)):
        pytest.skip(f"{subject}: {why[0]}")  # a case says nothing about the alignment of the storage it will get
    assert not why, f"{subject} took the case and refuses its tensors: {why}"
    with threads(1 if subject.name == "reference" else THREADS):
        getattr(subject.backend, verb)(call)


def attended(subject: Subject, case: AttendCase, **how: bool) -> BuiltAttend:
    """A case, built and run."""
    built = build_attend(case, subject.device, **how)
    run(subject, built.call)
    return built


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
