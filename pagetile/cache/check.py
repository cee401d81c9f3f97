"""The invariants that tie sequences to pools, as a function that tests call after every step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from pagetile.contracts.geometry import blocks_for

if TYPE_CHECKING:
    from pagetile.cache.groups import LayerGroup
    from pagetile.cache.sequence import Sequence
    from pagetile.cache.sequences import SequenceTable


def check_table(table: SequenceTable) -> None:
    """Prove that rows, references, prefixes and pools of a :class:`SequenceTable` agree.

    Raises:
        AssertionError: names the first invariant that does not hold.
    """
    for seq in table.sequences:
        _check_counts(seq, table)
        for g in table.groups:
            _check_row(seq, g, table)
    for name, pool in table.pools.items():
        pool.check()
        held = Counter(b for seq in table.sequences for b in seq.blocks[name][seq.released[name] :])
        holds = Counter(b for seq in table.sequences for g, b in seq.holds if g == name)
        _hold(holds == table.holds[name], f"group {name!r}: the holds of the sequences are the table's")
        for block in range(pool.num_blocks):
            _hold(
                pool.ref(block) == held[block] + holds[block],
                f"group {name!r}: block {block} has {pool.ref(block)} references, {held[block]} in rows and "
                f"{holds[block]} for copies",
            )


def _check_counts(seq: Sequence, table: SequenceTable) -> None:
    size = table.block_size
    _hold(
        0 <= seq.num_computed <= seq.num_stored <= min(len(seq), seq.num_reserved),
        f"{seq}: computed {seq.num_computed} <= stored {seq.num_stored} <= tokens and reserved {seq.num_reserved}",
    )
    _hold(seq.num_stored - seq.num_computed <= 1, f"{seq}: at most one stored token is computed again")
    if not table.prefix_cache:
        _hold(not seq.prefixes, f"{seq}: no prefixes without a prefix cache")
        return
    _hold(len(seq.prefixes) == seq.num_stored // size, f"{seq}: one prefix for every stored full block")
    for index, prefix in enumerate(seq.prefixes):
        own = np.asarray(seq.token_ids[index * size : (index + 1) * size]).astype("<i8").tobytes()
        _hold(prefix.content == own, f"{seq}: prefix {index} holds the sequence's own tokens")
        _hold(prefix.num_blocks == index + 1, f"{seq}: prefix {index} is {index + 1} blocks long")
        if index and prefix.parent is not seq.prefixes[index - 1]:
            same = prefix.parent is not None and prefix.parent.same(seq.prefixes[index - 1])
            _hold(same, f"{seq}: prefix {index} continues prefix {index - 1}")


def _check_row(seq: Sequence, g: LayerGroup, table: SequenceTable) -> None:
    row, released, size = seq.blocks[g.name], seq.released[g.name], table.block_size
    pool, where = table.pools[g.name], f"{seq}, group {g.name!r}"
    _hold(len(row) >= blocks_for(seq.num_reserved, size), f"{where}: a block for every reserved position")
    _hold(all(b == 0 for b in row[:released]), f"{where}: released blocks read 0")
    _hold(released * size <= g.first_visible(seq.num_computed), f"{where}: what the next query sees is not released")
    own = row[released:]
    _hold(len(set(own)) == len(own), f"{where}: no block stands for two logical blocks")
    _hold(all(0 <= b < pool.num_blocks for b in own), f"{where}: block ids are in the pool")
    for index in range(released, len(seq.prefixes)):
        prefix = pool.prefix(row[index])
        _hold(
            prefix is None or prefix.same(seq.prefixes[index]),
            f"{where}: block {row[index]} is registered under the prefix of its tokens",
        )


def _hold(condition: bool, invariant: str) -> None:
    if not condition:
        raise AssertionError(f"sequence table invariant broken: {invariant}")
