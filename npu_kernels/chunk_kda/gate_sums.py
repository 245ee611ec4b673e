"""Stage 10, the second step of the gate parameters' sums: dA_log and ddt_bias.

Formula, per value head, over the chunks c of stage 7:   log_k = sum_c sum_log          ddt_bias = sum_c sum_bias

Grid: persistent, 1-D, vector cores only. Task (value head): a program adds its head's rows in the order of the chunks,
so that the result repeats bit for bit; no atomics. The K numbers of log_k are left to torch's sum: a lone fp32 result
would be stored element by element on Ascend.
Tile: BR chunks x BK channels. Bytes per task: reads 2 x [chunks, K] fp32; writes 2 K numbers.
Must hold: stage 7 ran before; sums are workspace [chunks, HV, K].
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import load_tile, store_row


@triton.jit
def _sum_chunks(sums, n_chunks, n_k, stride: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):
    """[BK] sum over n_chunks rows."""
    b_s = tl.zeros([BK], dtype=tl.float32)
    for i_c in range((n_chunks + BR - 1) // BR):
        at = tl.cast(i_c * BR, tl.int64) * stride
        b_s += tl.sum(load_tile(sums + at, stride, n_chunks - i_c * BR, n_k, BR, BK), 0)  # [BR, BK]
    return b_s


@triton.jit(do_not_specialize=["n_chunks"])
def gate_sums(
    sum_bias, sum_log, ddt_bias, log_k, n_chunks, HV: tl.constexpr, K: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    for i_h in range(tl.program_id(0), HV, tl.num_programs(0)):
        for i_k in range((K + BK - 1) // BK):
            at = i_h * K + i_k * BK
            n_k = K - i_k * BK
            store_row(log_k + at, _sum_chunks(sum_log + at, n_chunks, n_k, HV * K, BR, BK), n_k, BK)
            if BIAS:
                store_row(ddt_bias + at, _sum_chunks(sum_bias + at, n_chunks, n_k, HV * K, BR, BK), n_k, BK)
