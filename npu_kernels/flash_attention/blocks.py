"""Jit helpers of the attention kernels: sequences, spans of blocks, loads, scores, masks.

A span is four block-aligned bounds begin <= a <= c <= end of a loop: [begin, a) and [c, end) hold blocks that the mask
cuts, [a, c) blocks that it does not; what lies outside is never visited. [begin, a) is empty unless HAS_BEFORE.

Grid, tile and bytes are those of the kernel that calls. Must hold: a sequence's own sizes fit 32 bits.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import load_tile

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)
"""ln 2 in two parts: whole numbers of 15 bits times the first are exact in float32."""
UNDERFLOW = tl.constexpr(-104.0)
"""e to this is below half of float32's least number."""
SMALL = tl.constexpr(0.55)
"""Up to here tanh is a polynomial: 1 - 2 / (e^2x + 1) is right to 6e-8 of 1, not of x."""


@triton.jit
def decode_pair(i_n, cu_q, cu_k, TQ, TK, PACKED: tl.constexpr):
    """First row and number of rows of sequence i_n: queries, then keys. First rows are int64."""
    if PACKED:
        begin_q = tl.cast(tl.load(cu_q + i_n), tl.int64)
        n_q = tl.cast(tl.cast(tl.load(cu_q + i_n + 1), tl.int64) - begin_q, tl.int32)
        begin_k = tl.cast(tl.load(cu_k + i_n), tl.int64)
        n_k = tl.cast(tl.cast(tl.load(cu_k + i_n + 1), tl.int64) - begin_k, tl.int32)
    else:
        begin_q = tl.cast(i_n, tl.int64) * TQ
        begin_k = tl.cast(i_n, tl.int64) * TK
        n_q = TQ
        n_k = TK
    return begin_q, n_q, begin_k, n_k


