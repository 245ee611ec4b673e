"""Stage 5: P, M times A's transposed block.

Formula, per chunk and value head:    P = M A^T,   P_ij = sum_m M_im A_jm

Grid: persistent, 1-D. Task (chunk, value head, row tile i, column tile j): a program owns one [BDA, BDA] tile of P.
Tile: BDA = BM = BN from tiling.py. M is strictly lower triangular, so the sum ends with the row tile's own block.
Bytes per task: reads up to i + 1 tiles of M and of A [BDA, BDA]; writes one of P.
Must hold: stage 4 ran before; every tensor contiguous; M and P are workspace [HV, B*T, BT]. Columns of A from the
chunk's length on may hold anything and read as 0.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import decode_chunk, load_tile, store_tile


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def chunk_kda_bwd_kernel_dA_post_right(
    A, M, P, cu_seqlens, chunk_indices, T, NT, R, n_chunks,
    HV: tl.constexpr, BT: tl.constexpr, BDA: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    NB: tl.constexpr = BT // BDA
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
        row_i = tl.minimum(i_i * BDA, last)
        row_j = tl.minimum(i_j * BDA, last)
        b_P = tl.zeros([BDA, BDA], dtype=tl.float32)
        for i_m in range(i_i + 1):
            n_m = n_rows - i_m * BDA
            p_M = M + (at_t + row_i) * BT + i_m * BDA
            b_M = load_tile(p_M, BT, n_rows - i_i * BDA, n_m, BDA, BDA)  # [BDA, BDA]
            p_A = A + ((row + row_j) * HV + i_h) * BT + i_m * BDA
            b_A = load_tile(p_A, HV * BT, n_rows - i_j * BDA, n_m, BDA, BDA)  # [BDA, BDA]
            b_P = tl.dot(b_M, tl.trans(b_A), b_P, input_precision=PREC)
        store_tile(P + (at_t + row_i) * BT + i_j * BDA, b_P, BT, n_rows - i_i * BDA, BDA, BDA, BDA)
