"""Which backend is taken, what is said about it, and why not."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import pagetile
from pagetile import flash_attn_varlen_func, reshape_and_cache_flash
from pagetile.backends import registry
from pagetile.backends.protocol import AttendCall, MergeCall, WriteCall
from pagetile.contracts.problem import MergeProblem, Problem
from pagetile.ops import dispatch
from pagetile.ops.plans import PLANS, Plan, Plans

PROBLEM = MergeProblem(device="cpu", dtype="float32", num_tokens=1, num_heads=1, head_size=8)


class Fussy:
    """A backend that takes 8 elements a head and nothing else."""

    name = "fussy"

    def __init__(self) -> None:
        self.calls: list[WriteCall | AttendCall | MergeCall] = []

    def why_not(self, problem: Problem) -> list[str]:
        return [] if problem.head_size == 8 else [f"head size {problem.head_size} is not 8", "and it is Monday"]

    def write(self, call: WriteCall) -> None:
        self.calls.append(call)

    def attend(self, call: AttendCall) -> None:
        self.calls.append(call)

    def merge(self, call: MergeCall) -> None:
        self.calls.append(call)


@pytest.fixture(autouse=True)
def _forget() -> Any:
    dispatch.forget()
    PLANS.clear()
    yield
    dispatch.forget()
    PLANS.clear()


@pytest.fixture
def fussy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The registry with one preferred backend, ``fussy``, before the reference."""
    module = ModuleType("pagetile_test_fussy")
    module.Fussy = Fussy
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entries = {
        "fussy": registry.Entry(module.__name__, "Fussy", ("cpu",)),
        "reference": registry.BACKENDS["reference"],
    }
    monkeypatch.setattr(registry, "BACKENDS", entries)
    return registry.load("fussy")


def merge_of(size: int, device: str = "cpu") -> MergeProblem:
    return MergeProblem(device=device, dtype="float32", num_tokens=1, num_heads=1, head_size=size)


