"""Names of dtypes, and what may be stored where. Strings, so that a :class:`Problem` needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagetile.contracts.errors import ArgumentError, DTypeError

if TYPE_CHECKING:
    import torch

FLOATING = ("float32", "float16", "bfloat16")
"""Dtypes of queries, keys, values and outputs on every backend (the reference also takes float64)."""

QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8")
"""Kinds of cache whose elements mean something only together with a scale."""

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8")
"""Values of ``kv_cache_dtype=``. ``auto``: the cache has the dtype of key and value, or names its own kind."""


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def storage_kind(cache_dtype: str, kv_cache_dtype: str) -> str:
    """What the elements of a cache mean: a floating dtype's name, ``fp8_e4m3``, ``fp8_e5m2`` or ``int8``.

    Args:
        cache_dtype: name of the cache tensor's dtype.
        kv_cache_dtype: the argument of that name.

    Raises:
        ArgumentError: ``kv_cache_dtype`` is not one of :data:`KV_CACHE_DTYPES`.
        DTypeError: the two contradict each other, or a ``uint8`` cache does not say which kind it holds.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ArgumentError(f"kv_cache_dtype is {kv_cache_dtype!r}; it must be one of {', '.join(KV_CACHE_DTYPES)}")
    asked = "fp8_e4m3" if kv_cache_dtype == "fp8" else kv_cache_dtype
    by_dtype = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "int8": "int8"}
    own = by_dtype.get(cache_dtype, cache_dtype)
    if cache_dtype == "uint8":
        if asked not in ("fp8_e4m3", "fp8_e5m2"):
            raise DTypeError(
                "the cache is uint8, which does not say what its bytes mean; "
                f"pass kv_cache_dtype='fp8_e4m3' or 'fp8_e5m2' (got {kv_cache_dtype!r})"
            )
        return asked
    if asked not in ("auto", own):
        raise DTypeError(
            f"kv_cache_dtype={kv_cache_dtype!r} does not fit a cache of {cache_dtype}, which holds {own}; "
            f"pass kv_cache_dtype='auto' or a cache of the kind you mean"
        )
    return own
