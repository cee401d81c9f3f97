"""The registered operators beside those of :mod:`pagetile.ops.library`: the legacy attention, gathers, copies of
blocks and the fused write.

=====================  =========================================  =========
operator               writes to                                  returns
=====================  =========================================  =========
``attend_partitions``  ``out`` and the three buffers              nothing
``row_slots``          nothing                                    ``slots``
``gather_rows``        ``key``, ``value``                         nothing
``copy_blocks``        every cache                                nothing
``swap_blocks``        ``dst``                                    nothing
``rope_and_cache``     ``out``, ``key_out``, both caches          nothing
=====================  =========================================  =========
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from pagetile.contracts.problem import Granularity
from pagetile.contracts.shapes import Sizes
from pagetile.ops.bind_attention import bind_attend, with_outputs
from pagetile.ops.blocks import run_copy, run_swap
from pagetile.ops.checks import QUANTISED
from pagetile.ops.fused import FusedArgs, bind_fused, run_fused
from pagetile.ops.gather import bind_rows, gather_problem, run_gather
from pagetile.ops.inplace import keep_in_place
from pagetile.ops.legacy import bind_partitions, run_partitioned
from pagetile.ops.library import ATTEND, LIBRARY, attend_args
from pagetile.ops.row_slots import row_slots
from pagetile.ops.scales import join_scale

SCHEMAS = {
    "attend_partitions": (
        f"(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, {ATTEND}) -> ()"
    ),
    "row_slots": (
        "(Tensor block_table, Tensor cu_seq_lens, Tensor? seq_starts, SymInt num_rows, SymInt num_blocks, "
        "SymInt block_size) -> Tensor"
    ),
    "gather_rows": (
        "(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor slots, Tensor? k_scale=None, "
        "Tensor? v_scale=None, str kv_cache_dtype='auto', str backend='auto') -> ()"
    ),
    "copy_blocks": (
        "(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping, str backend='auto') -> ()"
    ),
    "swap_blocks": "(Tensor[] src, Tensor(a!)[] dst, Tensor block_mapping, str backend='auto') -> ()",
    "rope_and_cache": (
        "(Tensor(a!) out, Tensor(b!)? key_out, Tensor query, Tensor key, Tensor value, Tensor(c!) key_cache, "
        "Tensor(d!) value_cache, Tensor slot_mapping, Tensor positions, Tensor rotary_cos, Tensor rotary_sin, "
        "str kv_cache_dtype='auto', Tensor? k_scale=None, Tensor? v_scale=None, float? k_scale_value=None, "
        "float? v_scale_value=None, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-06, "
        "bool interleaved=False, str backend='auto', str validate='False') -> ()"
    ),
}
"""Schemas of the registered operators, with their mutation marks."""

_VALIDATE: dict[str, bool | str] = {"False": False, "True": True}


def _attend_partitions(out: Tensor, *rest: Any, **kwargs: Any) -> None:
    buffers, args = rest[:3], rest[3:]
    run_partitioned(with_outputs(attend_args(*args, **kwargs), out, None, None), *buffers)


def _attend_partitions_fake(out: Tensor, *rest: Any, **kwargs: Any) -> None:
    buffers, rest = rest[:3], rest[3:]
    args = with_outputs(attend_args(*rest, **kwargs), out, None, None)
    bind_partitions(bind_attend(args, aligned=True), args, *buffers)


def _row_slots_fake(
    block_table: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None,
    num_rows: int,
    num_blocks: int,
    block_size: int,
) -> Tensor:
    del cu_seq_lens, seq_starts, num_blocks, block_size
    return block_table.new_empty((num_rows,), dtype=torch.int64)


def _bind_rows(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
):
    sizes = Sizes()
    kind = bind_rows(sizes, key_cache, value_cache, key, value, kv_cache_dtype)
    sizes.bind("slots", slots, "T")
    scale: Granularity = "none"
    for each in (k_scale, v_scale):
        if each is not None and kind in QUANTISED:
            finer: Granularity = "token_head" if each.dim() == 2 else "tensor" if each.numel() == 1 else "head"
            scale = finer if scale != "token_head" and (finer != "tensor" or scale == "none") else scale
    return gather_problem(sizes, kind, key, scale)


def _gather_rows(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    backend: str = "auto",
) -> None:
    problem = _bind_rows(key, value, key_cache, value_cache, slots, k_scale, v_scale, kv_cache_dtype)
    run_gather(problem, key, value, key_cache, value_cache, slots, k_scale, v_scale, backend)


def _gather_rows_fake(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    backend: str = "auto",
) -> None:
    del backend
    _bind_rows(key, value, key_cache, value_cache, slots, k_scale, v_scale, kv_cache_dtype)


def _copy_blocks(
    key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor, backend: str = "auto"
) -> None:
    named = [(f"key_caches[{i}]", cache) for i, cache in enumerate(key_caches)]
    named += [(f"value_caches[{i}]", cache) for i, cache in enumerate(value_caches)]
    run_copy(named, block_mapping, backend)


def _swap_blocks(src: list[Tensor], dst: list[Tensor], block_mapping: Tensor, backend: str = "auto") -> None:
    run_swap([f"[{i}]" for i in range(len(src))], src, dst, block_mapping, backend)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an operator whose every check looks at values."""
    del args, kwargs


def _fused_args(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    rotary_cos: Tensor,
    rotary_sin: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_value: float | None = None,
    v_scale_value: float | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    backend: str = "auto",
    validate: str = "False",
) -> FusedArgs:
    return FusedArgs(
        query,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        positions,
        rotary_cos,
        rotary_sin,
        kv_cache_dtype,
        join_scale(k_scale, k_scale_value),
        join_scale(v_scale, v_scale_value),
        q_weight,
        k_weight,
        eps,
        interleaved,
        backend,
        _VALIDATE.get(validate, validate),
    )


def _rope_and_cache(out: Tensor, key_out: Tensor | None, *args: Any, **kwargs: Any) -> None:
    run_fused(out, key_out, _fused_args(*args, **kwargs))


def _rope_and_cache_fake(out: Tensor, key_out: Tensor | None, *args: Any, **kwargs: Any) -> None:
    bind_fused(out, key_out, _fused_args(*args, **kwargs), aligned=True)


def _register() -> None:
    kernels = {
        "attend_partitions": (_attend_partitions, _attend_partitions_fake),
        "row_slots": (row_slots, _row_slots_fake),
        "gather_rows": (_gather_rows, _gather_rows_fake),
        "copy_blocks": (_copy_blocks, _nothing),
        "swap_blocks": (_swap_blocks, _nothing),
        "rope_and_cache": (_rope_and_cache, _rope_and_cache_fake),
    }
    for name, schema in SCHEMAS.items():
        kernel, fake = kernels[name]
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        register_fake(f"pagetile::{name}", fake, lib=LIBRARY)
    keep_in_place(("attend_partitions", "gather_rows", "rope_and_cache"))


_register()
