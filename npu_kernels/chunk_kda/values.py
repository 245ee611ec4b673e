"""Stage 5, what sums over V: the gradients of the two pair matrices, dv and the V half of db.

Formula, per chunk and value head, with Y of stage 4:

    P = scale * tril(do v_new^T)          D = -stril(Y v_new^T)          dv = b * Y
    db_v = sum_v Y * v                                                                    (betas.py)

P is the gradient of Aqk times scale, D the gradient of L: in a training step v_new = A (b * (v - kg h)), and so
-A^T M A^T of the op is -Y v_new^T, which saves the op's two BT^3 stages and their M.

Grid: persistent, 1-D. Task (chunk, value head): a program owns the chunk's two [BT, BT] blocks and its dv rows.
Tile: BT x BT, summed over BV columns of V (tiling.py); each product in a loop of its own.
Bytes per task: reads do and v [BT, V], v_new and Y twice [BT, V], b [BT] fp32; writes P and D [BT, BT],
dv [BT, V], db_v [BT] fp32.
Must hold: stages 3 (KEEP) and 4 ran before; P and D are workspace [HV, B*T, BT], db_v [HV, B*T], v_new and Y
[HV, B*T, V]; do, v and dv [B, T, HV, V].
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import decode_chunk, load_row, load_tile, store_row, store_tile


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def values(
    do, v, v_new, Y, b, P, D, dv, db_v, cu_seqlens, chunk_indices, scale, T, NT, R, n_chunks,
    HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), n_chunks * HV, tl.num_programs(0)):
        i_c = i_task // HV
        i_h = i_task - i_c * HV
        row, n_rows = decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT, PACKED)
        at_t = tl.cast(i_h, tl.int64) * R + row
        at_v = (row * HV + i_h) * V

        b_P = tl.zeros([BT, BT], dtype=tl.float32)
        for i_v in range(NV):
            o_c = i_v * BV
            b_do = load_tile(do + at_v + o_c, HV * V, n_rows, V - o_c, BT, BV)  # [BT, BV]
            b_vn = load_tile(v_new + at_t * V + o_c, V, n_rows, V - o_c, BT, BV)  # [BT, BV]
            b_P = tl.dot(b_do, tl.trans(b_vn), b_P, input_precision="ieee")
        b_P = tl.where(o_t[:, None] >= o_t[None, :], b_P * scale, 0.0)
        store_tile(P + at_t * BT, b_P, BT, n_rows, BT, BT, BT)

        b_D = tl.zeros([BT, BT], dtype=tl.float32)
        for i_v in range(NV):
            o_c = i_v * BV
            b_Y = load_tile(Y + at_t * V + o_c, V, n_rows, V - o_c, BT, BV)  # [BT, BV]
            b_vn = load_tile(v_new + at_t * V + o_c, V, n_rows, V - o_c, BT, BV)  # [BT, BV]
            b_D = tl.dot(b_Y, tl.trans(b_vn), b_D, input_precision="ieee")
        b_D = tl.where(o_t[:, None] > o_t[None, :], -b_D, 0.0)
        store_tile(D + at_t * BT, b_D, BT, n_rows, BT, BT, BT)

        b_b = load_row(b + at_t, n_rows, BT)[:, None]
        b_db = tl.zeros([BT], dtype=tl.float32)
        for i_v in range(NV):
            o_c = i_v * BV
            b_Yf = load_tile(Y + at_t * V + o_c, V, n_rows, V - o_c, BT, BV).to(tl.float32)  # [BT, BV]
            b_v = load_tile(v + at_v + o_c, HV * V, n_rows, V - o_c, BT, BV).to(tl.float32)  # [BT, BV]
            b_db += tl.sum(b_Yf * b_v, 1)
            store_tile(dv + at_v + o_c, b_b * b_Yf, HV * V, n_rows, V - o_c, BT, BV)
        store_row(db_v + at_t, b_db, n_rows, BT)
