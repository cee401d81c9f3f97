"""What only a GPU can show: graphs, streams, synchronisation, devices, alignment, far addresses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagetile.backends.deferred import error_word
from pagetile.contracts.errors import UnsupportedError
from pagetile.testing.build import build_attend, build_write
from pagetile.testing.cases import AttendCase, WriteCase
from pagetile.testing.tolerance import assert_attend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DECODE = AttendCase(dtype="bfloat16", head_size=128, num_q_heads=8, seqs=((1, 900), (1, 64), (1, 0), (1, 2000)))
PREFILL = AttendCase(dtype="bfloat16", head_size=128, num_q_heads=8, seqs=((130, 900), (300, 300), (1, 700), (0, 4)))
INVARIANT = replace(DECODE, batch_invariant=True)


@pytest.fixture
def backend():
    pytest.importorskip("triton")
    from pagetile.backends.triton import TritonBackend

    return TritonBackend()


@pytest.mark.parametrize("case", [DECODE, PREFILL, INVARIANT], ids=["decode", "prefill", "invariant"])
def test_no_synchronisation(case: AttendCase, backend) -> None:
    built = build_attend(case, "cuda")
    written = build_write(WriteCase(dtype="bfloat16"), "cuda")
    backend.attend(built.call)  # compiles
    backend.write(written.call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.attend(built.call)
        backend.write(written.call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_attend(built)


@pytest.mark.parametrize("case", [DECODE, PREFILL, INVARIANT], ids=["decode", "prefill", "invariant"])
def test_a_graph_captured_at_length_1_replays_at_any(case: AttendCase, backend) -> None:
    """Captured with every sequence at one key; replayed with the real lengths, and with all of them empty."""
    eager, built = build_attend(case, "cuda"), build_attend(case, "cuda")
    backend.attend(eager.call)
    call = built.call
    lens = call.seq_lens.clone()
    call.seq_lens.fill_(1)
    backend.attend(call)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        backend.attend(call)
    call.seq_lens.copy_(lens)
    call.out.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    rows = case.num_rows
    assert torch.equal(call.out[:rows], eager.call.out[:rows])
    call.seq_lens.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert (call.out[:rows] == 0).all()
    assert (call.lse[:, :rows] == -torch.inf).all()


def test_streams_do_not_share_states(backend) -> None:
    cases = [replace(DECODE, seed=seed, num_splits=5) for seed in range(4)]
    built = [build_attend(case, "cuda") for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for one, stream in zip(built, streams, strict=True):
            with torch.cuda.stream(stream):
                backend.attend(one.call)
    torch.cuda.synchronize()
    for one in built:
        assert_attend(one)


def test_every_base_one_element_off(backend) -> None:
    """A cached launch must not carry an alignment over to the next call."""
    aligned = build_attend(DECODE, "cuda")
    backend.attend(aligned.call)
    backend.attend(aligned.call)
    for name in ("q", "k", "v", "out"):
        built = build_attend(DECODE, "cuda")
        right = getattr(built.call, name)
        room = torch.zeros(right.numel() + 1, dtype=right.dtype, device="cuda")
        off = room[1:].view(right.shape)
        off.copy_(right)
        setattr(built.call, name, off)
        built.call.problem = aligned.call.problem
        assert off.data_ptr() % 16
        backend.attend(built.call)
        backend.attend(aligned.call)
        rows = DECODE.num_rows
        assert torch.equal(built.call.out[:rows], aligned.call.out[:rows]), name


def test_block_sizes_share_one_answer(backend) -> None:
    outs = []
    for block in (1, 3, 16, 24, 48, 64, 544):
        built = build_attend(replace(DECODE, block_size=block, batch_invariant=True), "cuda")
        backend.attend(built.call)
        assert_attend(built)
        outs.append(built.call.out[: DECODE.num_rows].clone())
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


def test_invariant_prefill_equals_decode_at_every_position(backend) -> None:
    case = AttendCase(dtype="bfloat16", head_size=128, num_q_heads=8, seqs=((700, 2500), (1, 30)), batch_invariant=True)
    whole = build_attend(case, "cuda")
    backend.attend(whole.call)
    assert_attend(whole)
    for row in (0, 1, 333, 699):
        call = build_attend(case, "cuda").call
        call.problem = replace(case, seqs=((1, 2500),)).problem("cuda")
        call.q, call.out, call.lse = call.q[row : row + 1], torch.zeros_like(call.out[:1]), None
        call.query_start_loc = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        call.seq_lens = torch.tensor([2500 - 699 + row], dtype=torch.int32, device="cuda")
        call.block_table = call.block_table[:1]
        backend.attend(call)
        assert torch.equal(call.out[0], whole.call.out[row]), row


def test_far_addresses(backend) -> None:
    """A cache of more than 2^31 elements: the last block is written and read back, the first stays."""
    blocks, heads, size = 70_000, 8, 128
    pool = torch.zeros(blocks, 2, 16, heads, size, dtype=torch.bfloat16, device="cuda")
    small = build_write(WriteCase(dtype="bfloat16", num_tokens=16, num_kv_heads=heads, head_size=size), "cuda").call
    small.key_cache, small.value_cache = pool[:, 0], pool[:, 1]
    small.key.normal_()
    small.value.normal_()
    small.slot_mapping = torch.arange((blocks - 1) * 16, blocks * 16, device="cuda")
    backend.write(small)
    assert torch.equal(pool[-1, 0], small.key)
    assert torch.equal(pool[-1, 1], small.value)
    assert not pool[:-1].any()
    case = AttendCase(dtype="bfloat16", num_q_heads=heads, num_kv_heads=heads, head_size=size, seqs=((1, 16),))
    call = build_attend(case, "cuda").call
    call.k, call.v = pool[:, 0], pool[:, 1]
    call.block_table = torch.tensor([[blocks - 1]], dtype=torch.int32, device="cuda")
    backend.attend(call)
    scores = torch.einsum("hd,khd->hk", call.q[0].float(), small.key.float()) * size**-0.5
    right = torch.einsum("hk,khd->hd", scores.softmax(-1), small.value.float())
    assert torch.allclose(call.out[0].float(), right, atol=2e-2)


def test_checking_is_refused_during_capture(backend) -> None:
    built = build_attend(DECODE, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(UnsupportedError, match="captured"):
        backend.check(built.call)


def test_a_replayed_graph_reports_in_the_same_word(backend) -> None:
    built = build_attend(DECODE, "cuda")
    backend.attend(built.call)
    error_word(torch.device("cuda", 0)).zero_()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        backend.attend(built.call)
    built.call.block_table[3, 2] = -7
    graph.replay()
    with pytest.raises(Exception, match=r"block_table\[3, 2\] is -7"):
        backend.raise_deferred()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_the_device_of_the_tensors_decides(backend) -> None:
    built = build_attend(DECODE, "cuda:1")
    built.call.problem = replace(built.call.problem, device="cuda")
    assert torch.cuda.current_device() == 0
    backend.attend(built.call)
    assert torch.cuda.current_device() == 0
    assert_attend(built)
