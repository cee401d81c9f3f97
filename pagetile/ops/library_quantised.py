"""The registered operators of quantised caches, beside those of :mod:`pagetile.ops.library`.

====================  ======================================
operator              writes to
====================  ======================================
``write_token_head``  ``key_cache``, ``value_cache``, scales
``convert``           ``dst``
====================  ======================================
"""

from __future__ import annotations

from torch import Tensor
from torch.library import register_fake

from pagetile.ops.convert import bind_convert, run_convert
from pagetile.ops.inplace import keep_in_place
from pagetile.ops.library import LIBRARY
from pagetile.ops.scales import join_scale
from pagetile.ops.write_token_head import bind_write_token_head, run_write_token_head

SCHEMAS = {
    "write_token_head": (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
        "str kv_cache_dtype, Tensor(c!) k_scale_cache, Tensor(d!) v_scale_cache, str backend='auto', "
        "str validate='False') -> ()"
    ),
    "convert": (
        "(Tensor(a!) dst, Tensor src, Tensor? scale=None, float? scale_value=None, str kv_dtype='fp8_e4m3') -> ()"
    ),
}
"""Schemas of the registered operators, with their mutation marks."""

_VALIDATE: dict[str, bool | str] = {"False": False, "True": True}


def _write_token_head(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    backend: str = "auto",
    validate: str = "False",
) -> None:
    tensors = (key, value, key_cache, value_cache, slot_mapping, k_scale_cache, v_scale_cache)
    run_write_token_head(*tensors, kv_cache_dtype, backend, _VALIDATE.get(validate, validate))


def _write_token_head_fake(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    backend: str = "auto",
    validate: str = "False",
) -> None:
    del backend, validate
    tensors = (key, value, key_cache, value_cache, slot_mapping, k_scale_cache, v_scale_cache)
    bind_write_token_head(*tensors, kv_cache_dtype, aligned=True)


def _convert(
    dst: Tensor,
    src: Tensor,
    scale: Tensor | None = None,
    scale_value: float | None = None,
    kv_dtype: str = "fp8_e4m3",
) -> None:
    run_convert(dst, src, join_scale(scale, scale_value), kv_dtype)


def _convert_fake(
    dst: Tensor,
    src: Tensor,
    scale: Tensor | None = None,
    scale_value: float | None = None,
    kv_dtype: str = "fp8_e4m3",
) -> None:
    bind_convert(dst, src, join_scale(scale, scale_value), kv_dtype)


def _register() -> None:
    kernels = {
        "write_token_head": (_write_token_head, _write_token_head_fake),
        "convert": (_convert, _convert_fake),
    }
    for name, schema in SCHEMAS.items():
        kernel, fake = kernels[name]
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        register_fake(f"pagetile::{name}", fake, lib=LIBRARY)
    keep_in_place(SCHEMAS)


_register()
