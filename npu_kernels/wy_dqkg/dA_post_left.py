"""Stage 6: dA, A's transposed block times P.

Formula, per chunk and value head:    dA = -stril(A^T P),   dA_ij = -sum_m A_mi P_mj for i > j

Grid: persistent, 1-D. Task (chunk, value head, row tile i, column tile j): a program owns one [BDA, BDA] tile of dA.
Tile: BDA = BM = BN from tiling.py. Tiles above the diagonal sum nothing and are written as 0.
Bytes per task: reads the tiles of A and of P [BDA, BDA] of each block row; writes one of dA fp32.
Must hold: stage 5 ran before; every tensor contiguous; P is workspace [HV, B*T, BT]. A need not be triangular: the sum
runs over all rows of the chunk.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import decode_chunk, load_tile, store_tile


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def chunk_kda_bwd_kernel_dA_post_left(
    A, P, dA, cu_seqlens, chunk_indices, T, NT, R, n_chunks,
    HV: tl.constexpr, BT: tl.constexpr, BDA: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    NB: tl.constexpr = BT // BDA
    o_i = tl.arange(0, BDA)
    for i_task in range(tl.program_id(0), n_chunks * HV * (NB * NB), tl.num_programs(0)):
        i_ch = i_task // (NB * NB)
        i_tile = i_task - i_ch * (NB * NB)
        i_i = i_tile // NB
        i_j = i_tile - i_i * NB
        i_c = i_ch // HV
        i_h = i_ch - i_c * HV
        row, n_rows = decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT, PACKED)
        at_t = tl.cast(i_h, tl.int64) * R + row
        last = tl.maximum(n_rows - 1, 0)
        n_blocks = tl.minimum(tl.cdiv(n_rows, BDA), tl.maximum(i_i - i_j + 1, 0) * NB)
        b_dA = tl.zeros([BDA, BDA], dtype=tl.float32)
        for i_m in range(n_blocks):
            n_m = n_rows - i_m * BDA
            p_A = A + ((row + i_m * BDA) * HV + i_h) * BT + i_i * BDA
            b_A = load_tile(p_A, HV * BT, n_m, n_rows - i_i * BDA, BDA, BDA)  # [BDA, BDA]
            b_P = load_tile(P + (at_t + i_m * BDA) * BT + i_j * BDA, BT, n_m, BDA, BDA, BDA)  # [BDA, BDA]
            b_dA = tl.dot(tl.trans(b_A), b_P, b_dA, input_precision=PREC)
        below = (i_i * BDA + o_i)[:, None] > (i_j * BDA + o_i)[None, :]
        b_dA = tl.where(below, -b_dA, 0.0)
        p_dA = dA + ((row + tl.minimum(i_i * BDA, last)) * HV + i_h) * BT + i_j * BDA
        store_tile(p_dA, b_dA, HV * BT, n_rows - i_i * BDA, BDA, BDA, BDA)
