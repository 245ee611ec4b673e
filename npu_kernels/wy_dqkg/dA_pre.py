"""Stage 4: M, the masked gradient of A's products.

Formula, per chunk and value head; E = 2^; beta scales the columns:

    M = stril((dv v^T + dw (k * E^g)^T) diag(b))

Grid: persistent, 1-D. Task (chunk, value head): a program owns the chunk's [BT, BT] block of M.
Tile: BT x BT, summed over BV and then BK columns (tiling.py); each sum has its own accumulator and
loop: Ascend's compiler cannot start the second sum from the first where K, V fit one block.
Bytes per task: reads dv, v [BT, V], dw, k [BT, K], g [BT, K] fp32, beta [BT] fp32; writes M [BT, BT].
Must hold: stage 1 ran before; every tensor contiguous; dw, beta_t and M are workspace [HV, B*T, ...].
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import decode_chunk, load_row, load_tile, store_tile


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def chunk_kda_bwd_kernel_wy_dA_pre(
    k, v, g, dv, dw, beta_t, M, cu_seqlens, chunk_indices, T, NT, R, n_chunks,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    main = k.dtype.element_ty
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), n_chunks * HV, tl.num_programs(0)):
        i_c = i_task // HV
        i_h = i_task - i_c * HV
        row, n_rows = decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT, PACKED)
        at_t = tl.cast(i_h, tl.int64) * R + row
        at_v = (row * HV + i_h) * V
        at_k = (row * HV + i_h) * K
        at_qk = (row * H + i_h // (HV // H)) * K
        b_vv = tl.zeros([BT, BT], dtype=tl.float32)
        for i_v in range(NV):
            n_v = V - i_v * BV
            b_dv = load_tile(dv + at_v + i_v * BV, HV * V, n_rows, n_v, BT, BV)  # [BT, BV]
            b_v = load_tile(v + at_v + i_v * BV, HV * V, n_rows, n_v, BT, BV)  # [BT, BV]
            b_vv = tl.dot(b_dv, tl.trans(b_v), b_vv, input_precision=PREC)
        b_kk = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(NK):
            n_k = K - i_k * BK
            b_dw = load_tile(dw + at_t * K + i_k * BK, K, n_rows, n_k, BT, BK)  # [BT, BK]
            b_g = load_tile(g + at_k + i_k * BK, HV * K, n_rows, n_k, BT, BK)  # [BT, BK]
            b_k = load_tile(k + at_qk + i_k * BK, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
            b_kg = (b_k * tl.exp2(b_g)).to(main)
            b_kk = tl.dot(b_dw, tl.trans(b_kg), b_kk, input_precision=PREC)
        b_b = load_row(beta_t + at_t, n_rows, BT)  # [BT]
        # scaled before they are added: a bare sum of two products is folded into one accumulator again
        b_M = b_vv * b_b[None, :] + b_kk * b_b[None, :]
        b_M = tl.where(o_t[:, None] > o_t[None, :], b_M, 0.0)
        store_tile(M + at_t * BT, b_M, BT, n_rows, BT, BT, BT)
