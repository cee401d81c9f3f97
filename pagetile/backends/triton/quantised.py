"""Device-side helpers of quantised caches: a stored byte as a number, a number as a byte, and the scale of either.

A byte becomes a number of the query's dtype exactly (bfloat16 and float16 hold all that a byte can say), so a product
of 16-bit queries with an 8-bit cache loses nothing before the scales, which join scores and sums in float32. The bytes
written are those of :func:`pagetile.reference.quantise`: true division, nearest even, saturation, one NaN.

``NATIVE`` uses the conversions of the hardware (NVIDIA from compute capability 8.9 on). Without it fp8 is made and read
with integers, which any GPU has.
"""

# The compiler of these kernels decides an `if` on a constant before it looks at the branches: they stay apart.

from __future__ import annotations

import triton
import triton.language as tl

from pagetile.backends.triton.available import interpreted

E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)
INT8 = tl.constexpr(3)
KINDS = {"fp8_e4m3": 1, "fp8_e5m2": 2, "int8": 3}
"""The constant ``KIND`` of kernels; 0 is a cache of the query's dtype."""

UNSCALED, NUMBER, ONE, HEAD, OWN = 0, 1, 2, 3, 4
"""Forms of a scale: none; a float among the arguments; one element, read; one for each (sequence and) head, read; one
for each token and head, read by an attention and filled by a write."""
OF_TOKENS = tl.constexpr(OWN)
LOADED = tl.constexpr(HEAD)

_FUSED = tl.constexpr(not interpreted())
"""Whether ``fma`` rounds once; the interpreter's rounds twice."""


