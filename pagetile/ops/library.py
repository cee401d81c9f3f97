"""The registered operators, ``torch.ops.pagetile.*``: what a compiled or traced graph holds.

The public functions go through these under ``torch.compile``, under fake tensors and for tensor subclasses, and call
the backend directly otherwise. They are made with ``Library.define`` and ``impl``, which cost about a sixth of
``torch.library.custom_op`` a call.

================  ==============================  ======================
operator          writes to                       returns
================  ==============================  ======================
``write``         ``key_cache``, ``value_cache``  nothing
``attend``        nothing                         ``out``
``attend_lse``    nothing                         ``out``, ``lse``
``attend_out``    ``out``, ``lse``, scratch       nothing
``merge_out``     ``output``, ``output_lse``      nothing
``append_slots``  nothing                         ``slots``
``admit``         nothing                         ``slots``
================  ==============================  ======================
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from pagetile.ops.append import append_slots
from pagetile.ops.arguments import check_keys, check_softcap
from pagetile.ops.attention import admit_attend, run_attend
from pagetile.ops.bind_attention import VARLEN, AttendArgs, bind_attend, window_for, with_outputs
from pagetile.ops.checks import host_float
from pagetile.ops.inplace import keep_in_place
from pagetile.ops.merge import bind_merge, run_merge
from pagetile.ops.scales import join_scale
from pagetile.ops.write import bind_write, run_write
from pagetile.ops.xpacked import head_size_v

ATTEND = (
    "Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor? seq_lens, Tensor? key_start_loc, "
    "Tensor? block_table, SymInt max_q_len, SymInt max_k_len, float scale, SymInt window_left=-1, "
    "SymInt window_right=-1, float softcap=0.0, Tensor? key_starts=None, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, float? k_scale_value=None, "
    "float? v_scale_value=None, str kv_cache_dtype='auto', int num_splits=0, bool batch_invariant=False, "
    "str backend='auto', str validate='False', str caller='flash_attn_varlen_func'"
)
"""What every attention operator takes after its outputs."""

SCHEMAS = {
    "write": (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
        "str kv_cache_dtype='auto', Tensor? k_scale=None, Tensor? v_scale=None, float? k_scale_value=None, "
        "float? v_scale_value=None, str backend='auto', str validate='False') -> ()"
    ),
    "attend": f"({ATTEND}) -> Tensor",
    "attend_lse": f"({ATTEND}) -> (Tensor, Tensor)",
    "attend_out": f"(Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, {ATTEND}) -> ()",
    "append_slots": (
        "(Tensor seq_lens, Tensor block_table, SymInt num_new, SymInt num_blocks, SymInt block_size, "
        "Tensor? leftpad=None, SymInt rotary_rows=-1, SymInt rotary_span=0, str table_name='block_table') -> Tensor"
    ),
    "admit": f"(Tensor slots, Tensor? workspace, bool with_lse, {ATTEND}) -> Tensor",
    "merge_out": (
        "(Tensor(a!) output, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse, "
        "Tensor(b!)? output_lse=None, str backend='auto') -> ()"
    ),
}
"""Schemas of the registered operators, with their mutation marks."""

_VALIDATE: dict[str, bool | str] = {"False": False, "True": True}


def _write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_value: float | None = None,
    v_scale_value: float | None = None,
    backend: str = "auto",
    validate: str = "False",
) -> None:
    run_write(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        kv_cache_dtype,
        join_scale(k_scale, k_scale_value),
        join_scale(v_scale, v_scale_value),
        backend,
        _VALIDATE.get(validate, validate),
    )


def _write_fake(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_value: float | None = None,
    v_scale_value: float | None = None,
    backend: str = "auto",
    validate: str = "False",
) -> None:
    del backend, validate
    k, v = join_scale(k_scale, k_scale_value), join_scale(v_scale, v_scale_value)
    bind_write(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k, v, aligned=True)


def attend_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor | None,
    key_start_loc: Tensor | None,
    block_table: Tensor | None,
    max_q_len: int,
    max_k_len: int,
    scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    key_starts: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_value: float | None = None,
    v_scale_value: float | None = None,
    kv_cache_dtype: str = "auto",
    num_splits: int = 0,
    batch_invariant: bool = False,
    backend: str = "auto",
    validate: str = "False",
    caller: str = VARLEN.caller,
) -> AttendArgs:
    """The arguments of an attention from those of its operator."""
    check_keys(k, key_start_loc, seq_lens, block_table)
    return AttendArgs(
        out=None,
        lse=None,
        q=q,
        k=k,
        v=v,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        key_start_loc=key_start_loc,
        block_table=block_table,
        max_q_len=max_q_len,
        max_k_len=max_k_len,
        scale=host_float("scale", scale),
        window=window_for((window_left, window_right)),
        softcap=check_softcap(softcap),
        key_starts=key_starts,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=join_scale(k_scale, k_scale_value),
        v_scale=join_scale(v_scale, v_scale_value),
        kv_cache_dtype=kv_cache_dtype,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        backend=backend,
        validate=_VALIDATE.get(validate, validate),
        caller=caller,
    )


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    return run_attend(attend_args(*args, **kwargs))[0]


def _attend_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = attend_args(*args, **kwargs)
    call.with_lse = True
    out, lse = run_attend(call)
    assert lse is not None
    return out, lse


def _attend_out(out: Tensor, lse: Tensor | None, workspace: Tensor | None, *args: Any, **kwargs: Any) -> None:
    run_attend(with_outputs(attend_args(*args, **kwargs), out, lse, workspace))


def fake_outputs(call: AttendArgs) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` without memory, after holding the tensors to each other."""
    bind_attend(call, aligned=True)
    rows, heads = call.q.shape[:2]
    out = call.q.new_empty((rows, heads, head_size_v(call.v, call.k)))
    return out, call.q.new_empty((heads, rows), dtype=torch.float32)


