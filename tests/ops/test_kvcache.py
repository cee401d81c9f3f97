"""``flash_attn_with_kvcache`` against the two ops it is made of, and rotary against a formula of complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import flash_attn_varlen_func, flash_attn_with_kvcache, reshape_and_cache_flash
from pagetile.ops.rotary import rotate

LENS = torch.tensor([8, 3, 0], dtype=torch.int32)
TABLE = torch.tensor([[7, 2, 9], [4, 11, -1], [5, -1, 99]], dtype=torch.int32)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def paged() -> tuple[Tensor, Tensor]:
    """Caches of 12 blocks of 4; only what the sequences hold is finite."""
    k, v = torch.full((12, 4, 2, 8), torch.nan), torch.full((12, 4, 2, 16), torch.nan)
    for b, length in enumerate(LENS.tolist()):
        for j in range(length):
            block = int(TABLE[b, j // 4])
            k[block, j % 4] = randn(2, 8, seed=100 * b + j)
            v[block, j % 4] = randn(2, 16, seed=1000 + 100 * b + j)
    return k, v


def contiguous(rows: int = 3, order: tuple[int, ...] = (0, 1, 2)) -> tuple[Tensor, Tensor]:
    """The same keys and values with a row of 12 slots a sequence, sequence b in row ``order[b]``."""
    pages = paged()
    result = tuple(torch.full((rows, 12, 2, cache.shape[-1]), torch.nan) for cache in pages)
    for cache, page in zip(result, pages, strict=True):
        for b, length in enumerate(LENS.tolist()):
            for j in range(length):
                cache[order[b], j] = page[int(TABLE[b, j // 4]), j % 4]
    return result


def new_tokens(count: int) -> tuple[Tensor, Tensor]:
    return randn(3, count, 2, 8, seed=7), randn(3, count, 2, 16, seed=8)


def by_hand(q: Tensor, k: Tensor, v: Tensor, backend: str, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots in a loop, then a write, then the packed attention."""
    k_cache, v_cache = paged()
    slots = [int(TABLE[b, j // 4]) * 4 + j % 4 for b, n in enumerate(LENS.tolist()) for j in range(n, n + k.shape[1])]
    reshape_and_cache_flash(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, torch.tensor(slots), backend=backend)
    loc = torch.arange(4, dtype=torch.int32) * q.shape[1]
    out, lse = flash_attn_varlen_func(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        q.shape[1],
        loc,
        12,
        seqused_k=LENS + k.shape[1],
        block_table=TABLE,
        return_softmax_lse=True,
        backend=backend,
        **options,
    )
    return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1), k_cache, v_cache


@pytest.mark.parametrize(
    "options", [{"causal": True}, {}, {"window_size": (2, 0), "softcap": 3.0, "softmax_scale": 0.2}]
)
@pytest.mark.parametrize(("queries", "news"), [(1, 1), (2, 2), (3, 1), (1, 4)])
def test_append_and_attend(backend: str, options: dict[str, Any], queries: int, news: int) -> None:
    q, (k, v) = randn(3, queries, 4, 8), new_tokens(news)
    out, lse, k_expected, v_expected = by_hand(q, k, v, backend, **options)
    k_cache, v_cache = paged()
    options = {**options, "return_softmax_lse": True, "backend": backend, "cache_seqlens": LENS, "block_table": TABLE}
    got = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
    assert got[0].shape == (3, queries, 4, 16)
    assert got[1].shape == (3, 4, queries)
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)
    torch.testing.assert_close(k_cache, k_expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_cache, v_expected, rtol=0, atol=0, equal_nan=True)
    assert LENS.tolist() == [8, 3, 0]

    order = (4, 0, 2)
    k_rows, v_rows = contiguous(5, order)
    options |= {"block_table": None, "cache_batch_idx": torch.tensor(order, dtype=torch.int32)}
    got = flash_attn_with_kvcache(q, k_rows, v_rows, k, v, **options)
    torch.testing.assert_close(got[0], out)
    torch.testing.assert_close(got[1], lse)
    for b, length in enumerate(LENS.tolist()):
        assert torch.equal(k_rows[order[b], length : length + news], k[b])
        assert torch.equal(v_rows[order[b], length : length + news], v[b])
        assert k_rows[order[b], length + news :].isnan().all()


def test_batch_row_0_is_left_alone(backend: str) -> None:
    """Dao-AILab/flash-attention#772: rows 1 to 4 are appended to, none of it lands in row 0."""
    k_cache, v_cache = torch.zeros(5, 6, 1, 8), torch.zeros(5, 6, 1, 8)
    new = torch.ones(4, 3, 1, 8)
    options = {"cache_seqlens": 2, "cache_batch_idx": torch.tensor([1, 2, 3, 4]), "backend": backend}
    flash_attn_with_kvcache(torch.zeros(4, 1, 2, 8), k_cache, v_cache, new, new, **options)
    assert not k_cache[0].any()
    assert k_cache[1:, 2:5].eq(1).all()
    assert k_cache.sum() == v_cache.sum() == 4 * 3 * 8


def test_without_new_tokens_an_int_or_the_whole_cache(backend: str) -> None:
    q, k_cache, v_cache = randn(2, 1, 4, 8), randn(2, 6, 2, 8, seed=1), randn(2, 6, 2, 8, seed=2)
    full = flash_attn_with_kvcache(q, k_cache, v_cache, backend=backend)
    lens = torch.tensor([6, 6], dtype=torch.int32)
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, backend=backend), full)
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=6, backend=backend), full)
    part = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=4, backend=backend)
    torch.testing.assert_close(part, flash_attn_with_kvcache(q, k_cache[:, :4], v_cache[:, :4], backend=backend))
    assert not torch.allclose(part, full)


