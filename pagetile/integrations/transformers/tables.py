"""Which blocks hold which tokens of a batch, for layers that see the same positions.

The sequences of an ordinary ``generate`` call move in step: each forward gives every one of them the same number of
rows, some of which may be padding. Padding is never stored. A table knows no tensors of keys: it hands out a
:class:`~pagetile.integrations.transformers.pages.Span` for each forward, and lists the blocks to copy before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagetile.cache.pool import BlockPool
from pagetile.contracts.errors import ArgumentError, OutOfBlocksError, ShapeError, UnsupportedError
from pagetile.contracts.geometry import PAD_SLOT, blocks_for
from pagetile.integrations.transformers.pages import Span

GROWTH = 2.0
"""A table without a fixed number of blocks takes that many times what it needs, so that it rarely has to move them."""


@dataclass(slots=True, eq=False)
class Step:
    """One forward of a batch.

    Attributes:
        count: rows of each sequence, padding included.
        span: where they are, on the host.
        copies: ``(source, destination)`` blocks to copy before the rows are written.
        rows: int64, the rows that are tokens, when the padding is not at the front; else None: all are taken, and
            those of padding at the front see nothing.
    """

    count: int
    span: Span
    copies: list[tuple[int, int]]
    rows: Tensor | None = None
    elsewhere: dict[torch.device, tuple[Span, Tensor | None]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[Span, Tensor | None]:
        """``span`` and ``rows`` on a device, moved once."""
        if device.type == "cpu":
            return self.span, self.rows
        if device not in self.elsewhere:
            rows = None if self.rows is None else self.rows.to(device)
            self.elsewhere[device] = self.span.to(device), rows
        return self.elsewhere[device]


class PageTable:
    """Blocks of a batch of sequences.

    Args:
        block_size: tokens in a block.
        window: tokens that a query sees, itself included; None is all. Blocks wholly behind it are given back.
        num_blocks: that many and no more; None grows as needed.
        expected_len: tokens a sequence will have at most, where that is known.
    """

    def __init__(
        self, block_size: int, window: int | None = None, num_blocks: int | None = None, expected_len: int | None = None
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.fixed = num_blocks
        self.expected_len = expected_len
        self.recording = False
        self.reset()

    def reset(self) -> None:
        """Forget all sequences."""
        self.pool: BlockPool | None = None if self.fixed is None else self._new_pool(self.fixed)
        self.blocks = np.zeros((0, 0), dtype=np.int32)  # [B, width]; 0 where there is none
        self.stored = np.zeros(0, dtype=np.int64)  # tokens of each sequence
        self.released = np.zeros(0, dtype=np.int64)  # leading blocks given back
        self.length = 0  # rows seen, padding included
        self.valid: np.ndarray | None = None  # [B, length], False for padding; None: there was none
        self.step: Step | None = None

    @property
    def batch_size(self) -> int:
        """Sequences; 0 before the first step."""
        return len(self.stored)

    @property
    def num_blocks(self) -> int:
        """Blocks that the layers must have room for."""
        return 0 if self.pool is None else self.pool.num_blocks

    # A forward -------------------------------------------------------------------------------------------------------

    def begin(self, batch: int, count: int, mask: Tensor | None) -> Step:
        """Take blocks for ``count`` more rows of each sequence.

        Args:
            mask: ``[batch, length + count]``, false for padding; None when there is none.

        Raises:
            ShapeError: another number of sequences than before, or a mask of another length.
            ArgumentError: a mask that contradicts an earlier one.
            UnsupportedError: padding between tokens, under a sliding window.
            OutOfBlocksError: a fixed number of blocks is not enough. Nothing has changed then.
        """
        if self.batch_size == 0:
            self._admit(batch)
        if batch != self.batch_size:
            raise ShapeError(f"key: axis 0 is {batch}, but the cache holds {self.batch_size} sequences")
        valid = self._valid_rows(count, mask)
        new = np.full(batch, count) if valid is None else valid.sum(1)
        at_front = valid is None or bool((valid[:, 1:] >= valid[:, :-1]).all())
        if self.window is not None and not (at_front and self._padding_comes_first(valid)):
            raise UnsupportedError(
                "attention_mask: padding after a token, in a model with sliding windows; the window counts padding, "
                "which is not stored. Pad on the left (tokenizer.padding_side = 'left')"
            )
        if not self.recording:
            self._release_behind_window()
        copies = self._take(new)
        step = self._step(count, new, valid, at_front, copies)
        self._remember(count, valid)
        self.stored = self.stored + new
        self.length += count
        self.step = step
        return step

    def _admit(self, batch: int) -> None:
        self.stored = np.zeros(batch, dtype=np.int64)
        self.released = np.zeros(batch, dtype=np.int64)
        self.blocks = np.zeros((batch, 0), dtype=np.int32)

    def _valid_rows(self, count: int, mask: Tensor | None) -> np.ndarray | None:
        if mask is None:
            if self.valid is not None and not self.valid.all():
                raise ArgumentError(
                    "attention_mask: none was given, but earlier rows of this cache are padding; pass the mask of all "
                    f"{self.length + count} positions"
                )
            return None
        if mask.shape != (self.batch_size, self.length + count):
            raise ShapeError(
                f"attention_mask: its shape is {tuple(mask.shape)}, but {self.batch_size} sequences have {self.length} "
                f"rows in the cache and {count} new ones; pass a mask of shape {(self.batch_size, self.length + count)}"
            )
        seen = mask.cpu().numpy().astype(bool)
        past = np.ones((self.batch_size, self.length), dtype=bool) if self.valid is None else self.valid
        if not np.array_equal(seen[:, : self.length], past):
            row, column = np.argwhere(seen[:, : self.length] != past)[0]
            raise ArgumentError(
                f"attention_mask[{row}, {column}] is {bool(seen[row, column])}, but it was {bool(past[row, column])} "
                "when that row was stored; padding is not stored, so what is padding cannot change"
            )
        new = seen[:, self.length :]
        return None if new.all() else new

    def _take(self, new: np.ndarray) -> list[tuple[int, int]]:
        """Own copies of shared blocks that will be written, and new blocks at the ends."""
        held = -(-self.stored // self.block_size)
        wanted = -(-(self.stored + new) // self.block_size) - held
        partial = np.flatnonzero((new > 0) & (self.stored % self.block_size != 0))
        columns = self.stored[partial] // self.block_size
        left: dict[int, int] = {}
        rewrites: list[tuple[int, int]] = []
        for row, column in zip(partial.tolist(), columns.tolist(), strict=True):
            block = int(self.blocks[row, column])
            refs = left.get(block)
            if refs is None:
                refs = self._require_pool(block).ref(block)
            if refs > 1:
                rewrites.append((row, column))
                refs -= 1
            left[block] = refs
        pool = self._room_for(int(wanted.sum()) + len(rewrites))
        copies = []
        for row, column in rewrites:
            old = int(self.blocks[row, column])
            (fresh,) = pool.allocate(1)
            pool.free([old])
            self.blocks[row, column] = fresh
            copies.append((old, fresh))
        self._extend(pool, held, wanted)
        return copies

    def _extend(self, pool: BlockPool, held: np.ndarray, wanted: np.ndarray) -> None:
        width = int((held + wanted).max(initial=0))
        if width > self.blocks.shape[1]:
            spare = max(width, self.blocks.shape[1] + 8)
            self.blocks = np.pad(self.blocks, ((0, 0), (0, spare - self.blocks.shape[1])))
        for row in np.flatnonzero(wanted).tolist():
            start = int(held[row])
            self.blocks[row, start : start + int(wanted[row])] = pool.allocate(int(wanted[row]))

    def _step(
        self, count: int, new: np.ndarray, valid: np.ndarray | None, at_front: bool, copies: list[tuple[int, int]]
    ) -> Step:
        batch, size = self.batch_size, self.block_size
        if valid is None:
            positions = self.stored[:, None] + np.arange(count)
            real = np.ones((batch, count), dtype=bool)
        else:
            positions = np.maximum(self.stored[:, None] + np.cumsum(valid, axis=1) - 1, 0)
            real = valid
        logical = np.minimum(positions // size, max(0, self.blocks.shape[1] - 1))
        slots = np.full((batch, count), PAD_SLOT, dtype=np.int64)
        if self.blocks.shape[1]:
            blocks = np.take_along_axis(self.blocks, logical, axis=1).astype(np.int64)
            slots = np.where(real, blocks * size + positions % size, PAD_SLOT)
        seq_lens = (self.stored + new).astype(np.int32)
        if at_front:
            starts, longest, rows = np.arange(batch + 1, dtype=np.int32) * np.int32(count), count, None
            flat = slots.reshape(-1)
        else:
            starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
            longest, chosen = int(new.max()), np.flatnonzero(real.reshape(-1))
            rows, flat = torch.from_numpy(chosen), slots.reshape(-1)[chosen]
        width = max(1, blocks_for(int(seq_lens.max(initial=0)), size))
        table = np.zeros((batch, width), dtype=np.int32)
        table[:, : min(width, self.blocks.shape[1])] = self.blocks[:, :width]
        at, loc, lens, blocks = (torch.from_numpy(array) for array in (flat, starts, seq_lens, table))
        span = Span(at, loc, lens, blocks, longest, int(seq_lens.max(initial=0)))
        return Step(count, span, copies, rows)

    def _padding_comes_first(self, valid: np.ndarray | None) -> bool:
        """Whether the sequences that have padding now have no tokens yet."""
        return valid is None or bool((self.stored[~valid.all(1)] == 0).all())

    def _remember(self, count: int, valid: np.ndarray | None) -> None:
        if valid is None and self.valid is None:
            return
        batch = self.batch_size
        past = np.ones((batch, self.length), dtype=bool) if self.valid is None else self.valid
        new = np.ones((batch, count), dtype=bool) if valid is None else valid
        self.valid = np.concatenate([past, new], axis=1)

    def _release_behind_window(self) -> None:
        """Give back blocks that no later query sees; the next one stands at ``stored``."""
        if self.window is None or self.pool is None:
            return
        behind = np.maximum(self.stored - (self.window - 1), 0) // self.block_size
        for row in np.flatnonzero(behind > self.released).tolist():
            first, last = int(self.released[row]), int(behind[row])
            self.pool.free(self.blocks[row, first:last].tolist())
            self.blocks[row, first:last] = 0
            self.released[row] = last

    # Blocks ----------------------------------------------------------------------------------------------------------

    def _new_pool(self, num_blocks: int) -> BlockPool:
        return BlockPool(num_blocks, self.block_size, prefix_cache=False)

    def _require_pool(self, block: int) -> BlockPool:
        assert self.pool is not None, f"block {block} without a pool"
        return self.pool

    def _room_for(self, count: int) -> BlockPool:
        """A pool that can allocate ``count`` blocks now."""
        pool = self.pool
        if pool is not None and pool.can_allocate(count):
            return pool
        if self.fixed is not None:
            assert pool is not None
            raise OutOfBlocksError(
                f"{count} blocks asked for, {pool.num_available} available of the {self.fixed} that the cache was "
                "given; give it more (num_blocks), or none, and it grows"
            )
        live = 0 if pool is None else pool.num_live
        size = max(int(GROWTH * (live + count)), live + count + 4 * self.batch_size)
        if self.expected_len is not None:
            longest = (
                self.expected_len if self.window is None else min(self.expected_len, self.window + self.block_size)
            )
            # One more for each sequence: while a shared block is copied, both are held.
            known = self.batch_size * (blocks_for(longest, self.block_size) + 1)
            size = max(min(size, known), live + count)
        grown = self._new_pool(max(size, 1))
        if pool is not None:
            grown.allocate(grown.num_blocks)
            unused = [b for b in range(grown.num_blocks) if b >= pool.num_blocks or pool.ref(b) == 0]
            for block in range(pool.num_blocks):
                grown.share([block] * (pool.ref(block) - 1))
            grown.free(unused[::-1])
        self.pool = grown
        return grown

    # Between forwards ------------------------------------------------------------------------------------------------

    def take_rows(self, rows: np.ndarray) -> None:
        """Make sequence i what sequence ``rows[i]`` was: for beams, repetition and selection. Blocks are shared."""
        if self.batch_size == 0:
            return
        if rows.size and not (rows.min() >= 0 and rows.max() < self.batch_size):
            raise ArgumentError(f"rows {rows.tolist()} are not all among the {self.batch_size} sequences of the cache")
        before = self._references()
        self.blocks, self.stored, self.released = self.blocks[rows], self.stored[rows], self.released[rows]
        if self.valid is not None:
            self.valid = self.valid[rows]
        change = self._references() - before
        if self.pool is not None:
            gained, lost = np.maximum(change, 0), np.maximum(-change, 0)
            self.pool.share(np.repeat(np.arange(len(change)), gained).tolist())
            self.pool.free(np.repeat(np.arange(len(change)), lost).tolist())

    def _references(self) -> np.ndarray:
        """For each block, the sequences that hold it."""
        columns = np.arange(self.blocks.shape[1])
        held = -(-self.stored // self.block_size)
        used = (columns >= self.released[:, None]) & (columns < held[:, None])
        return np.bincount(self.blocks[used], minlength=self.num_blocks)

    def check_crop(self, count: int) -> None:
        """Whether the last ``count`` rows can be taken back.

        Raises:
            ArgumentError: there are not as many.
            UnsupportedError: the window would need tokens whose blocks were given back.
        """
        if not 0 <= count <= self.length:
            raise ArgumentError(f"{count} tokens are to be removed; the cache has {self.length}")
        left = self.stored - self._tokens_in_last(count)
        if self.window is not None and (self.released * self.block_size > np.maximum(left - self.window + 1, 0)).any():
            raise UnsupportedError(
                f"{count} tokens are to be removed, but blocks behind the window of {self.window} have been given "
                "back; call activate_past_recording() before the first forward that may be taken back"
            )

    def crop(self, count: int) -> None:
        """Take the last ``count`` rows back; see :meth:`check_crop`."""
        left = self.stored - self._tokens_in_last(count)
        if self.pool is not None:
            keep, held = -(-left // self.block_size), -(-self.stored // self.block_size)
            for row in np.flatnonzero(held > keep).tolist():
                self.pool.free(self.blocks[row, int(keep[row]) : int(held[row])].tolist())
                self.blocks[row, int(keep[row]) : int(held[row])] = 0
        self.stored = left
        self.length -= count
        if self.valid is not None:
            self.valid = self.valid[:, : self.length]
        self.step = None
        if self.recording:
            self._release_behind_window()

    def _tokens_in_last(self, count: int) -> np.ndarray:
        if self.valid is None:
            return np.full(self.batch_size, count)
        return self.valid[:, self.length - count :].sum(1)

    def check(self) -> None:
        """Prove that the pool and the table agree.

        Raises:
            AssertionError: they do not.
        """
        if self.pool is None:
            return
        self.pool.check()
        counted = self._references()
        refs = [self.pool.ref(block) for block in range(self.pool.num_blocks)]
        assert refs == counted.tolist(), f"references {refs}, but the sequences hold {counted.tolist()}"
