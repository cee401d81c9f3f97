"""Every tensor of every op, wrong in every way: the message names it and both sides, and no byte has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import flash_attn_varlen_func, flash_attn_with_kvcache, merge_attn_states, reshape_and_cache_flash

Change = Callable[[Tensor], Any]


X_PACKED = {("write", "key_cache"), ("attend", "k")}
"""Arguments that may also have five axes."""


def another_rank(t: Tensor) -> Tensor:
    return t.unsqueeze(0)


def two_more_axes(t: Tensor) -> Tensor:
    """A key cache of five axes is x-packed, which is no mistake; six are."""
    return t[None, None]


def shrunk(axis: int) -> Change:
    return lambda t: t.narrow(axis, 0, t.shape[axis] - 1).clone()


def grown(axis: int) -> Change:
    return lambda t: torch.cat((t, t.narrow(axis, 0, 1)), dim=axis)


def another_dtype(t: Tensor) -> Tensor:
    return t.to(torch.float64 if t.dtype.is_floating_point else torch.int16)


def on_meta(t: Tensor) -> Tensor:
    return t.to("meta")


def gaps_in_rows(t: Tensor) -> Tensor:
    wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])
    wide[..., ::2] = t
    return wide[..., ::2]


def as_array(t: Tensor) -> Any:
    return t.numpy()


SHAPES = {
    "write": {"key": "T Hkv D", "value": "T Hkv Dv", "key_cache": "NB BS Hkv D", "value_cache": "NB BS Hkv Dv"},
    "attend": {
        "q": "T Hq D",
        "k": "NB BS Hkv D",
        "v": "NB BS Hkv Dv",
        "cu_seqlens_q": "B+1",
        "seqused_k": "B",
        "block_table": "B width",
        "out": "T Hq Dv",
        "alibi_slopes": "B Hq",
        "s_aux": "Hq",
    },
    "ragged": {"q": "T Hq D", "k": "keys Hkv D", "v": "keys Hkv Dv", "cu_seqlens_q": "B+1", "cu_seqlens_k": "B+1"},
    "kvcache": {
        "q": "B Sq Hq D",
        "k_cache": "NB BS Hkv D",
        "v_cache": "NB BS Hkv Dv",
        "k": "B Snew Hkv D",
        "v": "B Snew Hkv Dv",
        "cache_seqlens": "B",
        "cache_leftpad": "B",
        "block_table": "B width",
        "rotary_cos": "rows pairs",
        "rotary_sin": "rows pairs",
    },
    "merge": {
        "output": "T H D",
        "prefix_output": "T H D",
        "suffix_output": "T H D",
        "prefix_lse": "H T",
        "suffix_lse": "H T",
        "output_lse": "H T",
    },
}
FREE = {"NB", "keys", "width"}
"""Axes that agree with nobody."""

ANY_FLOAT = {"s_aux"}
ANY_STRIDE = {"merge", "out", "s_aux", "alibi_slopes", "rotary_cos", "rotary_sin", "cache_seqlens"}


def matrix() -> Iterator[Any]:
    for op, tensors in SHAPES.items():
        for name, axes in tensors.items():
            letters = axes.split()
            rank = two_more_axes if (op, name) in X_PACKED else another_rank
            yield pytest.param(op, name, rank, id=f"{op}-{name}-rank")
            for axis, letter in enumerate(letters):
                # BS of a cache with a row a sequence, or D of the values, has to agree with the other cache only
                if sum(letter in other.split() for other in tensors.values()) < 2 and letter not in ("rows", "pairs"):
                    continue
                if letter not in FREE:
                    yield pytest.param(op, name, shrunk(axis), id=f"{op}-{name}-{letter}-shrunk")
                    yield pytest.param(op, name, grown(axis), id=f"{op}-{name}-{letter}-grown")
            if name not in ANY_FLOAT:
                yield pytest.param(op, name, another_dtype, id=f"{op}-{name}-dtype")
            yield pytest.param(op, name, on_meta, id=f"{op}-{name}-device")
            yield pytest.param(op, name, as_array, id=f"{op}-{name}-array")
            if op not in ANY_STRIDE and name not in ANY_STRIDE:
                yield pytest.param(op, name, gaps_in_rows, id=f"{op}-{name}-stride")


def arguments_of(op: str, batch: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    if op == "write":
        return reshape_and_cache_flash, batch.write_arguments()
    if op == "attend":
        extra = {"out": torch.zeros(5, 4, 16), "alibi_slopes": torch.ones(3, 4), "s_aux": torch.ones(4)}
        return flash_attn_varlen_func, {**batch.attend_arguments(), **extra}
    if op == "ragged":
        return flash_attn_varlen_func, {
            "q": batch.q,
            "k": torch.zeros(6, 2, 8),
            "v": torch.zeros(6, 2, 16),
            "max_seqlen_q": 3,
            "cu_seqlens_q": batch.cu_seqlens_q,
            "max_seqlen_k": 3,
            "cu_seqlens_k": torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        }
    if op == "kvcache":
        return flash_attn_with_kvcache, {
            "q": torch.zeros(3, 2, 4, 8),
            "k_cache": batch.key_cache,
            "v_cache": batch.value_cache,
            "k": torch.ones(3, 1, 2, 8),
            "v": torch.ones(3, 1, 2, 16),
            "rotary_cos": torch.ones(16, 3),
            "rotary_sin": torch.ones(16, 3),
            "cache_seqlens": torch.tensor([8, 3, 2], dtype=torch.int32),
            "cache_leftpad": torch.tensor([0, 1, 0], dtype=torch.int32),
            "block_table": batch.block_table,
        }
    return merge_attn_states, {
        name: torch.zeros(4, 5) if name.endswith("lse") else torch.zeros(5, 4, 8) for name in SHAPES["merge"]
    }


@pytest.mark.parametrize(("op", "name", "change"), list(matrix()))
def test_the_message_names_the_tensor_and_nothing_is_written(op: str, name: str, change: Change, batch: Any) -> None:
    function, arguments = arguments_of(op, batch)
    before = {n: t.clone() for n, t in arguments.items() if isinstance(t, Tensor)}
    good = arguments[name]
    bad = change(good)
    with pytest.raises(pagetile.PagetileError) as caught:
        function(**{**arguments, name: bad})
    message = str(caught.value)
    assert name in message
    for n, t in before.items():
        assert torch.equal(arguments[n], t), f"{n} changed"
    if isinstance(bad, Tensor) and bad.dim() == good.dim():
        for axis in range(good.dim()):
            if bad.shape[axis] != good.shape[axis]:
                assert str(bad.shape[axis]) in message
                assert str(good.shape[axis]) in message or "divide" in message
        for a, b in ((good.device, bad.device), (good.dtype, bad.dtype)):
            if a != b:
                assert str(a).removeprefix("torch.") in message
                assert str(b).removeprefix("torch.") in message
    if isinstance(bad, Tensor) and bad.dim() != good.dim():
        assert f"{bad.dim()} axes" in message
        assert "must have" in message or "x-packed" in message


@pytest.mark.parametrize("op", SHAPES)
def test_the_good_input_of_the_matrix_is_good(op: str, batch: Any) -> None:
    function, arguments = arguments_of(op, batch)
    function(**arguments, backend="reference")


def test_more_slots_than_rows(batch: Any) -> None:
    with pytest.raises(pagetile.ShapeError, match=r"slot_mapping: axis 0 is 6, but key has only T = 5"):
        reshape_and_cache_flash(**{**batch.write_arguments(), "slot_mapping": torch.arange(6)})


def test_heads_that_do_not_divide(batch: Any) -> None:
    with pytest.raises(pagetile.ShapeError, match=r"Hq\) is 3, but k has Hkv = 2"):
        flash_attn_varlen_func(**{**batch.attend_arguments(), "q": torch.zeros(5, 3, 8)})


def test_a_slot_past_the_cache_names_slot_and_room(batch: Any, backend: str) -> None:
    before = batch.key_cache.clone()
    slots = torch.tensor([3, 48, 1, 2, 0])
    with pytest.raises(pagetile.SlotError, match="48"):
        reshape_and_cache_flash(**{**batch.write_arguments(), "slot_mapping": slots}, backend=backend)
    assert torch.equal(batch.key_cache, before)


@pytest.mark.parametrize("value", [99, 12, -1])
def test_a_block_outside_the_cache_names_row_column_and_value(batch: Any, backend: str, value: int) -> None:
    batch.block_table[0, 1] = value
    with pytest.raises(pagetile.BlockTableError, match=str(value)):
        flash_attn_varlen_func(**batch.attend_arguments(), backend=backend)


def test_an_expanded_cache_is_not_written_to(batch: Any) -> None:
    cache = torch.zeros(1, 4, 2, 8).expand(12, 4, 2, 8)
    with pytest.raises(pagetile.ArgumentError, match=r"key_cache: axis 0 has 12 elements at one address"):
        reshape_and_cache_flash(**{**batch.write_arguments(), "key_cache": cache})


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "value_cache"])
def test_a_tensor_that_requires_grad_is_refused_by_name(batch: Any, name: str) -> None:
    arguments = batch.write_arguments()
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(pagetile.UnsupportedError, match=f"^{name} requires grad"):
        reshape_and_cache_flash(**arguments)
    with torch.no_grad():
        reshape_and_cache_flash(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_attention_of_a_tensor_that_requires_grad_is_refused_by_name(batch: Any, name: str) -> None:
    arguments = {"out": torch.zeros(5, 4, 16), **batch.attend_arguments()}
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(pagetile.UnsupportedError, match=f"^{name} requires grad"):
        flash_attn_varlen_func(**arguments)


def test_errors_under_fake_tensors_are_the_same(batch: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        arguments = {n: mode.from_tensor(t) for n, t in batch.write_arguments().items()}
        arguments["key_cache"] = arguments["key_cache"][:, :, :1]
        with pytest.raises(pagetile.ShapeError, match=r"key_cache: axis 2 \(Hkv\) is 1, but key has Hkv = 2"):
            reshape_and_cache_flash(**arguments)
