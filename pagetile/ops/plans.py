"""What a call has already settled: everything about it that does not depend on data.

A plan is kept under the dtypes, shapes, strides, alignment and flags of a call, so the same question asked again
(the next layer, the next step) is neither validated nor dispatched anew. The store is bounded, and it can be printed
and cleared.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from pagetile.backends.protocol import Backend
from pagetile.contracts.problem import Problem
from pagetile.ops.again import Settled
from pagetile.ops.overlap import Apart

Question = TypeVar("Question", bound=Problem)


@dataclass(frozen=True, slots=True)
class Plan(Generic[Question]):
    """A validated problem and the backend that takes it; ``apart``: which tensors must not share memory."""

    problem: Question
    backend: Backend
    apart: Apart = field(default_factory=lambda: Apart((), ()))

    def __str__(self) -> str:
        return f"{self.backend.name}: {self.problem}"


class Plans:
    """Plans by key; the oldest leave when there are more than ``limit``.

    Attributes:
        settled: whole calls, for which no key is made.
    """

    def __init__(self, limit: int = 4096) -> None:
        self.limit = limit
        self.settled = Settled()
        self._plans: dict[Hashable, Plan[Any]] = {}
        self.get = self._plans.get  # bound once: the lookup is on the path of every call

    def put(self, key: Hashable, plan: Plan[Question]) -> Plan[Question]:
        """Keep ``plan``; safe when several threads settle the same key."""
        plans = self._plans
        while len(plans) >= self.limit:
            plans.pop(next(iter(plans), None), None)
        plans[key] = plan
        return plan

    def clear(self) -> None:
        """Forget every plan, so that backends are asked again."""
        self._plans.clear()
        self.settled.clear()

    def __len__(self) -> int:
        return len(self._plans)

    def __str__(self) -> str:
        lines = sorted({str(plan) for plan in list(self._plans.values())})
        return "\n".join([f"{len(self._plans)} plans of at most {self.limit}", *lines])


PLANS = Plans()
"""The plans of the public ops."""


def tensor_key(tensor: Any) -> Hashable:
    """What a plan depends on in a tensor, a number or None; anything else is refused when the plan is made."""
    if tensor is None:
        return None
    if isinstance(tensor, Tensor):
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg()
    return type(tensor), tensor if isinstance(tensor, int | float) else None
