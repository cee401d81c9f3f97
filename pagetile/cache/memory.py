"""How much memory a cache may take, without another package to ask."""

from __future__ import annotations

from pathlib import Path

import torch

from pagetile.contracts.errors import ArgumentError

DEFAULT_FRACTION = {"cpu": 0.5, "cuda": 0.85}
"""Share of the available memory that ``num_blocks="auto"`` takes when ``memory`` is not given."""


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
