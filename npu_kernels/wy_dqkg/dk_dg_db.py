"""Stage 3: adds the part that runs through w to dk, dg and db.

Formula, per chunk and value head, with A's transposed block; E = 2^:

    X   = A^T dw
    dk += b * E^g * X          dg += k * b * E^g * X          db += sum_k X * k * E^g

Grid: persistent, 1-D. Task (chunk, value head): a program owns the chunk's rows of dk, dg and db.
Tile: BT x BT x BK from tiling.py. A is loaded anew in each K block, since a product may overwrite its left operand.
Bytes per task: reads A [BT, BT] once per K block, dw, k [BT, K], g [BT, K] fp32, beta [BT] fp32; reads and writes dk,
dg [BT, K] fp32 and db [BT] fp32.
Must hold: stages 1 and 2 ran before; every tensor contiguous; dw, beta_t, db_t are workspace [HV, B*T, ...].
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import decode_chunk, load_row, load_tile, store_row, store_tile


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def chunk_kda_bwd_kernel_wy_dk_dg_db(
    k, g, A, dw, beta_t, dk, dg, db_t, cu_seqlens, chunk_indices, T, NT, R, n_chunks,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    for i_task in range(tl.program_id(0), n_chunks * HV, tl.num_programs(0)):
        i_c = i_task // HV
        i_h = i_task - i_c * HV
        row, n_rows = decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT, PACKED)
        at_t = tl.cast(i_h, tl.int64) * R + row
        at_A = (row * HV + i_h) * BT
        at_k = (row * HV + i_h) * K
        at_qk = (row * H + i_h // (HV // H)) * K
        b_b = load_row(beta_t + at_t, n_rows, BT)  # [BT]
        b_db = load_row(db_t + at_t, n_rows, BT)  # [BT]
        for i_k in range(NK):
            n_k = K - i_k * BK
            b_A = load_tile(A + at_A, HV * BT, n_rows, n_rows, BT, BT)  # [BT, BT]
            b_dw = load_tile(dw + at_t * K + i_k * BK, K, n_rows, n_k, BT, BK)  # [BT, BK]
            b_x = tl.dot(tl.trans(b_A), b_dw, input_precision=PREC)
            b_g = load_tile(g + at_k + i_k * BK, HV * K, n_rows, n_k, BT, BK)  # [BT, BK]
            b_k = load_tile(k + at_qk + i_k * BK, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
            b_x *= tl.exp2(b_g)
            b_db += tl.sum(b_x * b_k, 1)
            b_x *= b_b[:, None]
            b_dk = load_tile(dk + at_k + i_k * BK, HV * K, n_rows, n_k, BT, BK)  # [BT, BK]
            store_tile(dk + at_k + i_k * BK, b_dk + b_x, HV * K, n_rows, n_k, BT, BK)
            b_dg = load_tile(dg + at_k + i_k * BK, HV * K, n_rows, n_k, BT, BK)  # [BT, BK]
            store_tile(dg + at_k + i_k * BK, b_dg + b_k * b_x, HV * K, n_rows, n_k, BT, BK)
        store_row(db_t + at_t, b_db, n_rows, BT)
