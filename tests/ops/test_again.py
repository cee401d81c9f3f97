"""Calls that were settled before take a short way: it is taken, gives the same bits, and no check is lost on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagetile import (
    ArgumentError,
    BlockTableError,
    ShapeError,
    SlotError,
    UnsupportedError,
    flash_attn_varlen_func,
    reshape_and_cache_flash,
)
from pagetile.backends import registry
from pagetile.ops import again
from pagetile.ops.again import Settled, guard, guards_hold
from pagetile.ops.plans import PLANS


@pytest.fixture(autouse=True)
def fresh() -> None:
    PLANS.clear()


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which calls went through their plan."""
    from pagetile.ops import attention, write

    taken: list[str] = []
    for module, name in ((attention, "run_attend"), (write, "run_write")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name: taken.append(name) or real(*a))
    return taken


def test_guards_hold_with_this_torch() -> None:
    assert guards_hold()


def test_without_the_guards_every_call_takes_the_long_way(
    batch: Any, monkeypatch: pytest.MonkeyPatch, long_ways: list[str]
) -> None:
    monkeypatch.setattr(again, "guards_hold", lambda: False)
    for _ in range(3):
        flash_attn_varlen_func(**batch.attend_arguments())
        reshape_and_cache_flash(**batch.write_arguments())
    assert long_ways == ["run_attend", "run_write"] * 3


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_the_second_call_is_short_and_gives_the_same_bits(
    make_batch: Any, backend: str, with_out: bool, with_lse: bool, long_ways: list[str]
) -> None:
    right = []
    for seed in (0, 1, 2):
        arguments = make_batch(seed).attend_arguments()
        right.append(flash_attn_varlen_func(**arguments, return_softmax_lse=True, backend=backend, validate=True))
    del long_ways[:]
    for seed in (0, 1, 2):
        arguments = make_batch(seed).attend_arguments()
        out = torch.full((5, 4, 16), 7.0) if with_out else None
        got = flash_attn_varlen_func(**arguments, out=out, return_softmax_lse=with_lse, backend=backend)
        if with_lse:
            assert torch.equal(got[1], right[seed][1])
            got = got[0]
        assert torch.equal(got, right[seed][0])
        assert out is None or got is out
    assert long_ways == ["run_attend"]


def test_the_second_write_is_short(make_batch: Any, backend: str, long_ways: list[str]) -> None:
    for seed in (0, 1, 2):
        ours, theirs = make_batch(seed), make_batch(seed)
        reshape_and_cache_flash(**ours.write_arguments(), backend=backend)
        reshape_and_cache_flash(**theirs.write_arguments(), backend=backend, validate=True)
        assert torch.equal(ours.key_cache, theirs.key_cache)
        assert torch.equal(ours.value_cache, theirs.value_cache)
    assert long_ways == ["run_write"] * 4  # three of them for validate=True


def test_every_tensor_may_be_one_element_off(make_batch: Any, backend: str) -> None:
    """A call keeps nothing of the addresses of the one before."""

    def moved(x: torch.Tensor, by: int) -> torch.Tensor:
        buffer = torch.zeros(x.numel() + 8, dtype=x.dtype)
        at = -(buffer.data_ptr() // x.element_size()) % (16 // x.element_size()) + by
        return buffer.as_strided(x.shape, x.stride(), at).copy_(x)

    batch = make_batch()
    right = flash_attn_varlen_func(**batch.attend_arguments(), backend=backend)
    caches = {name: x.clone() for name, x in batch.write_arguments().items()}
    reshape_and_cache_flash(**caches, backend=backend)
    for off in (None, "q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table", "out", None):
        arguments = {**batch.attend_arguments(), "out": torch.zeros(5, 4, 16)}
        tensors = {n: moved(x, n == off) for n, x in arguments.items() if isinstance(x, torch.Tensor)}
        out = flash_attn_varlen_func(**{**arguments, **tensors}, backend=backend)
        assert torch.equal(out, right), off
    for off in (None, *caches, None):
        tensors = {n: moved(x, n == off) for n, x in make_batch().write_arguments().items()}
        reshape_and_cache_flash(**tensors, backend=backend)
        assert torch.equal(tensors["key_cache"], caches["key_cache"]), off
        assert torch.equal(tensors["value_cache"], caches["value_cache"]), off


def settle(batch: Any, **how: Any) -> dict[str, Any]:
    """Two calls, after which the third is short."""
    arguments = {**batch.attend_arguments(), "out": torch.zeros(5, 4, 16), **how}
    for _ in range(2):
        flash_attn_varlen_func(**arguments)
        reshape_and_cache_flash(**batch.write_arguments())
    return arguments


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"max_seqlen_q": 3.0}, ArgumentError, "max_seqlen_q is 3.0; it must be an integer"),
        ({"validate": 0}, ArgumentError, "validate is 0"),
        ({"block_table": torch.full((3, 3), 12, dtype=torch.int32)}, BlockTableError, r"block_table\[0, 0\] is 12"),
        (
            {"seqused_k": torch.tensor([9, 13, 2], dtype=torch.int32)},
            ArgumentError,
            "sequence 1 has 13 keys, but max_seqlen_k is 12",
        ),
        ({"cu_seqlens_q": torch.tensor([0, 3, 2, 5], dtype=torch.int32)}, ArgumentError, "cu_seqlens_q"),
        ({"q": torch.zeros(5, 3, 8)}, ShapeError, r"q: axis 1 \(Hq\) is 3"),
        ({"q": torch.zeros(5, 4, 8, requires_grad=True)}, UnsupportedError, "q requires grad"),
        ({"q": torch._neg_view(torch.zeros(5, 4, 8))}, ArgumentError, "q has its negative bit set"),
        ({"window_size": (2.5, 0)}, (ArgumentError, TypeError), "window_size"),
    ],
)
def test_no_check_is_lost(batch: Any, change: dict[str, Any], error: type, words: str) -> None:
    arguments = settle(batch)
    with pytest.raises(error, match=words):
        flash_attn_varlen_func(**{**arguments, **change})


