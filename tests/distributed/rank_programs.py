"""What a rank runs in the tests of :mod:`pagetile.distributed`: ``python rank_programs.py PROGRAM RANK WORLD FOLDER``.

A program prints what went wrong and ends with 1, or ends with 0.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pagetile import reshape_and_cache_flash
from pagetile.contracts.geometry import blocks_for
from pagetile.distributed import ContextParallel, LocalBatch, PeerError, RankGrid, TokenSplit, build_local_batch
from pagetile.distributed.model import sent_bytes
from pagetile.testing.build import BuiltAttend, build_attend
from pagetile.testing.cases import AttendCase
from pagetile.testing.tolerance import assert_attend

DECODE = ((1, 37), (1, 5), (1, 1), (0, 9), (1, 300))
PREFILL = ((5, 37), (3, 3), (0, 4), (17, 64), (1, 2))
CASES = [
    AttendCase(seqs=DECODE, num_q_heads=6, num_kv_heads=3),
    AttendCase(seqs=DECODE, num_q_heads=2, num_kv_heads=1, sinks=True, seed=1),  # fewer heads than four ranks
    AttendCase(seqs=PREFILL, num_q_heads=6, num_kv_heads=2, sinks=True, spare_rows=2, seed=2),
    AttendCase(seqs=PREFILL, num_q_heads=4, num_kv_heads=2, window=(9, -1), softcap=3.0, seed=3),
    AttendCase(seqs=PREFILL, num_q_heads=4, num_kv_heads=2, causal=False, window=(6, 2), seed=4),
    AttendCase(seqs=((1, 1), (0, 0)), num_q_heads=4, num_kv_heads=2, seed=5),  # empty shards
    AttendCase(seqs=((0, 9), (0, 0)), num_q_heads=4, num_kv_heads=2, seed=9),  # no queries at all
    AttendCase(seqs=((1, 20_000), (1, 3)), num_q_heads=4, num_kv_heads=2, seed=10),
    AttendCase(seqs=DECODE, num_q_heads=4, num_kv_heads=2, dtype="bfloat16", head_size=32, head_size_v=16, seed=6),
    AttendCase(seqs=PREFILL, num_q_heads=4, num_kv_heads=2, dtype="bfloat16", seed=7),
    AttendCase(seqs=DECODE, num_q_heads=4, num_kv_heads=2, kind="fp8_e4m3", scale="float", seed=8),
]
WAYS = [("all_to_all", 1), ("reduce_scatter", 3), ("all_gather", 16)]


class Shard:
    """One rank's cache of a case: its tokens in shuffled blocks of its own, NaN elsewhere."""

    def __init__(self, built: BuiltAttend, split: TokenSplit, block_size: int = 4) -> None:
        case, call = built.case, built.call
        lengths = [n for _, n in case.seqs]
        needed = [blocks_for(split.local_len(n), block_size) for n in lengths]
        order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(split.rank)).tolist()
        self.blocks = [[order.pop() for _ in range(n)] for n in needed]
        dtype = call.k.dtype
        shape = (sum(needed) + 2, block_size, case.num_kv_heads)
        unused = torch.full((), torch.nan)
        self.k, self.v = (unused.to(dtype).repeat(*shape, size) for size in (case.head_size, case.value_size))
        self.scales: dict[str, Any] = {"k_descale": call.k_scale, "v_descale": call.v_scale} if case.kind else {}
        everything = build_local_batch(self.blocks, lengths, lengths, block_size, split)
        keys, values = (torch.cat(x).to(call.q.dtype) for x in (built.keys, built.values))
        reshape_and_cache_flash(
            keys, values, self.k, self.v, everything.slot_mapping, "auto", call.k_scale, call.v_scale
        )
        self.batch: LocalBatch = build_local_batch(
            self.blocks,
            lengths,
            [n for n, _ in case.seqs],
            block_size,
            split,
            pad_tokens=case.num_rows + case.spare_rows,
        )
        self.new = [
            _padded(
                torch.cat([x[len(x) - n :] for x, (n, _) in zip(xs, case.seqs, strict=True)]), len(call.q), call.q.dtype
            )
            for xs in (built.keys, built.values)
        ]