def _attend_fake(*args: Any, **kwargs: Any) -> Tensor:
    return fake_outputs(attend_args(*args, **kwargs))[0]


def _attend_lse_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return fake_outputs(attend_args(*args, **kwargs))


def _attend_out_fake(out: Tensor, lse: Tensor | None, workspace: Tensor | None, *args: Any, **kwargs: Any) -> None:
    bind_attend(with_outputs(attend_args(*args, **kwargs), out, lse, workspace), aligned=True)


def _admit(slots: Tensor, workspace: Tensor | None, with_lse: bool, *args: Any, **kwargs: Any) -> Tensor:
    admit_attend(replace(attend_args(*args, **kwargs), workspace=workspace, with_lse=with_lse))
    return slots.clone()


def _admit_fake(slots: Tensor, workspace: Tensor | None, with_lse: bool, *args: Any, **kwargs: Any) -> Tensor:
    bind_attend(replace(attend_args(*args, **kwargs), workspace=workspace, with_lse=with_lse), aligned=True)
    return torch.empty_like(slots)


def _merge_out(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    backend: str = "auto",
) -> None:
    run_merge(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse, backend)


def _merge_out_fake(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    backend: str = "auto",
) -> None:
    del backend
    bind_merge(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)


def _append_slots_fake(
    seq_lens: Tensor,
    block_table: Tensor,
    num_new: int,
    num_blocks: int,
    block_size: int,
    leftpad: Tensor | None = None,
    rotary_rows: int = -1,
    rotary_span: int = 0,
    table_name: str = "block_table",
) -> Tensor:
    del block_table, num_blocks, block_size, leftpad, rotary_rows, rotary_span, table_name
    return seq_lens.new_empty((seq_lens.shape[0] * num_new,), dtype=torch.int64)


LIBRARY = Library("pagetile", "FRAGMENT")
"""Keeps the registrations alive."""


def _register() -> None:
    kernels = {
        "write": (_write, _write_fake),
        "attend": (_attend, _attend_fake),
        "attend_lse": (_attend_lse, _attend_lse_fake),
        "attend_out": (_attend_out, _attend_out_fake),
        "merge_out": (_merge_out, _merge_out_fake),
        "append_slots": (append_slots, _append_slots_fake),
        "admit": (_admit, _admit_fake),
    }
    for name, schema in SCHEMAS.items():
        kernel, fake = kernels[name]
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # any device: dispatch says which backend, or why none
        register_fake(f"pagetile::{name}", fake, lib=LIBRARY)
    keep_in_place(("write", "attend_out", "merge_out"))


_register()
