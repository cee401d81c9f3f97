"""What only a Hopper GPU can show: right results in every plan, bits that repeat, graphs, counters, bad ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagetile.contracts.errors import BlockTableError
from pagetile.testing.build import build_attend
from pagetile.testing.cases import AttendCase
from pagetile.testing.tolerance import assert_attend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BASE = AttendCase(dtype="bfloat16", head_size=128, num_q_heads=8, num_kv_heads=2, block_size=16, spare_rows=3)
DECODE = replace(BASE, seqs=((1, 900), (1, 64), (1, 0), (0, 5), (1, 2000), (3, 700), (4, 2)))
PREFILL = replace(BASE, seqs=((300, 900), (130, 130), (257, 2305), (77, 3)))
MIXED = replace(BASE, seqs=((1, 900), (130, 900), (300, 300), (1, 700), (0, 4), (2, 1), (40, 0)))
LONG = replace(BASE, seqs=((1, 20000), (2, 31)))

SHAPES = {
    "d64": {"head_size": 64}, "d80": {"head_size": 80}, "d96": {"head_size": 96}, "d256": {"head_size": 256},
    "d192_128": {"head_size": 192, "head_size_v": 128}, "d16_256": {"head_size": 16, "head_size_v": 256},
    "group1": {"num_q_heads": 2}, "group3": {"num_q_heads": 6}, "group7": {"num_q_heads": 14},
    "group64": {"num_q_heads": 64, "num_kv_heads": 1}, "f16": {"dtype": "float16"},
    **{f"p{block}": {"block_size": block} for block in (8, 24, 32, 48, 64, 128, 256, 544)},
    **{cache: {"cache": cache} for cache in ("hnd", "kv_first", "block_first", "halves", "layers", "mixed")},
    "ids64": {"table_dtype": "int64"}, "q_unaligned": {"q": "unaligned"}, "out_padded": {"out": "padded"},
    "lse_transposed": {"lse": "transposed"}, "no_lse": {"with_lse": False},
    "window": {"window": (100, 0)}, "window0": {"window": (0, 0)}, "both_sides": {"window": (30, 7), "causal": False},
    "not_causal": {"causal": False}, "softcap": {"softcap": 1.5, "gain": 4.0}, "alibi": {"alibi": "head"},
    "alibi_seq": {"alibi": "sequence", "causal": False}, "sinks": {"sinks": True},
    "all": {"window": (100, 0), "softcap": 3.0, "alibi": "head", "sinks": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def backend():
    pytest.importorskip("triton")
    from pagetile.backends.hopper import HopperBackend

    found = HopperBackend()
    why = found.why_not(DECODE.problem("cuda"))
    if why:
        pytest.skip("; ".join(why))
    return found


def attended(backend, case: AttendCase):
    built = build_attend(case, "cuda")
    assert not backend.why_not(built.call.problem)
    backend.attend(built.call)
    torch.cuda.synchronize()
    return built


@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED, LONG], ids=["decode", "prefill", "mixed", "long"])
def test_right_and_the_same_again(case: AttendCase, backend) -> None:
    first = attended(backend, case)
    assert_attend(first)
    assert not any(canary.broken() for canary in first.canaries)
    for _ in range(3):
        again = attended(backend, case)
        rows = case.num_rows
        assert torch.equal(again.call.out[:rows], first.call.out[:rows])
        assert torch.equal(again.call.lse[:, :rows], first.call.lse[:, :rows])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_every_shape(case: AttendCase, shape: str, backend) -> None:
    built = attended(backend, replace(case, **SHAPES[shape]))
    assert_attend(built)
    assert not any(canary.broken() for canary in built.canaries)


def test_key_starts(backend) -> None:
    for case, starts in ((DECODE, (0, 30, 0, 0, 1999, 700, 1)), (PREFILL, (899, 64, 1, 0))):
        assert_attend(attended(backend, replace(case, key_starts=starts)))


def test_many_sequences(backend) -> None:
    seqs = tuple((1 + i % 3, 17 + 37 * i % 1500) for i in range(400))
    assert_attend(attended(backend, replace(BASE, seqs=seqs)))


def test_counters_are_zero_again(backend) -> None:
    from pagetile.backends.hopper import scratch

    for case in (DECODE, PREFILL, MIXED, LONG):
        attended(backend, case)
    assert scratch._streams
    for held in scratch._streams.values():
        assert not held.any()


@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_no_synchronisation(case: AttendCase, backend) -> None:
    built = attended(backend, case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.attend(built.call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_attend(built)


@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED, LONG], ids=["decode", "prefill", "mixed", "long"])
def test_a_graph_captured_at_length_1_replays_at_any(case: AttendCase, backend) -> None:
    eager = attended(backend, case)
    built = build_attend(case, "cuda")
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
    built = [build_attend(replace(LONG, seed=seed), "cuda") for seed in range(4)]
    streams = [torch.cuda.Stream() for _ in built]
    torch.cuda.synchronize()
    for _ in range(10):
        for one, stream in zip(built, streams, strict=True):
            with torch.cuda.stream(stream):
                backend.attend(one.call)
    torch.cuda.synchronize()
    for one in built:
        assert_attend(one)


@pytest.mark.parametrize("seqs", [((1, 900), (2, 300)), ((100, 900), (90, 300))], ids=["decode", "prefill"])
@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_a_bad_id_hides_its_keys_and_is_reported(seqs: tuple, ids: str, backend) -> None:
    case = replace(BASE, seqs=seqs)
    built = build_attend(replace(case, table_dtype=ids), "cuda")
    for bad in (-1, len(built.call.k), 2**31 - 1, *((1 << 40,) if ids == "int64" else ())):
        built.call.block_table[0, 3] = bad
        backend.attend(built.call)
        with pytest.raises(BlockTableError, match=rf"block_table\[0, 3\] is {bad}"):
            backend.raise_deferred()
        with pytest.raises(BlockTableError, match=rf"block_table\[0, 3\] is {bad}"):
            backend.check(built.call)
    seen = [j for j in range(900) if j // 16 != 3]
    k, v = (x[0][seen].repeat_interleave(4, 1) for x in (built.keys, built.values))
    at = case.seqs[0][0] - 1  # the last query of the sequence sees all that is left
    q = built.call.q[at].double().cpu()
    p = torch.einsum("hd,khd->hk", q, k).mul(built.call.scale).softmax(-1)
    right = torch.einsum("hk,khd->hd", p, v)
    assert (built.call.out[at].double().cpu() - right).abs().max() < 2e-2


def test_far_addresses(backend) -> None:
    """A cache of more than 2^31 elements: the last block is read."""
    blocks, heads, size = 70_000, 8, 128
    pool = torch.zeros(blocks, 2, 16, heads, size, dtype=torch.bfloat16, device="cuda")
    pool[-1].normal_()
    case = replace(BASE, num_q_heads=heads, num_kv_heads=heads, seqs=((1, 16),))
    call = build_attend(case, "cuda").call
    call.k, call.v = pool[:, 0], pool[:, 1]
    call.block_table = torch.tensor([[blocks - 1]], dtype=torch.int32, device="cuda")
    backend.attend(call)
    scores = torch.einsum("hd,khd->hk", call.q[0].float(), pool[-1, 0].float()) * size**-0.5
    right = torch.einsum("hk,khd->hd", scores.softmax(-1), pool[-1, 1].float())
    assert torch.allclose(call.out[0].float(), right, atol=2e-2)


def test_every_base_one_element_off(backend) -> None:
    """A cached launch must not carry an alignment over to the next call."""
    case = DECODE
    aligned = attended(backend, case)
    for name in ("q", "out"):
        built = build_attend(case, "cuda")
        right = getattr(built.call, name)
        room = torch.zeros(right.numel() + 1, dtype=right.dtype, device="cuda")
        off = room[1:].view(right.shape)
        off.copy_(right)
        setattr(built.call, name, off)
        built.call.problem = aligned.call.problem
        backend.attend(built.call)
        backend.attend(aligned.call)
        rows = case.num_rows
        assert torch.equal(built.call.out[:rows], aligned.call.out[:rows]), name
