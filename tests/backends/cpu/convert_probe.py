"""Every element dtype through the kernels' own conversions; run in a process of its own, since vectors are a process's.

Importing it runs the checks.
"""

from __future__ import annotations

import numpy as np
import torch

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import Kernel
from pagetile.backends.cpu.kernels.elements import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    put_f32,
    read_row,
    read_strided,
    write_strided,
)
from pagetile.backends.cpu.kernels.softmax import exp_and_sum, soft_cap
from pagetile.backends.cpu.kernels.vector import W


def probe_read(source, stride, target, size, code):
    read_strided(source, stride, target, size, code)


def probe_rows(source, target, size, code):
    if code == P.FLOAT32:
        read_row(source, target, size, FLOAT32)
    elif code == P.BFLOAT16:
        read_row(source, target, size, BFLOAT16)
    else:
        read_row(source, target, size, FLOAT16)


def probe_write(source, target, stride, size, code):
    write_strided(source, target, stride, size, code)


def probe_exp(scores, low, high, total):
    put_f32(total, exp_and_sum(scores, low, high, np.float32(0), np.float32(1), np.float32(0)))


def probe_tanh(scores, low, high):
    soft_cap(scores, low, high, np.float32(1), np.float32(1))


READ, ROWS, WRITE, EXP, TANH = (Kernel(f) for f in (probe_read, probe_rows, probe_write, probe_exp, probe_tanh))


def check_halves(dtype: torch.dtype, code: int) -> None:
    """All 65536 patterns in; and out, every one of them, its neighbours' middles and what lies beside those."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = patterns.view(dtype)
    for step in (1, 3):
        source = torch.zeros(len(values) * step, dtype=dtype)
        source[::step] = values
        out = torch.empty(len(values))
        READ(source.data_ptr(), 2 * step, out.data_ptr(), len(values), code)
        assert torch.equal(out.nan_to_num(7), values.float().nan_to_num(7))
        assert torch.equal(out.signbit(), values.float().signbit())
    for size in (1, W - 1, W, W + 1, 77):
        out = torch.full((size + W + 1,), 5.0)
        ROWS(values.data_ptr() + 2 * 9000, out.data_ptr(), size, code)
        padded = -(-size // W) * W
        assert torch.equal(out[:size], values[9000 : 9000 + size].float())
        assert (out[size:padded] == 0).all()
        assert (out[padded:] == 5).all()

    exact = values.float()
    finite = exact[exact.isfinite()].sort().values
    middles = (finite[1:].double() + finite[:-1].double()).div(2).float()
    beside = torch.cat([torch.nextafter(middles, torch.tensor(s)) for s in (float("inf"), -float("inf"))])
    special = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 65519.9, 65520.0, 3.4e38, 1e-45])
    payload = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int64).to(torch.int32).view(torch.float32)
    every = torch.cat([exact, middles, beside, special, payload, torch.randn(1000)])
    for step in (1, 2):
        out = torch.zeros(len(every) * step, dtype=dtype)
        WRITE(every.data_ptr(), out.data_ptr(), 2 * step, len(every), code)
        found, wanted = out[::step].float(), every.to(dtype).float()
        assert torch.equal(found.isnan(), every.isnan())
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
        assert torch.equal(found.signbit()[~every.isnan()], wanted.signbit()[~every.isnan()])


def check_functions() -> None:
    x = torch.cat([torch.linspace(-126, 0, 40000), torch.tensor([0.0, -0.0, -126.5, -1e30, -float("inf")])])
    x = torch.cat([x, torch.zeros(-len(x) % W)])
    y, total = x.clone(), torch.zeros(1)
    EXP(y.data_ptr(), 0, len(x), total.data_ptr())
    true = torch.exp2(x.double())
    alive = x >= -126
    assert ((y[alive].double() - true[alive]) / true[alive]).abs().max() < 1.5e-7
    assert (y[~alive] == 0).all()
    assert (y[x == 0] == 1).all()
    nan = torch.full((W,), float("nan"))
    EXP(nan.data_ptr(), 0, W, total.data_ptr())
    assert nan.isnan().all()
    assert total.isnan().all()

    x = torch.cat([torch.linspace(-12, 12, 40000), torch.linspace(-0.01, 0.01, 1001), torch.tensor([1e30, -1e30])])
    x = torch.cat([x, torch.zeros(-len(x) % W)])
    y = x.clone()
    TANH(y.data_ptr(), 0, len(x))
    true = torch.tanh(x.double())
    error = (y.double() - true).abs() / true.abs().clamp_min(1e-30)
    assert error.max() < 2.5e-7, error.max()
    TANH(nan.data_ptr(), 0, W)
    assert nan.isnan().all()


check_halves(torch.float16, P.FLOAT16)
check_halves(torch.bfloat16, P.BFLOAT16)
check_functions()
