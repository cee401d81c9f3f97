"""What cases are made of: tokens, tables, slots, scales, guarded outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagetile.backends.protocol import Scale
from pagetile.contracts.geometry import blocks_for
from pagetile.reference.quantise import LARGEST, bits_of, head_scale, quantise
from pagetile.testing.cases import AttendCase, ScaleForm, WriteCase
from pagetile.testing.layouts import ROW_FAMILIES, Storage, row_storage
from pagetile.testing.poison import Canary, garbage_tails, poison

SENTINEL = 12345.0
"""What outputs hold before the call."""


def key_tokens(case: AttendCase, rng: torch.Generator) -> list[Tensor]:
    """K of each sequence, ``[L, Hkv, D]`` in the case's dtype."""
    drawn = _random_tokens(case, case.head_size, rng)
    if case.tokens != "one_hot":
        return drawn
    basis = torch.eye(case.head_size, dtype=getattr(torch, case.dtype))
    return [basis[: len(x)].unsqueeze(1).expand_as(x) for x in drawn]


def value_tokens(case: AttendCase, rng: torch.Generator) -> list[Tensor]:
    """V of each sequence, ``[L, Hkv, Dv]`` in the case's dtype."""
    drawn = _random_tokens(case, case.value_size, rng)
    if case.tokens != "uniform":
        return drawn
    return [torch.arange(len(x), dtype=x.dtype)[:, None, None].expand_as(x) for x in drawn]


def query_rows(case: AttendCase, keys: Sequence[Tensor], rng: torch.Generator) -> Tensor:
    """The rows of q that belong to a sequence, ``[T, Hq, D]``."""
    rows = torch.randn(case.num_rows, case.num_q_heads, case.head_size, generator=rng) * case.gain
    if case.tokens == "uniform":
        rows.zero_()
    if case.tokens == "one_hot":
        wanted = [k[wanted_key(i, len(k))] for k, (n, _) in zip(keys, case.seqs, strict=True) for i in range(n)]
        group = case.num_q_heads // case.num_kv_heads
        rows = 100 * case.head_size**0.5 * torch.stack(wanted).float().repeat_interleave(group, dim=1)
    return rows.to(getattr(torch, case.dtype))


def wanted_key(i: int, num_keys: int) -> int:
    """Which key query i of a sequence asks for in the tokens ``one_hot``."""
    return (7 * i + 20) % num_keys


def _random_tokens(case: AttendCase, size: int, rng: torch.Generator) -> list[Tensor]:
    dtype = getattr(torch, case.dtype)
    return [torch.randn(length, case.num_kv_heads, size, generator=rng).to(dtype) for _, length in case.seqs]


def deal_blocks(case: AttendCase, in_order: bool) -> Tensor:
    """Blocks dealt out to the sequences, three columns wider than the longest one needs."""
    lengths = [k_len for _, k_len in case.seqs]
    width = max((blocks_for(n, case.block_size) for n in lengths), default=0) + 3
    order = torch.randperm(case.num_blocks, generator=torch.Generator().manual_seed(case.seed + 1))
    free = iter(range(case.num_blocks) if in_order else order.tolist())
    table = torch.zeros(len(lengths), width, dtype=getattr(torch, case.table_dtype))
    for row, length in enumerate(lengths):
        for column in range(blocks_for(length, case.block_size)):
            table[row, column] = next(free)
    if case.poison:
        garbage_tails(table, lengths, case.block_size, case.num_blocks)
    return table


