"""Where a token is, and which tokens a query sees: this backend's copy of :mod:`pagetile.contracts.geometry` and
:mod:`pagetile.contracts.visibility`, in 64-bit integers; tests hold it to them.
"""

from __future__ import annotations

from pagetile.backends.cpu import params as P
from pagetile.backends.cpu.jit import inlined
from pagetile.backends.cpu.kernels.elements import get_i32, get_i64, index_at, put_i64, slot_value
from pagetile.backends.cpu.tuning import CHUNK, SCORE_PAD

ADDRESS_BYTES = (CHUNK + SCORE_PAD) * 8
"""Of an array of a chunk's addresses; there are two of each kind, for this chunk and the next."""


@inlined
def query_span(block, seq):
    """First row of a sequence's queries and their number."""
    loc = slot_value(block, P.A_QUERY_LOC)
    start = get_i32(loc + seq * 4)
    return start, get_i32(loc + seq * 4 + 4) - start


@inlined
def key_span(block, seq):
    """First row of a sequence's ragged keys (0 when paged) and the number of its keys."""
    loc = slot_value(block, P.A_KEY_LOC)
    if loc:
        start = get_i32(loc + seq * 4)
        return start, get_i32(loc + seq * 4 + 4) - start
    return 0, get_i32(slot_value(block, P.A_SEQ_LENS) + seq * 4)


@inlined
def first_key(block, seq):
    """Keys below this one are hidden."""
    starts = slot_value(block, P.A_KEY_STARTS)
    return get_i32(starts + seq * 4) if starts else 0


@inlined
def visible(block, seq, token, q_len, seq_len):
    """Half-open range of the keys that a query token sees; empty when ``low >= high``."""
    position = token + seq_len - q_len
    left, right = slot_value(block, P.A_LEFT), slot_value(block, P.A_RIGHT)
    low = first_key(block, seq)
    if left >= 0:
        low = max(low, position - left)
    high = seq_len
    if right >= 0:
        high = min(high, position + right + 1)
    return low, high


@inlined
def fill_addresses(block, seq, start, first, last, key_addresses, value_addresses):
    """Addresses of head 0 of the keys ``start + [first, last)``, written at ``[first, last)`` of both arrays.

    Nothing outside that range is looked up. The last key's address is repeated ``SCORE_PAD`` times, so that a score
    block may run past the end without leaving valid memory.
    """
    k, k_token = slot_value(block, P.A_K), slot_value(block, P.A_K_TOKEN)
    v, v_token = slot_value(block, P.A_V), slot_value(block, P.A_V_TOKEN)
    block_size = slot_value(block, P.A_BLOCK_SIZE)
    x = first
    if block_size == 0:
        row, _ = key_span(block, seq)
        while x < last:
            put_i64(key_addresses + x * 8, k + (row + start + x) * k_token)
            put_i64(value_addresses + x * 8, v + (row + start + x) * v_token)
            x += 1
    else:
        k_block, v_block = slot_value(block, P.A_K_BLOCK), slot_value(block, P.A_V_BLOCK)
        row = slot_value(block, P.A_TABLE) + seq * slot_value(block, P.A_TABLE_ROW)
        wide = slot_value(block, P.A_TABLE_WIDE)
        logical = (start + first) // block_size
        offset = (start + first) - logical * block_size
        while x < last:
            physical = index_at(row, logical, wide)
            k_home, v_home = k + physical * k_block, v + physical * v_block
            end = min(last, x + block_size - offset)
            while x < end:
                put_i64(key_addresses + x * 8, k_home + offset * k_token)
                put_i64(value_addresses + x * 8, v_home + offset * v_token)
                offset += 1
                x += 1
            logical += 1
            offset = 0
    final = get_i64(key_addresses + last * 8 - 8)
    for pad in range(SCORE_PAD):
        put_i64(key_addresses + (last + pad) * 8, final)


@inlined
def chunk_addresses(block, scratch, kind, start):
    """The array (``A_S_KADDR`` or ``A_S_VADDR``) of the chunk that begins at key ``start``; neighbours alternate."""
    return scratch + slot_value(block, kind) + (start // CHUNK & 1) * ADDRESS_BYTES
