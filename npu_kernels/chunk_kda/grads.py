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

With LOW the levels below it, pairs inside a run of 2^LOW rows, are taken one partner row at a time, unrounded and
without products: a level waits for its products whether its pairs are near or far, and these steps wait for nothing.

Grid: persistent, 1-D. Task (chunk, value head, K block): a program owns the [BT, BK] tile of dq, dk and dx.
Tile: BT x BK (tiling.py). On NVIDIA one launch does rows and columns (ROWS and COLS) in one loop over the levels; on
Ascend two launches do one each: together they overflow UB and take its compilers minutes.
Bytes per task: reads q, k, x [BT, BK], g or a [BT, BK] fp32 (with LOW again each step, from cache), P and D [BT, BT]
(with GATHER each level, from cache), dq, dk and da [BT, BK] fp32; writes dq and dk [BT, BK] (fp32, or final with
TOKEN_MAJOR), dx [BT, BK], two rows [BK] fp32, db_p [BT]. Two launches read q, k,
g, P and D twice and pass dk and da once more.
Fused: pair gradient, reverse cumsum, gate backward, and with NORM_HERE the norm's backward.
Must hold: stages 5 and 6 ran before; g is a of stage 1 without GATHER (pairs.py); x and dx [B, T, HV, K]; sums
[B*NT, HV, K]; db_p as db_k of stage 6; all else workspace as before.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.chunk_kda.gates import log_decay_backward
from mindspeed_kda.npu_kernels.chunk_kda.pairs import at_level, level_factor, operand, pair_levels, pair_offset, partner
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
    PREC: tl.constexpr, LOW: tl.constexpr, LEVELS: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, PACKED: tl.constexpr,
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

        if LOW > 0:
            b_rq = tl.zeros([BT, BK], dtype=tl.float32)
            b_rk = tl.zeros([BT, BK], dtype=tl.float32)
            b_col = tl.zeros([BT, BK], dtype=tl.float32)
            o_k = tl.arange(0, BK)[None, :]
            for j in range(1 << LOW):
                o_p = partner(o_t, j, LOW)
                m_p = (o_p < n_rows) & (o_t < n_rows)
                m_pk = (o_p < n_rows)[:, None] & (o_k < n_k)
                at_pair = pair_offset(o_t, o_p, BT)
                b_p = tl.load(p_P + at_pair, mask=m_p & (o_p != o_t), other=0.0).to(tl.float32)  # [BT]
                b_d = tl.load(p_D + at_pair, mask=m_p & (o_p != o_t), other=0.0).to(tl.float32)  # [BT]
                b_dp = b_d * tl.load(b + at_t + o_p, mask=m_p, other=0.0)
                b_pq = b_p
                if NORM:
                    b_rkp = tl.load(rk + at_r + o_p, mask=m_p, other=0.0)
                    b_pq *= tl.load(rq + at_r + o_p, mask=m_p, other=0.0)
                    b_p *= b_rkp
                    b_d *= b_rkp
                    b_dp *= b_rkp
                b_gp = tl.load(g + at_g + o_p[:, None] * K + o_k, mask=m_pk, other=0.0)  # [BT, BK]
                b_e = tl.exp2(-tl.abs(b_g - b_gp))
                b_kp = tl.load(k + at_qk + o_p[:, None] * (H * K) + o_k, mask=m_pk, other=0.0)  # [BT, BK]
                b_kp = b_e * b_kp.to(tl.float32)
                b_qp = tl.load(q + at_qk + o_p[:, None] * (H * K) + o_k, mask=m_pk, other=0.0)  # [BT, BK]
                b_qp = b_e * b_qp.to(tl.float32)
                b_rq += tl.where(o_p < o_t, b_p, 0.0)[:, None] * b_kp
                b_rk += tl.where(o_p < o_t, b_d, 0.0)[:, None] * b_kp
                b_col += tl.where(o_p > o_t, b_pq, 0.0)[:, None] * b_qp
                b_col += tl.where(o_p > o_t, b_dp, 0.0)[:, None] * b_kp
            b_dg += b_q * b_rq + b_b * b_k * b_rk - b_k * b_col
            b_dq += b_rq
            b_dk += b_b * b_rk + b_col
            b_db += tl.sum(b_k * b_rk, 1)

        b_P0 = load_tile(p_P, BT, n_rows, BT, BT, BT)  # [BT, BT]
        b_D0 = load_tile(p_D, BT, n_rows, BT, BT, BT)  # [BT, BT]
        for level in range(LOW, LEVELS):
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
