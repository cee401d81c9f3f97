"""The loading roles: queries, keys and values from the cache into swizzled tiles, by the copy engine alone.

Map coordinates of K and V are ``(block, offset in it, KV head, element)``, so the id of a block is never multiplied.
A tile is filled box by box, a box being the part of a page that a tile can take; in shared memory, boxes of 8 rows or
more stack up to the very bytes of one large box. Elements past the head size, and whole boxes outside the cache, are
zeros. The product of a tile then needs nothing rearranged.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

from pagetile.backends.hopper import facts as fact
from pagetile.backends.hopper import notes as memo
from pagetile.backends.hopper.compat import gl, gluon, load_box, mbarrier, reinterpret


@gluon.jit
def pages_of(row, key, first, last, facts, PAGE: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr):
    """Block ids of ``BOXES`` boxes of ``BOX`` keys from ``key`` on, from the columns ``[first, last]`` of a table row.

    A box outside them gets the page at their end: its keys are masked and its values cleared, whatever they are. An
    id that names no block stays out of the cache, so that the copy engine fills in zeros for it.
    """
    if BOXES == 1:
        page = gl.load(row + gl.maximum(gl.minimum(key // PAGE, last), first))
        if page.dtype == gl.int64:  # must not become a block when it loses its upper half
            num_blocks = fact.number(facts, fact.NUM_BLOCKS)
            page = gl.where((page >= 0) & (page < num_blocks), page, num_blocks).to(gl.int32)
        pages = (page,)
    else:
        half: gl.constexpr = BOXES // 2
        pages = pages_of(row, key, first, last, facts, PAGE, BOX, half) + pages_of(
            row, key + half * BOX, first, last, facts, PAGE, BOX, half
        )
    return pages


@gluon.jit
def columns_of(lo, hi, num_cols, PAGE: gl.constexpr):
    """``(first, last)`` column of a table row that the keys ``[lo, hi)`` need, inside the row."""
    first = gl.minimum(lo // PAGE, num_cols - 1)
    return first, gl.maximum(gl.minimum((hi - 1) // PAGE, num_cols - 1), first)


@gluon.jit
def load_boxes(
    cache_map, pages, key, head, full, tile, FIRST: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
    BOXES: gl.constexpr,
):  # fmt: skip
    """Start the copies of ``BOXES`` boxes of a tile, ``[KEYS, D]`` in shared memory, from row ``FIRST`` on."""
    for i in gl.static_range(BOXES):
        at = [pages[i], (key + FIRST + i * BOX) % PAGE, head, 0]
        load_box(cache_map, at, full, tile.slice(FIRST + i * BOX, BOX, 0))


@gluon.jit
def query_role(notes, note_full, note_empty, q_map, q_s, q_full, q_empty, GROUP: gl.constexpr, PACKED: gl.constexpr):
    """Role: bring the rows of each note's tile, ``[tokens, PACKED heads, D]`` as one box."""
    QUERIES: gl.constexpr = q_s.shape[0]
    shape: gl.constexpr = [QUERIES, q_s.shape[1] // PACKED, PACKED, q_s.shape[2]]
    boxed = reinterpret(q_s, q_s.dtype, shape, gl.NVMMASharedLayout(128, 16, 3))
    turn = gl.program_id(0) * 0
    note = memo.read_note(notes, note_full, turn)
    while memo.entry(note, memo.END) != 0:
        slot = turn % QUERIES
        mbarrier.wait(q_empty.index(slot), ((turn // QUERIES) & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), q_s.shape[1] * q_s.shape[2] * 2)
        at = [memo.entry(note, memo.ROW), memo.entry(note, memo.HEAD) * GROUP, 0]
        load_box(q_map, at, q_full.index(slot), boxed.index(slot))
        memo.drop_note(note_empty, turn)
        turn += 1
        note = memo.read_note(notes, note_full, turn)


@gluon.jit
def cache_role(
    notes, note_full, note_empty, facts, cache_map, tiles, full, empty, PAGE: gl.constexpr, IDS: gl.constexpr,
    BOX: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Role: stream the tiles of K, or of V; upwards from the note's tile with ``STEP`` 1, downwards with -1."""
    STAGES: gl.constexpr = tiles.shape[0]
    KEYS: gl.constexpr = tiles.shape[1]
    FEW: gl.constexpr = 4 if KEYS // BOX > 4 else KEYS // BOX
    step = gl.program_id(0) * 0
    turn = step
    note = memo.read_note(notes, note_full, turn)
    while memo.entry(note, memo.END) != 0:
        lo, hi = memo.entry(note, memo.LO), memo.entry(note, memo.HI)
        row = fact.pointer(facts, fact.TABLE, IDS) + memo.entry(note, memo.SEQ) * fact.stride(facts, fact.TABLE_ROW)
        first_col, last_col = columns_of(lo, hi, fact.number(facts, fact.NUM_COLS), PAGE)
        head = gl.where(hi > lo, memo.entry(note, memo.HEAD), -1)  # nothing to see: zeros
        key = memo.entry(note, memo.TILE) * KEYS
        for _ in range(memo.entry(note, memo.COUNT)):
            # Ids of the first boxes come before the wait for room; of the others after, since registers are few.
            pages = pages_of(row, key, first_col, last_col, facts, PAGE, BOX, FEW)
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), KEYS * tiles.shape[2] * 2)
            tile = tiles.index(stage)
            load_boxes(cache_map, pages, key, head, full.index(stage), tile, 0, PAGE, BOX, FEW)
            for i in gl.static_range(FEW * BOX, KEYS, FEW * BOX):
                pages = pages_of(row, key + i, first_col, last_col, facts, PAGE, BOX, FEW)
                load_boxes(cache_map, pages, key, head, full.index(stage), tile, i, PAGE, BOX, FEW)
            step += 1
            key += STEP * KEYS
        memo.drop_note(note_empty, turn)
        turn += 1
        note = memo.read_note(notes, note_full, turn)
