"""``shared_prefix_attention``: what it refuses, in which words, and its operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pagetile import (
    ArgumentError,
    BlockTableError,
    DeviceError,
    DTypeError,
    ShapeError,
    UnsupportedError,
    flash_attn_varlen_func,
    shared_prefix_attention,
)

OPS = torch.ops.pagetile


@pytest.fixture
def call(batch: Any) -> dict[str, Any]:
    """The batch of this folder (lengths 9, 4, 2; blocks of 4) behind a prefix of 6 tokens in blocks 5 and 8."""
    return {
        "q": batch.q,
        "k_cache": batch.key_cache,
        "v_cache": batch.value_cache,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "max_seqlen_q": 3,
        "prefix_table": torch.tensor([5, 8, 99], dtype=torch.int32),
        "prefix_len": 6,
        "block_table": batch.block_table,
        "seqused_k": batch.seqused_k,
        "max_seqlen_k": 12,
    }


def joined(call: dict[str, Any]) -> Tensor:
    """The same through ragged keys: the prefix, then the own keys, of every sequence."""
    parts, lens = [], call["seqused_k"].tolist()
    for cache in (call["k_cache"], call["v_cache"]):
        prefix = cache[call["prefix_table"][:2].long()].flatten(0, 1)[: int(call["prefix_len"])]
        rows = []
        for table, n in zip(call["block_table"], lens, strict=True):
            rows += [prefix, cache[table[: -(-n // 4)].long()].flatten(0, 1)[:n]]
        parts.append(torch.cat(rows))
    ends = torch.tensor([0, *(n + int(call["prefix_len"]) for n in lens)]).cumsum(0).to(torch.int32)
    return flash_attn_varlen_func(call["q"], *parts, 3, call["cu_seqlens_q"], 18, cu_seqlens_k=ends, causal=True)


def test_is_attention_over_prefix_and_own_keys(call: dict[str, Any], backend: str) -> None:
    out = shared_prefix_attention(**call, backend=backend)
    torch.testing.assert_close(out, joined(call))


def test_a_length_on_the_device(call: dict[str, Any], backend: str) -> None:
    for length in (torch.tensor([6], dtype=torch.int32), torch.tensor(6, dtype=torch.int32)):
        out = shared_prefix_attention(**{**call, "prefix_len": length}, backend=backend)
        torch.testing.assert_close(out, joined(call))


def test_a_window_that_hides_nothing_is_none(call: dict[str, Any]) -> None:
    assert torch.equal(shared_prefix_attention(**call, window_size=(17, 0)), shared_prefix_attention(**call))


def test_a_window_and_alibi_are_plain_attention_without_a_prefix(call: dict[str, Any]) -> None:
    how = {"window_size": (2, 0), "alibi_slopes": torch.rand(4)}
    out = shared_prefix_attention(**{**call, "prefix_len": 0}, **how)
    names = ("q", "k_cache", "v_cache", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k")
    plain = flash_attn_varlen_func(
        *(call[n] for n in names), seqused_k=call["seqused_k"], block_table=call["block_table"], **how
    )
    assert torch.equal(out, plain)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"window_size": (16, 0)}, UnsupportedError, r"window_size: the left side is 16, but with up to 18 keys"),
        ({"alibi_slopes": torch.ones(4)}, UnsupportedError, "alibi_slopes is given, but the distance"),
        ({"prefix_len": 13}, ArgumentError, r"prefix_len is 13, but prefix_table has room for 12 \(3 blocks\)"),
        ({"prefix_len": -1}, ArgumentError, "prefix_len is -1; it must be 0 or more"),
        ({"prefix_len": 2.5}, ArgumentError, "prefix_len is 2.5; it must be an integer"),
        ({"prefix_len": torch.tensor([6])}, DTypeError, "prefix_len is int64, but must be int32"),
        ({"prefix_len": torch.tensor([6, 6], dtype=torch.int32)}, ShapeError, r"prefix_len is \[2\]; it is an int"),
        ({"prefix_len": torch.tensor([13], dtype=torch.int32)}, ArgumentError, "prefix_len is 13, but prefix_table"),
        ({"prefix_len": torch.tensor([-1], dtype=torch.int32)}, ArgumentError, "prefix_len is -1, but prefix_table"),
        ({"prefix_len": torch.zeros(1, dtype=torch.int32, device="meta")}, DeviceError, "prefix_len is on meta"),
        ({"prefix_table": torch.zeros(1, 2, dtype=torch.int32)}, ShapeError, r"prefix_table: 2 axes \[1, 2\]"),
        ({"prefix_table": torch.zeros(2)}, DTypeError, "prefix_table is float32, but must be int32 or int64"),
        ({"prefix_table": torch.tensor([5, 8, 1, 1])[::2]}, ArgumentError, "prefix_table: axis 1 has stride 2"),
        ({"prefix_table": [5, 8]}, DTypeError, "prefix_table is a list; pass a torch.Tensor"),
        ({"prefix_table": torch.tensor([5, 12])}, BlockTableError, r"prefix_table\[1\] is 12, but"),
        (
            {"seqused_k": torch.tensor([1, 4, 2], dtype=torch.int32)},
            ArgumentError,
            r"seqused_k\[0\] is 1, but sequence",
        ),
        ({"block_table": torch.full((3, 3), 12)}, BlockTableError, r"block_table\[0, 0\] is 12, but"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, ShapeError, "block_table: axis 0"),
        ({"k_cache": torch.zeros(12, 4, 3, 8)}, ShapeError, r"v_cache: axis 2 \(Hkv\) is 2, but k_cache has Hkv = 3"),
        ({"seqused_k": None}, DTypeError, "seqused_k is a NoneType"),
    ],
)
def test_refuses(call: dict[str, Any], backend: str, change: dict[str, Any], error: type, words: str) -> None:
    out = torch.full((5, 4, 16), 7.0)
    with pytest.raises(error, match=words):
        shared_prefix_attention(**{**call, **change}, out=out, backend=backend)
    assert (out == 7).all()


def test_scales_of_a_sequence_are_refused(call: dict[str, Any]) -> None:
    caches = {name: call[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    with pytest.raises(UnsupportedError, match=r"v_descale is \[3, 2\], a scale for each sequence"):
        shared_prefix_attention(**{**call, **caches}, v_descale=torch.ones(3, 2))


def test_one_sequence_and_none(call: dict[str, Any], backend: str) -> None:
    one = {"cu_seqlens_q": call["cu_seqlens_q"][:2], "block_table": call["block_table"][:1]}
    whole = shared_prefix_attention(**call, backend=backend)
    out = torch.full((5, 4, 16), 7.0)
    shared_prefix_attention(**{**call, **one, "seqused_k": call["seqused_k"][:1]}, out=out, backend=backend)
    assert torch.equal(out[:3], whole[:3])
    assert (out[3:] == 7).all()
    none = {"cu_seqlens_q": call["cu_seqlens_q"][:1], "block_table": call["block_table"][:0]}
    out.fill_(7.0)
    shared_prefix_attention(**{**call, **none, "seqused_k": call["seqused_k"][:0]}, out=out, backend=backend)
    assert (out == 7).all()


def arguments(call: dict[str, Any]) -> tuple[Any, ...]:
    """Of the functional operators."""
    prefix = (call["prefix_table"], torch.tensor([6], dtype=torch.int32), 6)
    paged = (call["cu_seqlens_q"], call["seqused_k"], None, call["block_table"], 3, 12, 0.3, -1, 0)
    return *prefix, call["q"], call["k_cache"], call["v_cache"], *paged


@pytest.mark.parametrize("name", ["shared_prefix", "shared_prefix_lse"])
def test_opcheck(call: dict[str, Any], name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, arguments(call))


@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck_out(call: dict[str, Any], with_lse: bool) -> None:
    lse, workspace = torch.zeros(4, 5) if with_lse else None, torch.zeros(1 << 20, dtype=torch.uint8)
    torch.library.opcheck(OPS.shared_prefix_out.default, (torch.zeros(5, 4, 16), lse, workspace, *arguments(call)))


def test_fake_outputs_are_what_comes_out(call: dict[str, Any]) -> None:
    real = shared_prefix_attention(**call, return_softmax_lse=True)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) if isinstance(t, Tensor) else t for n, t in call.items()}
        fake = shared_prefix_attention(**fakes, return_softmax_lse=True)
        with pytest.raises(UnsupportedError, match="window_size"):
            shared_prefix_attention(**fakes, window_size=(3, 0))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_compiled_graphs_hold_one_operator_and_give_the_same_bits(call: dict[str, Any]) -> None:
    seen: list[str] = []

    def watch(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    program = torch.compile(lambda out: shared_prefix_attention(**call, out=out) * 2, backend=watch, fullgraph=True)
    out = torch.zeros(5, 4, 16)
    assert torch.equal(program(out), shared_prefix_attention(**call) * 2)
    assert torch.equal(out, shared_prefix_attention(**call))
    assert [name for name in seen if "shared_prefix" in name] == ["pagetile.shared_prefix_out"]
