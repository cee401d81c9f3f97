"""Collectives over one group, with errors that say who did not answer; what is sent is bytes, so that no rank rounds.

Every collective here is one call of ``torch.distributed``, started without waiting. On CPUs (gloo) waiting ends with
the group's time limit or ``timeout``, whichever is less. On GPUs (NCCL) waiting orders streams and costs no time on
the host, so a dead peer is found by NCCL's own watchdog, which ends the process after the group's time limit; with
``timeout`` the host waits for the result and raises instead (not while a CUDA graph is captured).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pagetile.contracts.errors import ArgumentError
from pagetile.distributed.errors import PeerError

# The names of torch 2.13, and those before it, which it warns about.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Exchange:
    """The ranks that exchange states.

    Attributes:
        group: a process group, or None for a single rank that needs none.
        size, rank: ranks in the group, and this one.
        timeout: seconds to wait for a collective, or None for the group's own limit.
    """

    def __init__(self, group: Any = None, timeout: float | None = None) -> None:
        if hasattr(group, "get_group") and not isinstance(group, dist.ProcessGroup):
            if group.ndim != 1:
                raise ArgumentError(
                    f"group is a DeviceMesh of {group.ndim} axes; states are exchanged along one, pass mesh['cp']"
                )
            group = group.get_group()
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if timeout is not None and not timeout > 0:
            raise ArgumentError(f"timeout is {timeout}; it is a number of seconds above 0, or None for the group's")
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ArgumentError("this rank is not in the group; pass the group that it is in")
        self.timeout = timeout

    def all_to_all(self, sent: Tensor, send_sizes: list[int], receive_size: int) -> tuple[Tensor, Pending]:
        """Send a piece of ``sent`` to each rank, receive one from each.

        Args:
            sent: uint8, the pieces in the order of ranks, ``send_sizes`` bytes each.
            receive_size: bytes that every rank sends here.

        Returns:
            uint8 ``[size, receive_size]``, row r from rank r, complete once the second is waited for.
        """
        received = sent.new_empty((self.size, receive_size))
        return received, self._start(
            "all-to-all",
            lambda: dist.all_to_all_single(
                received.view(-1), sent, [receive_size] * self.size, send_sizes, group=self.group, async_op=True
            ),
        )

    def all_gather(self, sent: Tensor) -> tuple[Tensor, Pending]:
        """``[size, *sent.shape]``: row r is what rank r sent. ``sent`` is contiguous."""
        received = sent.new_empty((self.size, *sent.shape))
        return received, self._start(
            "all-gather",
            lambda: _gather(received.view(-1), sent.view(-1), group=self.group, async_op=True),
        )

    def reduce_scatter(self, sent: Tensor) -> tuple[Tensor, Pending]:
        """The sum over the ranks of row ``rank`` of their ``sent`` ``[size, ...]``, contiguous."""
        received = sent.new_empty(sent.shape[1:])
        return received, self._start(
            "reduce-scatter",
            lambda: _scatter(received.view(-1), sent.view(-1), group=self.group, async_op=True),
        )

    def _start(self, what: str, start: Callable[[], Any]) -> Pending:
        try:
            return Pending(start(), what, self)
        except RuntimeError as error:
            raise self.failure(what, error) from error

    def failure(self, what: str, error: Exception) -> PeerError:
        """The error to raise for a collective that did not complete."""
        limit = "the group's time limit" if self.timeout is None else f"{self.timeout:g} s"
        return PeerError(
            f"the {what} of rank {self.rank} of {self.size} did not complete: another rank died or did not answer "
            f"within {limit}, or passed other shapes. The group cannot be used any more; end this process, or make new "
            f"groups without the rank that is gone. torch.distributed says: {error}"
        )


class Pending:
    """A collective under way."""

    def __init__(self, work: Any, what: str, exchange: Exchange) -> None:
        self._work, self._what, self._exchange = work, what, exchange

    def wait(self) -> None:
        """Have the result, on the CPU; on a GPU, have the current stream wait for it.

        Raises:
            PeerError: the collective did not complete.
        """
        work, self._work = self._work, None
        if work is None:
            return
        timeout = self._exchange.timeout
        try:
            work.wait() if timeout is None else work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._exchange.failure(self._what, error) from error


def synchronised(tensor: Tensor) -> Tensor:
    """``tensor`` as collectives want it: contiguous."""
    return tensor if tensor.is_contiguous() else tensor.contiguous(memory_format=torch.contiguous_format)
