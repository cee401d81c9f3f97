"""Products of bfloat16 pairs, by tiles or by vdpbf16ps: the same rules as of float32; and sums that overflow."""

from __future__ import annotations

import os

import pytest
import torch
from cpu_kit import attend_call, run_python, truth

from pagetile.backends.cpu.isa import ENV, WIDTHS, choose_isa, host_isa

CHECK = """
import torch
from dataclasses import replace
from cpu_kit import attend_call, truth
from pagetile.backends.cpu import CpuBackend
from pagetile.backends.cpu.isa import host_isa

def run(call):
    CpuBackend().attend(call)
    return call

for size, size_v, group in ((64, 64, 3), (40, 24, 1), (7, 130, 5), (128, 128, 17)):
    for window in ((-1, 0), (37, 0)):
        shape = dict(size=size, size_v=size_v, group=group, dtype=torch.bfloat16, window=window)
        make = lambda: attend_call([150], [300], **shape)
        whole = run(make())
        true = truth(whole)
        error = (whole.out.double() - true.out).abs() / (true.out.abs() + 0.5)
        assert error.max() < 0.02, (size, window, error.max())
        for position in (150, 191, 192, 299):
            call = make()
            call.q = call.q[position - 150 : position - 149].clone()
            call.out, call.lse = call.out[:1].clone(), call.lse[:, :1].clone()
            call.query_start_loc = torch.tensor([0, 1], dtype=torch.int32)
            call.seq_lens = torch.tensor([position + 1], dtype=torch.int32)
            call.problem = replace(call.problem, num_tokens=1, max_q_len=1)
            run(call)
            assert call.out[0].equal(whole.out[position - 150]), (size, window, position)
            assert call.lse[:, 0].equal(whole.lse[:, position - 150])
        spread = run(attend_call([150], [300], block_size=7, **shape))
        assert spread.out.equal(whole.out), "blocks of 7: keys are never evenly apart"

bad = attend_call([60], [60], dtype=torch.bfloat16)
clean = run(attend_call([60], [60], dtype=torch.bfloat16)).out
for value in (float("nan"), float("inf")):
    call = attend_call([60], [60], dtype=torch.bfloat16)
    call.v[call.block_table[0, 2], 3, 1, 5] = value  # position 35
    run(call)
    assert call.out[:35].equal(clean[:35])
    assert not call.out[35:, 3:, 5].isfinite().any()
    assert call.out[35:, :3].equal(clean[35:, :3])
print(host_isa().name)
"""


@pytest.mark.parametrize("name", [name for name in WIDTHS if name != "generic"])
def test_every_product_keeps_the_rules(name: str, tmp_path) -> None:
    """Against the truth, decode as a row of the prefill, keys in place or gathered, NaN and Inf kept to their rows."""
    try:
        import llvmlite.binding as llvm

        choose_isa(dict(llvm.get_host_cpu_features()), name)
        if name == "amx" and host_isa().dot != "amx" and ENV not in os.environ:
            pytest.skip("this system hands out no tiles")
    except Exception as error:
        pytest.skip(str(error))
    done = run_python(CHECK, **{ENV: name, "PAGETILE_CACHE_DIR": str(tmp_path)})
    assert done.stdout.split() == [name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_sums_that_overflow_are_taken_again(backend, dtype: torch.dtype, splits: int) -> None:
    """Values near the largest number: their mean is finite, their sum is not. Other rows keep their bits."""
    large = torch.finfo(dtype).max * 0.9
    make = lambda: attend_call([3, 1], [2100, 50], dtype=dtype, num_splits=splits, heads=1)  # noqa: E731
    call, before = make(), make()
    backend.attend(before)
    call.v[call.block_table[0, : 2100 // 16].long()] = large
    for position in range(2096, 2100):
        call.v[call.block_table[0, position // 16].long(), position % 16] = large
    backend.attend(call)
    assert call.out[:3].isfinite().all()
    assert ((call.out[:3].double() / large - 1).abs() < 0.01).all()
    assert call.lse.equal(before.lse)
    assert call.out[3].equal(before.out[3])


def test_overflow_with_a_sink_that_takes_half(backend) -> None:
    call = attend_call([1], [40], heads=1, group=1)
    call.q.zero_()
    call.v[call.block_table[0, :3].long()] = 3e38
    call.sinks = torch.tensor([40.0]).log()
    backend.attend(call)
    assert torch.allclose(call.out, torch.full_like(call.out, 1.5e38), rtol=1e-5)
    assert torch.allclose(call.lse, torch.tensor([[80.0]]).log())


def test_bfloat16_is_as_good_as_the_unfused_computation(backend) -> None:
    """Error against float64: at most twice that of matmul, float32 softmax, matmul in bfloat16."""
    call = attend_call([64], [1500], size=128, dtype=torch.bfloat16, heads=1, group=4)
    backend.attend(call)
    true = truth(call).out
    k, v = (
        x[call.block_table[0, torch.arange(1500) // 16].long(), torch.arange(1500) % 16, 0] for x in (call.k, call.v)
    )
    position = torch.arange(64) + 1500 - 64
    hidden = torch.arange(1500)[None] > position[:, None]
    scores = (torch.einsum("thd,sd->hts", call.q, k).float() * call.scale).masked_fill(hidden, float("-inf"))
    plain = torch.einsum("hts,sd->thd", scores.softmax(-1).to(torch.bfloat16), v)
    error, allowed = ((x.double() - true).abs().mean() for x in (call.out, plain))
    assert error <= 2 * allowed