def _padded(x: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    whole = torch.full((rows, *x.shape[1:]), torch.nan, dtype=dtype)
    whole[: len(x)] = x
    return whole


def check(cp: ContextParallel, case: AttendCase, with_new: bool) -> None:
    """Context-parallel attention of a case, every head gathered, against float64 on every rank."""
    built = build_attend(case)
    shard, call = Shard(built, cp.split), built.call
    new = {"key": shard.new[0], "value": shard.new[1]} if with_new else {}
    out, lse = cp.attend(
        call.q, shard.k, shard.v, shard.batch, causal=case.causal, window_size=case.window, softcap=case.softcap,
        s_aux=call.sinks, **shard.scales, **new,
    )  # fmt: skip
    heads = cp.heads(case.num_q_heads)
    assert (out.shape[1], lse.shape) == (len(heads), (len(heads), len(call.q))), f"{out.shape}, {lse.shape}"
    if cp.mode != "all_gather":
        out = cp.gather_heads(out, case.num_q_heads)
        lse = cp.gather_heads(lse.T.unsqueeze(-1), case.num_q_heads).squeeze(-1).T
    rest = slice(case.num_rows, None)
    no_sink = call.sinks is None
    assert (out[rest] == 0).all(), "a row that belongs to no sequence is not empty"
    assert not no_sink or torch.isneginf(lse[:, rest]).all(), "a row that belongs to no sequence has a log-sum-exp"
    call.out[: case.num_rows] = out[: case.num_rows]
    if call.lse is not None:
        call.lse[:, : case.num_rows] = lse[:, : case.num_rows]
    assert_attend(built, roundings=2)  # each rank's state, then the sum


def equal(rank: int, world: int) -> None:
    """Every case, every way of exchanging, with and without the new tokens at hand."""
    for mode, interleave in WAYS:
        cp = ContextParallel(interleave=interleave, mode=mode)
        for case in CASES:
            for with_new in (False, True):
                if with_new and (case.kind or case.seqs == DECODE):
                    continue  # as without, or new tokens that are not what the cache means
                try:
                    check(cp, case, with_new)
                except AssertionError as error:
                    raise AssertionError(
                        f"rank {rank}, {mode}, chunks of {interleave}, new {with_new}: {error}"
                    ) from error
    repeats(rank)
    bytes_of_the_model(rank, world)


def repeats(rank: int) -> None:
    """The same bits twice, and from start and finish as from one call."""
    built = build_attend(CASES[0])
    cp = ContextParallel(interleave=4)
    shard = Shard(built, cp.split)
    once = cp.attend(built.call.q, shard.k, shard.v, shard.batch)
    finish = cp.start_attend(built.call.q, shard.k, shard.v, shard.batch)
    for a, b in zip(once, finish(), strict=True):
        assert torch.equal(a, b), f"rank {rank}: other bits the second time"


def bytes_of_the_model(rank: int, world: int) -> None:
    """What the paper model says is sent is what the collectives are given."""
    out, lse = torch.rand(3, 8, 16).bfloat16(), torch.rand(8, 3)
    for mode in ("all_to_all", "all_gather", "reduce_scatter"):
        cp, given = ContextParallel(mode=mode), []
        for name in ("all_to_all", "all_gather", "reduce_scatter"):
            setattr(cp.exchange, name, counting(getattr(cp.exchange, name), name, given, world))
        cp.combine(out, lse)
        assert sum(given) == sent_bytes(3, 8, 16, 2, world, mode), f"rank {rank}, {mode}: {given}"


def counting(collective: Any, name: str, given: list[int], world: int) -> Any:
    """A collective that notes what goes to the other ranks: all of it to each, or each its part."""

    def call(sent: Tensor, *args: Any) -> Any:
        size = sent.numel() * sent.element_size() * (world - 1)
        given.append(size if name == "all_gather" else size // world)
        return collective(sent, *args)

    return call


def grid(rank: int, world: int) -> None:
    """Two KV heads on four ranks: each row of two ranks has one of them, each column half of the tokens."""
    layout = RankGrid.of(world, num_kv_heads=2)
    assert (layout.tp, layout.cp) == (2, 2)
    group = layout.make_groups(timeout=60)
    for seqs in (DECODE, PREFILL):
        case = AttendCase(seqs=seqs, num_q_heads=8, num_kv_heads=2, sinks=True, seed=11)
        whole = build_attend(case)
        heads = layout.heads(rank, 8, 2)
        q = slice(heads.q_heads.start, heads.q_heads.stop)
        kv = slice(heads.kv_heads.start, heads.kv_heads.stop)
        mine = build_attend(AttendCase(seqs=seqs, num_q_heads=4, num_kv_heads=1, sinks=True, seed=11))
        mine.call.q[: case.num_rows] = whole.call.q[: case.num_rows, q]
        mine.keys, mine.values = ([x[:, kv] for x in xs] for xs in (whole.keys, whole.values))
        assert whole.call.sinks is not None
        assert mine.call.sinks is not None
        mine.call.sinks.copy_(whole.call.sinks[q])
        cp = ContextParallel(group, interleave=2)
        assert cp.split == layout.tokens(rank, 2)
        shard = Shard(mine, cp.split)
        out, _ = cp.attend(mine.call.q, shard.k, shard.v, shard.batch, s_aux=mine.call.sinks)
        out = cp.gather_heads(out, 4)
        # All heads, from both rows: what the output projection of a tensor parallel layer would take apart again.
        everyone = [torch.empty_like(out) for _ in range(world)]
        dist.all_gather(everyone, out.contiguous())
        whole.call.out[: case.num_rows] = torch.cat(everyone[:: layout.cp], dim=1)[: case.num_rows]
        whole.call.lse = None
        assert_attend(whole, roundings=2)


def mesh(rank: int, world: int) -> None:
    """A DeviceMesh stands for its group; one of two axes does not."""
    from torch.distributed.device_mesh import init_device_mesh

    plane = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("tp", "cp"))
    cp = ContextParallel(plane["cp"], interleave=4)
    check(cp, CASES[0], False)
    try:
        ContextParallel(plane)
    except ValueError as error:
        said = str(error)
    else:
        said = "it was taken"
    assert "2 axes" in said, f"rank {rank}, a mesh of two axes: {said}"


def four(rank: int, world: int) -> None:
    """What needs four ranks, in one start of them."""
    equal(rank, world)
    grid(rank, world)
    mesh(rank, world)


def gone(rank: int, world: int, how: str, mode: str) -> None:
    """One rank dies, or sleeps until the others are done; on each of them the next exchange is an error by then."""
    heard = Path(sys.argv[4]) / "heard"
    out, lse = torch.rand(3, 8, 16), torch.rand(8, 3)
    cp = ContextParallel(mode=mode, timeout=None if how == "dies" else 4.0)
    cp.combine(out, lse)
    start, patience = time.monotonic(), 100
    if rank == world - 1:
        while how == "stalls" and not heard.exists() and time.monotonic() - start < patience:
            time.sleep(0.1)
        os._exit(0)
    said = ""
    try:
        for _ in range(3):
            cp.combine(out, lse)
    except PeerError as error:
        said = str(error)
    took = time.monotonic() - start
    heard.touch()
    assert f"rank {rank} of {world}" in said, f"rank {rank} heard {said!r}"
    assert took < patience, f"rank {rank}: an error only after {took:.1f} s"
    os._exit(0)  # not through the destructors of a broken group


def main() -> None:
    program, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    limit = 6 if program.startswith("gone") else 120
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit))
    name, *arguments = program.split(":")
    globals()[name](rank, world, *arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
