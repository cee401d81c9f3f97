"""FlashAttention's calls as programs make them: positions, shapes of what comes back, and the right values."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from flash_oracle import close, dense, paged

from pagetile.compat import flash_attn as fa2
from pagetile.compat.flash_attn import fa3, vllm
from pagetile.contracts.errors import ArgumentError, BlockTableError, DTypeError, UnsupportedError

FA2 = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
RAGGED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
APPEND = "q k_cache v_cache k v"
DESCALE = "q_descale k_descale v_descale"
POSITIONS = {
    fa2.flash_attn_func: f"q k v {FA2}",
    fa2.flash_attn_kvpacked_func: f"q kv {FA2}",
    fa2.flash_attn_qkvpacked_func: f"qkv {FA2}",
    fa2.flash_attn_varlen_func: f"q k v {RAGGED} {FA2} block_table",
    fa2.flash_attn_varlen_kvpacked_func: f"q kv {RAGGED} {FA2}",
    fa2.flash_attn_varlen_qkvpacked_func: f"qkv cu_seqlens max_seqlen {FA2}",
    fa2.flash_attn_with_kvcache: (
        f"{APPEND} rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal "
        "window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    ),
    fa3.flash_attn_func: (
        f"q k v softmax_scale causal qv {DESCALE} window_size attention_chunk softcap num_splits pack_gqa "
        "deterministic sm_margin return_attn_probs"
    ),
    fa3.flash_attn_varlen_func: (
        f"q k v {RAGGED} seqused_q seqused_k softmax_scale causal qv {DESCALE} window_size attention_chunk softcap "
        "num_splits pack_gqa deterministic sm_margin return_attn_probs"
    ),
    fa3.flash_attn_qkvpacked_func: (
        f"qkv softmax_scale causal {DESCALE} window_size attention_chunk softcap deterministic num_heads_q sm_margin "
        "return_attn_probs"
    ),
    fa3.flash_attn_with_kvcache: (
        f"{APPEND} qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q "
        f"cu_seqlens_k_new max_seqlen_q rotary_seqlens {DESCALE} softmax_scale causal window_size attention_chunk "
        "softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse"
    ),
}
"""Positional parameters of flash_attn 2.8.4, in order."""


@pytest.mark.parametrize("function", POSITIONS, ids=lambda f: f"{f.__module__[-3:]}.{f.__name__}")
def test_positional_orders_are_flash_attentions(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONS[function].split()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def qkv(batch: int = 2, sq: int = 5, sk: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw(batch, sq, 4, 16), draw(batch, sk, 2, 16, seed=1), draw(batch, sk, 2, 16, seed=2)


LAYOUTS = ["plain", "heads first", "last axis strided"]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "heads first":  # [B, H, S, D] transposed, as Transformers passes it
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "last axis strided":
        return x.mT.contiguous().mT
    return x


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_batch(layout: str) -> None:
    q, k, v = qkv()
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    strided = [laid_out(x, layout) for x in (q, k, v)]
    out, lse, probs = fa2.flash_attn_func(*strided, 0.0, None, True, (6, -1), 3.0, slopes, True, True)
    assert out.shape == (2, 5, 4, 16)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
    assert probs.shape == (0,)
    out3, lse3 = fa3.flash_attn_func(*strided, None, True, window_size=(6, -1), softcap=3.0, return_attn_probs=True)
    for b in range(2):
        right = dense(q[b], k[b], v[b], True, (6, -1), 3.0, slopes)
        close(out[b], right[0])
        close(lse[b], right[1])
        right = dense(q[b], k[b], v[b], True, (6, -1), 3.0)
        close(out3[b], right[0])
        close(lse3[b], right[1])
    plain = fa2.flash_attn_func(*strided, causal=True)
    assert isinstance(plain, torch.Tensor)


def test_no_keys_and_no_queries() -> None:
    q, k, v = qkv(sk=0)
    out, lse, _ = fa2.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((2, 4, 5), -torch.inf))
    q, k, v = qkv(sq=0)
    assert fa2.flash_attn_func(q, k, v).shape == (2, 0, 4, 16)


def test_more_queries_than_keys_leaves_rows_empty() -> None:
    q, k, v = qkv(sq=5, sk=2)
    out, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out[:, :3], torch.zeros(2, 3, 4, 16))
    assert torch.isneginf(lse[:, :, :3]).all()
    close(out[0], dense(q[0], k[0], v[0], True)[0])


def test_packed_projections() -> None:
    packed = draw(2, 7, 3, 4, 16)
    q, k, v = packed.unbind(2)
    expected = fa2.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa2.flash_attn_qkvpacked_func(packed, causal=True), expected)
    assert torch.equal(fa2.flash_attn_kvpacked_func(q, packed[:, :, 1:], causal=True), expected)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(packed, causal=True), expected)
    grouped = torch.cat([q, k[:, :, :2], v[:, :, :2]], dim=2)
    grouped_expected = fa2.flash_attn_func(q, k[:, :, :2], v[:, :, :2], causal=True)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(grouped, causal=True, num_heads_q=4), grouped_expected)
    rows, offsets = packed.flatten(0, 1), torch.tensor([0, 7, 14], dtype=torch.int32)
    ragged = fa2.flash_attn_varlen_qkvpacked_func(rows, offsets, 7, causal=True)
    assert torch.equal(ragged, expected.flatten(0, 1))
    lens = (offsets, offsets, 7, 7)
    assert torch.equal(fa2.flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], *lens, causal=True), ragged)
    with pytest.raises(ArgumentError, match="num_heads_q is 3"):
        fa3.flash_attn_qkvpacked_func(grouped, num_heads_q=3)


class Ragged:
    """Three sequences, one without queries, one longer than its queries."""

    q_lens, k_lens = (3, 0, 1), (11, 4, 17)

    def __init__(self) -> None:
        self.q = [draw(n, 4, 16) for n in self.q_lens]
        self.k = [draw(n, 2, 16, seed=5) for n in self.k_lens]
        self.v = [draw(n, 2, 16, seed=6) for n in self.k_lens]
        self.cu_q, self.cu_k = (
            torch.tensor([0, *lens]).cumsum(0).to(torch.int32) for lens in (self.q_lens, self.k_lens)
        )

    def check(self, out: torch.Tensor, lse: torch.Tensor | None, **how: Any) -> None:
        rights = [dense(*x, True, **how) for x in zip(self.q, self.k, self.v, strict=True)]
        close(out, torch.cat([out for out, _ in rights]))
        if lse is not None:
            assert lse.shape == (4, 4)
            close(lse, torch.cat([lse for _, lse in rights], dim=1))


@pytest.mark.parametrize("block_size", [0, 1, 3, 16])
def test_varlen(block_size: int) -> None:
    """Ragged keys, then paged ones of any block size; the lengths are the differences of ``cu_seqlens_k``."""
    x = Ragged()
    q, k, v, table = torch.cat(x.q), torch.cat(x.k), torch.cat(x.v), None
    if block_size:
        (k, table), (v, _) = paged(x.k, block_size, 40), paged(x.v, block_size, 40)
    out, lse, _ = fa2.flash_attn_varlen_func(
        q, k, v, x.cu_q, x.cu_k, 3, 17, 0.0, None, True, (-1, -1), 0.0, None, False, True, table
    )
    x.check(out, lse)
    three = fa3.flash_attn_varlen_func(q, k, v, x.cu_q, x.cu_k, 3, 17, causal=True, num_splits=0, block_table=table)
    assert torch.equal(three, out)
    if block_size:
        lens = torch.diff(x.cu_k)
        fork = vllm.flash_attn_varlen_func(
            q, k, v, 3, x.cu_q, 17, seqused_k=lens, causal=True, block_table=table, fa_version=3, cp_world_size=1
        )
        assert torch.equal(fork, out)


def test_room_behind_ragged_keys() -> None:
    """``seqused_k`` without a table: only the first keys of each sequence count, the rest may be NaN."""
    x = Ragged()
    room = 5
    k, v = (torch.cat([torch.cat([t, torch.full((room, 2, 16), torch.nan)]) for t in ts]) for ts in (x.k, x.v))
    offsets = (x.cu_k + room * torch.arange(4)).to(torch.int32)
    out, lse = fa3.flash_attn_varlen_func(
        torch.cat(x.q), k, v, x.cu_q, offsets, 3, 22, None, torch.diff(x.cu_k), causal=True, return_attn_probs=True
    )
    x.check(out, lse)


def test_append_and_decode() -> None:
    """New keys land at ``cache_seqlens``, in place; one query a sequence; the LSE is ``[B, Hq, Sq]``."""
    k, v = ([draw(n, 2, 16, seed=s) for n in (6, 13)] for s in (8, 9))
    q = draw(2, 1, 4, 16)
    (k_cache, table), (v_cache, _) = paged(k, 4, 20), paged(v, 4, 20)
    cut = torch.tensor([4, 11], dtype=torch.int32)
    new_k, new_v = (torch.stack([x[-2:] for x in xs]) for xs in (k, v))
    whole = k_cache.clone()
    for row, x in enumerate(k):  # forget the last two
        for position in (len(x) - 2, len(x) - 1):
            k_cache[table[row, position // 4], position % 4] = torch.nan
    out, lse = fa2.flash_attn_with_kvcache(
        q, k_cache, v_cache, new_k, new_v, None, None, cut, None, None, table, None, True, return_softmax_lse=True
    )
    assert torch.equal(k_cache.nan_to_num(7.0), whole.nan_to_num(7.0))
    assert lse.shape == (2, 4, 1)
    for b in range(2):
        right = dense(q[b], k[b], v[b], True)
        close(out[b], right[0])
        close(lse[b], right[1])
    three = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=cut + 2, page_table=table, causal=True, return_softmax_lse=True
    )
    assert len(three) == 4
    assert torch.equal(three[0], out)
    assert torch.equal(three[1], lse)


def test_packed_queries_over_rows_with_left_padding() -> None:
    q, cu_q = draw(5, 4, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    k, v = draw(4, 12, 2, 16, seed=3), draw(4, 12, 2, 16, seed=4)
    lens, pads = torch.tensor([9, 12], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    at = torch.tensor([3, 1], dtype=torch.int32)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lens, cache_batch_idx=at, cache_leftpad=pads, cu_seqlens_q=cu_q, max_seqlen_q=3,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    for b, (lo, hi) in enumerate([(0, 2), (2, 5)]):
        keys, values = k[at[b], : lens[b]], v[at[b], : lens[b]]
        right = dense(q[lo:hi], keys, values, True, first_key=int(pads[b]))
        close(out[lo:hi], right[0])
        close(lse[:, lo:hi], right[1])
    full = fa3.flash_attn_with_kvcache(
        q, k, v, cu_seqlens_q=cu_q, cache_batch_idx=at
    )  # the cache is full, rows 3 and 1
    close(full[:2], dense(q[:2], k[3], v[3])[0])


def test_sinks_go_through() -> None:
    q, k, v = qkv()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for out in (fa2.flash_attn_func(q, k, v, s_aux=sinks), fa3.flash_attn_func(q, k, v, s_aux=sinks)):
        close(out[1], dense(q[1], k[1], v[1], sinks=sinks)[0])


@pytest.mark.parametrize("block_size", [256, 24])
def test_the_calls_of_nano_vllm(block_size: int) -> None:
    """Prefill, prefill over a cached prefix, decode in a padded graph batch: keyword for keyword as it makes them."""
    x = Ragged()
    scale = 16**-0.5
    (k_cache, table), (v_cache, _) = paged(x.k, block_size, 8), paged(x.v, block_size, 8)
    table = table[:, :1].contiguous()  # nano-vllm pads its rows with -1 to the longest
    prefix = fa2.flash_attn_varlen_func(
        torch.cat(x.q), k_cache, v_cache, max_seqlen_q=3, cu_seqlens_q=x.cu_q, max_seqlen_k=17, cu_seqlens_k=x.cu_k,
        softmax_scale=scale, causal=True, block_table=table,
    )  # fmt: skip
    x.check(prefix, None)
    fresh = fa2.flash_attn_varlen_func(
        draw(28, 4, 16), torch.cat(x.k)[:28], torch.cat(x.v)[:28], max_seqlen_q=17, cu_seqlens_q=x.cu_k[[0, 1, 2]],
        max_seqlen_k=17, cu_seqlens_k=x.cu_k[[0, 1, 2]], softmax_scale=scale, causal=True, block_table=None,
    )  # fmt: skip
    close(fresh[:11], dense(draw(28, 4, 16)[:11], x.k[0], x.v[0], True)[0])
    q = draw(4, 4, 16)
    padded_table = torch.cat([table, torch.zeros(1, 1, dtype=torch.int32)])
    decode = fa2.flash_attn_with_kvcache(
        q.unsqueeze(1), k_cache, v_cache, cache_seqlens=torch.tensor([11, 4, 17, 0], dtype=torch.int32),
        block_table=padded_table, softmax_scale=scale, causal=True,
    )  # fmt: skip
    assert decode.shape == (4, 1, 4, 16)
    for b in range(3):
        close(decode[b], dense(q[b : b + 1], x.k[b], x.v[b], True)[0])
    assert torch.equal(decode[3], torch.zeros(1, 4, 16))


def test_the_call_of_mini_sglang() -> None:
    """Its one call, keyword for keyword: pages of one token, ``cu_seqlens_k_new`` without new keys, a version."""
    x = Ragged()
    (k_cache, table), (v_cache, _) = paged(x.k, 1, 40), paged(x.v, 1, 40)
    out = fa3.flash_attn_with_kvcache(
        q=torch.cat(x.q), k_cache=k_cache, v_cache=v_cache, page_table=table, cache_seqlens=torch.diff(x.cu_k),
        cu_seqlens_q=x.cu_q, cu_seqlens_k_new=x.cu_k, max_seqlen_q=3, softmax_scale=16**-0.5, sm_margin=0,
        window_size=(-1, -1), softcap=0.0, num_splits=0, pack_gqa=None, causal=True, ver=3,
    )  # fmt: skip
    x.check(out, None)


REFUSED = [
    (lambda q, k, v: fa2.flash_attn_func(q, k, v, 0.1), "dropout_p is 0.1"),
    (lambda q, k, v: fa2.flash_attn_func(q.requires_grad_(), k, v), "q requires grad"),
    (lambda q, k, v: fa3.flash_attn_func(q, k, v, qv=q), "qv is a tensor"),
    (lambda q, k, v: fa3.flash_attn_func(q, k, v, q_descale=q), "q_descale is a tensor"),
    (lambda q, k, v: fa3.flash_attn_func(q, k, v, attention_chunk=64), "attention_chunk is 64"),
    (lambda q, k, v: fa3.flash_attn_func(q, k, v, sm_margin=8), "sm_margin is 8"),
    (lambda q, k, v: fa3.flash_attn_with_kvcache(q, k, v, rotary_seqlens=q), "rotary_seqlens is a tensor"),
    (lambda q, k, v: fa3.flash_attn_with_kvcache(q[0], k, v, k=k, cu_seqlens_q=q), "k is a tensor"),
    (lambda q, k, v: fa3.flash_attn_with_kvcache(q, k, v, k, v, cu_seqlens_k_new=q), "cu_seqlens_k_new is given"),
    (lambda q, k, v: vllm.flash_attn_varlen_func(q, k, v, 1, q, 1, cp_world_size=2), "cp_world_size is 2"),
    (lambda q, k, v: vllm.flash_attn_varlen_func(q, k, v, 1, q, 1, output_scale=q), "output_scale is a tensor"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message.split()[0] for _, message in REFUSED])
def test_what_is_not_implemented_raises(call: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        call(*qkv())


def test_errors_speak_of_what_was_passed() -> None:
    x = Ragged()
    q, (cache, table) = torch.cat(x.q), paged(x.k, 4, 20)
    bad = table.clone()
    bad[2, 1] = 20
    with pytest.raises(BlockTableError, match=r"page_table\[2, 1\] is 20"):
        fa3.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=torch.diff(x.cu_k), page_table=bad, cu_seqlens_q=x.cu_q, causal=True
        )
    with pytest.raises(DTypeError, match="cu_seqlens_k"):
        fa2.flash_attn_varlen_func(q, cache, cache, x.cu_q, x.cu_k.long(), 3, 17, block_table=table)
    dense_q, k, v = (laid_out(t, "heads first") for t in qkv())
    with pytest.raises(DTypeError, match=r"^q is float32, but k is float16"):
        fa2.flash_attn_func(dense_q, k.half(), v.half())
    with pytest.raises(ArgumentError, match="cu_seqlens_k is None"):
        fa3.flash_attn_varlen_func(q, cache, cache, x.cu_q, None, 3, 17, block_table=table)


def test_in_a_whole_graph() -> None:
    x = Ragged()
    (k_cache, table), (v_cache, _) = paged(x.k, 4, 20), paged(x.v, 4, 20)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = fa2.flash_attn_varlen_func(q, k, v, x.cu_q, x.cu_k, 3, 17, causal=True, block_table=table)
        more = fa3.flash_attn_with_kvcache(
            out, k, v, cache_seqlens=torch.diff(x.cu_k), page_table=table, cu_seqlens_q=x.cu_q, causal=True
        )
        return fa2.flash_attn_func(more[None], more[None, :, :2], more[None, :, :2])

    q = torch.cat(x.q)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k_cache, v_cache), step(q, k_cache, v_cache))
