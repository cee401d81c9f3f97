"""Arguments of a kernel in shared memory, for roles that have few registers.

A role of a warp-specialised kernel gets every argument it names in registers, for as long as it runs; the loading and
scheduling warps have 24 of them. What is needed once a tile is left in shared memory instead: ``leave`` by all warps
before the roles part, ``number`` and ``pointer`` where it is used. The sequence is :data:`FACTS`, two to a line.
"""

from __future__ import annotations

from pagetile.backends.hopper.compat import gl, gluon

Q_LOC = gl.constexpr(0)
KEY_LENS = gl.constexpr(1)
KEY_STARTS = gl.constexpr(2)
NUM_SEQS = gl.constexpr(3)
TABLE = gl.constexpr(4)
TABLE_ROW = gl.constexpr(5)
NUM_COLS = gl.constexpr(6)
NUM_BLOCKS = gl.constexpr(7)
LEFT = gl.constexpr(8)
RIGHT = gl.constexpr(9)
KV_HEADS = gl.constexpr(10)
SHARE = gl.constexpr(11)
"""Prefill: ``min_q``. Decode: ``max_q``."""
COUNTERS = gl.constexpr(12)
WORK = gl.constexpr(13)
"""Prefill: ``num_items``. Decode: ``min_tiles``."""
ERROR = gl.constexpr(14)
LSE = gl.constexpr(16)
LSE_HEAD = gl.constexpr(17)
LSE_TOKEN = gl.constexpr(18)
SINKS = gl.constexpr(19)
SLOPES = gl.constexpr(20)
SLOPE_SEQ = gl.constexpr(21)
LINES = gl.constexpr(16)


@gluon.jit
def room():
    """Shared memory for the facts."""
    return gl.allocate_shared_memory(gl.int64, [LINES, 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def leave(facts, line: gl.constexpr, first, second):
    """Store two facts, integers or pointers."""
    pair: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    i = gl.arange(0, 2, layout=pair)
    facts.index(line // 2).store(gl.where(i == 0, first.to(gl.int64), second.to(gl.int64)))


@gluon.jit
def _fact(facts, which: gl.constexpr):
    pair: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    both = facts.index(which // 2).load(pair)
    return gl.sum(gl.where(gl.arange(0, 2, layout=pair) == which % 2, both, 0), axis=0)


@gluon.jit
def number(facts, which: gl.constexpr):
    """An int32 fact."""
    return _fact(facts, which).to(gl.int32)


@gluon.jit
def stride(facts, which: gl.constexpr):
    """An int64 fact."""
    return _fact(facts, which)


@gluon.jit
def pointer(facts, which: gl.constexpr, dtype: gl.constexpr):
    """A pointer fact."""
    return _fact(facts, which).to(gl.pointer_type(dtype))


@gluon.jit
def leave_all(facts, q_loc, key_lens, key_starts, num_seqs, table, table_row, num_cols, num_blocks, left, right,
              kv_heads, share, counters, work, error, lse, lse_head, lse_token, sinks, slopes, slope_seq):  # fmt: skip
    """Store every fact, in the order of their names above."""
    zero = num_seqs * 0
    leave(facts, Q_LOC, q_loc, key_lens)
    leave(facts, KEY_STARTS, key_starts, num_seqs)
    leave(facts, TABLE, table, table_row)
    leave(facts, NUM_COLS, num_cols, num_blocks)
    leave(facts, LEFT, left, right)
    leave(facts, KV_HEADS, kv_heads, share)
    leave(facts, COUNTERS, counters, work)
    leave(facts, ERROR, error, zero)
    leave(facts, LSE, lse, lse_head)
    leave(facts, LSE_TOKEN, lse_token, sinks)
    leave(facts, SLOPES, slopes, slope_seq)