def test_shared_memory_is_seen_on_the_short_way(batch: Any) -> None:
    """``out`` in the memory of the value cache has the strides of any other."""
    arguments = settle(batch)
    inside = batch.value_cache.view(-1)[: 5 * 4 * 16].view(5, 4, 16)
    with pytest.raises(ArgumentError, match="out and v share memory"):
        flash_attn_varlen_func(**{**arguments, "out": inside})
    write = batch.write_arguments()
    with pytest.raises(ArgumentError, match=r"key_cache and key share|key and key_cache share"):
        reshape_and_cache_flash(**{**write, "key": batch.key_cache.view(-1)[: 5 * 2 * 8].view(5, 2, 8)})


def test_a_bad_slot_on_the_short_way(batch: Any) -> None:
    settle(batch)
    before = batch.key_cache.clone()
    with pytest.raises(SlotError, match=r"slot_mapping\[2\] is 48"):
        reshape_and_cache_flash(**{**batch.write_arguments(), "slot_mapping": torch.tensor([1, 2, 48, 3, 4])})
    assert torch.equal(batch.key_cache, before)


def test_autograd_hears_of_a_short_write(batch: Any) -> None:
    settle(batch)
    weight = torch.ones(8, requires_grad=True)
    loss = (batch.key_cache * weight).sum()
    reshape_and_cache_flash(**batch.write_arguments())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_transforms_and_modes_do_not_take_it(batch: Any) -> None:
    arguments = settle(batch)
    rows = torch.randn(2, 5, 4, 8)
    batched = torch.vmap(lambda q: flash_attn_varlen_func(**{**arguments, "q": q, "out": None}))(rows)
    one_by_one = [flash_attn_varlen_func(**{**arguments, "q": q, "out": None}) for q in rows]
    assert torch.equal(batched, torch.stack(one_by_one))


def test_forgotten_backends_are_asked_again(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(batch, backend="reference")
    found = registry.load("reference")
    assert not isinstance(found, str)
    monkeypatch.setattr(type(found), "attend", lambda *_: pytest.fail("the reference was asked"))
    PLANS.clear()
    assert len(PLANS.settled) == 0
    with pytest.raises(pytest.fail.Exception, match="was asked"):
        flash_attn_varlen_func(**batch.attend_arguments(), backend="reference")


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "MAX_QUESTIONS", 3)
    monkeypatch.setattr(again, "MAX_ANSWERS", 2)
    store = Settled()
    for size in range(1, 6):
        store.put("same", (torch.zeros(size),), lambda _, size=size: size)
    assert len(store) == 2
    assert [run(None) for check, run in store.get("same") if check(torch.ones(5))] == [5]
    for name in range(5):
        store.put(name, (torch.zeros(1),), id)
    assert len(store) == 3
    check = guard((torch.zeros(2, 3), torch.zeros(4)))
    assert check is not None
    assert check(torch.ones(2, 3), torch.ones(4))
    assert not check(torch.ones(2, 3), None)
