"""Calls that were settled before, found by one comparison of all their tensors.

A plan is kept under the dtype, shape, strides and device of every tensor of a call. To read those out one by one in
Python takes longer than the kernel of a short decode. torch has a comparison of a list of tensors with what they were
before, in C++: the guards of ``torch.compile``. They hold for the type of each tensor, its dtype, device, sizes,
strides, negative bit and ``requires_grad``, and for the modes and transforms that are on, so that a call they let
through is a plain one whose every check has been passed. What is left is to read the addresses.

The guards are private to torch: :func:`guard` tries them once on tensors that differ in each of these, and where one
answer is not the right one, or they are not there, every call takes the long way through its plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Check = Callable[..., bool]

MAX_QUESTIONS = 1024
MAX_ANSWERS = 8


class Settled:
    """By the arguments that are no tensors, up to :data:`MAX_ANSWERS` pairs of a guard and what to run, newest first.

    What to run takes the tensors of the guard, and returns None where it turns out not to be meant.
    """

    def __init__(self) -> None:
        self._answers: dict[Hashable, tuple[tuple[Check, Callable[..., Any]], ...]] = {}
        self.get = self._answers.get  # bound once: the lookup is on the path of every call

    def possible(self) -> bool:
        """Whether anything can be kept."""
        return guards_hold()

    def put(self, question: Hashable, tensors: tuple[Tensor, ...], run: Callable[..., Any]) -> None:
        """Keep ``run`` for calls like this one; safe when several threads do."""
        check = guard(tensors)
        if check is None:
            return
        answers = self._answers
        while len(answers) >= MAX_QUESTIONS:
            answers.pop(next(iter(answers), None), None)
        answers[question] = ((check, run), *answers.get(question, ()))[:MAX_ANSWERS]

    def clear(self) -> None:
        """Forget everything."""
        self._answers.clear()

    def __len__(self) -> int:
        return sum(len(found) for found in list(self._answers.values()))


def guard(tensors: tuple[Tensor, ...]) -> Check | None:
    """A function that says whether other tensors are like these in all but their values and addresses, or None."""
    return _make(tensors) if guards_hold() else None


def _make(tensors: tuple[Tensor, ...]) -> Check:
    from torch._C._dynamo.guards import TensorGuards  # pyright: ignore[reportMissingImports]

    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


@functools.cache
def guards_hold() -> bool:
    """Whether this torch has the guards, and they tell apart all that a plan depends on."""
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            plain, other = torch.zeros(3, 4), torch.zeros(2)
            check = _make((plain, other))
            alike = [(torch.ones(3, 4), torch.ones(2))]
            unlike = [
                torch.ones(4, 3),
                torch.ones(4, 3).t(),
                torch.ones(3, 4, dtype=torch.int32),
                torch.ones(3, 4, device="meta"),
                torch.ones(3, 4, requires_grad=True),
                torch.ones(3, 4).as_subclass(_Other),
                torch.nn.Parameter(torch.ones(3, 4), requires_grad=False),
                torch._neg_view(torch.ones(3, 4)),  # pyright: ignore[reportPrivateImportUsage]
                None,
            ]
            good = all(check(*pair) for pair in alike)
            bad = any(check(tensor, other) or check(plain, other[:1]) for tensor in unlike)
            with _Mode():
                bad |= check(plain, other)
        return good and not bad
    except Exception:  # another layout of a private part of torch: the long way stays
        return False


class _Other(Tensor):
    pass


class _Mode(TorchDispatchMode):
    pass
