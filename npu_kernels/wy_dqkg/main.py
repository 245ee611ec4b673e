"""Stage 1, main gradient: the first dq, dk and dg, and dw for the stages after it.

Formula, per chunk of C rows (L the last) and value head; E = 2^, b_* on K columns of one block:

    dq  = scale * E^g * (do h^T)             dk1 = E^(g_L - g) * (v_new dh^T)          dw = -(dv h^T)
    dg  = q * dq - k * dk1,   on row L also   E^(g_L) * sum_v h * dh + sum_rows k * dk1

On row L the two copies of its own k * dk1 cancel and are left out of both: rounded, they would bury the rest of dg
under strong decay. The other rows' copies are one fp32 value. dk gets dk1; stage 3 adds to dk and dg.

Grid: persistent, 1-D. Task (chunk, value head, K block): a program owns the [BT, BK] tile of dq, dk, dg and dw.
Tile: BT x BK x BV from tiling.py. Each of the four sums over V has a loop of its own: Ascend950's compiler merges
two product accumulators of one loop.
Bytes per task: reads q, k [BT, BK], g [BT, BK] fp32, do, v_new, dv [BT, V], h three times and dh twice [BK, V];
writes dq, dk, dg [BT, BK] fp32 and dw [BT, BK].
Must hold: every tensor contiguous; dw is workspace [HV, B*T, K]; rows past the chunk are never stored.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import (
    decode_chunk,
    load_row,
    load_state_t,
    load_tile,
    state_offset,
    store_tile,
)


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def chunk_kda_bwd_kernel_wy_dqkg_fused(
    q, k, v_new, g, h, do, dh, dv, dq, dk, dg, dw, cu_seqlens, chunk_indices, scale, T, NT, R, n_chunks,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, V_FIRST: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    main = q.dtype.element_ty
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), n_chunks * HV * NK, tl.num_programs(0)):
        i_state = i_task // NK
        i_k = (i_task - i_state * NK) * BK
        i_c = i_state // HV
        i_h = i_state - i_c * HV
        row, n_rows = decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT, PACKED)
        n_k = K - i_k
        last = tl.maximum(n_rows - 1, 0)
        at_qk = (row * H + i_h // (HV // H)) * K + i_k
        at_k = (row * HV + i_h) * K + i_k
        at_v = (row * HV + i_h) * V
        at_state = tl.cast(i_state, tl.int64) * (K * V)
        m_t = (o_t < n_rows)[:, None]

        b_dq = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(NV):
            b_do = load_tile(do + at_v + i_v * BV, HV * V, n_rows, V - i_v * BV, BT, BV)  # [BT, BV]
            p_h = h + at_state + state_offset(i_k, i_v * BV, K, V, V_FIRST)
            b_h = load_state_t(p_h, n_k, V - i_v * BV, K, V, BK, BV, V_FIRST)  # [BV, BK]
            b_dq = tl.dot(b_do, b_h.to(main), b_dq, input_precision=PREC)
        b_g = load_tile(g + at_k, HV * K, n_rows, n_k, BT, BK)  # [BT, BK]
        b_q = load_tile(q + at_qk, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
        b_dq *= tl.exp2(b_g) * scale
        store_tile(dq + at_k, b_dq, HV * K, n_rows, n_k, BT, BK)
        b_dg = b_q * b_dq

        b_dk = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(NV):
            b_vn = load_tile(v_new + at_v + i_v * BV, HV * V, n_rows, V - i_v * BV, BT, BV)  # [BT, BV]
            p_dh = dh + at_state + state_offset(i_k, i_v * BV, K, V, V_FIRST)
            b_dh = load_state_t(p_dh, n_k, V - i_v * BV, K, V, BK, BV, V_FIRST)  # [BV, BK]
            b_dk = tl.dot(b_vn, b_dh.to(main), b_dk, input_precision=PREC)
        b_last = load_row(g + at_k + tl.cast(last, tl.int64) * (HV * K), n_k, BK)  # [BK]
        b_k = load_tile(k + at_qk, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
        # masked before exp2: a padding row has no g, and g_L - 0 may be large where g is no cumsum
        b_dk *= tl.exp2(tl.where(m_t, b_last[None, :] - b_g, 0.0))
        store_tile(dk + at_k, b_dk, HV * K, n_rows, n_k, BT, BK)
        # row L holds - k * dk1 and + k * dk1 of its own: left out, since under strong decay they dwarf what remains
        b_kdk = tl.where((o_t == last)[:, None], 0.0, b_k * b_dk)
        b_dg -= b_kdk
        b_row = tl.sum(b_kdk, 0)  # [BK]

        b_hdh = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(NV):
            at_hv = at_state + state_offset(i_k, i_v * BV, K, V, V_FIRST)
            b_h = load_state_t(h + at_hv, n_k, V - i_v * BV, K, V, BK, BV, V_FIRST).to(tl.float32)  # [BV, BK]
            b_dh = load_state_t(dh + at_hv, n_k, V - i_v * BV, K, V, BK, BV, V_FIRST).to(tl.float32)  # [BV, BK]
            b_hdh += tl.sum(b_h * b_dh, 0)
        b_row += tl.exp2(b_last) * b_hdh
        b_dg += tl.where((o_t == last)[:, None], b_row[None, :], 0.0)
        store_tile(dg + at_k, b_dg, HV * K, n_rows, n_k, BT, BK)

        b_dw = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(NV):
            b_dv = load_tile(dv + at_v + i_v * BV, HV * V, n_rows, V - i_v * BV, BT, BV)  # [BT, BV]
            p_h = h + at_state + state_offset(i_k, i_v * BV, K, V, V_FIRST)
            b_h = load_state_t(p_h, n_k, V - i_v * BV, K, V, BK, BV, V_FIRST)  # [BV, BK]
            b_dw = tl.dot(b_dv, b_h.to(main), b_dw, input_precision=PREC)
        store_tile(dw + (tl.cast(i_h, tl.int64) * R + row) * K + i_k, -b_dw, K, n_rows, n_k, BT, BK)
