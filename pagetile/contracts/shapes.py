"""Do the tensors of a call agree? Axes are letters, and every message says who disagrees with whom.

A :class:`Sizes` remembers what each letter stands for and which tensor said so first; the next tensor that uses the
letter has to agree. With a cache of 4 heads and a key of 8 (``key`` is bound first):

>>> import torch
>>> sizes = Sizes()
>>> sizes.bind("key", torch.empty(3, 8, 64), "T Hkv D")
>>> sizes.bind("key_cache", torch.empty(10, 16, 4, 64), "NB BS Hkv D")
Traceback (most recent call last):
pagetile.contracts.errors.ShapeError: key_cache: axis 2 (Hkv) is 4, but key has Hkv = 8; key_cache [NB, BS, Hkv, D] is [10, 16, 4, 64], pass key and key_cache with the same number of KV heads

Nothing here reads a value of a tensor, so all of it holds for fake tensors and without a synchronisation.
"""  # noqa: E501 (the message is one line)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pagetile.contracts.dtypes import dtype_name
from pagetile.contracts.errors import ArgumentError, DeviceError, DTypeError, ShapeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AXES = {
    "T": "number of tokens",
    "B": "number of sequences",
    "B+1": "number of sequences, plus one",
    "Hq": "number of query heads",
    "Hkv": "number of KV heads",
    "H": "number of heads",
    "D": "head size",
    "Dv": "head size of the values",
    "NB": "number of blocks",
    "BS": "block size",
    "Sq": "number of queries of a sequence",
    "Snew": "number of new tokens of a sequence",
    "S": "number of slots of a sequence",
    "rotary/2": "number of rotary pairs",
    "rows": "number of positions",
}
"""What the letters of a shape stand for, in messages."""


class Sizes:
    """Axis letters with the size each one has, and the tensor that fixed it."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, str]] = {}

    def __getitem__(self, axis: str) -> int:
        return self._known[axis][0]

    def said_by(self, axis: str) -> str:
        """Name of the tensor that fixed ``axis``."""
        return self._known[axis][1]

    def fix(self, axis: str, size: int, name: str) -> None:
        """Let ``axis`` be ``size`` because ``name`` says so."""
        self._known[axis] = (size, name)

    def bind(self, name: str, tensor: Tensor, axes: str) -> None:
        """Hold ``tensor`` to the shape ``axes``, for example ``"NB BS Hkv D"``; ``_`` takes any size.

        Raises:
            ShapeError: the rank differs, or an axis differs from what an earlier tensor fixed.
        """
        letters = axes.split()
        shape = tensor.shape
        if len(shape) != len(letters):
            raise ShapeError(
                f"{name}: {len(shape)} axes {_show(shape)}, but {name} must have {len(letters)}: [{', '.join(letters)}]"
            )
        known = self._known
        for axis, letter in enumerate(letters):
            if letter == "_":
                continue
            size = shape[axis]
            first = known.setdefault(letter, (size, name))
            if first[0] != size:
                raise ShapeError(self._mismatch(name, shape, letters, axis, *first))

    @staticmethod
    def _mismatch(name: str, shape: Sequence[int], letters: list[str], axis: int, size: int, first: str) -> str:
        letter = letters[axis]
        return (
            f"{name}: axis {axis} ({letter}) is {shape[axis]}, but {first} has {letter} = {size}; "
            f"{name} [{', '.join(letters)}] is {_show(shape)}, "
            f"pass {first} and {name} with the same {AXES.get(letter, letter)}"
        )


def require_tensor(name: str, value: Any) -> Tensor:
    """``value``, which has to be a ``torch.Tensor`` whose memory holds what it means.

    Raises:
        DTypeError: it is something else.
        ArgumentError: it is sparse or nested, or its negative bit is set (its memory holds the negated values).
    """
    import torch

    if not isinstance(value, torch.Tensor):
        raise DTypeError(f"{name} is a {type(value).__name__}; pass a torch.Tensor")
    if value.layout is not torch.strided:
        raise ArgumentError(f"{name} has the layout {value.layout}; pass a strided tensor: {name}.to_dense()")
    if value.is_nested:
        raise ArgumentError(
            f"{name} is a nested tensor; pass its rows packed into one, with the start of each sequence"
        )
    # A graph resolves the bit by itself, before an operator sees the tensor.
    if not torch.compiler.is_compiling() and value.is_neg():
        raise ArgumentError(
            f"{name} has its negative bit set: its memory holds the negated values; pass {name}.resolve_neg()"
        )
    return value


def require_device(name: str, tensor: Tensor, other: str, device: torch.device) -> None:
    """Hold ``tensor`` to the device of the tensor called ``other``.

    Raises:
        DeviceError: it lives elsewhere.
    """
    if tensor.device != device:
        raise DeviceError(
            f"{name} is on {tensor.device}, but {other} is on {device}; move one of them: {name}.to('{device}')"
        )


def require_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype], way_out: str = "") -> None:
    """Hold ``tensor`` to one of the dtypes ``allowed``.

    Raises:
        DTypeError: it has another one.
    """
    if tensor.dtype not in allowed:
        names = " or ".join(dtype_name(dtype) for dtype in allowed)
        raise DTypeError(
            f"{name} is {dtype_name(tensor.dtype)}, but must be {names}; "
            f"{way_out or f'convert it: {name}.to(torch.{dtype_name(allowed[0])})'}"
        )


def require_same_dtype(name: str, tensor: Tensor, other: str, dtype: torch.dtype) -> None:
    """Hold ``tensor`` to the dtype of the tensor called ``other``.

    Raises:
        DTypeError: they differ; the message names both.
    """
    if tensor.dtype != dtype:
        raise DTypeError(
            f"{name} is {dtype_name(tensor.dtype)}, but {other} is {dtype_name(dtype)}; "
            f"both must have one dtype, convert one of them: {name}.to(torch.{dtype_name(dtype)})"
        )


def require_contiguous_last(name: str, tensor: Tensor) -> None:
    """Hold ``tensor`` to elements that lie side by side along its last axis; a size of 1 may carry any stride.

    Raises:
        ArgumentError: its last stride is not 1.
    """
    axis = tensor.dim() - 1
    if tensor.stride(axis) != 1 and tensor.shape[axis] > 1:
        raise ArgumentError(
            f"{name}: axis {axis} has stride {tensor.stride(axis)}, but the last axis must be contiguous (stride 1); "
            f"shape {_show(tensor.shape)}, strides {_show(tensor.stride())}. Pass {name}.contiguous() "
            f"or store {name} the other way round"
        )


def require_no_overlap(name: str, tensor: Tensor) -> None:
    """Hold a tensor that is written to one address an element.

    Raises:
        ArgumentError: an axis of more than one element has stride 0 (an expanded tensor).
    """
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            raise ArgumentError(
                f"{name}: axis {axis} has {size} elements at one address (stride 0), and {name} is written to; "
                f"pass a tensor with memory of its own: {name}.clone()"
            )


def _show(sizes: Sequence[int]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"
