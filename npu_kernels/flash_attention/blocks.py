"""Jit helpers of the attention kernels: sequences, spans of blocks, scores.

A span is four block-aligned bounds begin <= a <= c <= end of a loop: [begin, a) and [c, end) hold blocks that the mask
cuts, [a, c) blocks that it does not; what lies outside is never visited.

Grid, tile and bytes are those of the kernel that calls. Must hold: a sequence's own sizes fit 32 bits.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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
def scores(b_q, b_k, scale, softcap, CAP: tl.constexpr):
    """Scaled and capped scores in base 2, and the capped score over its cap (0 without one): [rows, keys]."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    b_t = b_s
    if CAP:
        b_t = 1.0 - 2.0 / (tl.exp2(b_s / softcap * (2.0 * LOG2E)) + 1.0)
        b_s = b_t * softcap
    return b_s * LOG2E, b_t


@triton.jit
def sees(row, key, n_q, n_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
         BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """[BM, BN] mask of a block with its first query at row and its first key at key."""
    o_m = row + tl.arange(0, BM)
    o_n = key + tl.arange(0, BN)
    m_s = (o_m < n_q)[:, None] & (o_n < n_k)[None, :]
    o_d = o_n[None, :] - (o_m + (n_k - n_q))[:, None]
    if HAS_LEFT:
        m_s = m_s & (o_d >= -left)
    if HAS_RIGHT:
        m_s = m_s & (o_d <= right)
    return m_s
