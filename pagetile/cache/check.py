"""The invariants that tie sequences to pools, as functions that tests call after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as List

import numpy as np

from pagetile.cache.groups import LayerGroup
from pagetile.cache.pool import BlockPool
from pagetile.cache.sequence import Sequence
from pagetile.contracts.geometry import blocks_for


def check_sequences(sequences: List[Sequence], groups: List[LayerGroup], block_size: int, prefix_cache: bool) -> None:
    """Prove that counts, rows and prefixes of each sequence agree with each other.

    Raises:
        AssertionError: names the first invariant that does not hold.
    """
    for seq in sequences:
        _check_counts(seq)
        _check_prefixes(seq, block_size, prefix_cache)
        for g in groups:
            _check_row(seq, g, block_size)


def check_references(name: str, pool: BlockPool, holds: Counter[int], sequences: List[Sequence]) -> None:
    """Prove that a group's pool counts exactly the references that the sequences hold.

    Raises:
        AssertionError: names the first invariant that does not hold.
    """
    pool.check()
    held = Counter(block for seq in sequences for block in seq.blocks[name][seq.released[name] :])
    copied = Counter(block for seq in sequences for group, block in seq.holds if group == name)
    _hold(copied == holds, f"group {name!r}: the holds of the sequences are the table's")
    for block in range(pool.num_blocks):
        _hold(
            pool.ref(block) == held[block] + copied[block],
            f"group {name!r}: block {block} has {pool.ref(block)} references, {held[block]} in rows and "
            f"{copied[block]} for copies",
        )
    for seq in sequences:
        for index in range(seq.released[name], len(seq.prefixes)):
            prefix = pool.prefix(seq.blocks[name][index])
            _hold(
                prefix is None or prefix.same(seq.prefixes[index]),
                f"{seq}, group {name!r}: logical block {index} is registered under the prefix of its tokens",
            )


def _check_counts(seq: Sequence) -> None:
    _hold(
        0 <= seq.num_computed <= seq.num_stored <= min(len(seq), seq.num_reserved),
        f"{seq}: computed {seq.num_computed} <= stored {seq.num_stored} <= tokens, reserved {seq.num_reserved}",
    )
    _hold(seq.num_stored - seq.num_computed <= 1, f"{seq}: at most one stored token is computed again")
    _hold(0 <= seq.num_hit <= seq.num_computed, f"{seq}: found {seq.num_hit} <= computed")


def _check_prefixes(seq: Sequence, block_size: int, prefix_cache: bool) -> None:
    if not prefix_cache:
        _hold(not seq.prefixes, f"{seq}: no prefixes without a prefix cache")
        return
    _hold(len(seq.prefixes) == seq.num_stored // block_size, f"{seq}: one prefix for every stored full block")
    for index, prefix in enumerate(seq.prefixes):
        own = np.asarray(seq.token_ids[index * block_size : (index + 1) * block_size]).astype("<i8").tobytes()
        _hold(prefix.content == own, f"{seq}: prefix {index} holds the sequence's own tokens")
        _hold(prefix.num_blocks == index + 1, f"{seq}: prefix {index} is {index + 1} blocks long")
        if index:
            parent = prefix.parent
            joined = parent is not None and parent.same(seq.prefixes[index - 1])
            _hold(joined, f"{seq}: prefix {index} continues prefix {index - 1}")


def _check_row(seq: Sequence, g: LayerGroup, block_size: int) -> None:
    row, released, where = seq.blocks[g.name], seq.released[g.name], f"{seq}, group {g.name!r}"
    _hold(len(row) >= blocks_for(seq.num_reserved, block_size), f"{where}: a block for every reserved position")
    _hold(all(block == 0 for block in row[:released]), f"{where}: released blocks read 0")
    _hold(released * block_size <= g.first_visible(seq.num_computed), f"{where}: nothing that is seen is released")
    own = row[released:]
    _hold(len(set(own)) == len(own), f"{where}: no block stands for two logical blocks")


def _hold(condition: bool, invariant: str) -> None:
    if not condition:
        raise AssertionError(f"sequence table invariant broken: {invariant}")
