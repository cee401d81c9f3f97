"""copy_blocks and swap_blocks: in order, all layers, and nothing moves before every index has been looked at."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import pagetile
from pagetile import ArgumentError, BlockTableError, DTypeError, ShapeError


def caches(blocks: int = 6, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Two layers of K and V: dense, head-major, interleaved in one buffer."""
    shape = (blocks, 4, 2, 6)
    both = torch.randn(blocks, 2, *shape[1:]).to(dtype)
    head_major = torch.randn(blocks, 2, 4, 6).to(dtype).transpose(1, 2)
    return [torch.randn(shape).to(dtype), head_major, *both.unbind(1)]


def in_order(cache: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    expected = cache.clone()
    for source, destination in pairs:
        expected[destination] = expected[source].clone()
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_a_list_of_copies_means_one_after_the_other(backend: str, dtype: torch.dtype) -> None:
    rng = random.Random(3)
    for _ in range(12):
        pairs = [(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randint(0, 9))]
        k0, k1, v0, v1 = layers = caches(dtype=dtype)
        expected = [in_order(cache, pairs) for cache in layers]
        pagetile.copy_blocks([k0, k1], [v0, v1], torch.tensor(pairs).reshape(-1, 2).long(), backend=backend)
        for cache, right in zip(layers, expected, strict=True):
            assert torch.equal(cache, right), pairs


def test_a_chain_and_a_cycle(backend: str) -> None:
    cache = torch.arange(5.0).reshape(5, 1).repeat(1, 8)
    pagetile.copy_blocks([cache], [], [(0, 1), (1, 2)], backend=backend)
    assert cache[:, 0].tolist() == [0, 0, 0, 3, 4]
    pagetile.copy_blocks([cache], [], [(3, 0), (4, 3), (0, 4)], backend=backend)  # 3 and 4 change places
    assert cache[:, 0].tolist() == [3, 0, 0, 4, 3]


def test_nothing_between_the_blocks_of_a_view_is_touched(backend: str) -> None:
    buffer = torch.randn(5, 3, 4, 7)
    before = buffer.clone()
    pagetile.copy_blocks([buffer[:, 1, :, 2:5]], [], [(0, 3)], backend=backend)
    before[3, 1, :, 2:5] = before[0, 1, :, 2:5]
    assert torch.equal(buffer, before)


@pytest.mark.parametrize(
    ("pairs", "error", "words"),
    [
        ([(0, 1), (6, 2)], BlockTableError, r"block_mapping\[1, 0\] is 6, the source .* ids 0 to 5"),
        ([(0, 1), (2, -1)], BlockTableError, r"block_mapping\[1, 1\] is -1, the destination"),
        ([(0, 1, 2)], ShapeError, "pairs"),
        ([(0.5, 1.0)], DTypeError, "integers"),
    ],
)
def test_a_bad_index_moves_nothing(backend: str, pairs: list, error: type[Exception], words: str) -> None:
    layers = caches()
    before = [cache.clone() for cache in layers]
    with pytest.raises(error, match=words):
        pagetile.copy_blocks(layers[:2], layers[2:], pairs, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(layers, before, strict=True))


def test_caches_that_cannot_be_copied_together() -> None:
    cache = torch.zeros(6, 4)
    with pytest.raises(ShapeError, match=r"value_caches\[0\]: axis 0 \(NB\) is 5, but key_caches\[0\] has NB = 6"):
        pagetile.copy_blocks([cache], [torch.zeros(5, 4)], [(0, 1)])
    with pytest.raises(ArgumentError, match="pass every cache once"):
        pagetile.copy_blocks([cache, cache], [], [(0, 1)])
    with pytest.raises(ArgumentError, match="stride 0"):
        pagetile.copy_blocks([torch.zeros(1, 4).expand(6, 4)], [], [(0, 1)])


def test_swap_between_caches(backend: str) -> None:
    source, target = torch.randn(6, 4, 2, 5), torch.randn(9, 2, 4, 5).transpose(1, 2)
    expected = target.clone()
    expected[8], expected[0] = source[1], source[5]
    pagetile.swap_blocks(source, target, torch.tensor([[1, 8], [2, 0], [5, 0]], dtype=torch.int32), backend=backend)
    assert torch.equal(target, expected)


def test_swap_of_lists_and_within_one(backend: str) -> None:
    sources, targets = caches(), caches(4)
    expected = [b.clone() for b in targets]
    for a, b in zip(sources, expected, strict=True):
        b[2], b[3] = a[5], a[0]
    pagetile.swap_blocks(sources, targets, [(5, 2), (0, 3)], backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(targets, expected, strict=True))
    cache = torch.arange(4.0).reshape(4, 1)
    pagetile.swap_blocks(cache, cache, [(0, 1), (1, 2)], backend=backend)
    assert cache.flatten().tolist() == [0, 0, 0, 3]


def test_swap_refuses_what_does_not_fit() -> None:
    source = torch.zeros(6, 4, 2)
    with pytest.raises(ShapeError, match=r"a block of dst is \[4, 3\], but one of src is \[4, 2\]"):
        pagetile.swap_blocks(source, torch.zeros(6, 4, 3), [(0, 1)])
    with pytest.raises(DTypeError, match="dst is float16"):
        pagetile.swap_blocks(source, source.half(), [(0, 1)])
    with pytest.raises(ArgumentError, match="share memory"):
        pagetile.swap_blocks(source[:4], source[2:], [(0, 1)])
    with pytest.raises(BlockTableError, match=r"\[0, 1\] is 6"):
        pagetile.swap_blocks(source, torch.zeros(6, 4, 2), [(0, 6)])


def test_operators_and_compiled_graphs() -> None:
    layers = caches()
    mapping = torch.tensor([[0, 1], [1, 2]])
    torch.library.opcheck(torch.ops.pagetile.copy_blocks.default, (layers[:2], layers[2:], mapping))
    torch.library.opcheck(torch.ops.pagetile.swap_blocks.default, ([layers[0]], [torch.zeros(6, 4, 2, 6)], mapping))

    def step(k: Tensor, v: Tensor, mapping: Tensor) -> Tensor:
        pagetile.copy_blocks([k], [v], mapping)
        return k + v

    k, v = caches()[:2]
    expected = in_order(k, [(0, 1), (1, 2)]) + in_order(v, [(0, 1), (1, 2)])
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(k, v, mapping), expected)
