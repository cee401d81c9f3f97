"""Named slots of the parameter blocks that compiled kernels read, and the codes of the errors they report.

A block is a row of 64-bit slots: integers (addresses, byte strides, counts, flags) and, where the name ends in
``_F``, float64. Strides are in bytes. Plain integers at module level, so that numba sees constants.
"""

from __future__ import annotations

# fmt: off

# Every block starts with these four: what a check found.
ERROR, ERROR_ROW, ERROR_COLUMN, ERROR_VALUE = range(4)

(   # attend
    A_TICKET, A_WORKER, A_NUM_TASKS,                # counters: next task, next worker; tasks built by prepare
    A_NUM_GROUPS,                                   # split tasks that the second phase adds up
    A_NUM_SEQS, A_NUM_ROWS,                         # B, T
    A_SCALE_F, A_INNER_F,                           # scale; scale / softcap
    A_NATURAL_F, A_UNIT_F,                          # what turns scores into natural units, and into base 2
    A_BIAS_F, A_BAD,                                # weights are 2**-bias as large; some row came out not finite
    A_SCORE, A_WEIGH, A_ADD,                        # addresses of kernels: score_* and add_* of the dtype of K and V
    A_PHASE,                                        # 0: attend, 1: add up the states of split tasks
    A_Q, A_Q_ROW, A_Q_HEAD,
    A_K, A_K_BLOCK, A_K_TOKEN, A_K_HEAD, A_K_BYTES,  # ragged keys use the token stride alone; bytes of a row
    A_V, A_V_BLOCK, A_V_TOKEN, A_V_HEAD, A_V_BYTES,
    A_OUT, A_OUT_ROW, A_OUT_HEAD,
    A_LSE, A_LSE_HEAD, A_LSE_ROW,                   # address 0: none
    A_QUERY_LOC, A_SEQ_LENS, A_KEY_LOC,             # int32; the last two: address 0 where the other one counts
    A_TABLE, A_TABLE_ROW, A_TABLE_WIDE, A_TABLE_WIDTH,
    A_BLOCK_SIZE, A_NUM_BLOCKS,                     # 0 when ragged; A_NUM_BLOCKS is then the number of key rows
    A_KEY_STARTS,                                   # int32, address 0: none
    A_LEFT, A_RIGHT,                                # window, -1 unbounded
    A_EDITS,                                        # whether scores are edited at all before the mask
    A_CAP_F,                                        # softcap, 0 is off
    A_SLOPES, A_SLOPES_SEQ, A_SLOPES_HEAD,          # address 0: none
    A_SINKS, A_SINKS_HEAD,                          # address 0: none
    A_KS, A_KS_SEQ, A_KS_BLOCK, A_KS_TOKEN, A_KS_HEAD, A_KS_OWN,  # scales of K; address 0: none; OWN: one a token
    A_VS, A_VS_SEQ, A_VS_BLOCK, A_VS_TOKEN, A_VS_HEAD, A_VS_OWN,
    A_TASKS, A_TASK_COST, A_TASK_ORDER, A_BUCKETS, A_GROUPS,   # arrays that prepare fills
    A_SCRATCH,                                      # of all workers, then come the arrays above and the partial states
    A_PARTIALS,                                     # states of split tasks, a segment each
    # From here to the end: what depends on the problem alone.
    A_HEADS, A_GROUP, A_SIZE, A_SIZE_V, A_DTYPE,    # Hkv, Hq / Hkv, D, Dv, code of q and out
    A_MAX_Q, A_MAX_K,                               # bounds that the caller promised
    A_ROW_LIMIT, A_TILE_TOKENS, A_TASK_HEADS, A_SPLITS, A_STAGE_ROWS, A_DIRECT_K, A_DIRECT_V,  # the plan
    A_SCRATCH_BYTES,                                # a worker's share
    A_S_QUERY, A_S_SCORE, A_S_CHUNK, A_S_KEEP, A_S_STATE, A_S_TOTAL,  # offsets in it
    A_S_KADDR, A_S_VADDR, A_S_STAGE, A_S_SADDR, A_S_RANGE,
    A_S_PACKED, A_S_WEIGHT, A_S_TILES, A_S_ALONE, A_S_ZEROS, A_S_TURN, A_S_TURNED, A_S_FACTORS,
    A_STAGE_STRIDE,
    A_SUM_VECTORS,                                  # of a row of sums
    A_DOT,                                          # queries and weights are packed bfloat16
) = range(4, 114)
ATTEND_SLOTS = 114
A_FIXED = ERROR
"""From here to the end a block is first filled as it was for the last call of the same shapes."""

