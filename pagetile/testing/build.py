"""Cases into tensors: caches, tables, slots, guards and poison, all from the case's seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagetile.backends.protocol import AttendCall, MergeCall, Scale, WriteCall
from pagetile.reference.quantise import STORED_AS, bits_of, dequantise, quantise
from pagetile.reference.storage import by_token
from pagetile.testing.cases import AttendCase, Case, MergeCase, WriteCase
from pagetile.testing.layouts import cache_storage, is_aligned, lse_storage, row_storage
from pagetile.testing.materials import (
    deal_blocks,
    filled_buffers,
    guarded,
    heads_contiguous,
    key_tokens,
    put,
    query_rows,
    ragged_storage,
    random_scale,
    read_scale,
    slots_of,
    start_loc,
    stored_tokens,
    token_scale,
    value_tokens,
    write_source,
)
from pagetile.testing.poison import Canary


@dataclass
class BuiltAttend:
    """An attention ready to run.

    Attributes:
        keys, values: float64 ``[L, Hkv, D]`` of each sequence, dequantised: what the cache means.
        canaries: the caches (nothing may change) and what lies round ``out`` and ``lse``.
    """

    case: AttendCase
    call: AttendCall
    keys: list[Tensor]
    values: list[Tensor]
    canaries: list[Canary]


@dataclass
class BuiltWrite:
    """A write ready to run, and the caches (and scales) bit for bit as they must be afterwards."""

    case: WriteCase
    call: WriteCall
    buffers: list[Tensor]
    expected: list[Tensor]


@dataclass
class BuiltMerge:
    """A merge ready to run. The call may write into its inputs, so ``a``, ``b`` and their log-sum-exps are copies."""

    case: MergeCase
    call: MergeCall
    a: Tensor
    a_lse: Tensor
    b: Tensor
    b_lse: Tensor
    canaries: list[Canary]


Built = BuiltAttend | BuiltWrite | BuiltMerge


def build(case: Case, device: str = "cpu", *, in_order: bool = False) -> Built:
    """Tensors for a case; see :func:`build_attend`, :func:`build_write`, :func:`build_merge`."""
    if isinstance(case, AttendCase):
        return build_attend(case, device, in_order=in_order)
    return build_write(case, device) if isinstance(case, WriteCase) else build_merge(case, device)


def build_attend(case: AttendCase, device: str = "cpu", *, in_order: bool = False) -> BuiltAttend:
    """An attention over a cache filled from the seed.

    Args:
        in_order: physical blocks 0, 1, 2, ... instead of a shuffle; the values are the same ones.
    """
    dtype: torch.dtype = getattr(torch, case.dtype)
    kind = case.kind or case.dtype
    values = torch.Generator().manual_seed(case.seed)
    lengths = [k_len for _, k_len in case.seqs]
    k_tokens = key_tokens(case, values)
    v_tokens = value_tokens(case, values)
    table = deal_blocks(case, in_order)
    slots = [slots_of(table[row], length, case.block_size) for row, length in enumerate(lengths)]
    k_scale, v_scale = (read_scale(case, slots, values, device) for _ in "kv")
    k_stored, v_stored = (
        [quantise(x, kind, token_scale(s, seq, slots[seq])) for seq, x in enumerate(tokens)]
        for tokens, s in ((k_tokens, k_scale), (v_tokens, v_scale))
    )
    keys, meanings = (
        [dequantise(x, kind, token_scale(s, seq, slots[seq])).double() for seq, x in enumerate(stored)]
        for stored, s in ((k_stored, k_scale), (v_stored, v_scale))
    )

    store = STORED_AS.get(kind, dtype)
    if case.layout == "ragged":
        storage = ragged_storage(case)
        k_rows, v_rows = (torch.cat(s) if s else torch.empty(0) for s in (k_stored, v_stored))
        buffers = filled_buffers(storage, store, kind, case.poison, device)
        k, v = storage.look(buffers)
        for view, rows in ((k, k_rows), (v, v_rows)):
            bits_of(view).copy_(bits_of(rows))
    else:
        x = 16 // torch.empty(0, dtype=store).element_size()
        family = "xpacked" if case.layout == "xpacked" else case.cache
        storage = cache_storage(
            family, case.num_blocks, case.block_size, case.num_kv_heads, case.head_size, case.value_size, x
        )
        buffers = filled_buffers(storage, store, kind, case.poison, device)
        k, v = storage.look(buffers)
        for view, stored in ((k, k_stored), (v, v_stored)):
            for tokens, where in zip(stored, slots, strict=True):
                put(by_token(view, case.layout), where, tokens)

    q_storage = row_storage(case.q, case.num_rows + case.spare_rows, case.num_q_heads, case.head_size)
    q_buffers = filled_buffers(q_storage, dtype, case.dtype, case.poison, device)
    (q,) = q_storage.look(q_buffers)
    q[: case.num_rows] = query_rows(case, k_tokens, values)

    out, out_canary = guarded(
        "out", row_storage(case.out, len(q), case.num_q_heads, case.value_size), dtype, device, rows=case.num_rows
    )
    lse, lse_canary = guarded(
        "lse", lse_storage(case.lse, len(q), case.num_q_heads), torch.float32, device, columns=case.num_rows
    )
    slope_shape = (case.num_q_heads,) if case.alibi != "sequence" else (len(case.seqs), case.num_q_heads)
    slopes = torch.rand(slope_shape, generator=values).mul(0.5).to(device)
    sinks = torch.randn(case.num_q_heads, generator=values).to(device)

    paged = case.layout != "ragged"
    call = AttendCall(
        problem=case.problem(torch.device(device).type, is_aligned(k, v)),
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse if case.with_lse else None,
        query_start_loc=start_loc([q_len for q_len, _ in case.seqs], device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device) if paged else None,
        key_start_loc=None if paged else start_loc(lengths, device),
        block_table=table.to(device) if paged else None,
        scale=case.head_size**-0.5,
        window=case.problem().window,
        softcap=case.softcap,
        key_starts=torch.tensor(case.key_starts, dtype=torch.int32, device=device) if case.key_starts else None,
        alibi_slopes=slopes if case.alibi else None,
        sinks=sinks if case.sinks else None,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    frozen = [
        Canary(f"cache buffer {i}", b, torch.ones(b.shape, dtype=torch.bool, device=device))
        for i, b in enumerate(buffers)
    ]
    return BuiltAttend(case, call, keys, meanings, [*frozen, out_canary, lse_canary])


def build_write(case: WriteCase, device: str = "cpu") -> BuiltWrite:
    """A write into a poisoned cache."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    kind = case.kind or case.dtype
    rng = torch.Generator().manual_seed(case.seed)
    store = STORED_AS.get(kind, dtype)
    storage = cache_storage(
        "xpacked" if case.layout == "xpacked" else case.cache,
        case.num_blocks,
        case.block_size,
        case.num_kv_heads,
        case.head_size,
        case.value_size,
        16 // torch.empty(0, dtype=store).element_size(),
    )
    buffers = filled_buffers(storage, store, kind, True, device)
    sources = [write_source(case, size, dtype, rng, device) for size in (case.head_size, case.value_size)]

    num_slots = case.num_tokens if case.num_slots < 0 else case.num_slots
    slots = torch.randperm(case.num_blocks * case.block_size, generator=rng)[:num_slots].to(
        getattr(torch, case.slot_dtype)
    )
    if case.skip:
        negative = torch.tensor([-1, -2, -case.block_size, -(2**31)], dtype=slots.dtype)
        skipped = torch.arange(num_slots) % case.skip == 0
        slots = torch.where(skipped, negative[torch.arange(num_slots) % 4], slots)

    shape = (case.num_blocks, case.block_size, case.num_kv_heads)
    if case.scale == "token_head":
        scales: list[Scale] = [torch.full(shape, torch.nan, device=device) for _ in "kv"]
    else:
        scales = [random_scale(case.scale, case.num_kv_heads, (), rng, device) for _ in "kv"]
    expected = [b.clone() for b in buffers]
    filled = [s.clone() if isinstance(s, Tensor) else s for s in scales]
    kept = (slots >= 0).nonzero().flatten()
    for source, view, scale in zip(sources, storage.look(expected), filled, strict=True):
        tokens, where = source[kept.to(device)], slots[kept].to(device=device, dtype=torch.int64)
        put(by_token(view, case.layout), where, stored_tokens(tokens, kind, case.scale, scale, where))
    key_cache, value_cache = storage.look(buffers)
    if case.scale == "token_head":  # outputs as much as the caches are
        buffers += [s for s in scales if isinstance(s, Tensor)]
        expected += [s for s in filled if isinstance(s, Tensor)]
    key, value = sources
    problem = case.problem(
        torch.device(device).type,
        is_aligned(key, value, key_cache, value_cache),
        all(heads_contiguous(x) for x in (key, value, key_cache, value_cache)) and case.layout == "paged",
    )
    call = WriteCall(problem, key, value, key_cache, value_cache, slots.to(device), *scales)
    return BuiltWrite(case, call, buffers, expected)


