"""Add two attention states.

Contract: :mod:`pagetile.contracts.state`; the empty state is the identity bit for bit, an incoming log-sum-exp of
``+inf`` counts as empty. Grid: ``(row tiles, heads)``. Reads both states once, writes ``out`` and ``out_lse`` once;
``out`` may be one of the inputs, since a program reads its rows before it writes them. ``BOUNDED``: rows from
``q_loc[num_seqs]`` on stay as they are.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.device import SIZES


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    out,
    out_lse,
    a,
    a_lse,
    b,
    b_lse,
    q_loc,
    out_token,
    out_head,
    out_element,
    out_lse_head,
    out_lse_token,
    a_token,
    a_head,
    a_element,
    a_lse_head,
    a_lse_token,
    b_token,
    b_head,
    b_element,
    b_lse_head,
    b_lse_token,
    num_rows,
    num_seqs,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LSE: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """All strides in elements; float32 arithmetic, natural logarithms."""
    if BOUNDED:
        num_rows = tl.minimum(num_rows, tl.load(q_loc + num_seqs))
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, WIDTH)
    real = row < num_rows
    mask = real[:, None] & (element < D)[None, :]
    lse_a = tl.load(a_lse + head * a_lse_head + row * a_lse_token, mask=real, other=float("-inf"))
    lse_b = tl.load(b_lse + head * b_lse_head + row * b_lse_token, mask=real, other=float("-inf"))
    lse_a = tl.where(lse_a == float("inf"), float("-inf"), lse_a)
    lse_b = tl.where(lse_b == float("inf"), float("-inf"), lse_b)
    wide = element.to(tl.int64)
    a_at = (head * a_head + row * a_token)[:, None] + (wide * a_element)[None, :]
    b_at = (head * b_head + row * b_token)[:, None] + (wide * b_element)[None, :]
    x = tl.load(a + a_at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(b + b_at, mask=mask, other=0.0).to(tl.float32)

    no_a = lse_a == float("-inf")
    no_b = lse_b == float("-inf")
    peak = tl.maximum(lse_a, lse_b)
    safe = tl.where(no_a & no_b, 0.0, peak)
    w_a = tl.exp(lse_a - safe)
    w_b = tl.exp(lse_b - safe)
    total = w_a + w_b
    share = tl.where(no_a & no_b, 1.0, total)
    mixed = x * (w_a / share)[:, None] + y * (w_b / share)[:, None]
    merged = tl.where(no_b[:, None], x, tl.where(no_a[:, None], y, mixed))
    merged = tl.where((no_a & no_b)[:, None], 0.0, merged)
    at = (head * out_head + row * out_token)[:, None] + (wide * out_element)[None, :]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=mask)
    if LSE:
        lse = tl.where(no_b, lse_a, tl.where(no_a, lse_b, safe + tl.log(share)))
        tl.store(out_lse + head * out_lse_head + row * out_lse_token, lse, mask=real)
