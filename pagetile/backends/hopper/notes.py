"""Notes of the scheduling warp to the other roles: what the next piece of work is.

A note is :data:`NOTE` integers in shared memory, two of them in turn, each with a barrier for "written" and one for
"done with". Reading one gives every thread all of it, so that taking an entry out costs nothing.
"""

from __future__ import annotations

from pagetile.backends.hopper.compat import gl, gluon, mbarrier

NOTE = gl.constexpr(32)

END = gl.constexpr(0)
"""0 in this entry: there is no more work."""
SEQ = gl.constexpr(1)
HEAD = gl.constexpr(2)
ROW = gl.constexpr(3)
"""First row of the query."""
TOKENS = gl.constexpr(4)
POSITION = gl.constexpr(5)
"""Of the first token in its sequence."""
SEQ_LEN = gl.constexpr(6)
FIRST_KEY = gl.constexpr(7)
LO = gl.constexpr(8)
HI = gl.constexpr(9)
"""Keys that some row sees, half open."""
TILE = gl.constexpr(10)
"""Prefill: one past the last tile of keys. Decode: the first."""
COUNT = gl.constexpr(11)
EDGE_A = gl.constexpr(12)
EDGE_B = gl.constexpr(13)
"""Steps ``[EDGE_A, EDGE_B)`` need no mask."""
BAD = gl.constexpr(14)
"""Not 0: some id in this range names no block."""
TILES = gl.constexpr(15)
START = gl.constexpr(16)
SHARE = gl.constexpr(17)
"""Decode: tiles of the pair, its first tile in the flat list, tiles a program."""


@gluon.jit
def desk():
    """``(notes, written, done with)``; the barriers are not initialised."""
    one: gl.constexpr = mbarrier.MBarrierLayout()
    notes = gl.allocate_shared_memory(gl.int32, [2, NOTE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    return notes, full, empty


@gluon.jit
def put(note, which: gl.constexpr, value):
    """The note with one entry set; in the writing warp."""
    return gl.where(gl.arange(0, NOTE, layout=note.type.layout) == which, value, note)


@gluon.jit
def blank():
    """A note of zeros, an integer a lane of one warp."""
    return gl.full([NOTE], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def leave_note(notes, full, empty, turn, note):
    """Scheduler: hand a note over, once the note before the last is done with."""
    slot = turn & 1
    mbarrier.wait(empty.index(slot), ((turn >> 1) & 1) ^ 1)
    notes.index(slot).store(note)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def read_note(notes, full, turn):
    """Other roles: wait for the note of this turn; may be read again until it is dropped."""
    slot = turn & 1
    whole: gl.constexpr = gl.BlockedLayout([NOTE], [32], [gl.num_warps()], [0])
    mbarrier.wait(full.index(slot), (turn >> 1) & 1)
    return notes.index(slot).load(whole)


@gluon.jit
def drop_note(empty, turn):
    """Other roles: done with the note of this turn."""
    mbarrier.arrive(empty.index(turn & 1), count=1)


@gluon.jit
def entry(note, which: gl.constexpr):
    """One integer of a note."""
    return gl.sum(gl.where(gl.arange(0, NOTE, layout=note.type.layout) == which, note, 0), axis=0)
