"""A saved prefix cache: what comes back is what was there, and nothing but that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from pagetile.cache import LayerGroup, PagedKVCache, SequenceTable, load_prefixes, save_prefixes
from pagetile.contracts.errors import ArgumentError, CacheFileError

pytest.importorskip("safetensors")

GROUPS = (LayerGroup("full", (0, 2)), LayerGroup("local", (1,), window=6))
PROMPT = list(range(100, 119))


def room(num_blocks: int = 12, **changes) -> tuple[PagedKVCache, SequenceTable]:
    options = {"groups": GROUPS, "block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    cache = PagedKVCache(num_blocks=num_blocks, **{**options, **changes})
    return cache, SequenceTable.for_cache(cache)


def fill(cache: PagedKVCache, table: SequenceTable, tokens: list[int], salt: str | None = None) -> None:
    """A prompt that came, was computed (its keys are noise) and went."""
    seq = table.add(tokens, salt=salt)
    table.reserve(seq, seq.num_uncomputed)
    for group, meta in table.batch([(seq, seq.num_uncomputed)]).metadata.items():
        slots = meta.slot_mapping[meta.slot_mapping >= 0]
        for tensor in cache.block_tensors(group).values():
            flat = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            noise = torch.randint(0, 100, (len(slots), *tensor.shape[2:])).to(flat.dtype)
            flat[slots // cache.block_size, slots % cache.block_size] = noise
    table.commit(seq, seq.num_uncomputed)
    table.free(seq)


def content(cache: PagedKVCache, table: SequenceTable, tokens: list[int], salt: str | None = None) -> dict:
    """Keys and values of the blocks that a prompt hits, by group and tensor."""
    seq = table.add(tokens, salt=salt)
    found = {}
    for group in cache.groups:
        row = seq.blocks[group.name][seq.released[group.name] :]
        for name, tensor in cache.block_tensors(group.name).items():
            raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            found[name] = raw[list(row)].clone()
    found["hit"] = torch.tensor(seq.num_computed)
    table.free(seq)
    return found


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_prompt_hits_after_a_restart(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    cache, table = room(layout=layout, dtype=dtype)
    fill(cache, table, PROMPT)
    fill(cache, table, PROMPT[:8] + [1] * 8, salt="tenant")
    saved = save_prefixes(table, cache, tmp_path / "cache.safetensors", identity="weights 1")
    assert saved == sum(pool.num_cached for pool in table.pools.values())
    before = content(cache, table, PROMPT), content(cache, table, PROMPT[:8] + [1] * 8, "tenant")

    again, fresh = room(layout=layout, dtype=dtype)
    done = load_prefixes(fresh, again, tmp_path / "cache.safetensors", identity="weights 1")
    fresh.check()
    assert (done.loaded, done.known, done.skipped) == (saved, 0, 0)
    after = content(again, fresh, PROMPT), content(again, fresh, PROMPT[:8] + [1] * 8, "tenant")
    assert before[0]["hit"] == 16
    assert all(same(a, b) for a, b in zip(before, after, strict=True))
    assert content(again, fresh, PROMPT[:8] + [1] * 8)["hit"] == 8  # without the salt only the other prompt's blocks

    done = load_prefixes(fresh, again, tmp_path / "cache.safetensors", identity="weights 1")
    assert (done.loaded, done.known) == (0, saved)
    fresh.check()


def test_eviction_goes_on_where_it_was(tmp_path: Path) -> None:
    cache, table = room(groups=GROUPS[:1])
    for first in (1, 2, 3):
        fill(cache, table, [first] * 8)
    save_prefixes(table, cache, tmp_path / "c")
    again, fresh = room(groups=GROUPS[:1])
    load_prefixes(fresh, again, tmp_path / "c")
    pool, new = table.pools["full"], fresh.pools["full"]
    order = [[p.prefix(b).digest for b in p.registered_blocks()] for p in (pool, new)]
    assert order[0] == order[1]


def test_what_finds_no_room_is_left_out_tails_first(tmp_path: Path) -> None:
    cache, table = room(groups=GROUPS[:1])
    fill(cache, table, PROMPT)
    fill(cache, table, [7] * 8)
    assert save_prefixes(table, cache, tmp_path / "c") == 6
    again, fresh = room(num_blocks=4, groups=GROUPS[:1])
    held = fresh.add([5] * 4)
    fresh.reserve(held, 4)
    done = load_prefixes(fresh, again, tmp_path / "c")
    assert (done.loaded, done.skipped) == (3, 3)
    assert sorted([content(again, fresh, PROMPT)["hit"].item(), content(again, fresh, [7] * 8)["hit"].item()]) in (
        [4, 7],
        [4, 8],
    )
    fresh.check()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"layout": "HND"}, "layout 'NHD', this cache has 'HND'"),
        ({"dtype": torch.float16}, "dtype 'bfloat16', this cache has 'float16'"),
        ({"block_size": 8}, "block_size 4, this cache has 8"),
        ({"head_size": 16}, "groups"),
        ({"num_kv_heads": 1}, "groups"),
        ({"groups": GROUPS[:1]}, "groups"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_file_for_another_cache_is_refused(change: dict, what: str, tmp_path: Path) -> None:
    cache, table = room()
    fill(cache, table, PROMPT)
    save_prefixes(table, cache, tmp_path / "c")
    again, fresh = room(**change)
    with pytest.raises(CacheFileError, match=what):
        load_prefixes(fresh, again, tmp_path / "c")
    fresh.check()
    assert all(pool.num_free == pool.num_blocks for pool in fresh.pools.values())


def test_another_model_is_refused(tmp_path: Path) -> None:
    cache, table = room()
    fill(cache, table, PROMPT)
    save_prefixes(table, cache, tmp_path / "c", identity="weights 1")
    with pytest.raises(CacheFileError, match="identity 'weights 1', this cache has 'weights 2'"):
        load_prefixes(room()[1], room()[0], tmp_path / "c", identity="weights 2")


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    cache, table = room(groups=GROUPS[:1], num_kv_heads=1, head_size=1)
    fill(cache, table, PROMPT[:4])
    path = tmp_path / "c"
    save_prefixes(table, cache, path)
    whole = path.read_bytes()
    again, fresh = room(groups=GROUPS[:1], num_kv_heads=1, head_size=1)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(CacheFileError, match="damaged"):
            load_prefixes(fresh, again, path)
    for size in (0, 7, 32, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CacheFileError):
            load_prefixes(fresh, again, path)
    assert fresh.pools["full"].num_free == fresh.pools["full"].num_blocks


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from pagetile.cache.store import SEAL, _seal

    cache, table = room()
    save_file({"weight": torch.zeros(4), SEAL: torch.zeros(32, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    _seal(tmp_path / "model.safetensors")
    with pytest.raises(CacheFileError, match="no saved prefix cache"):
        load_prefixes(table, cache, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError):
        load_prefixes(table, cache, tmp_path / "none")
    with pytest.raises(ArgumentError, match="no prefix cache"):
        load_prefixes(SequenceTable.for_cache(cache, prefix_cache=False), cache, tmp_path / "none")


def test_an_error_while_reading_gives_the_blocks_back(tmp_path: Path, monkeypatch) -> None:
    cache, table = room()
    fill(cache, table, PROMPT)
    save_prefixes(table, cache, tmp_path / "c")
    again, fresh = room()
    monkeypatch.setattr(again, "block_tensors", lambda _group: {"9.key": torch.zeros(12, 1)})
    with pytest.raises(Exception, match=r"9\.key"):
        load_prefixes(fresh, again, tmp_path / "c")
    fresh.check()
    assert all(pool.num_free == pool.num_blocks for pool in fresh.pools.values())


def test_killed_while_saving(tmp_path: Path) -> None:
    """kill -9 at any moment leaves the previous file, whole; the next save clears away what was left."""
    cache, table = room()
    fill(cache, table, PROMPT)
    path = tmp_path / "c"
    save_prefixes(table, cache, path)
    before = path.read_bytes()
    script = textwrap.dedent("""
        import sys, time, torch
        from pagetile.cache import LayerGroup, PagedKVCache, SequenceTable, save_prefixes, store
        stop = sys.argv[2]
        seal, replace = store._seal, store.os.replace
        def wait(*_):
            print("here", flush=True)
            time.sleep(60)
        if stop == "written":
            store._seal = wait
        else:
            store.os.replace = wait
        cache = PagedKVCache(num_layers=1, num_blocks=4, block_size=4, num_kv_heads=1, head_size=8)
        table = SequenceTable.for_cache(cache)
        seq = table.add([1] * 8)
        table.reserve(seq, 8)
        table.commit(seq, 8)
        save_prefixes(table, cache, sys.argv[1])
    """)
    for moment in ("written", "sealed"):
        with subprocess.Popen([sys.executable, "-c", script, str(path), moment], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            os.kill(process.pid, signal.SIGKILL)
        assert list(tmp_path.glob(".c.partial-*")), "it died before it was whole"
        assert path.read_bytes() == before
    again, fresh = room()
    assert load_prefixes(fresh, again, path).loaded > 0
    for _ in range(50):  # the dead need a moment to be gone
        save_prefixes(table, cache, path)
        if not list(tmp_path.glob(".c.partial-*")):
            break
        time.sleep(0.1)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
