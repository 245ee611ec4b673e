"""Stage 7, what pairs of rows give to dq, dk, db and the gate, and the end of the gate's backward.

Formula, per chunk and value head; F_S the level factors of pairs.py, P and D of stage 5, q and k normalised:

    rows:     rq = sum_S F (P_S (F k))     rk = sum_S F (D_S (F k))     m = diag(P)
              dq += rq + m * k             dk += b * rk + m * q         db_p = sum_k k * rk  (one sum a K block)
    columns:  col = sum_S F (P_S^T (F q) + D_S^T (F b k))               dk += col
    da_t += sum_{s >= t} (q * rq + b * k * rk - k * col)_s
    dx, and the chunk's sums of dx (for dt_bias) and of the terms of dA_log: gates.py

The two terms of a pair in da are the same product of the same rounded operands, so that pairs on one side of t cancel
to fp32: unrounded values on one side would leave 1.3e-2 of da in bf16 at -5 per token, against 2.3e-3. No i = j pair is
in da.

Grid: persistent, 1-D. Task (chunk, value head, K block): a program owns the [BT, BK] tile of dq, dk and dx.
Tile: BT x BK (tiling.py). On NVIDIA one launch does rows and columns (ROWS and COLS) in one loop over the levels; on
Ascend two launches do one each: together they overflow UB and take its compilers minutes.
Bytes per task: reads q, k, x [BT, BK], g or a [BT, BK] fp32, P and D [BT, BT] (with GATHER each level, from cache), dq,
dk and da [BT, BK] fp32; writes dq and dk [BT, BK] (fp32, or final with TOKEN_MAJOR), dx [BT, BK], two rows [BK] fp32,
db_p [BT]. Two launches read q, k, g, P and D twice and pass dk and da once more.
Fused: pair gradient, reverse cumsum, gate backward, and with NORM_HERE the norm's backward.
Must hold: stages 5 and 6 ran before; g is a of stage 1 without GATHER (pairs.py); x and dx [B, T, HV, K]; sums
[B*NT, HV, K]; db_p as db_k of stage 6; all else workspace as before.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.chunk_kda.gates import log_decay_backward
from mindspeed_kda.npu_kernels.chunk_kda.pairs import at_level, level_factor, operand, pair_levels
from mindspeed_kda.npu_kernels.common import decode_chunk, load_row, load_tile, store_row, store_tile


@triton.jit
def _pairs(p, b_x, n_rows, BT: tl.constexpr, AGAIN: tl.constexpr):
    """P or D inside the loop over levels: the tile b_x, or AGAIN from cache, where registers are what is short."""
    if AGAIN:
        b_y = load_tile(p, BT, n_rows, BT, BT, BT)
    else:
        b_y = b_x
    return b_y


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def grads(
    q, k, x, rates, dt_bias, g, b, rq, rk, P, D, da, dq_hv, dk_hv, dq, dk, dx, db_p, sum_bias, sum_log,
    cu_seqlens, chunk_indices, bound, T, NT, R, n_chunks,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    NORM_HERE: tl.constexpr, TOKEN_MAJOR: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, XT: tl.constexpr,
    PREC: tl.constexpr, LEVELS: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), n_chunks * HV * NK, tl.num_programs(0)):
        i_s = i_task // NK
        i_k = i_task - i_s * NK
        i_c = i_s // HV
        i_h = i_s - i_c * HV
        i_hq = i_h // (HV // H)
        row, n_rows = decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT, PACKED)
        n_k = K - i_k * BK
        at_qk = (row * H + i_hq) * K + i_k * BK
        at_x = (row * HV + i_h) * K + i_k * BK
        at_t = tl.cast(i_h, tl.int64) * R + row
        at_r = tl.cast(i_hq, tl.int64) * R + row
        at_g = at_t * K + i_k * BK
        at_sum = (tl.cast(i_c, tl.int64) * HV + i_h) * K + i_k * BK
        p_P = P + at_t * BT
        p_D = D + at_t * BT
        b_b = load_row(b + at_t, n_rows, BT)[:, None]
        b_pair = pair_levels(BT)
        b_g = load_tile(g + at_g, K, n_rows, n_k, BT, BK)  # [BT, BK]
        b_q = load_tile(q + at_qk, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
        b_k = load_tile(k + at_qk, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
        if NORM:
            b_q *= load_row(rq + at_r, n_rows, BT)[:, None]
            b_k *= load_row(rk + at_r, n_rows, BT)[:, None]
        b_dg = tl.zeros([BT, BK], dtype=tl.float32)
        b_dk = load_tile(dk_hv + at_g, K, n_rows, n_k, BT, BK)  # [BT, BK]

        if ROWS:
            b_m = load_tile(p_P, BT, n_rows, BT, BT, BT).to(tl.float32)  # [BT, BT]
            b_m = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_m, 0.0), 1)[:, None]
            b_dq = load_tile(dq_hv + at_g, K, n_rows, n_k, BT, BK) + b_m * b_k  # [BT, BK]
            b_dk += b_m * b_q
            b_db = tl.zeros([BT], dtype=tl.float32)

        b_P0 = load_tile(p_P, BT, n_rows, BT, BT, BT)  # [BT, BT]
        b_D0 = load_tile(p_D, BT, n_rows, BT, BT, BT)  # [BT, BT]
        for level in range(LEVELS):
            S = 1 << level
            b_f = level_factor(g + at_g, b_g, n_rows, n_k, S, K, BT, BK, GATHER)
            if ROWS:
                b_kf = operand(b_k * b_f, XT, PREC)
                b_P = at_level(_pairs(p_P, b_P0, n_rows, BT, GATHER), b_pair, S)
                b_row = tl.dot(operand(b_P, XT, PREC), b_kf, input_precision=PREC)
                b_dg += operand(b_q * b_f, XT, PREC) * b_row
                b_dq += b_f * b_row
                b_D = at_level(_pairs(p_D, b_D0, n_rows, BT, GATHER), b_pair, S)
                b_rowk = tl.dot(operand(b_D, XT, PREC), b_kf, input_precision=PREC)
                b_db += tl.sum(b_kf * b_rowk, 1)
                b_dg += operand(b_b * b_k * b_f, XT, PREC) * b_rowk
                b_dk += b_b * b_f * b_rowk
            if COLS:
                b_Pt = tl.trans(at_level(_pairs(p_P, b_P0, n_rows, BT, GATHER), b_pair, S))
                b_col = tl.dot(operand(b_Pt, XT, PREC), operand(b_q * b_f, XT, PREC), input_precision=PREC)
                b_Dt = tl.trans(at_level(_pairs(p_D, b_D0, n_rows, BT, GATHER), b_pair, S))
                b_bf = operand(b_b * b_k * b_f, XT, PREC)
                b_col = tl.dot(operand(b_Dt, XT, PREC), b_bf, b_col, input_precision=PREC)
                b_dg -= operand(b_k * b_f, XT, PREC) * b_col
                b_dk += b_f * b_col

        if ROWS:
            store_row(db_p + tl.cast(i_k * HV, tl.int64) * R + at_t, b_db, n_rows, BT)
            if NORM_HERE:
                b_dq -= b_q * tl.sum(b_q * b_dq, 1)[:, None]
                b_dq *= load_row(rq + at_r, n_rows, BT)[:, None]
            if TOKEN_MAJOR:
                store_tile(dq + at_qk, b_dq, H * K, n_rows, n_k, BT, BK)
            else:
                store_tile(dq_hv + at_g, b_dq, K, n_rows, n_k, BT, BK)
        if COLS and NORM_HERE:
            b_dk -= b_k * tl.sum(b_k * b_dk, 1)[:, None]
            b_dk *= load_row(rk + at_r, n_rows, BT)[:, None]
        if COLS and TOKEN_MAJOR:
            store_tile(dk + at_qk, b_dk, H * K, n_rows, n_k, BT, BK)
        else:
            store_tile(dk_hv + at_g, b_dk, K, n_rows, n_k, BT, BK)

        b_da = load_tile(da + at_g, K, n_rows, n_k, BT, BK) + tl.cumsum(b_dg, 0, reverse=True)  # [BT, BK]
        if COLS:
            b_z = load_tile(x + at_x, HV * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
            b_rate = 1.0
            if GATE != 0:
                b_rate = load_row(rates + i_h * K + i_k * BK, n_k, BK)[None, :]
            if BIAS:
                b_z += load_row(dt_bias + i_h * K + i_k * BK, n_k, BK)[None, :]
            b_dx, b_dl = log_decay_backward(b_z, b_da, b_rate, bound, GATE)
            store_tile(dx + at_x, b_dx, HV * K, n_rows, n_k, BT, BK)
            if GATE != 0:
                m_t = (o_t < n_rows)[:, None]
                store_row(sum_log + at_sum, tl.sum(tl.where(m_t, b_dl, 0.0), 0), n_k, BK)
                if BIAS:
                    store_row(sum_bias + at_sum, tl.sum(tl.where(m_t, b_dx, 0.0), 0), n_k, BK)
        else:
            store_tile(da + at_g, b_da, K, n_rows, n_k, BT, BK)
