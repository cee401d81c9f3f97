"""Requests over the pools: which blocks a sequence holds, and the metadata of a batch.

The life of a step, for the sequences and token counts that a scheduler picked::

    copies = table.reserve(work)              # blocks for the new positions, all or nothing
    cache.run_copies(copies)                  # in order, before anything is written
    batch = table.batch(work)                 # token ids, positions, metadata of every group
    ...                                       # the model writes at batch slots and attends
    for seq, n in work: table.commit(seq, n)  # now they count, and full blocks may be hit by others

This is the only place where ``block_table``, ``slot_mapping``, ``query_start_loc`` and ``seq_lens`` are made. It knows
no tensors of keys and values and is not safe to use from several threads at once.

Source: vLLM's KV cache manager and its groups for hybrid models; PagedAttention's copy-on-write for parallel sampling.
"""

from __future__ import annotations

import operator
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pagetile.cache.batch import Batch, BatchShape, Work, group_metadata, pack
from pagetile.cache.check import check_references, check_sequences
from pagetile.cache.figures import GroupUsage, MemoryFigures, PeakMeter, TableStats
from pagetile.cache.groups import CacheGeometry, LayerGroup, check_groups, per_group
from pagetile.cache.hits import longest_hit, register_stored
from pagetile.cache.kv import PagedKVCache
from pagetile.cache.pool import BlockPool
from pagetile.cache.prefix import Hasher, Prefix, Salt, blake2b, token_array
from pagetile.cache.reservation import BlockCopy, Reservation
from pagetile.cache.sequence import Sequence
from pagetile.contracts.errors import ArgumentError
from pagetile.contracts.geometry import blocks_for
from pagetile.contracts.metadata import AttentionMetadata


