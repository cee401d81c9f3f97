"""Checks of values that only quantised caches need: what a scale may be, and what int8 cannot store."""

from __future__ import annotations

from torch import Tensor

from pagetile.backends.protocol import Scale, WriteCall
from pagetile.contracts.errors import ArgumentError


def check_scale(name: str, scale: Scale) -> None:
    """Hold a scale of a tensor or of KV heads on the CPU to finite numbers above 0.

    Elsewhere reading it would be a synchronisation, and scales of sequences and of tokens may hold anything in padded
    rows and unused slots: all these are taken as they are. (A float is checked where its granularity is found.)

    Raises:
        ArgumentError: naming the element.
    """
    if not isinstance(scale, Tensor) or not scale.is_cpu or scale.dim() > 1:
        return
    values = (float(scale),) if scale.numel() == 1 else scale.tolist()
    for head, value in enumerate(values):
        if not 0.0 < value < float("inf"):
            where = f"[{head}]" if scale.dim() else ""
            raise ArgumentError(f"{name}{where} is {value}; a scale is a finite number above 0")


def refuse_nan(call: WriteCall) -> None:
    """``validate=True`` of a write into int8: a NaN among the rows that have a slot. One synchronisation on a GPU.

    Raises:
        ArgumentError: naming the first NaN. Nothing has been written.
    """
    count = call.slot_mapping.shape[0]
    kept = call.slot_mapping >= 0
    for name, rows in (("key", call.key), ("value", call.value)):
        bad = rows[:count].isnan() & kept.view(-1, 1, 1)
        if bad.any():
            row, head, element = bad.nonzero()[0].tolist()
            raise ArgumentError(
                f"{name}[{row}, {head}, {element}] is NaN, which int8 cannot store (without validate=True it becomes "
                "0); find where it comes from, or keep the cache in fp8_e4m3. Nothing was written"
            )
