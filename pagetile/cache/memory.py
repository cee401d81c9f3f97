"""How much memory a cache may take, without another package to ask."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pagetile.contracts.errors import ArgumentError

DEFAULT_FRACTION = {"cpu": 0.5, "cuda": 0.85}
"""Share of the available memory that ``num_blocks="auto"`` takes when ``memory`` is not given."""

ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector of a CPU."""


def available_bytes(device: torch.device | str) -> int:
    """Bytes that can be allocated on a device now.

    On a CPU the smaller of ``MemAvailable`` in ``/proc/meminfo`` and what the control group leaves; on a GPU what
    ``torch.cuda.mem_get_info`` calls free.

    Raises:
        ArgumentError: this system does not say; give the number of blocks or of bytes instead.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        found = [n for n in (_meminfo(Path("/proc/meminfo")), _control_group(Path("/sys/fs/cgroup"))) if n is not None]
        if found:
            return max(0, min(found))
    raise ArgumentError(
        f"the available memory of {device} is not known on this system; give num_blocks, or memory in bytes"
    )


def budget(memory: int | float | None, device: torch.device | str) -> int:
    """Bytes meant by ``memory``: an int is bytes, a float in (0, 1] a share of what is available, None the default."""
    device = torch.device(device)
    if memory is None:
        memory = DEFAULT_FRACTION.get(device.type, 0.5)
    if isinstance(memory, float):
        if not 0.0 < memory <= 1.0:
            raise ArgumentError(f"memory is {memory}; a float is a share of the available memory, in (0, 1]")
        return int(available_bytes(device) * memory)
    if memory < 1:
        raise ArgumentError(f"memory is {memory}; an integer counts bytes, at least 1")
    return int(memory)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on a CPU pages of memory that the system hands out when they are first touched.

    ``torch.zeros`` writes every byte of a CPU tensor at once. Memory from ``calloc`` is zero by the system's promise
    and costs nothing until it is used, so a large cache starts in no time. NumPy's also asks for huge pages. The base
    is aligned to 64 bytes.
    """
    device = torch.device(device)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)


def _meminfo(path: Path) -> int | None:
    """``MemAvailable`` in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024  # the file counts kibibytes
    return None


def _control_group(root: Path) -> int | None:
    """What the limit of a version 2 control group leaves, in bytes; None without a limit."""
    try:
        limit, used = (root / "memory.max").read_text().strip(), (root / "memory.current").read_text().strip()
    except OSError:
        return None
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None
