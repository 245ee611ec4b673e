"""Jit helpers for pairs of rows inside a chunk, by halving: every pair j < i belongs to one level of a binary tree.

At level S the chunk is cut into runs of 2S rows; n, the middle row of a run, is the anchor of the pairs whose query i
lies in the second half of a run and whose key j lies in the first half of the same run:

    E_ij = 2^(g_i - g_j) = F_i F_j,     F = 2^(-|g - g_n|)

since g falls along the rows. One factor tile serves both sides, no exponent is above 0 whatever the decay, and a pair
sum is a plain [BT, K] x [K, BT] product, masked to the level. BT = 64 has six levels, S = 32 ... 1.
"""

import triton
import triton.language as tl


@triton.jit
def pair_levels(BT: tl.constexpr):
    """[BT, BT] int32: i ^ j below the diagonal, 0 elsewhere. A pair's level is its highest set bit."""
    o_t = tl.arange(0, BT)
    return tl.where(o_t[:, None] > o_t[None, :], o_t[:, None] ^ o_t[None, :], 0)


@triton.jit
def partner(o_t, j, LOW: tl.constexpr):
    """Row j of the run of 2^LOW rows that each row lies in."""
    return (o_t & (-(1 << LOW))) + j


@triton.jit
def pair_offset(o_t, o_p, BT: tl.constexpr):
    """Where a lower [BT, BT] matrix holds the pair of each row with its partner. Discrete: not for Ascend."""
    return tl.maximum(o_t, o_p) * BT + tl.minimum(o_t, o_p)


@triton.jit
def at_level(b_x, b_pair, S):
    """b_x [BT, BT] where the pair belongs to level S, 0 elsewhere."""
    return tl.where((b_pair >= S) & (b_pair < 2 * S), b_x, 0.0)


@triton.jit
def level_factor(p_g, b_g, n_rows, n_k, S, stride: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 GATHER: tl.constexpr):  # fmt: skip
    """F of level S, [BT, BK].

    GATHER: b_g [BT, BK] is g, p_g points at its first element, and the anchors' rows are loaded. Without: b_g is a, the
    log2 decay per token, and the exponent is the sum of a between a row and its anchor, by a 0/1 matrix product. That
    is right to fp32 of the sum itself, where a difference of g carries the rounding of all that the chunk has decayed
    before (2e-5 of the gate's gradient at -8 per token); and on Ascend a gather is a scalar loop.
    An anchor past the chunk reads as 0: its run has no query, and F stays finite.
    """
    o_t = tl.arange(0, BT)
    o_n = (o_t & (-2 * S)) + S
    if GATHER:
        o_k = tl.arange(0, BK)
        m = (o_n < n_rows)[:, None] & (o_k < n_k)[None, :]
        b_n = tl.load(p_g + o_n[:, None] * stride + o_k[None, :], mask=m, other=0.0)  # [BT, BK]
        b_d = -tl.abs(b_g - b_n)
    else:
        between = (o_t[None, :] > tl.minimum(o_t, o_n)[:, None]) & (o_t[None, :] <= tl.maximum(o_t, o_n)[:, None])
        b_d = tl.dot(tl.where(between, 1.0, 0.0), b_g, input_precision="ieee")
    return tl.exp2(b_d)


@triton.jit
def operand(b_x, XT: tl.constexpr, PREC: tl.constexpr):
    """b_x as an operand of a pair product, rounded here and not inside the product.

    The gate gradient takes the rounded values on both sides of a pair, so that pairs which do not span a token cancel
    in its sum to fp32. TF32 keeps 10 bits of mantissa; half a unit of the last is added before the rest is cut.
    """
    if PREC == "tf32":
        bits = b_x.to(tl.int32, bitcast=True)
        b_y = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        b_y = b_x.to(XT)
    return b_y
