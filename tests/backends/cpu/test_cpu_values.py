"""Values are checked before anything is written; the message names the tensor, the place, the value and the way out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_kit import attend_call, truth, write_call

from pagetile.contracts.errors import ArgumentError, BlockTableError, DTypeError, SlotError


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def broken(name: str):
    """A call with one fault, the error it must raise, and words of its message."""
    call = attend_call([2, 1], [40, 20])
    if name == "block above":
        call.block_table[1, 1] = len(call.k)
        return call, BlockTableError, ["block_table[1, 1]", f"is {len(call.k)}", "20 tokens"]
    if name == "block negative":
        call.block_table[0, 2] = -1
        return call, BlockTableError, ["block_table[0, 2]", "is -1"]
    if name == "table too narrow":
        call.block_table = call.block_table[:, :2]
        return call, BlockTableError, ["seq_lens[0]", "40", "2 columns of 16", "32"]
    if name == "negative length":
        call.seq_lens = ints(40, -3)
        return call, ArgumentError, ["seq_lens[1]", "-3"]
    if name == "bound of keys":
        call.problem = replace(call.problem, max_k_len=39)
        return call, ArgumentError, ["sequence 0", "40 keys", "max_k_len is 39"]
    if name == "bound of queries":
        call.problem = replace(call.problem, max_q_len=1)
        return call, ArgumentError, ["sequence 0", "2 queries", "max_q_len is 1"]
    if name == "starts at 1":
        call.query_start_loc = ints(1, 2, 3)
        return call, ArgumentError, ["query_start_loc[0]", "is 1"]
    if name == "decreases":
        call.query_start_loc = ints(0, 2, 1)
        return call, ArgumentError, ["query_start_loc", "decreases from 2 at [1] to 1 at [2]"]
    if name == "past the rows":
        call.query_start_loc = ints(0, 2, 4)
        return call, ArgumentError, ["query_start_loc[2]", "is 4", "q has 3 rows"]
    if name == "key start":
        call.key_starts = ints(0, -1)
        return call, ArgumentError, ["key_starts[1]", "-1"]
    if name == "index dtype":
        call.seq_lens = call.seq_lens.long()
        return call, DTypeError, ["seq_lens", "int64"]
    if name == "table dtype":
        call.block_table = call.block_table.short()
        return call, DTypeError, ["block_table", "int16"]
    if name == "no table":
        call.block_table = None
        return call, ArgumentError, ["block_table is missing"]
    if name == "slopes dtype":
        call.alibi_slopes = torch.zeros(6, dtype=torch.float64)
        return call, DTypeError, ["alibi_slopes", "float64"]
    if name == "sinks dtype":
        call.sinks = torch.zeros(6, dtype=torch.bfloat16)
        return call, DTypeError, ["sinks", "bfloat16"]
    call.k = call.v = torch.randn(50, 2, 64)
    call.seq_lens = call.block_table = None
    call.problem = replace(call.problem, layout="ragged", block_size=0)
    call.key_start_loc = {"ragged end": ints(0, 40, 51), "ragged order": ints(0, 40, 20)}[name]
    words = {
        "ragged end": ["key_start_loc[2]", "is 51", "k has 50 rows"],
        "ragged order": ["key_start_loc", "40", "20"],
    }
    return call, ArgumentError, words[name]


FAULTS = [
    "block above",
    "block negative",
    "table too narrow",
    "negative length",
    "bound of keys",
    "bound of queries",
    "starts at 1",
    "decreases",
    "past the rows",
    "key start",
    "index dtype",
    "table dtype",
    "no table",
    "slopes dtype",
    "sinks dtype",
    "ragged end",
    "ragged order",
]


@pytest.mark.parametrize("name", FAULTS)
def test_attend_refuses(backend, name: str) -> None:
    call, error, words = broken(name)
    with pytest.raises(error) as caught:
        backend.attend(call)
    for word in words:
        assert word in str(caught.value)
    assert (call.out == 77).all()
    assert (call.lse == 77).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables_and_slots_of_both_widths(backend, dtype: torch.dtype) -> None:
    call = attend_call([1, 3], [20, 300], table_dtype=dtype)
    backend.attend(call)
    torch.testing.assert_close(call.out.double(), truth(call).out, atol=2e-6, rtol=0)
    key = torch.randn(3, 2, 8)
    cache = torch.zeros(4, 16, 2, 8)
    backend.write(write_call(key, key, cache, cache.clone(), torch.tensor([36, -(2**31), 5], dtype=dtype)))
    assert torch.equal(cache[2, 4], key[0])
    assert torch.equal(cache[0, 5], key[2])
    assert cache.count_nonzero() == 2 * 16


@pytest.mark.parametrize("bad", [64, 65, 2**31 - 1, 2**40])
@pytest.mark.parametrize("rows", [3, 3000])
def test_a_bad_slot_stops_the_write_before_it_starts(backend, bad: int, rows: int) -> None:
    torch.set_num_threads(2)
    key = torch.randn(rows, 2, 64)
    slots = torch.full((rows,), -1)
    slots[0], slots[rows - 1] = 7, bad
    k, v = torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 64)
    with pytest.raises(SlotError) as caught:
        backend.write(write_call(key, key, k, v, slots))
    for word in (f"slot_mapping[{rows - 1}]", str(bad), "4 blocks of 16", "0 to 63"):
        assert word in str(caught.value)
    assert not k.any()
    assert not v.any()


def test_a_workspace_is_used_or_refused(backend) -> None:
    from pagetile.backends.cpu.attend import scratch_bytes

    call = attend_call([1, 3], [20, 3000])
    needed = scratch_bytes(call)
    call.workspace = torch.zeros(needed - 1, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match=str(needed)):
        backend.attend(call)
    call.workspace = torch.zeros(needed, dtype=torch.uint8)
    backend.attend(call)
    assert call.workspace.any()
    torch.testing.assert_close(call.out.double(), truth(call).out, atol=2e-6, rtol=0)


def test_why_not_names_what_is_missing(backend) -> None:
    problem = attend_call([1], [1]).problem
    for kind in (problem.kind, "fp8_e4m3", "fp8_e5m2", "int8"):
        assert backend.why_not(replace(problem, kind=kind)) == []
    for change, word in (
        ({"device": "cuda"}, "cuda"),
        ({"dtype": "float64", "kind": "float64"}, "float64"),
        ({"layout": "xpacked", "kind": "float16"}, "x-packed"),
        ({"layout": "xpacked", "kind": "fp8_e4m3", "scale": "token_head"}, "x-packed"),
        ({"layout": "ragged", "kind": "fp8_e4m3", "scale": "token_head"}, "paged cache"),
        ({"kind": "float16"}, "float16"),
        ({"scale": "token_head"}, "token_head"),
    ):
        reasons = backend.why_not(replace(problem, **change))
        assert len(reasons) == 1
        assert word in reasons[0]


def test_plans_print_their_reasons(backend) -> None:
    text = str(backend.plan(attend_call([1], [5000], heads=1, num_splits=3)))
    assert "splits = 3" in text
    assert "as asked" in text
    key = torch.randn(3, 2, 8)
    apart = write_call(key, key, torch.zeros(2, 2, 16, 8).transpose(1, 2), torch.zeros(2, 16, 2, 8), torch.tensor([1]))
    plan = backend.plan(apart)
    assert (plan.k_spans, plan.k_bytes, plan.v_spans, plan.v_bytes) == (2, 32, 1, 64)
    assert "heads are apart" in str(plan)


def test_a_split_that_needs_too_much_memory_is_not_made() -> None:
    from pagetile.backends.cpu.tuning import plan_attend

    problem = replace(attend_call([1], [1]).problem, num_tokens=8192, max_q_len=8192, max_k_len=70000, num_splits=8)
    plan = plan_attend(problem, threads=2, near_heads=2)
    assert plan.splits == 1
    assert "MiB" in dict(plan.why)["splits"]
