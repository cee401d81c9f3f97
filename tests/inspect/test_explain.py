"""Positions, slots and addresses, there and back; and the cuts of a write."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagetile.contracts.errors import ArgumentError, BlockTableError, DTypeError
from pagetile.inspect.explain import CacheShape, dtype_of, explain_position, explain_slot
from pagetile.inspect.splits import splits, vllm_split, write_problem


@given(
    block_size=st.integers(1, 50),
    table=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6, unique=True),
    data=st.data(),
)
def test_there_and_back(block_size: int, table: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(table) * block_size - 1))
    cache = CacheShape(block_size, 2, 8, "float32")
    found = explain_position(table, position, cache)
    back = explain_slot(found.slot, table, cache)
    assert (back.position, back.logical, back.block, back.offset) == (
        position,
        found.logical,
        found.block,
        found.offset,
    )
    assert back.addresses == found.addresses


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_addresses_are_those_of_a_real_tensor(layout: str, dtype: str) -> None:
    """The bytes that a torch view of the token reports, for every slot and head of an odd-sized cache."""
    blocks, size, heads, dim = 4, 3, 5, 7
    real = getattr(torch, dtype)
    if layout == "NHD":
        tensor = torch.zeros(blocks, size, heads, dim, dtype=real)
    else:
        tensor = torch.zeros(blocks, heads, size, dim, dtype=real).transpose(1, 2)
    cache = CacheShape(size, heads, dim, dtype)
    for slot in range(blocks * size):
        for found in explain_slot(slot, cache=cache).addresses[layout]:
            token = tensor[slot // size, slot % size, found.head]
            assert found.first == token.data_ptr() - tensor.data_ptr()
            assert found.last - found.first + 1 == token.numel() * token.element_size()


def test_a_table_that_names_a_block_twice_is_said() -> None:
    assert explain_position([7, 2, 7], 35).others == (3,)
    assert explain_position([7, 2, 9], 35).others == ()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: explain_position([7, 2, 9], 48), BlockTableError, "48"),
        (lambda: explain_position([7, 2, 9], -1), ArgumentError, "-1"),
        (lambda: explain_position([7, -2, 9], 20), ArgumentError, r"block_table\[1\]"),
        (lambda: explain_slot(-1), ArgumentError, "not stored"),
        (lambda: explain_slot(3, heads=[8]), ArgumentError, "0 to 7"),
        (lambda: CacheShape(block_size=0), ArgumentError, "block_size"),
        (lambda: CacheShape(dtype="double"), DTypeError, "double"),
        (lambda: splits(CacheShape(dtype="half"), 1, dtype="bf16"), DTypeError, "bfloat16"),
    ],
)
def test_refusals(call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_short_names() -> None:
    assert dtype_of("fp8_e5m2") == "float8_e5m2"
    assert dtype_of("float16") == "float16"


@pytest.mark.parametrize(("heads", "size", "hazard"), [(2, 8, True), (4, 8, False), (1, 8, False)])
def test_vllm_hazard_of_few_elements(heads: int, size: int, hazard: bool) -> None:
    """Under 32 elements a token there is no whole warp to take a head; one head alone is contiguous."""
    cache = CacheShape(16, heads, size)
    assert bool(vllm_split(cache, "HND", write_problem(cache, "HND", 1)).hazards) is hazard


def test_triton_split_is_the_backends_own() -> None:
    from pagetile.backends.triton import tuning

    for cache in (CacheShape(), CacheShape(3, 5, 24, "bf16")):
        found = {s.layout: s for s in splits(cache, 7) if s.who == "triton"}
        for layout, split in found.items():
            plan = tuning.plan_write(write_problem(cache, layout, 7, device="cuda"))
            assert (split.spans == 1) is plan.span
            assert split.why == plan.reasons
        assert set(found) == {"NHD", "HND"}


def test_cpu_split_is_the_backends_own() -> None:
    from pagetile.backends.cpu.tuning import WRITE_SERIAL_BYTES, plan_write

    cache = CacheShape(16, 8, 128, "float32")
    tokens = WRITE_SERIAL_BYTES // (8 * 128 * 4) + 1
    [found] = [s for s in splits(cache, tokens, threads=3) if (s.who, s.layout) == ("cpu", "HND")]
    plan = plan_write(write_problem(cache, "HND", tokens), 3, 4, False, False)
    assert (found.spans, found.elements) == (plan.k_spans, plan.k_bytes // 4)
    assert "3 threads" in found.how
    assert [line.split(": ", 1) for line in found.why] == [list(pair) for pair in plan.why]