@triton.jit
def as_float32(x):
    """float32 of any element exactly; bfloat16 by its bits, which the interpreter holds as integers."""
    if x.dtype == tl.bfloat16:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def decode(stored, like, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """What stored bytes (uint8) stand for, in the dtype of ``like``; a cache that is not quantised passes through."""
    dtype: tl.constexpr = like.dtype
    if KIND == 0:
        x = stored
    elif KIND == INT8:
        x = stored.to(tl.int8, bitcast=True).to(dtype)
    elif NATIVE and KIND == E5M2:
        x = from_half(stored.to(tl.float8e5, bitcast=True).to(tl.float16), dtype)
    elif KIND == E5M2:  # the upper half of a float16
        x = from_half((stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True), dtype)
    elif NATIVE:
        x = from_half(stored.to(tl.float8e4nv, bitcast=True).to(tl.float16), dtype)
    else:
        x = decode_e4m3(stored, dtype)
    return x


@triton.jit
def from_half(x, dtype: tl.constexpr):
    """float16 in another dtype; exact for what a byte can say."""
    if dtype != tl.float16:
        x = x.to(tl.float32).to(dtype)
    return x


@triton.jit
def decode_e4m3(stored, dtype: tl.constexpr):
    """E4M3 by integers.

    Exponent and mantissa, moved to where the wider format has them, are off by a power of two; multiplying by it is
    exact, and also makes subnormals what they are.
    """
    if dtype == tl.float32:
        bits = stored.to(tl.uint32)
        rest = bits & 0x7F
        x = ((rest << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    elif dtype == tl.float16:
        bits = stored.to(tl.uint16)
        rest = bits & 0x7F
        x = ((rest << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
    else:
        bits = stored.to(tl.uint16)
        rest = bits & 0x7F
        x = ((rest << 4) | ((bits & 0x80) << 8)).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
    return tl.where(rest == 0x7F, float("nan"), x).to(dtype)


@triton.jit
def scale_values(v, p, scale, seen, MASKED: tl.constexpr):
    """``(values, weights)`` with each key's own scale in one of them.

    It joins the weights, except in float16: there a weight times a small scale would lose its digits, and the values
    are rounded once more instead.
    """
    if v.dtype == tl.float16:
        v = (v.to(tl.float32) * scale[:, None]).to(tl.float16)
    else:
        p = p * scale[None, :]
        if MASKED:  # a scale that is not finite reaches only the rows that see its key
            p = tl.where(seen, p, 0.0)
    return v, p


@triton.jit
def scaled_state(state, by, KIND: tl.constexpr, DV2: tl.constexpr):
    """A state whose sums have the scale of V; of a quantised cache only."""
    peak, total, acc, acc2 = state
    if KIND > 0:
        acc = acc * by
        if DV2 > 0:
            acc2 = acc2 * by
    return peak, total, acc, acc2


@triton.jit
def head_scale(number, scales, seq, head, step_seq, step_head, FORM: tl.constexpr):
    """One scale for a sequence's KV head: ``number``, times what is loaded where that is its form."""
    if FORM == LOADED:
        number = number * tl.load(scales + seq.to(tl.int64) * step_seq + head.to(tl.int64) * step_head)
    return number


@triton.jit
def largest(KIND: tl.constexpr):
    """The largest magnitude that a kind stores."""
    return 448.0 if KIND == E4M3 else 57344.0 if KIND == E5M2 else 127.0


@triton.jit
def divide(x, scale, KIND: tl.constexpr):
    """``x / scale`` rounded once, as true division does, with a scale a row; NaN stays NaN.

    Two corrections of ``x * (1 / scale)`` with the exact remainder give the rounded quotient (Markstein 1990), in five
    multiplications instead of a division. What is too large for the kind anyway is only kept large. Where the remainder
    or the inverse could underflow, it is a division.
    """
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    ordinary = (scale >= 8.271806125530277e-25) & (scale <= 1.2089258196146292e24)  # 2 ** -80 to 2 ** 80
    scales = tl.expand_dims(scale, 1) + tl.zeros_like(x)
    if _FUSED and tl.min(ordinary.to(tl.int32), 0) > 0:
        inverses = tl.expand_dims(inverse, 1) + tl.zeros_like(x)
        rough = x * inverses
        y = tl.math.fma(tl.math.fma(-rough, scales, x), inverses, rough)
        y = tl.math.fma(tl.math.fma(-y, scales, x), inverses, y)
        y = tl.where(tl.abs(rough) < 2.0 * largest(KIND), y, rough)
    else:
        y = tl.div_rn(x, scales)
    return y


@triton.jit
def encode(y, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """float32 as a kind stores it (uint8): nearest even, saturating; NaN is 0x7F in fp8 and 0 in int8."""
    if KIND == INT8:
        kept = tl.minimum(tl.maximum(y, -127.0), 127.0)
        stored = (kept + 12582912.0).to(tl.int32, bitcast=True) & 0xFF  # 1.5 * 2**23: the last byte is the integer
        stored = tl.where(y != y, 0, stored).to(tl.uint8)
    elif NATIVE and KIND == E4M3:
        stored = tl.where(y != y, 0x7F, y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)).to(tl.uint8)
    elif NATIVE:
        stored = tl.where(y != y, 0x7F, y.to(tl.float8e5).to(tl.uint8, bitcast=True)).to(tl.uint8)
    else:
        stored = encode_fp8(y, KIND)
    return stored


@triton.jit
def encode_fp8(y, KIND: tl.constexpr):
    """fp8 by integers: the rounded upper bits of float32 where the result is normal, counted steps where it is not."""
    DROPPED: tl.constexpr = 20 if KIND == E4M3 else 21  # mantissa bits of float32 that do not fit
    BIAS: tl.constexpr = (120 << 3) if KIND == E4M3 else (112 << 2)  # difference of the exponents', in place
    LARGEST: tl.constexpr = 0x43E00000 if KIND == E4M3 else 0x47600000
    NORMAL: tl.constexpr = 0x3C800000 if KIND == E4M3 else 0x38800000  # bits of the smallest normal number
    STEPS: tl.constexpr = 16384.0 if KIND == E4M3 else 128.0  # its last bit is the smallest step of the kind
    STEP_BITS: tl.constexpr = 0x46800000 if KIND == E4M3 else 0x43000000
    bits = y.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, LARGEST)
    normal = ((magnitude + ((magnitude >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)) >> DROPPED) - BIAS
    tiny = (magnitude.to(tl.float32, bitcast=True) + STEPS).to(tl.int32, bitcast=True) - STEP_BITS
    stored = tl.where(magnitude < NORMAL, tiny, normal) | ((bits >> 24) & 0x80)
    return tl.where(y != y, 0x7F, stored).to(tl.uint8)


@triton.jit
def quantise_rows(x, scale, KIND: tl.constexpr, NATIVE: tl.constexpr, SCALED: tl.constexpr):
    """Rows of any dtype, each divided by its scale (float32 ``[rows]``), as bytes. ``SCALED``: it may differ from 1."""
    y = as_float32(x)
    if SCALED:
        y = divide(y, scale, KIND)
    return encode(y, KIND, NATIVE)


@triton.jit
def own_scale(x, KIND: tl.constexpr):
    """The scale of each row: its largest finite magnitude over the kind's largest value, 1 where that is 0."""
    magnitude = tl.abs(as_float32(x))
    magnitude = tl.where(magnitude < float("inf"), magnitude, 0.0)
    scale = tl.div_rn(tl.max(magnitude, 1), tl.zeros([x.shape[0]], tl.float32) + largest(KIND))
    return tl.where(scale > 0.0, scale, 1.0)
