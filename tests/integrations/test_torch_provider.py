"""``torch.nn.attention.varlen`` over pagetile: on the CPU, where PyTorch has no kernel of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile.contracts.errors import ArgumentError, BlockTableError, UnsupportedError
from pagetile.integrations import torch_provider

home = pytest.importorskip("torch.nn.attention")
varlen = pytest.importorskip("torch.nn.attention.varlen")
if not hasattr(home, "register_flash_attention_impl"):
    pytest.skip("this PyTorch has no registry of attention kernels", allow_module_level=True)

LSE = varlen.AuxRequest(lse=True)


@pytest.fixture
def enabled() -> Iterator[None]:
    torch_provider.enable()
    yield
    torch_provider.disable()


class Batch:
    """Three sequences over blocks of 5, one without queries; table tails point nowhere, unused slots are NaN."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.lens = torch.tensor([17, 4, 9], dtype=torch.int32)
        self.cu_q = torch.tensor([0, 3, 3, 4], dtype=torch.int32)
        self.cu_k = torch.tensor([0, 17, 21, 30], dtype=torch.int32)
        self.q = torch.randn(4, 4, 16, generator=draw)
        self.k, self.v = (torch.randn(30, 2, 16, generator=draw) for _ in "kv")
        self.table = torch.tensor([[7, 2, 9, 1, -1], [4, -1, 99, 99, 99], [3, 0, 2**31 - 1, -1, -1]], dtype=torch.int32)
        self.caches = []
        for rows in (self.k, self.v):
            cache = torch.full((10, 5, 2, 16), torch.nan)
            for b, (start, n) in enumerate(zip(self.cu_k.tolist(), self.lens.tolist(), strict=False)):
                for j in range(n):
                    cache[self.table[b, j // 5], j % 5] = rows[start + j]
            self.caches.append(cache)

    def ours(self, **options: Any) -> tuple[Tensor, Tensor]:
        return pagetile.flash_attn_varlen_func(
            self.q, self.k, self.v, 3, self.cu_q, 17, self.cu_k, return_softmax_lse=True, **options
        )

    def paged(self, **options: Any) -> Any:
        how = {"enable_gqa": True, "seqused_k": self.lens, "block_table": self.table, **options}
        return varlen.varlen_attn(self.q, *self.caches, self.cu_q, None, 3, 17, **how)

    def ragged(self, **options: Any) -> Any:
        return varlen.varlen_attn(self.q, self.k, self.v, self.cu_q, self.cu_k, 3, 17, enable_gqa=True, **options)


def test_only_while_it_is_enabled() -> None:
    batch = Batch()
    torch_provider.register()
    assert "pagetile" in home.list_flash_attention_impls()
    assert home.current_flash_attention_impl() != "pagetile"
    for _ in range(2):  # and it can be taken up again
        with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
            batch.paged()
        home.activate_flash_attention_impl("pagetile")
        torch_provider.enable()  # again: nothing happens
        assert home.current_flash_attention_impl() == "pagetile"
        batch.paged()
        torch_provider.disable()
        torch_provider.disable()
        assert home.current_flash_attention_impl() is None


def test_disable_leaves_another_provider_alone() -> None:
    class Handle:
        removed = False

        def remove(self) -> None:
            self.removed = True

    handle = Handle()
    home.register_flash_attention_impl("other", register_fn=lambda: handle)
    home.activate_flash_attention_impl("other")
    torch_provider.disable()
    assert home.current_flash_attention_impl() == "other"
    torch_provider.enable()
    assert handle.removed
    torch_provider.disable()


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0), (2, 1)])
def test_paged_and_ragged(window: tuple[int, int]) -> None:
    batch = Batch()
    out, lse = batch.ours(window_size=window)
    for got, got_lse in (
        batch.paged(window_size=window, return_aux=LSE),
        batch.ragged(window_size=window, return_aux=LSE),
    ):
        torch.testing.assert_close(got, out)
        torch.testing.assert_close(got_lse, lse)
    assert isinstance(batch.ragged(window_size=window), Tensor)


@pytest.mark.usefixtures("enabled")
def test_scale_and_splits() -> None:
    batch = Batch()
    out, _ = batch.ours(softmax_scale=0.7, causal=True)
    torch.testing.assert_close(batch.paged(scale=0.7, window_size=(-1, 0), num_splits=3), out)


@pytest.mark.usefixtures("enabled")
def test_one_split_is_a_promise_about_bits() -> None:
    """PyTorch: ``num_splits=1`` gives a sequence the same bits whatever else is in the batch."""
    batch = Batch()
    together = batch.paged(num_splits=1)
    alone = varlen.varlen_attn(
        batch.q[3:], *batch.caches, torch.tensor([0, 1], dtype=torch.int32), None, 1, 9, enable_gqa=True,
        seqused_k=batch.lens[2:], block_table=batch.table[2:], num_splits=1,
    )  # fmt: skip
    assert torch.equal(together[3:], alone)


