"""The cache's tensors: shapes, strides, sizes in bytes, and copies of blocks."""

from __future__ import annotations

import pytest
import torch

from pagetile.cache import memory
from pagetile.cache.groups import CacheGeometry, LayerGroup, group_layers
from pagetile.cache.kv import PagedKVCache
from pagetile.contracts.errors import ArgumentError, BlockTableError, DTypeError, UnsupportedError
from pagetile.contracts.geometry import split_slot

GEMMA = group_layers([4, 4, None])


def make(**change) -> PagedKVCache:
    arguments = {"num_layers": 2, "num_blocks": 5, "block_size": 3, "num_kv_heads": 2, "head_size": 4}
    return PagedKVCache(**{**arguments, **change})


def label(cache: PagedKVCache) -> None:
    """A constant of its own for each (layer, K or V, block)."""
    for g in cache.groups:
        for layer in g.layers:
            for which, tensor in enumerate((cache.key(layer), cache.value(layer))):
                for block in range(tensor.shape[0]):
                    tensor[block] = 100 * layer + 50 * which + block


def labels(cache: PagedKVCache, layer: int) -> tuple[list[int], list[int]]:
    """The constant of every block, after checking that each block holds only one."""
    out = []
    for tensor in (cache.key(layer).float(), cache.value(layer).float()):
        flat = tensor.reshape(tensor.shape[0], -1)
        assert (flat == flat[:, :1]).all()
        out.append([int(x) % 50 for x in flat[:, 0]])
    return out[0], out[1]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.uint8])
def test_layouts_are_strides_not_shapes(layout: str, dtype: torch.dtype) -> None:
    """LMCache/LMCache#4467: with 2 KV heads a layout guessed from the shape is ambiguous; here it is an argument."""
    cache = make(layout=layout, dtype=dtype, head_size_v=6)
    assert cache.key(1).shape == (5, 3, 2, 4)
    assert cache.value(1).shape == (5, 3, 2, 6)
    assert cache.key(1).stride() == ((24, 8, 4, 1) if layout == "NHD" else (24, 4, 12, 1))
    assert cache.key(0).dtype == dtype
    bases = {t.untyped_storage().data_ptr() for i in range(2) for t in (cache.key(i), cache.value(i))}
    assert len(bases) == 4  # no two share storage


def test_dtype_comes_from_the_argument_only() -> None:
    """TransformerLensOrg/TransformerLens#1260: a cache made in the global default dtype promoted everything."""
    torch.set_default_dtype(torch.float64)
    try:
        assert make(dtype=torch.bfloat16).key(0).dtype == torch.bfloat16
        assert make().key(0).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_bytes_are_those_of_the_tensors() -> None:
    groups = (*GEMMA[:1], LayerGroup("full", (2,), None, num_kv_heads=1, head_size=16, head_size_v=8))
    cache = PagedKVCache(
        groups=groups,
        num_blocks={"window_4": 7, "full": 3},
        block_size=5,
        num_kv_heads=2,
        head_size=4,
        dtype=torch.float16,
    )
    tensors = [t for i in range(3) for t in (cache.key(i), cache.value(i))]
    assert cache.num_bytes == sum(t.nbytes for t in tensors)
    assert cache.bytes_per_token == 2 * (2 * 2 * (4 + 4) + 1 * (16 + 8))
    assert cache.bytes_per_block == 5 * cache.bytes_per_token
    assert cache.key(2).shape == (3, 5, 1, 16)
    assert cache.value(2).shape == (3, 5, 1, 8)
    assert cache.value(0).shape == (7, 5, 2, 4)
    assert cache.group_of(1).name == "window_4"
    for extra, blocks in ((0, 9), (-1, 8), (cache.bytes_per_block - 1, 9)):
        assert cache.blocks_that_fit(9 * cache.bytes_per_block + extra) == blocks
    assert cache.blocks_that_fit(-5) == 0