def build_merge(case: MergeCase, device: str = "cpu") -> BuiltMerge:
    """A merge whose first rows cycle through: both, first empty, second empty, both empty (unless ``empty`` is 0)."""
    dtype = getattr(torch, case.dtype)
    rng = torch.Generator().manual_seed(case.seed)
    states, canaries = [], []
    for i, name in enumerate("ab"):
        rows, row_canary = guarded(
            name, row_storage(case.rows, case.num_tokens, case.num_heads, case.head_size), dtype, device
        )
        lse, lse_canary = guarded(
            f"{name}_lse", lse_storage(case.lse, case.num_tokens, case.num_heads), torch.float32, device
        )
        rows.copy_(torch.randn(rows.shape, generator=rng))
        lse.copy_(torch.randn(lse.shape, generator=rng) * case.spread)
        if case.empty:
            gone = torch.arange(case.num_tokens) % 4 == i + 1
            gone |= torch.arange(case.num_tokens) % 4 == 3
            lse[:, gone] = case.empty
            rows[gone] = torch.nan  # an empty state's output is never looked at
        states += [rows, lse]
        canaries += [row_canary, lse_canary]
    if case.into == "new":
        out, canary = guarded(
            "out", row_storage(case.rows, case.num_tokens, case.num_heads, case.head_size), dtype, device
        )
        out_lse, lse_canary = guarded(
            "out_lse", lse_storage(case.lse, case.num_tokens, case.num_heads), torch.float32, device
        )
        canaries += [canary, lse_canary]
    else:
        out, out_lse = states[:2] if case.into == "a" else states[2:]
    a, a_lse, b, b_lse = (x.clone() for x in states)
    for canary in canaries:
        canary.before = canary.buffer.clone()
    call = MergeCall(case.problem(torch.device(device).type), out, out_lse if case.with_lse else None, *states)
    return BuiltMerge(case, call, a, a_lse, b, b_lse, canaries)


def without_poison(case: AttendCase) -> AttendCase:
    """The same case over a clean cache: zeros where nobody's tokens are."""
    return replace(case, poison=False)
