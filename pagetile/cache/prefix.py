"""Who a block is: the identity of a prefix, as a chain of full blocks.

Two requests may share a block when everything up to its end is the same: the salt, and every token id from position
0. A :class:`Prefix` says exactly that: its own block's tokens, and the prefix before it. Its ``digest`` is chained
the same way, ``digest = hash(parent digest, tokens)``, with a strong hash over 64-bit token ids, so it is equal in
every process and may serve as a key outside of this one. Inside, a digest only finds candidates: a hit also compares
the tokens and the parents, so that no hash, however weak, can hand out another request's data.

Source: the chained block hashes of vLLM's prefix cache; hash consing for the shared parents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pagetile.contracts.errors import ArgumentError, DTypeError, ShapeError

Hasher = Callable[[bytes, bytes], bytes]
"""``(parent digest, bytes of this block) -> digest``."""

Salt = str | bytes | int | None
"""Keeps apart requests that must not share blocks (tenants, adapters, images); equal salts may share."""


def blake2b(parent: bytes, content: bytes) -> bytes:
    """The default hasher: BLAKE2b with a 32-byte digest."""
    return hashlib.blake2b(parent + content, digest_size=32).digest()


class Prefix:
    """A prefix that ends on a block boundary.

    Attributes:
        parent: the prefix one block shorter; None for the root, which holds the salt and no tokens.
        content: the block's token ids as little-endian int64 (of the root: the salt and the block size).
        digest: chained hash, a key for other processes.
        num_blocks: blocks in the prefix; the root has 0.
    """

    __slots__ = ("content", "digest", "num_blocks", "parent")

    def __init__(self, parent: Prefix | None, content: bytes, digest: bytes) -> None:
        self.parent = parent
        self.content = content
        self.digest = digest
        self.num_blocks: int = 0 if parent is None else parent.num_blocks + 1

    @classmethod
    def root(cls, salt: Salt, block_size: int, hasher: Hasher = blake2b) -> Prefix:
        """The empty prefix of a salt."""
        content = b"pagetile prefix 1;" + str(block_size).encode() + b";" + _salt_bytes(salt)
        return cls(None, content, hasher(b"", content))

    def extend(self, tokens: Any, hasher: Hasher = blake2b) -> Prefix:
        """This prefix and one more block of tokens."""
        return self.extend_bytes(token_array(tokens).tobytes(), hasher)

    def extend_bytes(self, content: bytes, hasher: Hasher = blake2b) -> Prefix:
        """:meth:`extend` by ids that are little-endian int64 bytes already."""
        return Prefix(self, content, hasher(self.digest, content))

    def same(self, other: Prefix) -> bool:
        """Whether both are the same tokens after the same salt, whatever the digests say.

        Walks towards the roots until the two chains meet in one object, which they do at once when both came from
        the same cache entries.
        """
        a: Prefix | None = self
        b: Prefix | None = other
        while a is not b:
            if a is None or b is None or a.digest != b.digest or a.content != b.content:
                return False
            a, b = a.parent, b.parent
        return True

    def __repr__(self) -> str:
        return f"Prefix({self.num_blocks} blocks, {self.digest[:6].hex()})"


def chain(
    tokens: Any, block_size: int, salt: Salt = None, hasher: Hasher = blake2b, parent: Prefix | None = None
) -> Iterator[Prefix]:
    """The prefixes of all full blocks of ``tokens``, shortest first; continues ``parent`` when given.

    >>> [p.num_blocks for p in chain(range(10), block_size=4)]      # the last 2 tokens are no full block
    [1, 2]
    >>> list(chain([65] * 4, 4))[0].digest == list(chain([321] * 4, 4))[0].digest      # 321 is 65 + 256
    False
    """
    ids = token_array(tokens)
    prefix = Prefix.root(salt, block_size, hasher) if parent is None else parent
    for start in range(0, len(ids) - block_size + 1, block_size):
        prefix = prefix.extend(ids[start : start + block_size], hasher)
        yield prefix


def token_array(tokens: Any) -> np.ndarray:
    """Token ids as little-endian int64 ``[n]``: Python or numpy integers, arrays, CPU tensors, negative ids too.

    Raises:
        DTypeError: something that is not an integer (a float is never rounded).
        ArgumentError: an id outside 64 bits.
    """
    ids = np.asarray(tokens if hasattr(tokens, "__array__") or hasattr(tokens, "__len__") else list(tokens))
    if ids.size == 0:
        return np.zeros(0, dtype="<i8")
    if ids.dtype.kind == "O" or (ids.dtype.kind == "u" and int(ids.max()) > np.iinfo(np.int64).max):
        raise ArgumentError("token_ids holds a value outside 64 bits; token ids are integers in [-2**63, 2**63)")
    if ids.dtype.kind not in "iu":
        raise DTypeError(f"token_ids has dtype {ids.dtype}; token ids are integers")
    if ids.ndim != 1:
        raise ShapeError(f"token_ids has shape {ids.shape}; give the ids of one sequence, one dimension")
    return ids.astype("<i8", copy=False)


def _salt_bytes(salt: Salt) -> bytes:
    """The salt with its type, so that ``1``, ``"1"`` and ``b"1"`` are three salts."""
    if salt is None:
        return b"none"
    if isinstance(salt, bool) or not isinstance(salt, (str, bytes, int)):
        raise DTypeError(f"salt is {type(salt).__name__}; it must be str, bytes, int or None")
    if isinstance(salt, bytes):
        return b"bytes:" + salt
    return f"{type(salt).__name__}:{salt}".encode()
