"""The tracer delegates without changing anything, records what was asked, and every address follows from the record."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pagetile
from pagetile.backends import registry
from pagetile.backends.reference import ReferenceBackend
from pagetile.contracts.errors import BackendError, SlotError
from pagetile.contracts.metadata import AttentionMetadata, build_metadata
from pagetile.inspect import derive
from pagetile.inspect.record import Table
from pagetile.inspect.tracer import Tracer
from pagetile.ops import dispatch

HEADS, SIZE, SIZE_V = 2, 8, 4


def caches(blocks: int = 12, size: int = 16, layout: str = "NHD") -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of different head sizes; ``interleaved`` is one buffer with both, as engines have it."""
    if layout == "interleaved":
        both = torch.zeros(blocks, HEADS, size, SIZE + SIZE_V).transpose(1, 2)
        return both[..., :SIZE], both[..., SIZE:]
    if layout == "HND":
        return tuple(torch.zeros(blocks, HEADS, size, d).transpose(1, 2) for d in (SIZE, SIZE_V))  # type: ignore
    return torch.zeros(blocks, size, HEADS, SIZE), torch.zeros(blocks, size, HEADS, SIZE_V)


def step(tracer: Tracer | str, meta: AttentionMetadata, kc: torch.Tensor, vc: torch.Tensor, **options) -> torch.Tensor:
    make = torch.Generator().manual_seed(3)
    rows = meta.num_tokens
    key, value = torch.randn(rows, HEADS, SIZE, generator=make), torch.randn(rows, HEADS, SIZE_V, generator=make)
    pagetile.reshape_and_cache_flash(key, value, kc, vc, meta.slot_mapping, backend=tracer)
    return pagetile.flash_attn_varlen_func(
        torch.randn(rows, 2 * HEADS, SIZE, generator=make),
        kc,
        vc,
        meta.max_query_len,
        meta.query_start_loc,
        meta.max_seq_len,
        seqused_k=meta.seq_lens,
        block_table=meta.block_table,
        causal=True,
        backend=tracer,
        **options,
    )


def test_the_answer_is_the_delegates_bit_for_bit() -> None:
    meta = build_metadata([[7, 2, 9], [4]], [37, 5], [17, 1], 16)
    results = [(step(b, meta, *(c := caches())), *c) for b in (Tracer("reference"), "reference")]
    for traced, plain in zip(*results, strict=True):
        assert torch.equal(traced, plain)


def test_off_is_the_undecorated_backend() -> None:
    """A tracer leaves nothing behind: the same op without it gets the backend's own object."""
    kc, vc = caches()
    meta = build_metadata([[7, 2, 9]], [37], [37], 16)
    tracer = Tracer("reference")
    step(tracer, meta, kc, vc)
    problem = next(iter(tracer._choices))
    assert dispatch.select(problem, "reference") is registry.load("reference")
    assert type(dispatch.select(problem, "reference")) is ReferenceBackend
    assert dispatch.select(problem, tracer) is tracer


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_writes_are_where_the_bytes_changed(layout: str, size: int) -> None:
    """The derivation of a write against the memory itself: exactly the derived bytes are no longer what they were."""
    kc, vc = caches(40, size, layout)
    for tensor in (kc, vc):
        tensor.fill_(float("nan"))
    meta = build_metadata([[7, 2, 9, *range(10, 38)]], [30], [9], size, skip=[[(22, 24)]], pad_tokens=11)
    tracer = Tracer("reference")
    pagetile.reshape_and_cache_flash(
        torch.rand(11, HEADS, SIZE), torch.rand(11, HEADS, SIZE_V), kc, vc, meta.slot_mapping, backend=tracer
    )
    expected: dict[str, set[int]] = {"key_cache": set(), "value_cache": set()}
    for access in derive.accesses(tracer.trace, 0, 0):
        if access.head is not None:
            expected[access.tensor] |= set(range(access.address, access.address + access.bytes, 4))
    for name, tensor in (("key_cache", kc), ("value_cache", vc)):
        changed = {
            tensor[tuple(index)].data_ptr() - tensor.data_ptr() for index in torch.nonzero(tensor.isfinite()).tolist()
        }
        assert changed == expected[name]
        assert len(changed) == 7 * HEADS * tensor.shape[3]


