"""The registered operators of attention over a shared prefix, beside those of :mod:`pagetile.ops.library`.

=====================  ======================  ================
operator               writes to               returns
=====================  ======================  ================
``shared_prefix``      nothing                 ``out``
``shared_prefix_lse``  nothing                 ``out``, ``lse``
``shared_prefix_out``  ``out``, ``lse``,       nothing
                       scratch
=====================  ======================  ================
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.library import register_fake

from pagetile.ops.bind_attention import SUFFIX, AttendArgs, bind_attend, with_outputs
from pagetile.ops.inplace import keep_in_place
from pagetile.ops.library import ATTEND, LIBRARY, attend_args, fake_outputs
from pagetile.ops.shared_prefix import Prefix, check_reach, prefix_args, run_shared_prefix

_ARGUMENTS = "Tensor prefix_table, Tensor prefix_lens, SymInt max_prefix_len, " + ATTEND.replace(
    "str caller='flash_attn_varlen_func'", f"str caller='{SUFFIX.caller}'"
)

SCHEMAS = {
    "shared_prefix": f"({_ARGUMENTS}) -> Tensor",
    "shared_prefix_lse": f"({_ARGUMENTS}) -> (Tensor, Tensor)",
    "shared_prefix_out": f"(Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, {_ARGUMENTS}) -> ()",
}
"""Schemas of the registered operators, with their mutation marks."""


def _call(table: Tensor, lens: Tensor, max_len: int, *args: Any, **kwargs: Any) -> tuple[AttendArgs, Prefix]:
    return attend_args(*args, **kwargs), Prefix(table, lens, max_len)


def _shared_prefix(*args: Any, **kwargs: Any) -> Tensor:
    return run_shared_prefix(*_call(*args, **kwargs))[0]


def _shared_prefix_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call, prefix = _call(*args, **kwargs)
    call.with_lse = True
    out, lse = run_shared_prefix(call, prefix)
    assert lse is not None
    return out, lse


def _shared_prefix_out(out: Tensor, lse: Tensor | None, workspace: Tensor | None, *args: Any, **kwargs: Any) -> None:
    call, prefix = _call(*args, **kwargs)
    run_shared_prefix(with_outputs(call, out, lse, workspace), prefix)


def _bind(call: AttendArgs, prefix: Prefix) -> AttendArgs:
    check_reach(call, prefix)
    bind_attend(call, aligned=True)
    bind_attend(prefix_args(call, prefix, call.query_start_loc.new_empty(2)), aligned=True)
    return call


def _shared_prefix_fake(*args: Any, **kwargs: Any) -> Tensor:
    return fake_outputs(_bind(*_call(*args, **kwargs)))[0]


def _shared_prefix_lse_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return fake_outputs(_bind(*_call(*args, **kwargs)))


def _shared_prefix_out_fake(
    out: Tensor, lse: Tensor | None, workspace: Tensor | None, *args: Any, **kwargs: Any
) -> None:
    call, prefix = _call(*args, **kwargs)
    _bind(with_outputs(call, out, lse, workspace), prefix)


def _register() -> None:
    kernels = {
        "shared_prefix": (_shared_prefix, _shared_prefix_fake),
        "shared_prefix_lse": (_shared_prefix_lse, _shared_prefix_lse_fake),
        "shared_prefix_out": (_shared_prefix_out, _shared_prefix_out_fake),
    }
    for name, schema in SCHEMAS.items():
        kernel, fake = kernels[name]
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        register_fake(f"pagetile::{name}", fake, lib=LIBRARY)
    keep_in_place(("shared_prefix_out",))


_register()
