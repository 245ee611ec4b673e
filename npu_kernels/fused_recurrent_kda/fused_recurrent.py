"""The only stage of ``fused_recurrent_kda``: one token after the other, for generation.

Formula, per token of one sequence and value head, S the state [K, V], all in fp32:

    r = 1 / sqrt(sum_d x^2 + 1e-6) for q and k       S <- exp(a) * S               d = b * (v - S^T k r_k)
    a = gate(x), b = c * sigmoid(beta)               S <- S + (k r_k) d^T          o = scale * S^T q r_q

Grid: persistent, 1-D, vector cores only. Task (sequence, value head, V block): a program owns the state's BV columns
for the whole sequence, so that the state goes through memory once a call and not once a token.
Tile: BV x BS, K whole (BS = power of two), turned so that q, k and the decay are rows; BV from tiling.py.
Bytes per token and V block: reads q, k, x [K], v [BV], beta; writes o [BV]. Per task: dt_bias and rates [K], the state
[K, BV] fp32 in and out.
Fused: norm, gate, sigmoid and both products of a step; nothing is kept between tokens but the state.
Must hold: every tensor contiguous; h0 and ht fp32, [N, HV, K, V] or V-first; rates [HV, K]. Rows of no sequence are not
written.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.chunk_kda.gates import log_decay, sigmoid
from mindspeed_kda.npu_kernels.common import (
    decode_sequence,
    load_row,
    load_state_t,
    load_tile,
    state_offset,
    store_row,
    store_tile,
)

ROW = tl.constexpr(16)


@triton.jit
def _same(b_x, BV: tl.constexpr, SIZE: tl.constexpr):
    """[BV]: the sum of [1, SIZE], once for each row. A vector, since Ascend would hold a lone sum as scalar code."""
    return tl.sum(tl.broadcast_to(b_x, [BV, SIZE]), 1)


@triton.jit(do_not_specialize=["T", "n_seqs"])
def fused_recurrent(
    q, k, v, x, beta, rates, dt_bias, h0, o, ht, cu_seqlens, scale, bound, beta_scale, T, n_seqs,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr, HAS_H0: tl.constexpr,
    HAS_HT: tl.constexpr, V_FIRST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    GROUP: tl.constexpr = HV // H
    for i_task in range(tl.program_id(0), n_seqs * HV * NV, tl.num_programs(0)):
        i_s = i_task // NV
        o_v = (i_task - i_s * NV) * BV
        n_v = V - o_v
        i_n = i_s // HV
        i_h = i_s - i_n * HV
        begin, n_tokens, _ = decode_sequence(i_n, cu_seqlens, T, 0, 1, PACKED)
        at_state = tl.cast(i_s, tl.int64) * (K * V) + state_offset(0, o_v, K, V, V_FIRST)
        b_h = tl.zeros([BV, BS], dtype=tl.float32)
        if HAS_H0:
            b_h += load_state_t(h0 + at_state, K, n_v, K, V, BS, BV, V_FIRST)  # [BV, BS]
        b_rate = 1.0
        if GATE != 0:
            b_rate = load_tile(rates + i_h * K, K, 1, K, 1, BS)  # [1, BS]
        if BIAS:
            b_bias = load_tile(dt_bias + i_h * K, K, 1, K, 1, BS)  # [1, BS]

        for i_t in range(n_tokens):
            at_h = (begin + i_t) * HV + i_h
            at_qk = ((begin + i_t) * H + i_h // GROUP) * K
            b_z = load_tile(x + at_h * K, K, 1, K, 1, BS).to(tl.float32)  # [1, BS]
            if BIAS:
                b_z += b_bias
            b_h *= tl.exp(log_decay(b_z, b_rate, bound, GATE))
            b_b = load_tile(beta + at_h, ROW, 1, 1, 1, ROW).to(tl.float32)  # [1, ROW], the first alone
            b_b = _same(b_b, BV, ROW)  # [BV]
            if SIGMOID:
                b_b = beta_scale * sigmoid(b_b)
            b_k = load_tile(k + at_qk, K, 1, K, 1, BS).to(tl.float32)  # [1, BS]
            b_q = load_tile(q + at_qk, K, 1, K, 1, BS).to(tl.float32)  # [1, BS]
            b_v = load_row(v + at_h * V + o_v, n_v, BV).to(tl.float32)  # [BV]
            b_y = tl.sum(b_h * b_k, 1)
            if NORM:
                b_rk = 1.0 / tl.sqrt(_same(b_k * b_k, BV, BS) + 1e-6)  # [BV]
                b_d = b_b * (b_v - b_y * b_rk) * b_rk
            else:
                b_d = b_b * (b_v - b_y)
            b_h += b_d[:, None] * b_k
            b_o = scale * tl.sum(b_h * b_q, 1)
            if NORM:
                b_o *= 1.0 / tl.sqrt(_same(b_q * b_q, BV, BS) + 1e-6)
            store_row(o + at_h * V + o_v, b_o, n_v, BV)
        if HAS_HT:
            if V_FIRST:
                store_tile(ht + at_state, b_h, K, n_v, K, BV, BS)
            else:
                store_tile(ht + at_state, tl.trans(b_h), V, K, n_v, BS, BV)