@pytest.mark.usefixtures("enabled")
def test_room_behind_the_keys() -> None:
    """``seqused_k`` without a table: the room behind the keys of a sequence is not looked at."""
    batch = Batch()
    k, v = (torch.full((3 * 20, 2, 16), torch.nan) for _ in "kv")
    for b, n in enumerate(batch.lens.tolist()):
        for room, rows in ((k, batch.k), (v, batch.v)):
            room[20 * b : 20 * b + n] = rows[batch.cu_k[b] : batch.cu_k[b] + n]
    starts = torch.tensor([0, 20, 40, 60], dtype=torch.int32)
    got = varlen.varlen_attn(
        batch.q, k, v, batch.cu_q, starts, 3, 20, enable_gqa=True, seqused_k=batch.lens, window_size=(-1, 0)
    )
    torch.testing.assert_close(got, batch.ours(causal=True)[0])


@pytest.mark.usefixtures("enabled")
@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this PyTorch has no varlen_attn_out")
def test_an_output_of_the_caller() -> None:
    batch = Batch()
    out = torch.full_like(batch.q, torch.nan)
    got, lse = varlen.varlen_attn_out(
        out, batch.q, *batch.caches, batch.cu_q, None, 3, 17, enable_gqa=True, seqused_k=batch.lens,
        block_table=batch.table, window_size=(-1, 0), return_aux=LSE,
    )  # fmt: skip
    right, right_lse = batch.ours(causal=True)
    assert got is out
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("dynamic", [False, True])
def test_in_a_whole_graph(dynamic: bool) -> None:
    batch = Batch()
    keys = (*batch.caches, batch.cu_q, batch.lens, batch.table)

    def step(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lens: Tensor, table: Tensor) -> Tensor:
        out = varlen.varlen_attn(
            2 * q, k, v, cu_q, None, 3, 17, window_size=(-1, 0), enable_gqa=True, seqused_k=lens, block_table=table
        )
        return out + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = step(batch.q, *keys)
    assert torch.equal(compiled(batch.q, *keys), expected)
    assert not torch.equal(compiled(batch.q + 1, *keys), expected)


@pytest.mark.usefixtures("enabled")
def test_what_is_not_implemented_raises() -> None:
    batch = Batch()
    forward = torch.ops.aten._flash_attention_forward
    packed = (batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, 3, 17)
    with pytest.raises(UnsupportedError, match=r"dropout_p is 0\.5"):
        forward(*packed, 0.5, False, False)
    with pytest.raises(UnsupportedError, match="return_debug_mask is True"):
        forward(*packed, 0.0, False, True)
    with pytest.raises(UnsupportedError, match="cu_seq_q is None"):
        forward(batch.q[None], batch.k[None], batch.v[None], None, None, 3, 17, 0.0, False, False)
    with pytest.raises(ArgumentError, match="seqused_k is given without cu_seq_k"):
        forward(batch.q, batch.k, batch.v, batch.cu_q, None, 3, 17, 0.0, False, False, seqused_k=batch.lens)
    batch.table[1, 0] = 99
    with pytest.raises(BlockTableError, match=r"block_table\[1, 0\] is 99"):
        batch.paged()


@pytest.mark.usefixtures("enabled")
def test_a_gradient_raises_where_it_would_be_needed() -> None:
    batch = Batch()
    batch.q.requires_grad_()
    out = batch.ragged()
    with pytest.raises(UnsupportedError, match="no backward"):
        out.sum().backward()


@pytest.mark.usefixtures("enabled")
def test_errors_speak_of_what_was_passed() -> None:
    batch = Batch()
    with pytest.raises(ArgumentError, match="max_k is -1"):
        varlen.varlen_attn(batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, 3, -1, enable_gqa=True)


def test_calls_that_are_not_ours_go_on_to_the_kernel_that_was_there() -> None:
    """On CUDA the operator serves scaled_dot_product_attention and training too."""

    class Before:
        calls = 0

        def call_boxed(self, keyset: Any, *args: Any, **kwargs: Any) -> str:
            assert (keyset, len(args) > 9) == ("keys", True)
            assert kwargs == {"scale": None}
            Before.calls += 1
            return "theirs"

    batch = Batch()
    for name, lead in (("_flash_attention_forward", ()), ("_flash_attention_forward_no_dropout_inplace", (batch.q,))):
        kernel = torch_provider.or_else(name, Before())
        dense = (batch.q[None], batch.k[None], batch.v[None], None, None, 3, 17)
        packed = (batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, 3, 17)
        assert kernel("keys", *lead, *dense, 0.0, False, False, scale=None) == "theirs"
        assert kernel("keys", *lead, *packed, 0.1, False, False, scale=None) == "theirs"
        assert kernel("keys", *lead, *packed, 0.0, False, True, scale=None) == "theirs"
        mine = kernel("keys", *lead, *packed, 0.0, True, False, scale=None)
        right = batch.ours(causal=True)[1] if lead else batch.ours(causal=True)[0]
        torch.testing.assert_close(mine if lead else mine[0], right)
        batch = Batch()
    assert Before.calls == 6
