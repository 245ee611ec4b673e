"""Stage 2, pairs inside a chunk: Aqk, and A = (I + L)^-1.

Formula, per chunk and value head, E_ij = 2^(g_i - g_j); q and k normalised:

    Aqk_ij = scale * sum_d q_i k_j E_ij  (i >= j)          L_ij = b_i sum_d k_i k_j E_ij  (i > j)

Both are sums over the levels of pairs.py. A is built up the same tree: with A the inverse for runs of S rows and L_S
the entries of L at level S, the inverse for runs of 2S rows is A - A L_S A. It starts at the identity; everything is
fp32 (INV: the products' precision), and each step inverts nothing, so that no power of L ever grows.

Grid: persistent, 1-D. Task (chunk, value head): a program owns the chunk's two [BT, BT] blocks.
Tile: BT x BT, summed over BK columns of K (tiling.py). Levels x 2 products of BT x BK x BT per K block, levels x 2 of
BT x BT x BT for A.
Bytes per task: reads q, k [BT, K], g or a [BT, K] fp32 (with GATHER the anchors again, each level), b, r_q, r_k [BT]
fp32; writes Aqk and A [BT, BT] in the main type.
Fused: the products, their masks, beta and the inversion; L is never stored (2 x 4 x BT x BT bytes less).
Must hold: stage 1 ran before; g is a of stage 1 without GATHER (pairs.py); Aqk and A are [HV, B*T, BT], columns past a
tail chunk are 0.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.chunk_kda.pairs import at_level, level_factor, operand, pair_levels
from mindspeed_kda.npu_kernels.common import decode_chunk, load_row, load_tile, store_tile


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def intra(
    q, k, g, b, rq, rk, Aqk, A, cu_seqlens, chunk_indices, scale, T, NT, R, n_chunks,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    XT: tl.constexpr, PREC: tl.constexpr, INV: tl.constexpr, LEVELS: tl.constexpr, GATHER: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), n_chunks * HV, tl.num_programs(0)):
        i_c = i_task // HV
        i_h = i_task - i_c * HV
        i_hq = i_h // (HV // H)
        row, n_rows = decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT, PACKED)
        at_qk = (row * H + i_hq) * K
        at_t = tl.cast(i_h, tl.int64) * R + row
        at_r = tl.cast(i_hq, tl.int64) * R + row
        b_pair = pair_levels(BT)
        m_diag = o_t[:, None] == o_t[None, :]
        if NORM:
            b_rq = load_row(rq + at_r, n_rows, BT)
            b_rk = load_row(rk + at_r, n_rows, BT)

        b_P = tl.zeros([BT, BT], dtype=tl.float32)
        b_L = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(NK):
            o_c = i_k * BK
            n_k = K - o_c
            p_g = g + at_t * K + o_c
            b_g = load_tile(p_g, K, n_rows, n_k, BT, BK)  # [BT, BK]
            b_q = load_tile(q + at_qk + o_c, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
            b_k = load_tile(k + at_qk + o_c, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
            if NORM:
                b_q *= b_rq[:, None]
                b_k *= b_rk[:, None]
            b_P += tl.where(m_diag, tl.sum(b_q * b_k, 1)[:, None], 0.0)
            for level in range(LEVELS):
                S = 1 << level
                b_f = level_factor(p_g, b_g, n_rows, n_k, S, K, BT, BK, GATHER)
                b_kt = tl.trans(operand(b_k * b_f, XT, PREC))  # [BK, BT]
                b_qq = tl.dot(operand(b_q * b_f, XT, PREC), b_kt, input_precision=PREC)
                b_P += at_level(b_qq, b_pair, S)
                b_kk = tl.dot(operand(b_k * b_f, XT, PREC), b_kt, input_precision=PREC)
                b_L += at_level(b_kk, b_pair, S)
        store_tile(Aqk + at_t * BT, b_P * scale, BT, n_rows, BT, BT, BT)

        b_L *= load_row(b + at_t, n_rows, BT)[:, None]
        # level 0: A is the identity, so that A - A L A is 1 - L
        b_A = tl.where(m_diag, 1.0, -at_level(b_L, b_pair, 1))
        for level in range(1, LEVELS):
            S = 1 << level
            b_u = tl.dot(at_level(b_L, b_pair, S), b_A, input_precision=INV)  # L_S A
            # A has no entry at this level yet: the mask only makes the left operand a tile of its own
            b_A -= tl.dot(tl.where(b_pair >= S, 0.0, b_A), b_u, input_precision=INV)
        store_tile(A + at_t * BT, b_A, BT, n_rows, BT, BT, BT)