def test_one_call_of_two_tokens_is_two_calls_of_one(backend: str) -> None:
    """hyprstream/hyprstream#1521: a cached forward of several tokens masks what a step at a time would mask."""
    q, (k, v) = randn(3, 2, 4, 8), new_tokens(2)
    options = {"block_table": TABLE, "causal": True, "backend": backend}
    k_cache, v_cache = paged()
    both = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=LENS, **options)
    k_cache, v_cache = paged()
    for i in range(2):
        step = flash_attn_with_kvcache(
            q[:, i : i + 1], k_cache, v_cache, k[:, i : i + 1], v[:, i : i + 1], cache_seqlens=LENS + i, **options
        )
        torch.testing.assert_close(both[:, i : i + 1], step)


def test_left_padding_hides_keys(backend: str) -> None:
    q, pad = randn(2, 2, 4, 8), torch.tensor([2, 0], dtype=torch.int32)
    k_cache, v_cache = randn(2, 6, 2, 8, seed=1), randn(2, 6, 2, 8, seed=2)
    options = {"causal": True, "alibi_slopes": torch.rand(4), "window_size": (4, 0), "backend": backend}
    poisoned = k_cache.clone(), v_cache.clone()
    for cache in poisoned:
        cache[0, :2] = torch.nan
    out = flash_attn_with_kvcache(q, *poisoned, cache_seqlens=6, cache_leftpad=pad, **options)
    assert torch.equal(out[1:], flash_attn_with_kvcache(q[1:], k_cache[1:], v_cache[1:], cache_seqlens=6, **options))
    moved = [cache[:1, 2:].contiguous() for cache in (k_cache, v_cache)]
    torch.testing.assert_close(out[:1], flash_attn_with_kvcache(q[:1], *moved, cache_seqlens=4, **options))


def turned(x: Tensor, positions: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """The definition: a pair of channels is a complex number, turned by ``exp(i * angle)`` of its position."""
    half = angles.shape[1]
    head, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).transpose(-1, -2)
    z = torch.view_as_complex(pairs.contiguous())
    z = z * torch.polar(torch.ones_like(angles[positions]), angles[positions]).unsqueeze(2)
    back = torch.view_as_real(z)
    head = back.flatten(-2) if interleaved else back.transpose(-1, -2).flatten(-2)
    return torch.cat((head, rest), dim=-1)


