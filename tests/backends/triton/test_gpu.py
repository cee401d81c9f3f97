"""What only a GPU can show: graphs, streams, synchronisation, devices, alignment, far addresses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pagetile
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


def prefix_call(device: str, length: int) -> dict:
    """Three requests behind a prefix in blocks of 16; the last has no own keys yet."""
    rng = torch.Generator().manual_seed(length)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(device, torch.float16)

    def ints(*values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return {
        "q": random(7, 8, 64),
        "k_cache": random(40, 16, 2, 64),
        "v_cache": random(40, 16, 2, 64),
        "cu_seqlens_q": ints(0, 1, 5, 6),
        "max_seqlen_q": 4,
        "prefix_table": torch.arange(20, dtype=torch.int32, device=device),
        "prefix_len": ints(length),
        "block_table": ints([20, 21, 22], [23, 24, 25], [26, 27, 28]),
        "seqused_k": ints(33, 7, 0),
        "max_seqlen_k": 48,
    }


def plain_of(call: dict) -> torch.Tensor:
    """Each request over keys that lie together."""
    parts, lens, length = [], call["seqused_k"].tolist(), int(call["prefix_len"])
    for cache in (call["k_cache"], call["v_cache"]):
        rows = []
        for row, own in enumerate(lens):
            head = cache[call["prefix_table"].long()].flatten(0, 1)[:length]
            rows += [head, cache[call["block_table"][row].long()].flatten(0, 1)[:own]]
        parts.append(torch.cat(rows))
    ends = torch.tensor([0, *(length + own for own in lens)]).cumsum(0).to(call["q"].device, torch.int32)
    return pagetile.flash_attn_varlen_func(
        call["q"], *parts, 4, call["cu_seqlens_q"], 400, cu_seqlens_k=ends, causal=True, backend="triton"
    )


def test_a_shared_prefix_without_a_synchronisation_in_a_graph_for_any_prefix() -> None:
    call = prefix_call("cuda", 1)
    out = torch.full_like(call["q"], 7.0)
    pagetile.shared_prefix_attention(**call, out=out, backend="triton")  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pagetile.shared_prefix_attention(**call, out=out, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pagetile.shared_prefix_attention(**call, out=out, backend="triton")
    for length in (0, 1, 16, 37, 320):
        call["prefix_len"].fill_(length)
        graph.replay()
        torch.testing.assert_close(out[:6], plain_of(call)[:6], atol=2e-3, rtol=4e-3)  # float16, rounded thrice
        assert (out[6] == 7).all()


def test_the_short_way_with_every_base_one_element_off() -> None:
    """Through the public ops, where a call like one before is found by its guard and launched directly."""

    def moved(x: torch.Tensor, by: int) -> torch.Tensor:
        buffer = torch.zeros(x.numel() + 16, dtype=x.dtype, device=x.device)
        at = -(buffer.data_ptr() // x.element_size()) % (16 // x.element_size()) + by
        return buffer.as_strided(x.shape, x.stride(), at).copy_(x)

    built = build_attend(DECODE, "cuda").call
    tensors = {
        "q": built.q, "k": built.k, "v": built.v, "cu_seqlens_q": built.query_start_loc, "seqused_k": built.seq_lens,
        "block_table": built.block_table, "out": torch.zeros_like(built.q),
    }  # fmt: skip
    key = torch.randn(4, DECODE.num_kv_heads, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.tensor([5, 3, -1, 900], device="cuda")
    rows = DECODE.num_rows
    right = None
    for off in (None, None, None, *tensors, "key", "slots", None):
        x = {name: moved(t, name == off) for name, t in tensors.items()}
        out = pagetile.flash_attn_varlen_func(**x, max_seqlen_q=1, max_seqlen_k=2000, causal=True, backend="triton")
        right = out[:rows].clone() if right is None else right
        if off in ("k", "v"):  # another pipeline, so another order of sums
            torch.testing.assert_close(out[:rows], right, atol=4e-3, rtol=2e-2)
        else:
            assert torch.equal(out[:rows], right), off
        source = moved(key, off == "key")
        pagetile.reshape_and_cache_flash(source, source.clone(), x["k"], x["v"], moved(slots, off == "slots"))
        block = built.k.shape[1]
        assert torch.equal(x["k"][900 // block, 900 % block], key[3]), off