(   # write
    W_TICKET,
    W_SLOTS, W_SLOT_STEP, W_WIDE, W_COUNT,
    W_BLOCK_SIZE, W_LIMIT,                          # slots per block, slots in the cache
    W_CHUNK,                                        # rows a ticket
    W_K_FROM, W_K_FROM_ROW, W_K_FROM_SPAN, W_K_TO, W_K_TO_BLOCK, W_K_TO_TOKEN, W_K_TO_SPAN, W_K_SPANS, W_K_BYTES,
    W_V_FROM, W_V_FROM_ROW, W_V_FROM_SPAN, W_V_TO, W_V_TO_BLOCK, W_V_TO_TOKEN, W_V_TO_SPAN, W_V_SPANS, W_V_BYTES,
) = range(4, 30)

(   # quantised write: the slots of a write, and these
    W_DTYPE, W_KIND, W_OWN_SCALES,                  # codes; OWN: the scales are outputs, one a token and head
    W_K_SIZE, W_V_SIZE,                             # elements of a span
    W_K_SCALE, W_K_SCALE_BLOCK, W_K_SCALE_TOKEN, W_K_SCALE_SPAN,
    W_V_SCALE, W_V_SCALE_BLOCK, W_V_SCALE_TOKEN, W_V_SCALE_SPAN,
) = range(30, 43)
WRITE_SLOTS = 43

(   # merge
    M_TICKET, M_WORKER,
    M_ROWS, M_HEADS, M_SIZE, M_DTYPE, M_CHUNK,
    M_OUT, M_OUT_ROW, M_OUT_HEAD, M_OUT_STEP, M_OUT_LSE, M_OUT_LSE_HEAD, M_OUT_LSE_ROW,
    M_A, M_A_ROW, M_A_HEAD, M_A_STEP, M_A_LSE, M_A_LSE_HEAD, M_A_LSE_ROW,
    M_B, M_B_ROW, M_B_HEAD, M_B_STEP, M_B_LSE, M_B_LSE_HEAD, M_B_LSE_ROW,
    M_SCRATCH, M_SCRATCH_BYTES,
) = range(4, 34)
MERGE_SLOTS = 34

# What ERROR holds. 0: nothing wrong.
(
    BAD_SLOT, BAD_BLOCK, BAD_SEQ_LEN, SEQ_PAST_TABLE, SEQ_PAST_BOUND,
    QUERY_LOC_START, QUERY_LOC_ORDER, QUERY_LOC_END, QUERY_PAST_BOUND,
    KEY_LOC_START, KEY_LOC_ORDER, KEY_LOC_END, BAD_KEY_START,
) = range(1, 14)

# Codes of element dtypes.
FLOAT32, BFLOAT16, FLOAT16 = range(3)
DTYPE_CODES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}

# Codes of what a quantised cache holds.
FP8_E4M3, FP8_E5M2, INT8 = range(3)
KIND_CODES = {"fp8_e4m3": FP8_E4M3, "fp8_e5m2": FP8_E5M2, "int8": INT8}

# Fields of a task, int64 each: the rows are (KV heads) x (tokens) x (group), the keys those of whole segments.
(T_SEQ, T_HEAD, T_HEADS, T_TOKEN, T_TOKENS, T_FIRST_SEGMENT, T_LAST_SEGMENT, T_PARTIAL) = range(8)
TASK_BYTES = 64

# fmt: on