ANGLES = torch.arange(16.0).unsqueeze(1).double() * torch.tensor([1.0, 0.3, 0.05, 0.01]).double()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [1, 3, 4])
def test_rotation_is_the_formula(interleaved: bool, pairs: int) -> None:
    x, positions, angles = randn(2, 3, 2, 8), torch.tensor([[0, 5, 15], [2, 3, 4]]), ANGLES[:, :pairs]
    got = rotate(x, positions, angles.cos().float(), angles.sin().float(), interleaved)
    torch.testing.assert_close(got.double(), turned(x, positions, angles, interleaved), rtol=1e-6, atol=1e-6)
    assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


def test_rotation_rounds_once_in_16_bits() -> None:
    x, positions = randn(1, 4, 2, 8).bfloat16(), torch.tensor([[1, 2, 3, 4]])
    cos, sin = ANGLES.cos().bfloat16(), ANGLES.sin().bfloat16()
    got = rotate(x, positions, cos, sin, True)
    wide = rotate(x.double().float(), positions, cos.float(), sin.float(), True)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wide.bfloat16())


def test_a_position_outside_the_tables_is_nan() -> None:
    got = rotate(torch.ones(1, 2, 1, 8), torch.tensor([[16, 1]]), ANGLES.cos().float(), ANGLES.sin().float(), False)
    assert got[0, 0].isnan().all()
    assert got[0, 1].isfinite().all()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (3, -1)}, {}])
@pytest.mark.parametrize("pad", [None, torch.tensor([1, 2, 0], dtype=torch.int32)])
def test_rotary(backend: str, interleaved: bool, options: dict[str, Any], pad: Tensor | None) -> None:
    """q turns with its position where the mask knows positions, else all of it to that of the first new key."""
    angles = ANGLES[:, :3]
    tables = angles.cos().float(), angles.sin().float()
    q, (k, v) = randn(3, 2, 4, 8), new_tokens(2)
    start = (LENS if pad is None else LENS - pad).long().unsqueeze(1)
    steps = torch.arange(2) if options else torch.zeros(2, dtype=torch.long)
    q_turned = turned(q, start + steps, angles, interleaved).float()
    k_turned = turned(k, start + torch.arange(2), angles, interleaved).float()
    common = {"cache_seqlens": LENS, "block_table": TABLE, "cache_leftpad": pad, "backend": backend, **options}
    caches, expected_caches = paged(), paged()
    got = flash_attn_with_kvcache(q, *caches, k, v, *tables, rotary_interleaved=interleaved, **common)
    expected = flash_attn_with_kvcache(q_turned, *expected_caches, k_turned, v, **common)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[0], expected_caches[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert not torch.equal(caches[0][2, 0], k[0, 0])


def test_q_of_any_strides(backend: str) -> None:
    """[B, H, S, D] transposed has no single stride from row to row; it is copied, and right."""
    k_cache, v_cache = paged()
    q = randn(2, 4, 3, 8).transpose(1, 2)
    options = {"cache_seqlens": LENS[:2], "block_table": TABLE[:2], "causal": True, "backend": backend}
    out = flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    assert torch.equal(out, flash_attn_with_kvcache(q.contiguous(), k_cache, v_cache, **options))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v": None}, pagetile.ArgumentError, "one of k and v is given without the other"),
        ({"cache_batch_idx": torch.arange(3)}, pagetile.ArgumentError, "block_table and cache_batch_idx are both"),
        ({"cache_seqlens": None}, pagetile.ArgumentError, "k is given without cache_seqlens"),
        ({"cache_seqlens": LENS.long()}, pagetile.DTypeError, "cache_seqlens is int64, but must be int32"),
        ({"cache_seqlens": 13}, pagetile.ArgumentError, "cache_seqlens is 13, but the cache has room for 12"),
        ({"cache_seqlens": 12}, pagetile.ArgumentError, r"cache_seqlens\[0\] is 12.*make 13.*room for 12"),
        ({"cache_seqlens": LENS - 1}, pagetile.ArgumentError, r"cache_seqlens\[2\] is -1"),
        (
            {"cache_seqlens": torch.tensor([8, 8, 0], dtype=torch.int32)},
            pagetile.BlockTableError,
            r"block_table\[1, 2\] is -1.*nothing has been written",
        ),
        ({"cache_leftpad": LENS - 9}, pagetile.ArgumentError, r"cache_leftpad\[0\] is -1"),
        ({"rotary_cos": torch.ones(16, 4)}, pagetile.ArgumentError, "rotary_cos and rotary_sin is given without"),
        (
            {"rotary_cos": torch.ones(16, 5), "rotary_sin": torch.ones(16, 5)},
            pagetile.ShapeError,
            "is 5, but q has D = 8",
        ),
        (
            {"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4)},
            pagetile.ArgumentError,
            "rotary_cos: axis 0 is 8, but sequence 0 rotates positions 8 to 8",
        ),
        ({"k_descale": torch.ones(3, 2)}, pagetile.UnsupportedError, r"k_descale is \[3, 2\], but new keys are stored"),
        ({"backend": "hopper"}, pagetile.BackendError, "backend='hopper' cannot.*the tensors are on cpu"),
        ({"softcap": -1.0}, pagetile.ArgumentError, "softcap is -1.0"),
        ({"s_aux": torch.ones(3)}, pagetile.ShapeError, r"s_aux: axis 0 \(Hq\) is 3, but q has Hq = 4"),
        ({"k_descale": torch.tensor(0.5)}, pagetile.ArgumentError, "k_descale is 0.5"),
        ({"v_descale": torch.tensor(0.5)}, pagetile.ArgumentError, "v_descale is 0.5"),
    ],
)
def test_an_error_comes_before_the_first_byte(change: dict[str, Any], error: type, message: str) -> None:
    k_cache, v_cache = paged()
    before = k_cache.clone(), v_cache.clone()
    k, v = new_tokens(1)
    arguments = {"k": k, "v": v, "cache_seqlens": LENS, "block_table": TABLE, "causal": True, **change}
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(randn(3, 1, 4, 8), k_cache, v_cache, **arguments)
    for cache, old in zip((k_cache, v_cache), before, strict=True):
        assert torch.equal(cache.isnan(), old.isnan())
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())


