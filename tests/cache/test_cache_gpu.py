"""The cache and the metadata on a GPU: same values, no synchronisation, replayable at any lengths."""

from __future__ import annotations

import pytest
import torch

from pagetile.cache.groups import LayerGroup
from pagetile.cache.kv import PagedKVCache
from pagetile.cache.sequences import SequenceTable
from pagetile.contracts.errors import BlockTableError
from pagetile.contracts.metadata import build_metadata, slots_on_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCHES = [
    ([[7, 2, 9], [4], [1, 3]], [37, 5, 20], [17, 1, 0]),
    ([[5], [6], []], [1, 16, 0], [1, 2, 0]),
    ([], [], []),
]


def test_the_host_builder_reaches_the_gpu_without_a_synchronisation() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        built = [build_metadata(*batch, 16, device="cuda", pad_tokens=20, pad_seqs=4) for batch in BATCHES]
        slots = [slots_on_device(m.block_table, m.seq_lens, m.query_start_loc, 16, 20) for m in built]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, m, on_device in zip(BATCHES, built, slots, strict=True):
        host = build_metadata(*batch, 16, pad_tokens=20, pad_seqs=4)
        assert torch.equal(m.slot_mapping.cpu(), host.slot_mapping)
        assert torch.equal(m.block_table.cpu(), host.block_table)
        assert torch.equal(on_device.cpu(), host.slot_mapping)


def test_the_device_form_replays_in_a_graph_at_other_lengths() -> None:
    """sgl-project/sglang#22800: captured at one size, wrong at another."""
    table = torch.zeros(4, 3, dtype=torch.int32, device="cuda")
    lens = torch.zeros(4, dtype=torch.int32, device="cuda")
    loc = torch.zeros(5, dtype=torch.int32, device="cuda")
    slots_on_device(table, lens, loc, 16, 20)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = slots_on_device(table, lens, loc, 16, 20)
    for batch in BATCHES:
        m = build_metadata(*batch, 16, pad_tokens=20, pad_seqs=4, table_width=3)
        table.copy_(m.block_table)
        lens.copy_(m.seq_lens)
        loc.copy_(m.query_start_loc)
        graph.replay()
        assert torch.equal(out.cpu(), m.slot_mapping)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_copies_on_the_gpu(dtype: torch.dtype, layout: str) -> None:
    cache = PagedKVCache(
        groups=[LayerGroup("a", (0, 1)), LayerGroup("b", (2,), 4)],
        num_blocks={"a": 4, "b": 3},
        block_size=3,
        num_kv_heads=2,
        head_size=8,
        dtype=dtype,
        layout=layout,
        device="cuda",
    )
    for block in range(4):
        cache.value(1)[block] = torch.tensor(block).to(dtype)
    with pytest.raises(BlockTableError):
        cache.run_copies([("a", 0, 1), ("b", 0, 3)])
    assert cache.value(1)[:, 0, 0, 0].float().tolist() == [0, 1, 2, 3]
    cache.run_copies([("a", 3, 0), ("a", 0, 2)])
    assert cache.value(1)[:, -1, -1, -1].float().tolist() == [3, 1, 3, 3]
    assert cache.key(1).device.type == "cuda"


def test_auto_takes_a_share_of_what_is_free() -> None:
    free = torch.cuda.mem_get_info()[0]
    cache = PagedKVCache(num_layers=2, num_blocks="auto", memory=0.01, num_kv_heads=8, head_size=128, device="cuda")
    assert 0.009 * free < cache.num_bytes <= 0.01 * free
    seq_table = SequenceTable.for_cache(cache)
    seq = seq_table.add(range(40))
    seq_table.reserve(seq, 40)
    assert seq_table.batch([(seq, 40)], device="cuda").token_ids.device.type == "cuda"