@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (0, 0)])
def test_reads_are_what_the_answer_depends_on(window: tuple[int, int]) -> None:
    """Poison every slot that the derivation does not name: the answer stays. Poison one that it names: it does not."""
    meta = build_metadata([[7, 2, 9], [4]], [37, 5], [3, 1], 16)
    kc, vc = caches()
    kc.copy_(torch.rand(kc.shape)), vc.copy_(torch.rand(vc.shape))
    tracer = Tracer("reference")
    clean = step(tracer, meta, kc, vc, window_size=window)
    call, store = tracer.trace.steps[0].find("attend")[0], tracer.trace.stores[0]
    slots = np.concatenate(list(derive.read_slots(call, store).values()))
    dead = np.setdiff1d(np.arange(12 * 16), slots)
    for tensor in (kc, vc):
        tensor[torch.from_numpy(dead // 16), torch.from_numpy(dead % 16)] = float("nan")
    assert torch.equal(step("reference", meta, kc, vc, window_size=window), clean)
    new = set(meta.slot_mapping.tolist())
    old = [slot for slot in slots.tolist() if slot not in new]  # the new ones are written again below
    for slot in old[:3]:
        kept = vc[slot // 16, slot % 16].clone()
        vc[slot // 16, slot % 16] = float("nan")
        assert not step("reference", meta, kc, vc, window_size=window).isfinite().all()
        vc[slot // 16, slot % 16] = kept


def test_block_table_lookups() -> None:
    meta = build_metadata([[7, 2, 9], [4]], [37, 5], [3, 1], 16)
    tracer = Tracer("reference")
    step(tracer, meta, *caches(), window_size=(18, 0))
    found = [a for a in derive.accesses(tracer.trace, 0, 0, "attend") if a.tensor == "block_table"]
    # positions 34 - 18 = 16 on, so logical block 0 is behind the window
    assert [(a.row, a.offset, a.block) for a in found] == [(0, 1, 2), (0, 2, 9), (1, 0, 4)]


def test_layers_that_are_asked_the_same_share_a_call() -> None:
    tracer = Tracer("reference")
    pairs = [caches() for _ in range(3)]
    for length in (5, 6):
        meta = build_metadata([[7, 2, 9]], [length], [5 if length == 5 else 1], 16)
        for kc, vc in pairs:
            step(tracer, meta, kc, vc)
    trace = tracer.trace
    assert len(trace.steps) == 2, "the second write to a cache begins a step"
    assert [(c.op, c.stores) for c in trace.steps[1].calls] == [("write", [0, 1, 2]), ("attend", [0, 1, 2])]
    assert [(t.call, t.store) for t in trace.steps[0].timings] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_only_changed_rows_are_kept_and_all_come_back() -> None:
    """A table that lives 300 steps, with rows that grow, leave and move: each step's rows are found again."""
    rng = np.random.default_rng(0)
    rows: list[list[int]] = [[3], [5, 6]]
    table, history = None, []
    for number in range(300):
        for row in rows:
            if rng.random() < 0.1:
                row.append(int(rng.integers(100)))
        if rng.random() < 0.05:
            rows.pop(int(rng.integers(len(rows)))) if len(rows) > 1 else rows.append([number])
        if rng.random() < 0.05:
            rows.append([number])
        raw = np.full((len(rows), 80), -1, dtype=np.int32)  # garbage in the tails
        for r, row in enumerate(rows):
            raw[r, : len(row)] = row
        table = Table.after(table, raw, np.asarray([len(r) * 4 for r in rows], dtype=np.int32), 4)
        history.append((table, [list(r) for r in rows]))
    kept = sum(len(entries) for table, _ in history for _, _, entries in table.changes)
    whole = sum(len(r) for _, rows in history for r in rows)
    assert kept < whole / 5
    for table, rows in history:
        assert [r.tolist() for r in table.rows()] == rows


def test_metadata_changed_in_place_is_seen() -> None:
    """An engine may keep one slot tensor and overwrite it; the record must not change with it."""
    tracer, (kc, vc) = Tracer("reference"), caches()
    slots = torch.tensor([3])
    for slot in (3, 90):
        slots[0] = slot
        pagetile.reshape_and_cache_flash(
            torch.rand(1, HEADS, SIZE), torch.rand(1, HEADS, SIZE_V), kc, vc, slots, backend=tracer
        )
    assert [s.calls[0].slots.tolist() for s in tracer.trace.steps] == [[3], [90]]


def test_a_refused_call_is_not_recorded() -> None:
    tracer, (kc, vc) = Tracer("reference"), caches()
    with pytest.raises(SlotError):
        pagetile.reshape_and_cache_flash(
            torch.rand(1, HEADS, SIZE), torch.rand(1, HEADS, SIZE_V), kc, vc, torch.tensor([10**6]), backend=tracer
        )
    assert not any(s.calls for s in tracer.trace.steps)


def test_reasons_are_the_delegates() -> None:
    kc = torch.zeros(2, 16, HEADS, SIZE, dtype=torch.float64)

    class Refuses(ReferenceBackend):
        def why_not(self, problem):  # noqa: ARG002
            return ["it is Sunday"]

    row = torch.rand(1, HEADS, SIZE, dtype=torch.float64)
    with pytest.raises(BackendError, match="it is Sunday"):
        pagetile.reshape_and_cache_flash(row, row, kc, kc.clone(), torch.tensor([0]), backend=Tracer(Refuses()))


def test_merge_is_recorded() -> None:
    tracer = Tracer("reference")
    out, lse = torch.zeros(3, 2, 4), torch.zeros(2, 3)
    pagetile.merge_attn_states(torch.empty_like(out), out, lse, out, lse, backend=tracer)
    assert [c.op for c in tracer.trace.steps[0].calls] == ["merge"]
