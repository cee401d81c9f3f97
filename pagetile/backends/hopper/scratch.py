"""Device memory that launches need besides their tensors: counters that are always 0 between them, and partial states.

States come from the caching allocator at every call, in the order of the stream, so that nothing is shared by two
streams or two graphs. Counters must be 0 when a kernel starts and are set back by it, so they are kept: a stretch of
one slab for each stream, and for each call of a captured graph. An aborted launch ends the CUDA context, and the slab
with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError

SLAB = 1 << 21
"""Counters of a device, 8 MiB. Where they are used up, a call gets its own, zeroed by one more launch."""

_slabs: dict[int, tuple[Tensor, list[int]]] = {}  # device -> the slab, and how much of it is given away
_streams: dict[tuple[int, int], Tensor] = {}  # (device, stream) -> its counters


def describe() -> list[str]:
    """What is held, one line a device."""
    return [f"device {device}: {given[0]} of {len(slab)} counters" for device, (slab, given) in _slabs.items()]


def forget() -> None:
    """Deal out anew to each stream. The slabs stay: graphs may have been captured over parts of them."""
    _streams.clear()


def counters(count: int, device: int, stream: int) -> Tensor:
    """``count`` int32 counters that are 0 and stay with this stream, or with this call of the graph being captured."""
    if torch.cuda.is_current_stream_capturing():
        found = _take(count, device)
        return found if found is not None else torch.zeros(count, dtype=torch.int32, device=f"cuda:{device}")
    held = _streams.get((device, stream))
    if held is None or held.numel() < count:
        if device not in _slabs:
            slab = torch.zeros(SLAB, dtype=torch.int32, device=f"cuda:{device}")
            torch.cuda.current_stream(device).synchronize()  # once: other streams may be the next to use it
            _slabs[device] = (slab, [0])
        held = _take(max(1024, 1 << (count - 1).bit_length()), device)
        if held is None:
            return torch.zeros(count, dtype=torch.int32, device=f"cuda:{device}")
        _streams[(device, stream)] = held
    return held


def _take(count: int, device: int) -> Tensor | None:
    if device not in _slabs:
        return None
    slab, given = _slabs[device]
    start = given[0]
    if start + count > len(slab):
        return None
    given[0] = start + -(-count // 4) * 4
    return slab[start : start + count]


def states(workspace: Tensor | None, floats: int, device: torch.device) -> Tensor:
    """One float32 buffer for partial states: the caller's workspace, or memory of the current stream.

    Raises:
        ArgumentError: the workspace is not contiguous, or too small.
    """
    if workspace is None:
        return torch.empty(floats, dtype=torch.float32, device=device)
    size = workspace.numel() * workspace.element_size()
    if not workspace.is_contiguous() or size < 4 * floats:
        raise ArgumentError(
            f"workspace has {size} bytes (contiguous: {workspace.is_contiguous()}), but this problem needs "
            f"{4 * floats} contiguous bytes; pass a larger one, or None"
        )
    return workspace.view(-1).view(torch.uint8)[: 4 * floats].view(torch.float32)