def test_auto_uses_the_bytes_given_and_no_more() -> None:
    cache = make(num_blocks="auto", memory=10_000)
    assert cache.num_blocks == {"full": 10_000 // cache.bytes_per_block}
    assert cache.num_bytes <= 10_000 < cache.num_bytes + cache.bytes_per_block
    grouped = PagedKVCache(
        groups=GEMMA, num_blocks="auto", memory=100_000, expected_len=60, block_size=2, num_kv_heads=1, head_size=8
    )
    assert grouped.num_bytes <= 100_000
    assert grouped.num_blocks["full"] == pytest.approx(10 * grouped.num_blocks["window_4"], rel=0.1)  # 30 blocks to 3


def test_auto_on_a_cpu_states_a_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface/transformers#42869: the available memory of a CPU was None, and the start a TypeError."""
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 40_000)
    assert make(num_blocks="auto", memory=0.5).num_bytes <= 20_000
    assert make(num_blocks="auto").num_blocks == make(num_blocks="auto", memory=0.5).num_blocks


def test_available_memory_is_read_from_the_system(tmp_path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:     64 kB\n")
    assert memory._meminfo(tmp_path / "meminfo") == 64 * 1024
    assert memory._meminfo(tmp_path / "nothing") is None
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory._control_group(tmp_path) == 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._control_group(tmp_path) is None
    assert memory.available_bytes("cpu") > 0


def test_unknown_memory_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_meminfo", lambda _path: None)
    monkeypatch.setattr(memory, "_control_group", lambda _path: None)
    with pytest.raises(ArgumentError, match="give num_blocks, or memory in bytes"):
        make(num_blocks="auto")
    assert make(num_blocks="auto", memory=10_000).num_blocks["full"] > 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_copies_move_k_and_v_of_exactly_those_blocks(layout: str, dtype: torch.dtype) -> None:
    """vllm-project/vllm#17362, #15603: K and V of the wrong blocks moved when the layout was not the assumed one."""
    cache = make(layout=layout, dtype=dtype if dtype.itemsize > 1 else torch.uint8, num_blocks=4)
    label(cache)
    cache.copy_blocks("full", [(0, 3)])
    for layer in range(2):
        assert labels(cache, layer) == ([0, 1, 2, 0], [0, 1, 2, 0])
    exact = make(layout=layout, dtype=dtype, num_blocks=2)
    bits = torch.arange(exact.key(0)[0].numel() * dtype.itemsize, dtype=torch.uint8) + 90  # NaN patterns included
    exact.key(0)[0].copy_(bits.view(dtype).reshape(exact.key(0)[0].shape))
    exact.copy_blocks("full", [(0, 1)])
    assert torch.equal(*(exact.key(0)[i].contiguous().view(torch.uint8) for i in (0, 1)))


@pytest.mark.parametrize(
    ("pairs", "after"),
    [
        ([(0, 1), (1, 2)], [0, 0, 0, 3, 4]),  # a chain
        ([(1, 2), (0, 1)], [0, 0, 1, 3, 4]),
        ([(0, 4), (1, 0), (4, 1)], [1, 0, 2, 3, 0]),  # a swap through a spare block
        ([(2, 2)], [0, 1, 2, 3, 4]),
        ([], [0, 1, 2, 3, 4]),
        ([(0, 1), (0, 2), (0, 3)], [0, 0, 0, 0, 4]),
    ],
)
def test_copies_behave_as_if_in_order(pairs, after) -> None:
    cache = make()
    label(cache)
    cache.copy_blocks("full", pairs)
    assert labels(cache, 1) == (after, after)


@pytest.mark.parametrize("bad", [(0, 5), (5, 0), (-1, 0), (0, -1), (0, 511), (3, 1)])
def test_bad_copies_move_nothing(bad: tuple[int, int]) -> None:
    """vllm-project/vllm#7577, #50443: no range check; destination 511 of 39 blocks was a segmentation fault."""
    cache = make()
    label(cache)
    with pytest.raises(IndexError) as caught:
        cache.copy_blocks("full", [(2, 1), bad])
    assert isinstance(caught.value, BlockTableError)
    assert "pair 1" in str(caught.value)
    for layer in range(2):
        assert labels(cache, layer) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])


def test_copies_of_several_groups_are_checked_before_any_runs() -> None:
    cache = PagedKVCache(groups=GEMMA, num_blocks={"window_4": 2, "full": 4}, num_kv_heads=1, head_size=2)
    label(cache)
    cache.run_copies([("full", 3, 0), ("window_4", 1, 0)])
    assert labels(cache, 2)[0] == [3, 1, 2, 3]
    assert labels(cache, 0)[0] == labels(cache, 1)[1] == [1, 1]
    with pytest.raises(BlockTableError, match="'window_4' has blocks 0 to 1"):
        cache.run_copies([("full", 1, 2), ("window_4", 3, 0)])
    assert labels(cache, 2)[0] == [3, 1, 2, 3]


