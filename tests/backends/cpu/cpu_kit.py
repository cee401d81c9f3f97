"""Calls for the CPU backend, without ops: paged caches filled at random, every unused slot NaN."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pagetile import reference
from pagetile.backends.protocol import AttendCall, MergeCall, WriteCall
from pagetile.contracts.dtypes import dtype_name
from pagetile.contracts.problem import AttendProblem, MergeProblem, WriteProblem
from pagetile.contracts.state import State

ROOT = Path(__file__).resolve().parents[3]
NAN = float("nan")


def attend_call(
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    heads: int = 2,
    group: int = 3,
    size: int = 64,
    size_v: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: tuple[int, int] = (-1, 0),
    num_splits: int = 0,
    table_dtype: torch.dtype = torch.int32,
    seed: int = 0,
    **edits,
) -> AttendCall:
    """One call over a paged cache; sequence b's data depend on the seed and on nothing else in the batch."""
    size_v = size if size_v is None else size_v
    needed = [-(-k // block_size) for k in k_lens]
    k = torch.full((sum(needed) + 2, block_size, heads, size), NAN, dtype=dtype)
    v = torch.full((sum(needed) + 2, block_size, heads, size_v), NAN, dtype=dtype)
    table = torch.full((len(k_lens), max([0, *needed]) + 1), 2**31 - 1, dtype=table_dtype)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(seed + 1))
    q = torch.full((sum(q_lens), heads * group, size), NAN, dtype=dtype)
    used, row = 0, 0
    for b, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        table[b, : needed[b]] = order[used : used + needed[b]]
        used += needed[b]
        blocks, offsets = table[b, torch.arange(k_len) // block_size].long(), torch.arange(k_len) % block_size
        k[blocks, offsets] = torch.randn(k_len, heads, size, generator=generator).to(dtype)
        v[blocks, offsets] = torch.randn(k_len, heads, size_v, generator=generator).to(dtype)
        q[row : row + q_len] = torch.randn(q_len, heads * group, size, generator=generator).to(dtype)
        row += q_len
    problem = AttendProblem(
        device="cpu",
        dtype=dtype_name(dtype),
        kind=dtype_name(dtype),
        layout="paged",
        num_seqs=len(q_lens),
        num_tokens=len(q),
        max_q_len=max([0, *q_lens]),
        max_k_len=max([0, *k_lens]),
        num_q_heads=heads * group,
        num_kv_heads=heads,
        head_size=size,
        head_size_v=size_v,
        block_size=block_size,
        window=window,
        num_splits=num_splits,
    )
    return AttendCall(
        problem=problem,
        q=q,
        k=k,
        v=v,
        out=torch.full((len(q), heads * group, size_v), 77.0, dtype=dtype),
        lse=torch.full((heads * group, len(q)), 77.0),
        query_start_loc=torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(k_lens, dtype=torch.int32),
        key_start_loc=None,
        block_table=table,
        scale=size**-0.5,
        window=window,
        **edits,
    )


def truth(call: AttendCall, dtype: torch.dtype = torch.float64) -> State:
    """The reference over the same numbers in another dtype; on one thread, since its operations are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = reference.attend(
        call.q.to(dtype),
        call.k.to(dtype),
        call.v.to(dtype),
        call.query_start_loc,
        scale=call.scale,
        seq_lens=call.seq_lens,
        block_table=call.block_table,
        window=call.window,
        softcap=call.softcap,
        key_starts=call.key_starts,
        alibi_slopes=call.alibi_slopes,
        sinks=call.sinks,
    )
    torch.set_num_threads(threads)
    return state


def write_call(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> WriteCall:
    name = dtype_name(key.dtype)
    problem = WriteProblem(
        "cpu", name, name, "paged", len(key), key.shape[1], key.shape[2], value.shape[2], key_cache.shape[1]
    )
    return WriteCall(problem, key, value, key_cache, value_cache, slots)


def merge_call(a: State, b: State, into: State | None = None) -> MergeCall:
    into = into or State(torch.empty_like(a.out), torch.empty_like(a.lse))
    problem = MergeProblem("cpu", dtype_name(a.out.dtype), *a.out.shape)
    return MergeCall(problem, into.out, into.lse, a.out, a.lse, b.out, b.lse)


def run_python(code: str, path: Path = ROOT, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process that imports pagetile from ``path`` and these helpers from here."""
    paths = os.pathsep.join([str(path), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,  # python -c looks there first
        env={**os.environ, "PYTHONPATH": paths, **env},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not check or done.returncode == 0, done.stderr
    return done
