"""Every exception that pagetile raises on purpose.

::

    PagetileError
    ├── ShapeError         (ValueError)           two sizes that must agree do not
    ├── ArgumentError      (ValueError)           a value outside what the argument allows
    ├── DTypeError         (TypeError)            a dtype, or a pair of dtypes, that no op takes
    ├── DeviceError        (ValueError)           tensors of one call live on different devices
    ├── SlotError          (IndexError)           a slot outside the cache
    ├── BlockTableError    (IndexError)           a block id outside the cache
    ├── UnsupportedError   (NotImplementedError)  an argument that is known here and not implemented
    │   └── BackendError                          the backend asked for cannot take this problem
    ├── CacheFileError     (ValueError)           a file that is damaged, or was saved from another kind of cache
    └── OutOfBlocksError   (RuntimeError)         the pool has fewer free blocks than asked for

Each class also derives from the builtin that a caller would expect, so ``except IndexError`` works without
importing anything from here. Messages name the tensor, the axis, both values and the way out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


class PagetileError(Exception):
    """Base of all exceptions raised on purpose by pagetile."""

    def rename(self, names: Mapping[str, str]) -> None:
        """Speak of tensors and bounds as the caller knows them: ``names`` is from words of the message to his."""
        if names and self.args:
            words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
            self.args = (words.sub(lambda found: names[found[0]], str(self.args[0])), *self.args[1:])


class ShapeError(PagetileError, ValueError):
    """Two sizes that must agree do not."""


class ArgumentError(PagetileError, ValueError):
    """A value outside what the argument allows."""


class DTypeError(PagetileError, TypeError):
    """A dtype, or a pair of dtypes, that no op takes."""


class DeviceError(PagetileError, ValueError):
    """Tensors of one call live on different devices."""


class SlotError(PagetileError, IndexError):
    """A slot outside the cache."""


class BlockTableError(PagetileError, IndexError):
    """A block id outside the cache."""


class UnsupportedError(PagetileError, NotImplementedError):
    """An argument, or a combination of arguments, that is known here and not implemented."""


class BackendError(UnsupportedError):
    """The backend asked for cannot take this problem.

    Attributes:
        reasons: backend name -> every reason why it refused.
    """

    def __init__(self, message: str, reasons: Mapping[str, Sequence[str]]) -> None:
        super().__init__(message)
        self.reasons = {name: list(why) for name, why in reasons.items()}


class CacheFileError(PagetileError, ValueError):
    """A file that is damaged, is no saved cache, or was saved from another kind of cache."""


class OutOfBlocksError(PagetileError, RuntimeError):
    """The pool has fewer free blocks than asked for. Nothing was taken."""
