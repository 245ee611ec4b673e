"""Stage 2: dv and the first part of db.

Formula, per chunk and value head, with A's transposed block:

    Y  = A^T dv          dv_out = b * Y          db = sum_v Y * v

Grid: persistent, 1-D. Task (chunk, value head): a program owns the chunk's rows of dv_out and db.
Tile: BT x BT x BV from tiling.py. A is loaded anew in each V block, since a product may overwrite its left operand.
Bytes per task: reads A [BT, BT] once per V block, dv, v [BT, V], beta [BT] fp32; writes dv_out [BT, V], db [BT] fp32.
Must hold: every tensor contiguous; beta_t and db_t are workspace [HV, B*T], so that a chunk's scalars are contiguous.
Columns of A from the chunk's length on may hold anything and read as 0.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import decode_chunk, load_row, load_tile, store_row, store_tile


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def chunk_kda_bwd_kernel_wy_dv2_db(
    v, A, dv, beta_t, dv_out, db_t, cu_seqlens, chunk_indices, T, NT, R, n_chunks,
    HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    for i_task in range(tl.program_id(0), n_chunks * HV, tl.num_programs(0)):
        i_c = i_task // HV
        i_h = i_task - i_c * HV
        row, n_rows = decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT, PACKED)
        at_t = tl.cast(i_h, tl.int64) * R + row
        at_A = (row * HV + i_h) * BT
        at_v = (row * HV + i_h) * V
        b_b = load_row(beta_t + at_t, n_rows, BT)  # [BT]
        b_db = tl.zeros([BT], dtype=tl.float32)
        for i_v in range(NV):
            b_A = load_tile(A + at_A, HV * BT, n_rows, n_rows, BT, BT)  # [BT, BT]
            b_dv = load_tile(dv + at_v + i_v * BV, HV * V, n_rows, V - i_v * BV, BT, BV)  # [BT, BV]
            b_y = tl.dot(tl.trans(b_A), b_dv, input_precision=PREC)
            b_v = load_tile(v + at_v + i_v * BV, HV * V, n_rows, V - i_v * BV, BT, BV).to(tl.float32)  # [BT, BV]
            b_db += tl.sum(b_y * b_v, 1)
            store_tile(dv_out + at_v + i_v * BV, b_y * b_b[:, None], HV * V, n_rows, V - i_v * BV, BT, BV)
        store_row(db_t + at_t, b_db, n_rows, BT)