def test_a_cache_of_more_than_2_31_elements() -> None:
    """vllm-project/vllm#1486: addresses past 2**31 elements; the memory is only touched where it is written."""
    cache = PagedKVCache(
        num_layers=1, num_blocks=131073, block_size=16, num_kv_heads=8, head_size=128, dtype=torch.uint8
    )
    assert cache.key(0).numel() > 2**31
    cache.key(0)[131072, 15, 7, 127] = 9
    cache.copy_blocks("full", [(131072, 1)])
    assert cache.key(0)[1, 15, 7, 127] == 9
    block, offset = split_slot(131072 * 16 + 15, 16)
    assert cache.key(0)[block, offset, 7, 127] == 9


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_layers": None}, ArgumentError, "either num_layers or groups"),
        ({"groups": GEMMA}, ArgumentError, "either num_layers or groups"),
        ({"num_layers": 0}, ArgumentError, "num_layers is 0"),
        ({"num_blocks": 0}, ArgumentError, "num_blocks of group 'full' is 0"),
        ({"num_blocks": 2.5}, ArgumentError, "num_blocks of group 'full' is 2.5"),
        ({"num_blocks": {"other": 3}}, ArgumentError, r"names the groups \['other'\], the cache has \['full'\]"),
        ({"num_blocks": "many"}, ArgumentError, "num_blocks is 'many'"),
        ({"num_blocks": 4, "memory": 10}, ArgumentError, "memory goes with num_blocks='auto'"),
        ({"num_blocks": "auto", "memory": 1.5}, ArgumentError, "memory is 1.5"),
        ({"num_blocks": "auto", "memory": 0}, ArgumentError, "memory is 0"),
        ({"num_blocks": "auto", "memory": 100}, ArgumentError, "one block of every group takes 384 bytes"),
        ({"block_size": 0}, ArgumentError, "block_size is 0"),
        ({"num_kv_heads": None}, ArgumentError, "num_kv_heads of group 'full' is None"),
        ({"head_size": 0}, ArgumentError, "head_size of group 'full' is 0"),
        ({"dtype": torch.int64}, DTypeError, "dtype is torch.int64"),
        ({"layout": "HDN"}, ArgumentError, "layout is 'HDN'"),
    ],
)
def test_refusals(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**change)


def test_groups_that_cannot_live_together() -> None:
    """ovg-project/kvcached#446, #451: groups of different block sizes, hashed at one granularity, went wrong."""

    def geometry(*groups: LayerGroup) -> CacheGeometry:
        return CacheGeometry.of(groups, block_size=16, num_kv_heads=1, head_size=8, itemsize=2)

    with pytest.raises(UnsupportedError, match="'b' has block_size 32, the cache has 16"):
        geometry(LayerGroup("a", (0,), block_size=16), LayerGroup("b", (1,), block_size=32))
    with pytest.raises(ArgumentError, match="same name"):
        geometry(LayerGroup("a", (0,)), LayerGroup("a", (1,)))
    with pytest.raises(ArgumentError, match=r"layers \[1\] are in two groups"):
        geometry(LayerGroup("a", (0, 1)), LayerGroup("b", (1,)))
    with pytest.raises(ArgumentError, match="at least one"):
        LayerGroup("a", ())
    with pytest.raises(ArgumentError, match="window 0"):
        LayerGroup("a", (0,), window=0)
    with pytest.raises(ArgumentError, match="layer 3 is in no group"):
        make().key(3)
    with pytest.raises(ArgumentError, match="no group 'x'"):
        make().copy_blocks("x", [])


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 8, 9])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_blocks_behind_a_window(window: int, block_size: int) -> None:
    """By counting: a block is behind when the query, and so every later one, sees none of its positions."""
    g = LayerGroup("w", (0,), window)
    for position in range(30):
        seen = {p // block_size for p in range(position + 1) if position - p < window}
        assert g.blocks_behind(position, block_size) == min(seen)
        assert g.first_visible(position) == max(0, position - (window - 1))
