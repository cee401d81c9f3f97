"""The derivation of a trace against an oracle that shares no line with it.

The oracle knows the definition of visibility, key by key, and asks torch where an element lies; it uses neither the
geometry nor the ranges of the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import pagetile
from pagetile.contracts.geometry import CacheStrides
from pagetile.inspect import derive
from pagetile.inspect.record import Call, Store, Table, Trace
from pagetile.inspect.tracer import Tracer

LAYOUTS = ("NHD", "HND", "pages in turn", "halves")


@dataclass
class Case:
    """One random batch over caches of one layout."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    q_lens: list[int]
    seq_lens: list[int]
    ratio: int
    window: tuple[int, int]
    causal: bool


def draw(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    heads, ratio, size = int(rng.choice([1, 2, 3])), int(rng.choice([1, 3, 7])), int(rng.choice([1, 3, 5, 16, 24]))
    q_lens = rng.integers(0, 5, 3).tolist()
    seq_lens = [int(rng.choice([0, 1, size, size + 1, 3 * size - 1])) for _ in q_lens]
    width = max(-(-n // size) for n in seq_lens)
    blocks = 3 * width + 2
    k, v = caches(LAYOUTS[seed % 4], blocks, size, heads)
    # The table is part of a wider one, whose other entries belong to somebody else or to nobody.
    wide = torch.full((3, width + int(rng.integers(1, 4))), -7, dtype=[torch.int32, torch.int64][seed % 2])
    ids = rng.permutation(blocks).tolist()
    for b, n in enumerate(seq_lens):
        for column in range(-(-n // size)):
            wide[b, column] = ids.pop()
    table = wide[:, : width + 1]
    window = [(-1, -1), (0, 0), (2, 1), (5, -1), (-1, 3)][int(rng.integers(5))]
    return Case(k, v, table, q_lens, seq_lens, ratio, window, bool(rng.integers(2)))


def caches(layout: str, blocks: int, size: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == "NHD":
        return torch.rand(blocks, size, heads, 8), torch.rand(blocks, size, heads, 4)
    if layout == "HND":
        return torch.rand(blocks, heads, size, 8).transpose(1, 2), torch.rand(blocks, heads, size, 4).transpose(1, 2)
    if layout == "pages in turn":
        pair = torch.rand(blocks, 2, size, heads, 8)
        return pair[:, 0], pair[:, 1]
    both = torch.rand(blocks, heads, size, 12).transpose(1, 2)
    return both[..., :8], both[..., 8:]


def needed(case: Case) -> list[set[int]]:
    """Positions that some query of each sequence sees, by the definition."""
    left, right = case.window
    found = []
    for q_len, seq_len in zip(case.q_lens, case.seq_lens, strict=True):
        seen = set()
        for i in range(q_len):
            p = i + seq_len - q_len
            for j in range(seq_len):
                hidden = (case.causal and j > p) or (left >= 0 and j < p - left) or (right >= 0 and j > p + right)
                if not hidden:
                    seen.add(j)
        found.append(seen)
    return found


def away(tensor: torch.Tensor, *index: int) -> int:
    """Bytes from a tensor's base to an element."""
    return tensor[index].data_ptr() - tensor.data_ptr()


@pytest.mark.parametrize("seed", range(40))
def test_reads(seed: int) -> None:
    case = draw(seed)
    heads, size = case.k.shape[2], case.k.shape[1]
    total = sum(case.q_lens)
    tracer = Tracer("reference")
    pagetile.flash_attn_varlen_func(
        torch.rand(total, heads * case.ratio, 8),
        case.k,
        case.v,
        max(case.q_lens),
        torch.tensor([0, *np.cumsum(case.q_lens)], dtype=torch.int32),
        max(case.seq_lens),
        seqused_k=torch.tensor(case.seq_lens, dtype=torch.int32),
        block_table=case.table,
        causal=case.causal,
        window_size=case.window,
        backend=tracer,
    )
    expected = set()
    for b, seen in enumerate(needed(case)):
        for column in {j // size for j in seen}:
            expected.add(("block_table", away(case.table, b, column), case.table.element_size()))
        for j in seen:
            block = int(case.table[b, j // size])
            for h in range(heads):
                expected.add(("key_cache", away(case.k, block, j % size, h), 32))
                expected.add(("value_cache", away(case.v, block, j % size, h), 4 * case.v.shape[3]))
    found = [(a.tensor, a.address, a.bytes) for a in derive.accesses(tracer.trace, 0, 0)] if tracer.trace.stores else []
    assert len(found) == len(set(found)), "each access once"
    assert set(found) == expected


@pytest.mark.parametrize("seed", range(12))
def test_writes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, heads = int(rng.choice([1, 3, 16])), int(rng.choice([1, 2, 3]))
    k, v = caches(LAYOUTS[seed % 4], 6, size, heads)
    wanted = rng.permutation(6 * size)[: min(7, 6 * size)].tolist()
    wanted[1:1] = [-1, -(2**31)]
    # Every second element of a longer tensor, where the op takes that.
    slots = torch.zeros(2 * len(wanted), dtype=[torch.int32, torch.int64][seed % 2])[::2]
    slots.copy_(torch.tensor(wanted))
    tracer = Tracer("reference")
    rows = len(wanted)
    pagetile.reshape_and_cache_flash(
        torch.rand(rows, heads, k.shape[3]), torch.rand(rows, heads, v.shape[3]), k, v, slots, backend=tracer
    )
    expected = set()
    for row, slot in enumerate(wanted):
        expected.add(("slot_mapping", away(slots, row), slots.element_size()))
        for h in range(heads) if slot >= 0 else ():
            expected.add(("key_cache", away(k, slot // size, slot % size, h), 4 * k.shape[3]))
            expected.add(("value_cache", away(v, slot // size, slot % size, h), 4 * v.shape[3]))
    assert {(a.tensor, a.address, a.bytes) for a in derive.accesses(tracer.trace, 0, 0)} == expected


def test_left_padding_hides_keys() -> None:
    """Keys below the first one are not read; positions stay where they are."""
    k, v = caches("NHD", 8, 3, 2)
    table = torch.tensor([[5, 1, 2], [7, 3, 4]], dtype=torch.int32)
    tracer = Tracer("reference")
    pagetile.flash_attn_with_kvcache(
        torch.rand(2, 1, 2, 8),
        k,
        v,
        cache_seqlens=torch.tensor([8, 4], dtype=torch.int32),
        cache_leftpad=torch.tensor([4, 0], dtype=torch.int32),
        block_table=table,
        causal=True,
        backend=tracer,
    )
    found = {(a.row, a.position) for a in derive.accesses(tracer.trace, 0, 0) if a.tensor == "key_cache"}
    assert found == {(0, j) for j in range(4, 8)} | {(1, j) for j in range(4)}
    lookups = {(a.row, a.offset) for a in derive.accesses(tracer.trace, 0, 0) if a.tensor == "block_table"}
    assert lookups == {(0, 1), (0, 2), (1, 0), (1, 1)}


def test_block_ids_outside_the_cache_are_looked_up_and_not_read() -> None:
    """As on a GPU, where such an id is hidden; the CPU raises, so no backend here would record it."""
    raw = np.asarray([[2, -1, 8, 0]], dtype=np.int32)
    lens = np.asarray([20], dtype=np.int32)  # longer than the row has room for
    store = Store(0, "full", 8, 4, 1, 8, 8, 4, CacheStrides.nhd(4, 1, 8), CacheStrides.nhd(4, 1, 8))
    call = Call(
        "attend",
        [0],
        query_start_loc=np.asarray([0, 1]),
        seq_lens=lens,
        table=Table.after(None, raw, lens, 4),
        window=(-1, 0),
        table_stride=4,
    )
    trace = Trace([store])
    trace.new_step().calls.append(call)
    found = list(derive.accesses(trace, 0, 0))
    assert [a.block for a in found if a.tensor == "block_table"] == [2, -1, 8, 0]
    assert [a.position for a in found if a.tensor == "key_cache"] == [0, 1, 2, 3, 12, 13, 14, 15]
    assert derive.read_slots(call, store)[0].tolist() == [8, 9, 10, 11, 0, 1, 2, 3]


# The verbs beyond the three: what memory changed, or what came out, is what the derivation says.


def test_gathers() -> None:
    k, v = caches("halves", 6, 3, 2)
    tracer = Tracer("reference")
    table = torch.tensor([[4, 1], [2, -9]], dtype=torch.int32)
    keys, _ = pagetile.gather_cache(k, v, table, torch.tensor([0, 5, 7], dtype=torch.int32), backend=tracer)
    assert torch.equal(keys[5], k[2, 0])
    found = [(a.op, a.row, a.block, a.offset) for a in derive.accesses(tracer.trace, 0, 0) if a.tensor == "key_cache"]
    places = [(4, 0), (4, 1), (4, 2), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert found == [("gather", row, *place) for row, place in enumerate(places) for _ in range(2)]


def test_copies() -> None:
    k, v = caches("HND", 6, 3, 2)
    tracer = Tracer("reference")
    row = torch.rand(1, 2, 8)
    pagetile.reshape_and_cache_flash(row, row[..., :4].contiguous(), k, v, torch.tensor([0]), backend=tracer)
    before = k.clone()
    tracer.begin_step()
    pagetile.copy_blocks([k], [v], [(0, 4), (4, 5), (2, 3)], backend=tracer)
    found = [a for a in derive.accesses(tracer.trace, 1, 0, "copy") if a.tensor == "key_cache"]
    stored = {a.address for a in found if a.op == "copy_to"}
    changed = {away(k, *i) for i in torch.nonzero((k != before).any(-1)).tolist()}
    assert changed == stored == {away(k, b, o, h) for b in (3, 4, 5) for o in range(3) for h in range(2)}
    assert {a.address for a in found if a.op == "copy_from"} >= {away(k, 0, o, h) for o in range(3) for h in range(2)}


def test_fused_writes_are_writes() -> None:
    k, v = torch.zeros(4, 3, 2, 8), torch.zeros(4, 3, 2, 8)
    tracer = Tracer("reference")
    table = torch.rand(10, 4)
    slots = torch.tensor([7, -1, 2])
    pagetile.rope_and_cache(
        torch.rand(3, 4, 8),
        torch.rand(3, 2, 8),
        torch.rand(3, 2, 8) + 1,
        k,
        v,
        slots,
        torch.tensor([3, 4, 5]),
        table,
        table,
        backend=tracer,
    )
    found = {a.address for a in derive.accesses(tracer.trace, 0, 0, "write") if a.tensor == "value_cache"}
    assert found == {away(v, *i) for i in torch.nonzero(v.any(-1)).tolist()}


def test_a_workspace_is_held_to_what_the_delegate_needs() -> None:
    from pagetile.backends import registry

    backend = registry.load("cpu")
    if isinstance(backend, str) or not hasattr(backend, "workspace_bytes"):
        pytest.skip("no backend here says how much it needs")
    asked = []

    class Says(type(backend)):  # type: ignore[misc]
        def workspace_bytes(self, call):
            asked.append(call)
            return 1 << 40

    case = draw(3)
    with pytest.raises(pagetile.ArgumentError, match=str(1 << 40)):
        pagetile.flash_attn_varlen_func(
            torch.rand(1, case.k.shape[2], 8),
            case.k,
            case.v,
            1,
            torch.tensor([0, 1], dtype=torch.int32),
            0,
            seqused_k=torch.tensor([0], dtype=torch.int32),
            block_table=case.table[:1],
            workspace=torch.zeros(8),
            backend=Tracer(Says()),
        )
    assert len(asked) == 1
