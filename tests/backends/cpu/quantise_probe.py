"""Every 16-bit pattern and every rounding boundary through the CPU's quantised write, against the reference.

Importing it runs the checks; in a process of its own, since the width of vectors is a process's.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pagetile.backends.cpu import CpuBackend
from pagetile.backends.cpu.kernels.vector import W
from pagetile.backends.protocol import WriteCall
from pagetile.contracts.dtypes import QUANTISED
from pagetile.contracts.problem import WriteProblem
from pagetile.reference.quantise import LARGEST, STORED_AS, dequantise, quantise, token_head_scale
from pagetile.testing.patterns import digest, golden, keys, pattern_call
from pagetile.testing.poison import first_difference, same_bits

WIDTH = W
CPU = CpuBackend()


def check_patterns() -> None:
    assert list(golden()) == keys()
    for key in keys():
        call = pattern_call(key)
        CPU.write(call)
        kind, scale = key.split()[1], float(key.split()[2])
        right = quantise(call.key, kind, scale).view_as(call.key_cache)
        assert same_bits(call.key_cache, right), f"{key}: {first_difference(call.key_cache, right)}"
        assert digest(call.key_cache) == golden()[key], key
        heads = pattern_call(key, per_head=True)
        CPU.write(heads)
        assert same_bits(heads.value_cache, call.value_cache)


def boundaries(kind: str) -> torch.Tensor:
    """Every value a byte stands for, the middles between neighbours, the float32 numbers beside both, and the rest."""
    values = dequantise(torch.arange(256, dtype=torch.uint8).view(STORED_AS[kind]), kind)
    values = values[values.isfinite()].sort().values
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    infinity = torch.tensor(torch.inf)
    beside = [torch.nextafter(points, edge) for edge in (infinity, -infinity)]
    loud = [LARGEST[kind] * 1.04, 3.4e38, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, -0.0]
    return torch.cat([points, *beside, torch.tensor(loud), torch.randn(997)])


def check_float32(kind: str) -> None:
    """An odd number of elements, so that the last ones go one by one; also times scales that do not divide evenly."""
    for scale in (1.0, 0.3, 7.0):
        x = (boundaries(kind) * scale).view(1, 1, -1)
        stored = [torch.zeros(1, 1, 1, x.shape[-1], dtype=STORED_AS[kind]) for _ in "kv"]
        problem = WriteProblem("cpu", "float32", kind, "paged", 1, 1, x.shape[-1], x.shape[-1], 1, scale="tensor")
        call = WriteCall(problem, x, x, *stored, torch.tensor([0]), scale, torch.tensor([scale]))
        CPU.write(call)
        for got in stored:
            right = quantise(x, kind, scale).view_as(got)
            assert same_bits(got, right), f"{kind} {scale}: {first_difference(got, right)}"
        own = [torch.zeros(1, 1, 1) for _ in "kv"]
        CPU.write(replace(call, problem=replace(problem, scale="token_head"), k_scale=own[0], v_scale=own[1]))
        assert torch.equal(own[0][0], token_head_scale(x[0], kind).view(1, 1))
        assert same_bits(stored[1], quantise(x, kind, own[1].unsqueeze(-1)).view_as(stored[1]))


check_patterns()
for each in QUANTISED:
    check_float32(each)