def test_rotary_needs_new_keys() -> None:
    with pytest.raises(pagetile.ArgumentError, match="rotary_cos and rotary_sin are given without k"):
        flash_attn_with_kvcache(
            randn(3, 1, 4, 8), *paged(), rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4), cache_seqlens=LENS
        )


def test_a_cache_of_too_few_rows() -> None:
    with pytest.raises(pagetile.ShapeError, match="k_cache: axis 0 is 2, but q has B = 3"):
        flash_attn_with_kvcache(randn(3, 1, 4, 8), randn(2, 6, 2, 8), randn(2, 6, 2, 8), cache_seqlens=1)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "int8"])
def test_a_quantised_cache_uses_one_scale_for_both(kind: str) -> None:
    """New keys are stored with the scale that they are read with."""
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    k_cache, v_cache = torch.zeros(3, 4, 2, 8).to(dtype), torch.zeros(3, 4, 2, 16).to(dtype)
    k, v = new_tokens(3)
    scales = {"k_descale": torch.tensor([0.02, 0.04]), "v_descale": 0.03}
    options = {"cache_seqlens": 0, "causal": True, "backend": "reference"}
    out = flash_attn_with_kvcache(randn(3, 3, 4, 8), k_cache, v_cache, k, v, kv_cache_dtype=kind, **scales, **options)
    plain = flash_attn_with_kvcache(
        randn(3, 3, 4, 8), torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 16), k, v, **options
    )
    torch.testing.assert_close(out, plain, rtol=0.1, atol=0.1)


def test_graph_padding_writes_nowhere(backend: str) -> None:
    """Rows that only fill a fixed shape have length 0, no new token and a table of -1; theirs is the empty state."""
    k_cache, v_cache = paged()
    lens = torch.tensor([8, 0], dtype=torch.int32)
    table = torch.tensor([[7, 2, 9], [-1, -1, -1]], dtype=torch.int32)
    options = {"cache_seqlens": lens, "block_table": table, "causal": True, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(randn(2, 1, 4, 8), k_cache, v_cache, **options, backend=backend)
    assert not out[1].any()
    assert torch.equal(lse[1], torch.full((4, 1), -torch.inf))
