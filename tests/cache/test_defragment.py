"""Compaction over a real cache: whatever a sequence or the prefix cache could read, it reads the same bits after."""

from __future__ import annotations

import random

import pytest
import torch

from pagetile.cache import LayerGroup, PagedKVCache, SequenceTable, compaction, defragment
from pagetile.cache.sequence import Sequence
from pagetile.contracts.errors import ArgumentError, OutOfBlocksError

GROUPS = (LayerGroup("full", (0, 1)), LayerGroup("local", (2,), window=5))


class Load:
    """Random requests over a small cache, whose stored keys and values are noise."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.cache = PagedKVCache(groups=GROUPS, num_blocks=24, block_size=4, num_kv_heads=2, head_size=2)
        self.table = SequenceTable.for_cache(self.cache)
        self.moved = 0

    def compute(self, seq: Sequence, n: int) -> None:
        """A forward of the next ``n`` tokens, as far as the cache is concerned."""
        try:
            copies = self.table.reserve(seq, n)
        except OutOfBlocksError:
            self.table.preempt(seq)
            return
        self.cache.run_copies(copies)
        for group, meta in self.table.batch([(seq, n)]).metadata.items():
            slots = meta.slot_mapping[meta.slot_mapping >= 0]
            for tensor in self.cache.block_tensors(group).values():
                tensor[slots // 4, slots % 4] = torch.rand(len(slots), *tensor.shape[2:])
        self.table.commit(seq, n)

    def operate(self) -> None:
        """One operation: come, go on, fork, roll back, lose blocks, go, compact."""
        alive = self.table.sequences
        seq = self.random.choice(alive) if alive else None
        what = self.random.choice(("add", "add", "step", "step", "fork", "truncate", "preempt", "free", "defragment"))
        if what == "add" and len(alive) < 6:
            new = self.table.add([self.random.randrange(2) for _ in range(self.random.randrange(1, 20))])
            self.compute(new, new.num_uncomputed)
        elif what == "defragment":
            self.compact()
        elif seq is None:
            return
        elif what == "step":
            self.table.append(seq, self.random.randrange(2))
            self.compute(seq, seq.num_uncomputed)
        elif what == "fork" and len(alive) < 6:
            self.table.fork(seq)
        elif what == "truncate" and len(seq):
            self.table.truncate(seq, self.random.randrange(len(seq)))
        elif what == "preempt":
            self.table.preempt(seq)
        elif what == "free":
            self.table.free(seq)

    def compact(self) -> None:
        before, known = self.contents(), self.known()
        moves = defragment(self.table, self.cache)
        self.moved += sum(map(len, moves.values()))
        after = self.contents()
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert torch.equal(tensor, after[key]), key
        assert {digest: content.tolist() for digest, content in known.items()} == {
            digest: content.tolist() for digest, content in self.known().items()
        }

    def contents(self) -> dict[tuple, torch.Tensor]:
        """Keys and values of each sequence's stored positions that it still sees."""
        found = {}
        for seq in self.table.sequences:
            for g in self.cache.groups:
                positions = torch.arange(g.first_visible(seq.num_computed), seq.num_stored)
                row = torch.tensor(list(seq.blocks[g.name]) or [0])
                for name, tensor in self.cache.block_tensors(g.name).items():
                    found[seq.id, name] = tensor[row[positions // 4], positions % 4].clone()
        return found

    def known(self) -> dict[tuple, torch.Tensor]:
        """Keys of every block that a prompt could hit."""
        return {
            (name, pool.digest(b), pool.ref(b)): self.cache.key(2 if name == "local" else 0)[b].clone()
            for name, pool in self.table.pools.items()
            for b in pool.registered_blocks()
            if len(pool._by_digest[pool.digest(b)]) == 1
        }


def test_ten_thousand_operations() -> None:
    load = Load(0)
    for _ in range(10_000):
        load.operate()
        load.table.check()
    assert load.moved > 1_000


def test_the_table_of_another_cache_is_refused() -> None:
    load = Load(0)
    other = PagedKVCache(groups=GROUPS, num_blocks=7, block_size=4, num_kv_heads=2, head_size=2)
    with pytest.raises(ArgumentError, match="give the table's own cache"):
        defragment(load.table, other)


def test_not_between_a_reservation_and_its_copies() -> None:
    load = Load(0)
    seq = load.table.add([1, 0, 1, 0, 1])
    load.compute(seq, 5)
    fork = load.table.fork(seq)
    load.table.append(fork, 1)
    load.table.reserve(fork, 1)
    with pytest.raises(ArgumentError, match=f"sequence {fork.id} waits for copies"):
        defragment(load.table, load.cache)
    load.table.check()


def test_an_error_while_copying_changes_nothing(monkeypatch) -> None:
    load = Load(0)
    first, second = load.table.add([1] * 9), load.table.add([0] * 9)
    for seq in (first, second):
        load.compute(seq, 9)
    load.table.free(first)
    load.table.reset_prefix_cache()
    before, rows = load.contents(), {name: list(row) for name, row in second.blocks.items()}
    assert all(compaction(load.table).values())

    def fail(*_args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(load.cache, "copy_blocks", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        defragment(load.table, load.cache)
    load.table.check()
    assert {name: list(row) for name, row in second.blocks.items()} == rows
    assert all(torch.equal(before[key], tensor) for key, tensor in load.contents().items())