def slots_of(row: Tensor, length: int, block_size: int) -> Tensor:
    positions = torch.arange(length)
    return row[positions // block_size].to(torch.int64) * block_size + positions % block_size


def put(cache: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Store tokens ``[n, Hkv, D]`` at slots of a by-token cache."""
    bs = cache.shape[1]
    slots = slots.to(cache.device)
    bits_of(cache)[slots // bs, slots % bs] = bits_of(tokens).to(cache.device).reshape(len(tokens), *cache.shape[2:])


def filled_buffers(storage: Storage, dtype: torch.dtype, kind: str, poisoned: bool, device: str) -> list[Tensor]:
    buffers = storage.allocate(dtype, device)
    if poisoned:
        for buffer in buffers:
            poison(buffer, kind)
    return buffers


def guarded(
    name: str, storage: Storage, dtype: torch.dtype, device: str, rows: int | None = None, columns: int | None = None
) -> tuple[Tensor, Canary]:
    """One view full of sentinels, and the canary round it; only ``[:rows]`` or ``[:, :columns]`` may change."""
    buffers = storage.allocate(dtype, device)
    outside = [torch.ones(b.shape, dtype=torch.bool, device=device) for b in buffers]
    (mask,) = storage.look(outside)
    mask[:rows] = mask[:rows] if columns is not None else False
    if columns is not None:
        mask[:, :columns] = False
    buffers[0].fill_(SENTINEL)
    (view,) = storage.look(buffers)
    return view, Canary(name, buffers[0], outside[0])


def write_source(case: WriteCase, size: int, dtype: torch.dtype, rng: torch.Generator, device: str) -> Tensor:
    storage = row_storage(case.source, case.num_tokens, case.num_kv_heads, size)
    buffers = storage.allocate(dtype, device)
    for buffer in buffers:
        poison(buffer, case.dtype)
    (rows,) = storage.look(buffers)
    used = case.num_tokens if case.num_slots < 0 else case.num_slots
    tokens = torch.randn(used, case.num_kv_heads, size, generator=rng)
    if case.loud:
        loud = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 6e4, -6e4, 500.0, -300.0, 1e-5, -0.0])
        flat = tokens.view(-1)
        flat[::3] = loud[torch.arange(len(flat[::3])) % len(loud)]
    rows[:used] = tokens.to(dtype)
    return rows


def stored_tokens(tokens: Tensor, kind: str, form: ScaleForm, scale: Scale, where: Tensor) -> Tensor:
    """Tokens as the cache must hold them; fills ``scale`` when each token and head has its own."""
    if form != "token_head" or not isinstance(scale, Tensor):
        return quantise(tokens, kind, head_scale(scale, tokens.device))
    x = tokens.float().abs()
    own = x.masked_fill(~x.isfinite(), 0).amax(-1) / torch.full((), LARGEST[kind], device=x.device)
    own[own == 0] = 1
    scale[where // scale.shape[1], where % scale.shape[1]] = own
    return quantise(tokens, kind, own.unsqueeze(-1))


def random_scale(form: ScaleForm, heads: int, lead: tuple[int, ...], rng: torch.Generator, device: str) -> Scale:
    """A scale between 1/64 and 1/16, so that normal values fill the kinds' range without one being 1.0."""
    if form == "none":
        return None
    shape = {"float": (), "0d": (), "one": (1,), "head": (heads,)}.get(form, (*lead, heads))
    scale = (torch.rand(shape, generator=rng) * 3 + 1) / 64
    return float(scale) if form == "float" else scale.to(device)


def read_scale(case: AttendCase, slots: Sequence[Tensor], rng: torch.Generator, device: str) -> Scale:
    """A scale in the case's form; with one for each token and head, the slots nobody owns hold NaN if poisoned."""
    if case.scale != "token_head":
        return random_scale(case.scale, case.num_kv_heads, (len(case.seqs),), rng, device)
    shape = (case.num_blocks, case.block_size, case.num_kv_heads)
    scale = torch.full(shape, torch.nan if case.poison else 0.0)
    for where in slots:
        own = random_scale("token_head", case.num_kv_heads, (len(where),), rng, "cpu")
        scale.flatten(0, 1)[where] = torch.as_tensor(own)
    return scale.to(device)


def token_scale(scale: Scale, seq: int, slots: Tensor) -> Tensor:
    """A scale as it applies to the tokens of one sequence, on the host."""
    if isinstance(scale, Tensor):
        scale = scale.cpu()
        if scale.dim() == 3:
            scale = scale.flatten(0, 1)[slots]
        elif scale.dim() == 2:
            scale = scale[seq]
    return head_scale(scale, torch.device("cpu"))


def ragged_storage(case: AttendCase) -> Storage:
    """K and V end to end, each in its own storage, stray rows before and after."""
    total = sum(k_len for _, k_len in case.seqs)
    family = case.cache if case.cache in ROW_FAMILIES else "contiguous"
    k, v = (row_storage(family, total, case.num_kv_heads, size) for size in (case.head_size, case.value_size))
    return Storage(k.shapes + v.shapes, lambda b: (*k.look(b[:1]), *v.look(b[1:])))


def start_loc(lengths: Sequence[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def heads_contiguous(x: Tensor) -> bool:
    return x.shape[-2] == 1 or x.stride(-2) == x.shape[-1]