def test_the_preferred_backend_is_taken_silently(fussy: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagetile"):
        assert dispatch.select(merge_of(8)) is fussy
    assert not caplog.records


def test_falling_past_it_is_said_once_with_every_reason(fussy: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagetile"):
        for _ in range(3):
            assert dispatch.select(merge_of(16)).name == "reference"
        assert dispatch.select(merge_of(8)) is fussy
        dispatch.select(merge_of(24))
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    first = caplog.records[0].getMessage()
    assert "reference takes merge 1 rows" in first
    assert "fussy: head size 16 is not 8 and and it is Monday" in first
    assert "head size 24" in caplog.records[1].getMessage()


def test_a_name_runs_or_raises_with_every_reason(fussy: Any) -> None:
    assert dispatch.select(merge_of(8), "fussy") is fussy
    with pytest.raises(pagetile.BackendError, match="head size 16 is not 8; and it is Monday") as caught:
        dispatch.select(merge_of(16), "fussy")
    assert caught.value.reasons == {"fussy": ["head size 16 is not 8", "and it is Monday"]}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        pagetile.ArgumentError, match="backend is 'cuda'; it must be auto or one of hopper, triton, cpu"
    ):
        dispatch.select(PROBLEM, "cuda")


def test_the_device_of_the_tensors_decides() -> None:
    assert registry.candidates("cuda") == ["triton", "reference"]
    assert registry.candidates("cpu") == ["cpu", "reference"]
    assert registry.candidates("xpu") == ["reference"]
    with pytest.raises(pagetile.BackendError, match=r"backend='cpu' cannot merge.*the tensors are on cuda"):
        dispatch.select(merge_of(8, "cuda"), "cpu")
    with pytest.raises(pagetile.BackendError, match=r"backend='hopper' cannot.*on cpu, and hopper takes cuda"):
        dispatch.select(PROBLEM, "hopper")


def test_a_missing_extra_is_a_reason_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        raise ModuleNotFoundError("No module named 'numba'", name="numba")

    monkeypatch.setattr(registry, "import_module", missing)
    assert registry.load("cpu") == "the package numba is not installed; pip install 'pagetile[cpu]'"
    with pytest.raises(pagetile.BackendError, match=r"pip install 'pagetile\[cpu\]'"):
        dispatch.select(PROBLEM, "cpu")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("no", name="pagetile.backends.hopper"), "pagetile.backends.hopper is not part of this"),
        (ImportError("libcuda.so.1"), "cannot be loaded: ImportError: libcuda.so.1"),
        (OSError("illegal instruction"), "cannot be loaded: OSError: illegal instruction"),
    ],
)
def test_whatever_goes_wrong_is_a_reason(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    def broken(_: str) -> Any:
        raise error

    monkeypatch.setattr(registry, "import_module", broken)
    assert reason in str(registry.load("hopper"))


@pytest.mark.usefixtures("fussy")
def test_no_backend_at_all() -> None:
    problem = MergeProblem(device="cpu", dtype="int8", num_tokens=1, num_heads=1, head_size=16)
    with pytest.raises(pagetile.BackendError, match="no backend can merge 1 rows") as caught:
        dispatch.select(problem)
    assert set(caught.value.reasons) == {"fussy", "reference"}
    assert all(caught.value.reasons.values())


def test_reasons_of_every_backend() -> None:
    reasons = dispatch.reasons(PROBLEM)
    assert list(reasons) == ["hopper", "triton", "cpu", "reference"]
    assert reasons["reference"] == []
    assert reasons["triton"]
    assert "the tensors are on cpu" in reasons["hopper"][0]


def test_the_op_asks_once_for_each_question(fussy: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fussy, "why_not", lambda problem: asked.append(problem) or [])
    for _ in range(3):
        reshape_and_cache_flash(**batch.write_arguments())
    assert len(asked) == 1
    reshape_and_cache_flash(**{**batch.write_arguments(), "slot_mapping": batch.slot_mapping[:4]})
    assert [problem.num_tokens for problem in asked] == [5, 4]
    assert len(fussy.calls) == 4


def test_a_backend_object_is_taken_as_it_is(batch: Any) -> None:
    mine = Fussy()
    reshape_and_cache_flash(**batch.write_arguments(), backend=mine)
    out = flash_attn_varlen_func(**batch.attend_arguments(), backend=mine)
    assert [type(call) for call in mine.calls] == [WriteCall, AttendCall]
    assert mine.calls[1].out is out
    with pytest.raises(pagetile.BackendError, match="backend 'fussy' cannot"):
        dispatch.select(merge_of(16), mine)
    subclass = batch.key.as_subclass(type("Wrapped", (torch.Tensor,), {}))
    with pytest.raises(pagetile.UnsupportedError, match=r"backend is an object \(Fussy\)"):
        reshape_and_cache_flash(**{**batch.write_arguments(), "key": subclass}, backend=mine)


def test_deferred_errors_are_asked_of_every_loaded_backend(fussy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fussy, "raise_deferred", asked.append, raising=False)
    registry.load("reference")
    pagetile.raise_deferred()
    pagetile.raise_deferred("cpu")
    assert asked == [None, torch.device("cpu")]


@pytest.mark.usefixtures("fussy")
def test_a_refusal_by_name_leaves_the_cache_alone(batch: Any) -> None:
    before = batch.key_cache.clone()
    arguments = batch.write_arguments()
    arguments["key"], arguments["key_cache"] = arguments["key"][..., :4], arguments["key_cache"][..., :4]
    with pytest.raises(pagetile.BackendError, match="head size 4 is not 8"):
        reshape_and_cache_flash(**arguments, backend="fussy")
    assert torch.equal(batch.key_cache, before)


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table"])
def test_strides_are_part_of_a_plan(batch: Any, name: str) -> None:
    """flashinfer-ai/flashinfer#4625: a plan kept with one tensor's strides must not serve another's."""
    expected = flash_attn_varlen_func(**batch.attend_arguments(), backend="reference")
    arguments = batch.attend_arguments()
    tensor = arguments[name]
    wide = torch.cat((tensor, tensor), dim=-1) if tensor.dim() > 1 else tensor
    arguments[name] = wide[..., : tensor.shape[-1]] if tensor.dim() > 1 else tensor.clone()
    plans = len(PLANS)
    assert torch.equal(flash_attn_varlen_func(**arguments, backend="reference"), expected)
    assert len(PLANS) == plans + (tensor.dim() > 1)


def test_plans_are_bounded_printable_and_clearable() -> None:
    plans = Plans(limit=3)
    for i in range(5):
        plans.put(i, Plan(merge_of(8 * i + 8), registry.load("reference")))
    assert len(plans) == 3
    assert plans.get(0) is None
    assert plans.get(4) is not None
    assert str(plans).splitlines()[0] == "3 plans of at most 3"
    assert "reference: merge 1 rows, 1 heads of 40, float32 on cpu" in str(plans)
    plans.clear()
    assert len(plans) == 0
