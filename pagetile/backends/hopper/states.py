"""States of the decode kernel: rows that are finished, and partial ones that meet in device memory.

A program leaves at most two states, one of the pair its stretch begins in and one of the pair it ends in, so there are
two places a program. Who arrives last at a pair's counter adds its states in the order of the programs and sets the
counter back to 0.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

from pagetile.backends.hopper import facts as fact
from pagetile.backends.hopper import notes as memo
from pagetile.backends.hopper.compat import barrier, gl, gluon
from pagetile.backends.hopper.device import finish

ROWS = gl.constexpr(64)


@gluon.jit
def store_rows(acc, r, element, note, out, out_token, out_head, PACKED: gl.constexpr, GROUP: gl.constexpr,
               DV: gl.constexpr):  # fmt: skip
    """Finished rows of one pair to ``out``; ``r`` and ``element`` are those of ``acc``."""
    active = (r // PACKED < memo.entry(note, memo.TOKENS)) & (r % PACKED < GROUP)
    at = (memo.entry(note, memo.ROW) + r // PACKED).to(gl.int64) * out_token
    at += (memo.entry(note, memo.HEAD) * GROUP + r % PACKED).to(gl.int64) * out_head
    mask = active[:, None] & (element < DV)[None, :]
    gl.store(out + at[:, None] + element[None, :], acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def finish_rows(peak, total, r, note, facts, PACKED: gl.constexpr, GROUP: gl.constexpr, SINKS: gl.constexpr,
                LSE: gl.constexpr):  # fmt: skip
    """The factor of each row's sum; its log-sum-exp is stored."""
    active = (r // PACKED < memo.entry(note, memo.TOKENS)) & (r % PACKED < GROUP)
    head = memo.entry(note, memo.HEAD) * GROUP + r % PACKED
    factor, result = finish(peak, total, head, active, fact.pointer(facts, fact.SINKS, gl.float32), SINKS)
    if LSE:
        at = (memo.entry(note, memo.ROW) + r // PACKED) * fact.stride(facts, fact.LSE_TOKEN)
        at += head * fact.stride(facts, fact.LSE_HEAD)
        gl.store(fact.pointer(facts, fact.LSE, gl.float32) + at, result, mask=active)
    return factor


@gluon.jit
def slot_of(program, start, share):
    """Where a program leaves its state of the pair that starts at ``start``: its first piece, or its last."""
    return 2 * program + (program * share < start).to(gl.int32)


@gluon.jit
def merge(first, last, start, share, note, facts, states, peaks, out, out_token, out_head, HELD: gl.constexpr,
          WIDE: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr,
          DV: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr):  # fmt: skip
    """Add the states that the programs ``[first, last]`` left of one pair, in their order, and store the rows.

    ``PARTS`` states are loaded at once, ``PART`` elements of a row at a time: what the registers of 128 threads hold.
    The weights come from the greatest peak of all, found first.
    """
    cube: gl.constexpr = gl.BlockedLayout([PARTS, 1, 4], [1, 128 // PART, PART // 4], [1, 4, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(2, cube)
    plane: gl.constexpr = gl.SliceLayout(0, cube)
    i = gl.arange(0, PARTS, layout=gl.SliceLayout(1, flat))
    r = gl.arange(0, HELD, layout=gl.SliceLayout(0, flat))
    row = gl.arange(0, HELD, layout=gl.SliceLayout(1, plane))
    element = gl.arange(0, PART, layout=gl.SliceLayout(0, plane))
    inner = gl.arange(0, PART, layout=gl.SliceLayout(0, gl.SliceLayout(0, cube)))
    peak = gl.full([HELD], float("-inf"), gl.float32, layout=gl.SliceLayout(0, flat))
    for base in range(first, last + 1, PARTS):
        program = base + i
        at = slot_of(program, start, share) * (2 * HELD)
        mask = (program <= last)[:, None]
        some = gl.load(peaks + at[:, None] + r[None, :], mask=mask, other=float("-inf"), cache_modifier=".cg")
        peak = gl.maximum(peak, gl.max(some, axis=0))
    safe = gl.where(peak == float("-inf"), 0.0, peak)
    total = gl.zeros([HELD], gl.float32, layout=gl.SliceLayout(0, flat))
    factor = gl.zeros([HELD], gl.float32, layout=gl.SliceLayout(1, plane))
    for part in gl.static_range(WIDE // PART):
        acc = gl.zeros([HELD, PART], gl.float32, layout=plane)
        for base in range(first, last + 1, PARTS):
            program = base + i
            slot = slot_of(program, start, share)
            mask = (program <= last)[:, None]
            at = peaks + (slot * (2 * HELD))[:, None] + r[None, :]
            weight = gl.exp2(gl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg") - safe[None, :])
            at3 = (slot.to(gl.int64) * (HELD * WIDE))[:, None] + (r * WIDE)[None, :]  # [parts, rows]
            at3 = gl.expand_dims(at3, 2) + gl.expand_dims(gl.expand_dims(inner, 0), 0) + part * PART
            sums = gl.load(states + at3, mask=gl.expand_dims(mask & (r >= 0)[None, :], 2), other=0.0,
                           cache_modifier=".cg")  # fmt: skip
            acc += gl.sum(sums * gl.expand_dims(weight, 2), axis=0)
            if part == 0:
                shares = gl.load(at + HELD, mask=mask, other=0.0, cache_modifier=".cg")
                total += gl.sum(shares * weight, axis=0)
        if part == 0:
            factor = finish_rows(
                gl.convert_layout(peak, gl.SliceLayout(1, plane)), gl.convert_layout(total, gl.SliceLayout(1, plane)),
                row, note, facts, PACKED, GROUP, SINKS, LSE,
            )  # fmt: skip
        store_rows(acc * factor[:, None], row, element + part * PART, note, out, out_token, out_head, PACKED, GROUP, DV)


@gluon.jit
def leave_state(state, r, note, facts, states, peaks, out, out_token, out_head, HELD: gl.constexpr,
                PARTS: gl.constexpr, PART: gl.constexpr, PACKED: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr,
                SINKS: gl.constexpr, LSE: gl.constexpr):  # fmt: skip
    """Store the state of a piece; who was last of the pair adds them all and resets the counter."""
    peak, total, acc = state
    WIDE: gl.constexpr = acc.shape[1]
    sums: gl.constexpr = acc.type.layout
    program = gl.program_id(0)
    start, share, tiles = memo.entry(note, memo.START), memo.entry(note, memo.SHARE), memo.entry(note, memo.TILES)
    slot = slot_of(program, start, share)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums))
    element = gl.arange(0, WIDE, layout=gl.SliceLayout(0, sums))
    at = states + slot.to(gl.int64) * (HELD * WIDE)
    gl.store(at + (row * WIDE)[:, None] + element[None, :], acc, mask=(row < HELD)[:, None])
    gl.store(peaks + slot * (2 * HELD) + r, peak, mask=r < HELD)
    gl.store(peaks + slot * (2 * HELD) + HELD + r, total, mask=r < HELD)
    barrier()
    first, last = start // share, (start + tiles - 1) // share
    pair = memo.entry(note, memo.SEQ) * fact.number(facts, fact.KV_HEADS) + memo.entry(note, memo.HEAD)
    counter = fact.pointer(facts, fact.COUNTERS, gl.int32) + pair
    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == last - first:
        merge(
            first, last, start, share, note, facts, states, peaks, out, out_token, out_head, HELD, WIDE, PARTS, PART,
            PACKED, GROUP, DV, SINKS, LSE,
        )  # fmt: skip
        gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
