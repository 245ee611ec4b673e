"""Stage 6, what the chunk's states give to dq, dk, db and the gate.

Formula, per chunk (L its last row) and value head; E = 2^; Y of stage 4; q and k normalised:

    dq = scale * E^g * (do h^T)          X = -E^g * (Y h^T)          dk1 = E^(g_L - g) * (v_new dh^T)
    dk = dk1 + b * X                     db_k = sum_k X * k          (one sum a K block)
    da_t = sum_{s >= t} (q * dq + k * b * X)_s + sum_{s < t} (k * dk1)_s + E^(g_L) * sum_v h * dh

With SUMS (fp32) g is a of stage 1 and both sums are taken here, g_L - g from the chunk's end as in stage 1.
X is the op's A^T dw times E^g, by associativity: A^T (dv h^T) = (A^T dv) h^T. The k * dk1 terms are a sum over earlier
rows, so that nothing cancels (docs/kda_math.md, section 8).

Grid: persistent, 1-D. Task (chunk, value head, K block): a program owns the [BT, BK] tile of dq, dk and da.
Tile: BT x BK, summed over BV columns of V (tiling.py); each product in a loop of its own.
Bytes per task: reads do, v_new and Y [BT, V], h (three times) and dh (twice) [BK, V], q, k [BT, BK], g or a [BT, BK]
fp32, b, r_q, r_k [BT]; writes dq, dk, da [BT, BK] fp32, db_k [BT] fp32.
Fused: the op's main stage, its dk/dg/db stage and the reverse cumsum of its dg; dw, dg and the op's A are not touched.
Must hold: stages 1, 3 (KEEP) and 4 ran before; dq_hv, dk_hv and da are workspace [HV, B*T, K], db_k [NK, HV, B*T].
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import decode_chunk, load_row, load_tile, state_slot, store_row, store_tile


@triton.jit
def _times_state(x, s, stride: tl.constexpr, n_rows, n_k, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr):  # fmt: skip
    """x s^T, [BT, BK] fp32, of x [BT, V] and a state s [BK, V], both from memory."""
    b_y = tl.zeros([BT, BK], dtype=tl.float32)
    for i_v in range((V + BV - 1) // BV):
        b_x = load_tile(x + i_v * BV, stride, n_rows, V - i_v * BV, BT, BV)  # [BT, BV]
        b_s = load_tile(s + i_v * BV, V, n_k, V - i_v * BV, BK, BV)  # [BK, BV]
        b_y = tl.dot(b_x, tl.trans(b_s), b_y, input_precision="ieee")
    return b_y


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def states(
    q, k, do, g, b, rq, rk, h, dh, v_new, Y, dq_hv, dk_hv, da, db_k, cu_seqlens, chunk_indices, scale, T, NT, R,
    n_chunks,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, NORM: tl.constexpr, SUMS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), n_chunks * HV * NK, tl.num_programs(0)):
        i_s = i_task // NK
        i_k = i_task - i_s * NK
        i_c = i_s // HV
        i_h = i_s - i_c * HV
        i_hq = i_h // (HV // H)
        row, n_rows = decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT, PACKED)
        slot = state_slot(i_c, row, chunk_indices, BT, PACKED)
        n_k = K - i_k * BK
        # with no row every other tile is masked off, but the slot may be one that no chunk has written
        n_s = tl.where(n_rows > 0, n_k, 0)
        at_qk = (row * H + i_hq) * K + i_k * BK
        at_do = (row * HV + i_h) * V
        at_t = tl.cast(i_h, tl.int64) * R + row
        at_r = tl.cast(i_hq, tl.int64) * R + row
        at_g = at_t * K + i_k * BK
        at_state = (slot * HV + i_h) * (K * V) + i_k * (BK * V)
        last = tl.maximum(n_rows - 1, 0)

        b_dq = _times_state(do + at_do, h + at_state, HV * V, n_rows, n_s, V, BT, BK, BV)
        b_g = load_tile(g + at_g, K, n_rows, n_k, BT, BK)  # [BT, BK]
        if SUMS:
            b_rest = tl.cumsum(b_g, 0, reverse=True) - b_g
            b_last = tl.sum(b_g, 0)  # [BK]
            b_g = tl.cumsum(b_g, 0)
        else:
            b_last = load_row(g + at_g + tl.cast(last, tl.int64) * K, n_s, BK)  # [BK]
            # rows past the chunk have g = 0 here: masked before exp2
            b_rest = tl.where((o_t < n_rows)[:, None], b_last[None, :] - b_g, 0.0)
        b_q = load_tile(q + at_qk, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
        if NORM:
            b_q *= load_row(rq + at_r, n_rows, BT)[:, None]
        b_dq *= tl.exp2(b_g) * scale
        store_tile(dq_hv + at_g, b_dq, K, n_rows, n_k, BT, BK)
        b_dg = b_q * b_dq

        b_X = _times_state(Y + at_t * V, h + at_state, V, n_rows, n_s, V, BT, BK, BV)
        b_k = load_tile(k + at_qk, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
        if NORM:
            b_k *= load_row(rk + at_r, n_rows, BT)[:, None]
        b_X *= -tl.exp2(b_g)
        store_row(db_k + tl.cast(i_k * HV, tl.int64) * R + at_t, tl.sum(b_X * b_k, 1), n_rows, BT)
        b_X *= load_row(b + at_t, n_rows, BT)[:, None]
        b_dg += b_k * b_X
        b_da = tl.cumsum(b_dg, 0, reverse=True)

        b_dk = _times_state(v_new + at_t * V, dh + at_state, V, n_rows, n_s, V, BT, BK, BV)
        b_dk *= tl.exp2(b_rest)
        store_tile(dk_hv + at_g, b_dk + b_X, K, n_rows, n_k, BT, BK)
        # row L is in no sum over earlier rows, and undamped: left out, it cannot swallow the digits of the others
        b_c = tl.where((o_t < last)[:, None], b_k * b_dk, 0.0)
        b_da += tl.cumsum(b_c, 0) - b_c

        b_s = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(NV):
            n_v = V - i_v * BV
            b_h = load_tile(h + at_state + i_v * BV, V, n_s, n_v, BK, BV).to(tl.float32)  # [BK, BV]
            b_dh = load_tile(dh + at_state + i_v * BV, V, n_s, n_v, BK, BV).to(tl.float32)  # [BK, BV]
            b_s += tl.sum(b_h * b_dh, 1)
        b_da += (tl.exp2(b_last) * b_s)[None, :]
        store_tile(da + at_g, b_da, K, n_rows, n_k, BT, BK)
