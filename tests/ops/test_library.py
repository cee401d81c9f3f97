"""The registered operators: true mutation marks, fake implementations, and a public function that goes through them
wherever tensors are not plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pagetile import flash_attn_varlen_func, flash_attn_with_kvcache, merge_attn_states, reshape_and_cache_flash

OPS = torch.ops.pagetile


def packed(kind: str) -> tuple[Tensor, Tensor]:
    """K and V caches of 12 blocks of 4, 2 heads of 8: each its own, or both views of one buffer."""
    if kind == "apart":
        return torch.zeros(12, 4, 2, 8), torch.zeros(12, 4, 2, 8)
    if kind == "unbind":
        return torch.zeros(12, 2, 4, 2, 8).unbind(1)
    return torch.zeros(12, 2, 4, 16).transpose(1, 2).split(8, dim=-1)  # [NB, Hkv, BS, 2 D], HND


KINDS = ["apart", "unbind", "split"]


def attend_inputs(batch: Any) -> tuple[Any, ...]:
    return (
        batch.q,
        batch.key_cache,
        batch.value_cache,
        batch.cu_seqlens_q,
        batch.seqused_k,
        None,
        batch.block_table,
        3,
        12,
        0.3,
        -1,
        0,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_write(batch: Any, kind: str) -> None:
    torch.library.opcheck(OPS.write.default, (batch.key, batch.value[..., :8], *packed(kind), batch.slot_mapping))


def test_opcheck_write_quantised(batch: Any) -> None:
    caches = torch.zeros(2, 12, 4, 2, 8, dtype=torch.uint8).unbind(0)
    scale = torch.tensor([0.5, 2.0])
    arguments = (batch.key, batch.value[..., :8], *caches, batch.slot_mapping, "fp8_e4m3", scale, None, None, 0.5)
    torch.library.opcheck(OPS.write.default, (*arguments, "reference"))


@pytest.mark.parametrize("op", [OPS.attend.default, OPS.attend_lse.default])
def test_opcheck_attend(batch: Any, op: Any) -> None:
    torch.library.opcheck(op, attend_inputs(batch))


@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck_attend_out(batch: Any, with_lse: bool) -> None:
    out, lse = torch.zeros(5, 4, 16), torch.zeros(4, 5)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    torch.library.opcheck(OPS.attend_out.default, (out, lse if with_lse else None, workspace, *attend_inputs(batch)))


def test_opcheck_attend_ragged_with_everything(batch: Any) -> None:
    starts = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    extras = (2.0, None, torch.ones(3, 4), torch.ones(4))
    arguments = (
        batch.q,
        torch.randn(6, 2, 8),
        torch.randn(6, 2, 16),
        batch.cu_seqlens_q,
        None,
        starts,
        None,
        3,
        3,
        0.3,
    )
    torch.library.opcheck(OPS.attend_lse.default, (*arguments, 1, 0, *extras))


@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck_merge(with_lse: bool) -> None:
    states = (torch.randn(5, 4, 8), torch.randn(4, 5), torch.randn(5, 4, 8), torch.randn(4, 5))
    torch.library.opcheck(
        OPS.merge_out.default, (torch.zeros(5, 4, 8), *states, torch.zeros(4, 5) if with_lse else None)
    )


def test_opcheck_append_slots(batch: Any) -> None:
    arguments = (torch.tensor([8, 3, 2], dtype=torch.int32), batch.block_table, 1, 12, 4)
    torch.library.opcheck(OPS.append_slots.default, arguments)


def test_schemas_mark_what_is_written_and_nothing_else() -> None:
    marked = {
        name: [a.name for a in getattr(OPS, name).default._schema.arguments if a.alias_info and a.alias_info.is_write]
        for name in ("write", "attend", "attend_lse", "attend_out", "merge_out", "append_slots")
    }
    assert marked == {
        "write": ["key_cache", "value_cache"],
        "attend": [],
        "attend_lse": [],
        "attend_out": ["out", "lse", "workspace"],
        "merge_out": ["output", "output_lse"],
        "append_slots": [],
    }


def test_fake_outputs_are_what_comes_out(batch: Any) -> None:
    real = flash_attn_varlen_func(**batch.attend_arguments(), return_softmax_lse=True)
    with FakeTensorMode() as mode:
        arguments = batch.attend_arguments()
        arguments = {n: mode.from_tensor(t) if isinstance(t, Tensor) else t for n, t in arguments.items()}
        fake = flash_attn_varlen_func(**arguments, return_softmax_lse=True)
        reshape_and_cache_flash(**{n: mode.from_tensor(t) for n, t in batch.write_arguments().items()})
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_meta_tensors_only_check(batch: Any) -> None:
    arguments = {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in batch.attend_arguments().items()}
    out = flash_attn_varlen_func(**arguments)
    assert out.device.type == "meta"
    assert out.shape == (5, 4, 16)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operators(batch: Any) -> None:
    with Recorder() as seen:
        reshape_and_cache_flash(**batch.write_arguments())
        flash_attn_varlen_func(**batch.attend_arguments(), out=torch.zeros(5, 4, 16), return_softmax_lse=True)
        merge_attn_states(*(torch.zeros(4, 5) if i in (2, 4) else torch.zeros(5, 4, 8) for i in range(5)))
    for name in ("write", "attend_out", "merge_out"):
        assert f"pagetile.{name}.default" in seen.names


class Wrapped(Tensor):
    pass


def test_a_subclass_takes_the_operators_and_gets_the_same_result(batch: Any) -> None:
    plain = flash_attn_varlen_func(**batch.attend_arguments())
    out = flash_attn_varlen_func(**{**batch.attend_arguments(), "q": batch.q.as_subclass(Wrapped)})
    assert torch.equal(plain, out.as_subclass(Tensor))


def test_parameters_are_plain_tensors(batch: Any) -> None:
    caches = {n: torch.nn.Parameter(t, requires_grad=False) for n, t in batch.write_arguments().items() if "cache" in n}
    reshape_and_cache_flash(**{**batch.write_arguments(), **caches})
    assert torch.equal(caches["key_cache"][7, 0], batch.key[0])


def test_autograd_hears_of_a_write(batch: Any) -> None:
    """A backward that saved the cache before it was overwritten must complain, not compute with new values."""
    weight = torch.ones(8, requires_grad=True)
    loss = (batch.key_cache * weight).sum()
    reshape_and_cache_flash(**batch.write_arguments())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode(batch: Any) -> None:
    with torch.inference_mode():
        caches = {n: t.clone() for n, t in batch.write_arguments().items()}
        reshape_and_cache_flash(**caches)
        lens = torch.tensor([1, 1], dtype=torch.int32)
        out = flash_attn_with_kvcache(
            torch.ones(2, 1, 4, 8), torch.ones(2, 4, 2, 8), torch.ones(2, 4, 2, 8), cache_seqlens=lens
        )
    assert torch.equal(out, torch.ones(2, 1, 4, 8))
