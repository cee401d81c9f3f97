"""Where one token lives, in words and numbers: position -> block, offset, slot, byte addresses, and the way back.

Every figure comes from :mod:`pagetile.contracts.geometry`, the room that kernels' addresses are tested against; the
work splits come from the backends' own tuning functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pagetile.contracts.dtypes import FLOATING
from pagetile.contracts.errors import ArgumentError, DTypeError
from pagetile.contracts.geometry import CacheStrides, join_slot, slot_of, split_position, split_slot

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
"""Bytes of an element, by dtype name."""

SHORT_NAMES = {
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "byte": "uint8",
}
"""What people call the dtypes."""


def dtype_of(name: str) -> str:
    """The full name of a dtype.

    >>> dtype_of("half"), dtype_of("fp8"), dtype_of("bfloat16")
    ('float16', 'float8_e4m3fn', 'bfloat16')

    Raises:
        DTypeError: no cache holds it.
    """
    full = SHORT_NAMES.get(name, name)
    if full not in ITEM_BYTES:
        raise DTypeError(f"dtype is {name!r}; it must be one of {', '.join((*ITEM_BYTES, *SHORT_NAMES))}")
    return full


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One K or V cache of logical shape ``[num_blocks, block_size, num_kv_heads, head_size]``, without its tensor."""

    block_size: int = 16
    num_kv_heads: int = 8
    head_size: int = 128
    dtype: str = "float16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_of(self.dtype))
        for name in ("block_size", "num_kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    def strides(self, layout: str) -> CacheStrides:
        """Strides of a contiguous cache in layout ``NHD`` or ``HND``, in elements."""
        if layout not in ("NHD", "HND"):
            raise ArgumentError(f"layout is {layout!r}; it must be 'NHD' or 'HND'")
        make = CacheStrides.nhd if layout == "NHD" else CacheStrides.hnd
        return make(self.block_size, self.num_kv_heads, self.head_size)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Where one head of one token is: bytes ``[first, last]`` from the base of the cache, both ends included."""

    head: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is to be said about one token.

    Attributes:
        position: of the request; None when only the slot is known, or when no table entry names its block.
        logical: index into the block table, or None.
        block, offset, slot: where the token is stored.
        block_table: the row that was given; empty when there is none.
        addresses: for each layout the bytes of each head asked for.
        others: further positions that the table maps to the same slot (a table that names a block twice is a fault).
    """

    cache: CacheShape
    position: int | None
    logical: int | None
    block: int
    offset: int
    slot: int
    block_table: tuple[int, ...] = ()
    addresses: dict[str, tuple[ByteRange, ...]] = field(default_factory=dict)
    others: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def explain_position(
    block_table: Sequence[int], position: int, cache: CacheShape | None = None, heads: Sequence[int] | None = None
) -> Explanation:
    """A position of a request, followed through its block table.

    Args:
        block_table: the request's row, physical block of each logical block.
        position: from 0.
        cache: sizes of the cache; the worked example's by default.
        heads: KV heads whose addresses are wanted; None is all of them.

    >>> e = explain_position([7, 2, 9], 20)
    >>> e.logical, e.offset, e.block, e.slot
    (1, 4, 2, 36)
    >>> e.addresses["NHD"][3]
    ByteRange(head=3, first=74496, last=74751)

    Raises:
        BlockTableError: the table has no entry for the position.
        ArgumentError: a negative position or block id, or a head that is not there.
    """
    cache = cache or CacheShape()
    if position < 0:
        raise ArgumentError(f"position is {position}; positions of a request start at 0")
    slot = slot_of(block_table, position, cache.block_size)
    logical, _ = split_position(position, cache.block_size)
    if block_table[logical] < 0:
        raise ArgumentError(f"block_table[{logical}] is {block_table[logical]}; a block id is 0 or more")
    return _explain(slot, tuple(block_table), cache, heads, position)


def explain_slot(
    slot: int, block_table: Sequence[int] = (), cache: CacheShape | None = None, heads: Sequence[int] | None = None
) -> Explanation:
    """The way back: a slot's block and offset, and with a block table the position that is stored there.

    >>> e = explain_slot(36, [7, 2, 9])
    >>> e.block, e.offset, e.logical, e.position
    (2, 4, 1, 20)
    >>> explain_slot(36).position is None
    True

    Raises:
        ArgumentError: a negative slot (such rows are not stored), an address past 64 bits, or a head that is not there.
    """
    cache = cache or CacheShape()
    if slot < 0:
        raise ArgumentError(f"slot is {slot}; a row with a negative slot is not stored, so it is nowhere in the cache")
    return _explain(slot, tuple(block_table), cache, heads, None)


def _explain(
    slot: int, table: tuple[int, ...], cache: CacheShape, heads: Sequence[int] | None, position: int | None
) -> Explanation:
    block, offset = split_slot(slot, cache.block_size)
    last = (block + 1) * cache.block_size * cache.num_kv_heads * cache.head_size * cache.itemsize
    if last > 2**63:
        raise ArgumentError(
            f"slot {slot} of {cache.num_kv_heads} heads of {cache.head_size} {cache.dtype} would be past 2^63 bytes; "
            "slots and addresses are 64 bits wide"
        )
    found = [join_slot(logical, offset, cache.block_size) for logical, home in enumerate(table) if home == block]
    if position is None and found:
        position = found[0]
    wanted = range(cache.num_kv_heads) if heads is None else heads
    return Explanation(
        cache=cache,
        position=position,
        logical=None if position is None else split_position(position, cache.block_size)[0],
        block=block,
        offset=offset,
        slot=slot,
        block_table=table,
        addresses={layout: _addresses(slot, cache, layout, wanted) for layout in ("NHD", "HND")},
        others=tuple(p for p in found if p != position),
    )


def _addresses(slot: int, cache: CacheShape, layout: str, heads: Sequence[int]) -> tuple[ByteRange, ...]:
    strides, size = cache.strides(layout), cache.itemsize
    ranges = []
    for head in heads:
        if not 0 <= head < cache.num_kv_heads:
            raise ArgumentError(f"head is {head}; the cache has KV heads 0 to {cache.num_kv_heads - 1}")
        first = strides.element(slot, head, cache.block_size) * size
        ranges.append(ByteRange(head, first, first + cache.head_size * size - 1))
    return tuple(ranges)


def source_dtype(cache_dtype: str, dtype: str | None) -> str:
    """dtype of key and value rows that go into a cache: the cache's own, or what was said for a quantised one.

    Raises:
        DTypeError: not a floating dtype that an op takes, or another one than a floating cache's.
    """
    if dtype is None:
        return cache_dtype if cache_dtype in FLOATING else "bfloat16"
    full = dtype_of(dtype)
    if full not in FLOATING or (cache_dtype in FLOATING and full != cache_dtype):
        raise DTypeError(
            f"key and value are {full} and the cache is {cache_dtype}; a cache holds their dtype or is quantised"
        )
    return full