@triton.jit
def decode_task(i_task, blocks, NB, H: tl.constexpr, PACKED: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Sequence, head and block within the sequence of a task, blocks innermost. NB: blocks of a sequence, or of all
    packed ones, for which ``blocks`` lists (sequence, block); a surplus row names a block past its sequence's end."""
    i_x = i_task // NB
    i_b = i_task - i_x * NB
    if LAST_FIRST:
        i_b = NB - 1 - i_b
    if PACKED:
        i_h = i_x
        i_n = tl.cast(tl.load(blocks + 2 * i_b), tl.int32)
        i_b = tl.cast(tl.load(blocks + 2 * i_b + 1), tl.int32)
    else:
        i_n = i_x // H
        i_h = i_x - i_n * H
    return i_n, i_h, i_b


@triton.jit
def row_offset(i_n, i_h, begin_q, row, TQ, H: tl.constexpr, PACKED: tl.constexpr):
    """Where row ``row`` of a sequence stands in [B, H, TQ], int64. Packed calls have one batch."""
    if PACKED:
        at = tl.cast(i_h, tl.int64) * TQ + begin_q + row
    else:
        at = (tl.cast(i_n, tl.int64) * H + i_h) * TQ + row
    return at


@triton.jit
def span(first, n_block, shift, n, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, B: tl.constexpr):
    """Bounds of the partners of n_block items from ``first``: item i meets i + shift - before to i + shift + after,
    within [0, n)."""
    lo = 0
    hi = n
    full_lo = 0
    full_hi = n
    last = first + n_block - 1
    if HAS_BEFORE:
        lo = tl.maximum(first + shift - before, 0)
        full_lo = tl.maximum(last + shift - before, 0)
    if HAS_AFTER:
        hi = tl.maximum(tl.minimum(last + shift + after + 1, n), 0)
        full_hi = tl.maximum(tl.minimum(first + shift + after + 1, n), 0)
    begin = lo // B * B
    end = (hi + B - 1) // B * B
    a = tl.minimum((full_lo + B - 1) // B * B, end)
    c = tl.maximum(full_hi // B * B, a)
    return begin, a, c, end


@triton.jit
def load_block(p, stride: tl.constexpr, n_rows, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
               WHOLE: tl.constexpr):  # fmt: skip
    """[ROWS, COLS] tile of rows of N elements; WHOLE says that all ROWS are there, and spares their mask."""
    if WHOLE:
        o_r = tl.arange(0, ROWS)
        o_c = tl.arange(0, COLS)
        if N == COLS:
            b_x = tl.load(p + o_r[:, None] * stride + o_c[None, :])
        else:
            b_x = tl.load(p + o_r[:, None] * stride + o_c[None, :], mask=(o_c < N)[None, :], other=0.0)
    else:
        b_x = load_tile(p, stride, n_rows, N, ROWS, COLS)
    return b_x


@triton.jit
def load_line(p, n, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """[SIZE] contiguous elements, those from n on read as 0; WHOLE as in load_block."""
    o = tl.arange(0, SIZE)
    if WHOLE:
        b_x = tl.load(p + o)
    else:
        b_x = tl.load(p + o, mask=o < n, other=0.0)
    return b_x


@triton.jit
def _tanh(b_x, EXACT: tl.constexpr):
    """tanh to 1.2e-7 of its value with EXACT, to 6e-8 of 1 without. exp2 may overflow to inf, which gives 1."""
    b_t = 1.0 - 2.0 / (tl.exp2(b_x * (2.0 * LOG2E)) + 1.0)
    if EXACT:
        b_z = b_x * b_x
        # (tanh(x) / x - 1) / x^2 for x^2 up to SMALL^2, a Chebyshev fit: 6e-8 with float32's rounding
        b_y = -0.0066157465 * b_z + 0.021312738
        b_y = b_y * b_z - 0.053910065
        b_y = b_y * b_z + 0.13333118
        b_y = b_y * b_z - 0.33333332
        b_t = tl.where(b_z < SMALL * SMALL, b_x + b_x * b_z * b_y, b_t)
    return b_t


@triton.jit
def products(b_a, b_b, PARTS: tl.constexpr, NA: tl.constexpr, NB: tl.constexpr, BD: tl.constexpr):
    """a b^T [NA, NB] over the BD numbers of a row, in PARTS (1 or 4) sums."""
    if PARTS == 4:
        b_a0, b_a1 = tl.split(tl.reshape(b_a, [NA, BD // 2, 2]))
        b_b0, b_b1 = tl.split(tl.reshape(b_b, [NB, BD // 2, 2]))
        b_a00, b_a01 = tl.split(tl.reshape(b_a0, [NA, BD // 4, 2]))
        b_a10, b_a11 = tl.split(tl.reshape(b_a1, [NA, BD // 4, 2]))
        b_b00, b_b01 = tl.split(tl.reshape(b_b0, [NB, BD // 4, 2]))
        b_b10, b_b11 = tl.split(tl.reshape(b_b1, [NB, BD // 4, 2]))
        b_s0 = tl.dot(b_a00, tl.trans(b_b00), input_precision="ieee")
        b_s1 = tl.dot(b_a01, tl.trans(b_b01), input_precision="ieee")
        b_s2 = tl.dot(b_a10, tl.trans(b_b10), input_precision="ieee")
        b_s3 = tl.dot(b_a11, tl.trans(b_b11), input_precision="ieee")
        b_s = (b_s0 + b_s1) + (b_s2 + b_s3)
    else:
        b_s = tl.dot(b_a, tl.trans(b_b), input_precision="ieee")
    return b_s


@triton.jit
def scores(b_s, factor, cap, inner, CAP: tl.constexpr, EXACT: tl.constexpr):
    """Scaled and capped scores from the products q . k, natural with EXACT and in base 2 without, and the capped score
    over its cap (its derivative is 1 - t^2; without a cap it means nothing).

    factor, cap: scale and cap of the scores in that base; inner: scale over cap. All from the host, since Ascend
    computes a lone fp32 scalar element by element."""
    if CAP:
        b_t = _tanh(b_s * inner, EXACT)
        b_x = b_t * cap
    else:
        b_t = b_s
        b_x = b_s * factor
    return b_x, b_t


@triton.jit
def power(b_x, EXACT: tl.constexpr):
    """exp of a difference of scores. In fp32 that difference is taken before its change of base, which then costs a
    share of the difference and not of the scores; in 16 bits nobody sees it, and the change is part of a factor."""
    if EXACT:
        b_x = b_x * LOG2E
    return tl.exp2(b_x)


@triton.jit
def below_lse(b_x, b_lse, EXACT: tl.constexpr):
    """Scores less lse, which is natural, and what the rounded difference lost of it, for ``probability``."""
    if EXACT:
        b_d = b_x - b_lse
        b_y = b_d - b_x
        b_lost = (b_x - (b_d - b_y)) - (b_lse + b_y)
    else:
        b_d = b_x - b_lse * LOG2E
        b_lost = b_d
    return b_d, b_lost


@triton.jit
def probability(b_d, b_lost, EXACT: tl.constexpr):
    """exp of what ``below_lse`` gave, or of -inf. In fp32 the difference comes to 10 and more, and it and its change of
    base would cost two roundings of such a number, 3e-7 of the result: e^d is 2^n e^(d - n ln 2) here."""
    if EXACT:
        b_n = tl.floor(b_d * LOG2E + 0.5)
        b_r = (b_d - b_n * LN2_HIGH) - b_n * LN2_LOW + b_lost
        b_p = tl.where(b_d < UNDERFLOW, 0.0, tl.exp2(b_n) * tl.exp2(b_r * LOG2E))  # of -inf, b_r is not a number
    else:
        b_p = tl.exp2(b_d)
    return b_p


@triton.jit
def sees(o_m, o_n, n_q, n_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Mask of queries o_m and keys o_n, which come as a column and a row, either way round."""
    m_s = (o_m < n_q) & (o_n < n_k)
    if HAS_LEFT:
        m_s = m_s & (o_n - o_m >= n_k - n_q - left)
    if HAS_RIGHT:
        m_s = m_s & (o_n - o_m <= n_k - n_q + right)
    return m_s