class SequenceTable:
    """All sequences over a set of layer groups, each group with a pool of its own.

    >>> table = SequenceTable([LayerGroup("full", (0,))], num_blocks=8, block_size=4)
    >>> a = table.add([1, 2, 3, 4, 5, 6])
    >>> table.reserve(a, 6)                                   # two blocks, nothing to copy
    []
    >>> table.metadata([(a, 6)]).slot_mapping.tolist()
    [0, 1, 2, 3, 4, 5]
    >>> table.commit(a, 6)
    >>> b = table.add([1, 2, 3, 4, 9])                        # its first block is known
    >>> b.num_computed, list(b.blocks["full"])
    (4, [0])
    >>> c = table.fork(a)                                     # shares both blocks, also the partial one
    >>> table.append(c, 7)
    >>> table.reserve(c, 1)                                   # so its first write copies block 1
    [BlockCopy(group='full', src=1, dst=2)]

    Args:
        groups: see :class:`~pagetile.cache.groups.LayerGroup`.
        num_blocks: blocks of every group, or a mapping by group name.
        block_size: tokens in a block, the same in all groups.
        prefix_cache: whether full blocks of known prefixes are kept and shared.
        hasher: see :data:`~pagetile.cache.prefix.Hasher`.
        geometry: what a block costs, for the figures in bytes.

    Raises:
        UnsupportedError: groups with different block sizes.
    """

    def __init__(
        self,
        groups: Iterable[LayerGroup],
        num_blocks: int | Mapping[str, int],
        block_size: int,
        *,
        prefix_cache: bool = True,
        hasher: Hasher = blake2b,
        geometry: CacheGeometry | None = None,
    ) -> None:
        self.groups = check_groups(tuple(groups), block_size)
        self.block_size = int(block_size)
        self.prefix_cache = prefix_cache
        self.hasher = hasher
        self.geometry = geometry
        counts = per_group("num_blocks", num_blocks, self.groups)
        self.pools = {name: BlockPool(n, block_size, prefix_cache, hasher) for name, n in counts.items()}
        self.holds: dict[str, Counter[int]] = {name: Counter() for name in counts}
        self.stats = TableStats()
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0
        self._peak = PeakMeter(self.pools, geometry)

    @classmethod
    def for_cache(cls, cache: PagedKVCache, *, prefix_cache: bool = True, hasher: Hasher = blake2b) -> SequenceTable:
        """A table with the groups, blocks and costs of a cache."""
        return cls(
            cache.groups,
            cache.num_blocks,
            cache.block_size,
            prefix_cache=prefix_cache,
            hasher=hasher,
            geometry=cache.geometry,
        )

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that were added and not freed, oldest first."""
        return list(self._sequences.values())

    # Coming and going -----------------------------------------------------------------------------------------------

    def add(self, token_ids: Any, *, salt: Salt = None, take_hits: bool = True) -> Sequence:
        """A new sequence. With ``take_hits`` it takes what the prefix cache knows of it, see :meth:`take_hits`.

        A scheduler that lets requests wait adds them without, and takes the hits when it admits them: a waiting
        request then holds no blocks.
        """
        seq = Sequence(self._next_id, array("q", token_array(token_ids).tobytes()), salt, self.pools)
        Prefix.root(salt, self.block_size, self.hasher)  # refuses a salt of a wrong type before anything is kept
        self._next_id += 1
        self._sequences[seq.id] = seq
        if take_hits:
            self.take_hits(seq)
        return seq

    def take_hits(self, seq: Sequence) -> int:
        """Take the longest known prefix of a sequence that holds no blocks (a new or a preempted one).

        Full groups need every block of it, sliding groups those that the next query sees. At least the last token is
        left to compute: when all are known, its K and V are too, so it is computed and not written.

        Returns:
            Tokens that need not be computed, ``seq.num_computed``.
        """
        self._known(seq)
        if any(seq.blocks.values()):
            raise ArgumentError(f"sequence {seq.id} holds blocks already; hits are taken before any, or after preempt")
        if not self.prefix_cache or not len(seq):
            return 0
        prefixes, found = longest_hit(seq, self.groups, self.pools, self.block_size, self.hasher)
        count = len(prefixes)
        seq.prefixes = prefixes
        seq.num_stored = seq.num_reserved = count * self.block_size
        seq.num_hit = seq.num_computed = min(seq.num_stored, len(seq) - 1)
        for g in self.groups:
            behind = min(count, g.blocks_behind(seq.num_computed, self.block_size))
            seq.blocks[g.name] = array("i", [0] * behind + found[g.name][behind:count])
            seq.released[g.name] = behind
            self.pools[g.name].take_hits(found[g.name][behind:count], queries=len(seq) // self.block_size)
        self.stats.queried_tokens += len(seq)
        self.stats.hit_tokens += seq.num_hit
        return seq.num_computed

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same tokens, sharing every block that holds one of them, also a partial one.

        Whoever writes first into a shared block gets a copy of it from :meth:`reserve`.
        """
        self._known(seq)
        child = Sequence(self._next_id, array("q", seq.token_ids), seq.salt, self.pools)
        self._next_id += 1
        stored = blocks_for(seq.num_stored, self.block_size)
        for name, pool in self.pools.items():
            pool.share(seq.blocks[name][seq.released[name] : stored])
            child.blocks[name] = seq.blocks[name][:stored]
            child.released[name] = seq.released[name]
        child.num_computed, child.num_hit = seq.num_computed, seq.num_hit
        child.num_stored = child.num_reserved = seq.num_stored
        child.prefixes = list(seq.prefixes)
        self._sequences[child.id] = child
        return child

    def free(self, seq: Sequence) -> None:
        """Give all blocks back, tails first, and forget the sequence."""
        self._known(seq)
        self._drop_blocks(seq)
        del self._sequences[seq.id]

    def preempt(self, seq: Sequence) -> None:
        """Give all blocks back and start again from position 0; the tokens stay, :meth:`take_hits` may find them."""
        self._known(seq)
        self.stats.preemptions += seq.num_computed > seq.num_hit  # computed work is lost
        self._drop_blocks(seq)

    # A step ---------------------------------------------------------------------------------------------------------

    def reserve(self, work: Sequence | Iterable[tuple[Sequence, int]], n: int | None = None) -> list[BlockCopy]:
        """Blocks in every group for positions ``[num_computed, num_computed + n)`` of each sequence, all or nothing.

        ``reserve(seq, n)`` or ``reserve([(seq, n), ...])``. May reach beyond the known tokens.

        Returns:
            Copies to run, in order, before the next write: shared blocks that are about to be written. Their sources
            are kept until the sequence commits (or gives its blocks back: then its copies are no longer to be run).

        Raises:
            OutOfBlocksError: a group has too few blocks for all of ``work``. Nothing has changed then.
            ArgumentError: a sequence that was freed or is named twice, or a negative count.
        """
        copies = Reservation(self.pools, self.holds, self.block_size, self._pairs(work, n)).carry_out()
        self.stats.copies += len(copies)
        self._peak.note(self._sequences.values())
        return copies

    def append(self, seq: Sequence, token_id: int) -> None:
        """Add a token at the end. It has no place in the cache until reserved."""
        self.extend(seq, (token_id,))

    def extend(self, seq: Sequence, token_ids: Iterable[int]) -> None:
        """Add several tokens at the end, for instance drafts to be verified."""
        self._known(seq)
        seq.token_ids.extend(array("q", token_array(token_ids).tobytes()))

    def commit(self, seq: Sequence, n: int) -> None:
        """After the forward: the next ``n`` tokens are computed and stored.

        Full blocks become known to the prefix cache (never before they were written); blocks wholly behind a window
        go back to their pool and read 0 in the table; sources of copies are let go. Fewer tokens may be committed than
        were reserved, as when drafts are rejected: :meth:`truncate` then drops the rejected ones.
        """
        self._known(seq)
        self._check_reserved(seq, n, "commit")
        if n > seq.num_uncomputed:
            raise ArgumentError(
                f"commit of {n} tokens, but sequence {seq.id} has {len(seq)} tokens, {seq.num_computed} of them "
                "computed; append tokens first"
            )
        seq.num_computed += n
        seq.num_stored = max(seq.num_stored, seq.num_computed)
        self._release_holds(seq)
        if self.prefix_cache:
            register_stored(seq, self.pools, self.block_size, self.hasher)
        for g in self.groups:
            if g.window is not None:
                self._release_behind(seq, g)

    def truncate(self, seq: Sequence, n: int) -> int:
        """Keep the first ``n`` tokens, as after rejected drafts; blocks past them are given back.

        When a sliding group has already released blocks that the shorter sequence would see, nothing of it can be
        kept: the sequence falls back to position 0, as after :meth:`preempt`.

        Returns:
            ``seq.num_computed`` afterwards.
        """
        self._known(seq)
        n = operator.index(n)
        if not 0 <= n <= len(seq):
            raise ArgumentError(f"truncate to {n} tokens, but sequence {seq.id} has {len(seq)}")
        computed = min(seq.num_computed, n)
        lost = any(seq.released[g.name] * self.block_size > g.first_visible(computed) for g in self.groups)
        del seq.token_ids[n:]
        if lost:
            self._drop_blocks(seq)
            return 0
        seq.num_computed, seq.num_stored = computed, min(seq.num_stored, n)
        seq.num_reserved = min(seq.num_reserved, seq.num_stored)
        seq.num_hit = min(seq.num_hit, computed)
        del seq.prefixes[seq.num_stored // self.block_size :]
        keep = blocks_for(n, self.block_size)
        for name, pool in self.pools.items():
            pool.free(seq.blocks[name][keep:])
            del seq.blocks[name][keep:]
        return computed

    # Batches --------------------------------------------------------------------------------------------------------

    def metadata(
        self,
        work: Iterable[tuple[Sequence, int]],
        group: str | None = None,
        device: torch.device | str = "cpu",
        pad_tokens: int | None = None,
        pad_seqs: int | None = None,
        table_width: int | None = None,
    ) -> AttentionMetadata:
        """Metadata of one group for the next ``n`` tokens of each sequence, which must be reserved.

        Args:
            work: ``[(seq, n), ...]`` in the order of the packed rows; ``n`` may be 0.
            group: name of the group; may be left out when there is only one.
            device, pad_tokens, pad_seqs, table_width: see :func:`~pagetile.contracts.metadata.build_metadata`.
        """
        name, work = self._group(group), self._reserved_work(work)
        return group_metadata(work, name, self.block_size, BatchShape(device, pad_tokens, pad_seqs, table_width))

    def batch(
        self,
        work: Iterable[tuple[Sequence, int]],
        device: torch.device | str = "cpu",
        pad_tokens: int | None = None,
        pad_seqs: int | None = None,
        table_width: int | None = None,
    ) -> Batch:
        """Token ids and positions of the packed rows, and the metadata of every group. See :meth:`metadata`."""
        work = self._reserved_work(work)
        for seq, n in work:
            if n > seq.num_uncomputed:
                raise ArgumentError(f"a batch of {n} tokens, but sequence {seq.id} has {seq.num_uncomputed} to compute")
        return pack(work, list(self.pools), self.block_size, BatchShape(device, pad_tokens, pad_seqs, table_width))

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, for instance because the weights changed. Sequences keep their blocks."""
        for pool in self.pools.values():
            pool.reset_prefix_cache()

    # Figures --------------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, GroupUsage]:
        """Blocks live, cached and free, and prefix hits, of each group."""
        return {name: GroupUsage.of(pool) for name, pool in self.pools.items()}

    def memory_figures(self, max_len: int) -> MemoryFigures:
        """At the step that held most: bytes of live blocks, and of contiguous buffers for the same sequences.

        Args:
            max_len: tokens that a contiguous buffer of the maximum length would have for each sequence.

        Raises:
            ArgumentError: the table does not know what a block costs (no ``geometry``).
        """
        return self._peak.figures(max_len)

    def live_bytes(self) -> int:
        """Bytes of the blocks that sequences hold now, over all groups; 0 without a geometry."""
        return self._peak.live_bytes()

    # Proof ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove every invariant of the table and of its pools.

        Raises:
            AssertionError: names the first one that does not hold.
        """
        check_sequences(self.sequences, self.groups, self.block_size, self.prefix_cache)
        for name, pool in self.pools.items():
            check_references(name, pool, self.holds[name], self.sequences)

    # Inside ---------------------------------------------------------------------------------------------------------

    def _release_behind(self, seq: Sequence, g: LayerGroup) -> None:
        row, first = seq.blocks[g.name], seq.released[g.name]
        behind = g.blocks_behind(seq.num_computed, self.block_size)
        if behind > first:
            self.pools[g.name].free(row[first:behind])
            row[first:behind] = array("i", bytes(row.itemsize * (behind - first)))
            seq.released[g.name] = behind

    def _release_holds(self, seq: Sequence) -> None:
        for name, block in seq.holds:
            self.holds[name][block] -= 1
            if not self.holds[name][block]:
                del self.holds[name][block]
            self.pools[name].free([block])
        seq.holds.clear()

    def _drop_blocks(self, seq: Sequence) -> None:
        self._release_holds(seq)
        for name, pool in self.pools.items():
            pool.free(seq.blocks[name][seq.released[name] :])
            seq.blocks[name] = array("i")
            seq.released[name] = 0
        seq.num_computed = seq.num_stored = seq.num_reserved = seq.num_hit = 0
        seq.prefixes = []

    def _group(self, name: str | None) -> str:
        if name is None and len(self.groups) == 1:
            return self.groups[0].name
        if name not in self.pools:
            raise ArgumentError(f"group is {name!r}; it must be one of {list(self.pools)}")
        return name

    def _known(self, seq: Sequence) -> None:
        if self._sequences.get(seq.id) is not seq:
            raise ArgumentError(f"sequence {seq.id} is not in this table; it was freed, or belongs to another")

    def _pairs(self, work: Sequence | Iterable[tuple[Sequence, int]], n: int | None) -> Work:
        if isinstance(work, Sequence) == (n is None):
            raise ArgumentError("give either a sequence and its number of new tokens, or a list of such pairs")
        pairs = [(work, n)] if isinstance(work, Sequence) else list(work)
        for seq, count in pairs:
            self._known(seq)
            if operator.index(count) < 0:  # type: ignore[arg-type]
                raise ArgumentError(f"{count} new tokens for sequence {seq.id}; the number is not negative")
        if len({seq.id for seq, _ in pairs}) != len(pairs):
            raise ArgumentError("a sequence is named twice; give each once, with all its new tokens")
        return pairs  # type: ignore[return-value]

    def _reserved_work(self, work: Iterable[tuple[Sequence, int]]) -> Work:
        pairs = self._pairs(work, None)
        for seq, n in pairs:
            self._check_reserved(seq, n, "a batch")
        return pairs

    def _check_reserved(self, seq: Sequence, n: int, what: str) -> None:
        if n < 0 or seq.num_computed + n > seq.num_reserved:
            raise ArgumentError(
                f"{what} of {n} tokens of sequence {seq.id} at position {seq.num_computed}, but positions below "
                f"{seq.num_reserved} are reserved; call reserve first (also after fork and truncate)"
            )
