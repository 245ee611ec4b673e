"""Stage 1, the transforms of the inputs: norms, gate, chunk cumsum, sigmoid of beta, and the decayed copies of q and k.

Formula, per chunk of rows up to L and value head; E = 2^:

    r = 1 / sqrt(sum_d x^2 + 1e-6) for q and k          a = gate(x) / ln 2     b = c * sigmoid(beta)
    g = cumsum(a)                    first = E^(g_0)              decay = E^(g_L)
    qg = scale * q r_q * E^(g - g_0)             kg = k r_k * E^(g - g_0)             kr = k r_k * E^(g_L - g)

In fp32 g_L - g is a sum of its own from the chunk's end: the difference carries the rounding of all that the chunk has
decayed into its last rows, which decay least (final_state off by 8.7e-7, against 1e-7).

The products that take qg and kg put E^(g_0) on the state, in fp32: at -10 per token it alone would make every fp16
operand subnormal (dh0 off by 7e-3).

Grid: persistent, 1-D, vector cores only. Task (chunk, value head): a program owns the chunk's rows, K block by K block.
Tile: BT x BK from tiling.py.
Bytes per task: reads q, k (twice with NORM = 1 and K > BK), x [BT, K] and beta [BT]; writes a (KEEP_A) and g
[BT, K] fp32, qg, kg and kr [BT, K] in the main type, first and decay [K] and b, r_q, r_k [BT] fp32.
Fused: norm, gate, cumsum, sigmoid and the three decayed copies, which are separate passes elsewhere; the normalised q
and k are never stored (2 x 2 x BT x K elements less), and the scans that follow load product operands only.
Must hold: every tensor contiguous; a, g, qg, kg, kr are workspace [HV, B*T, K], b [HV, B*T], r_q and r_k [H, B*T],
first and decay [slots, HV, K]; rows past the chunk are never stored. NORM: 0 none, 1 computed here, 2 read.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.chunk_kda.gates import LOG2E, MIN_LOG2, log_decay, sigmoid
from mindspeed_kda.npu_kernels.common import decode_chunk, load_row, load_tile, state_slot, store_row, store_tile


@triton.jit
def _rnorm(x, stride: tl.constexpr, n_rows, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """[BT] reciprocal norms of rows of K elements from x."""
    b_s = tl.zeros([BT], dtype=tl.float32)
    for i_k in range((K + BK - 1) // BK):
        b_x = load_tile(x + i_k * BK, stride, n_rows, K - i_k * BK, BT, BK).to(tl.float32)  # [BT, BK]
        b_s += tl.sum(b_x * b_x, 1)
    return 1.0 / tl.sqrt(b_s + 1e-6)


@triton.jit(do_not_specialize=["T", "NT", "R", "n_chunks"])
def prepare(
    q, k, x, beta, rates, dt_bias, a, g, qg, kg, kr, first, decay, b, rq, rk, cu_seqlens, chunk_indices,
    scale, bound, beta_scale, T, NT, R, n_chunks,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr, KEEP_A: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    GROUP: tl.constexpr = HV // H
    o_t = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), n_chunks * HV, tl.num_programs(0)):
        i_c = i_task // HV
        i_h = i_task - i_c * HV
        i_hq = i_h // GROUP
        row, n_rows = decode_chunk(i_c, cu_seqlens, chunk_indices, T, NT, BT, PACKED)
        slot = state_slot(i_c, row, chunk_indices, BT, PACKED)
        at_qk = (row * H + i_hq) * K
        at_x = (row * HV + i_h) * K
        at_t = tl.cast(i_h, tl.int64) * R + row
        at_r = tl.cast(i_hq, tl.int64) * R + row
        at_decay = (slot * HV + i_h) * K
        last = tl.maximum(n_rows - 1, 0)
        m_t = (o_t < n_rows)[:, None]

        b_b = tl.load(beta + row * HV + i_h + o_t * HV, mask=o_t < n_rows, other=0.0).to(tl.float32)  # [BT]
        if SIGMOID:
            b_b = beta_scale * sigmoid(b_b)
        store_row(b + at_t, b_b, n_rows, BT)
        if NORM == 1:
            b_rq = _rnorm(q + at_qk, H * K, n_rows, K, BT, BK)
            b_rk = _rnorm(k + at_qk, H * K, n_rows, K, BT, BK)
            if i_h == i_hq * GROUP:
                store_row(rq + at_r, b_rq, n_rows, BT)
                store_row(rk + at_r, b_rk, n_rows, BT)
        if NORM == 2:
            b_rq = load_row(rq + at_r, n_rows, BT)
            b_rk = load_row(rk + at_r, n_rows, BT)

        for i_k in range(NK):
            o_c = i_k * BK
            n_k = K - o_c
            b_z = load_tile(x + at_x + o_c, HV * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
            b_rate = 1.0
            if GATE != 0:
                b_rate = load_row(rates + i_h * K + o_c, n_k, BK)[None, :]
            if BIAS:
                b_z += load_row(dt_bias + i_h * K + o_c, n_k, BK)[None, :]
            b_a = tl.maximum(log_decay(b_z, b_rate, bound, GATE) * LOG2E, MIN_LOG2)
            b_a = tl.where(m_t, b_a, 0.0)
            if KEEP_A:
                store_tile(a + at_t * K + o_c, b_a, K, n_rows, n_k, BT, BK)
            b_g = tl.cumsum(b_a, 0)
            store_tile(g + at_t * K + o_c, b_g, K, n_rows, n_k, BT, BK)
            b_last = tl.sum(tl.where((o_t == last)[:, None], b_g, 0.0), 0)  # [BK]
            b_first = tl.sum(tl.where((o_t == 0)[:, None], b_g, 0.0), 0)  # [BK]
            if n_rows > 0:
                store_row(first + at_decay + o_c, tl.exp2(b_first), n_k, BK)
                store_row(decay + at_decay + o_c, tl.exp2(b_last), n_k, BK)
            b_eg = tl.exp2(b_g - b_first[None, :])
            b_q = load_tile(q + at_qk + o_c, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
            if NORM != 0:
                b_q *= b_rq[:, None]
            store_tile(qg + at_t * K + o_c, b_q * b_eg * scale, K, n_rows, n_k, BT, BK)
            b_k = load_tile(k + at_qk + o_c, H * K, n_rows, n_k, BT, BK).to(tl.float32)  # [BT, BK]
            if NORM != 0:
                b_k *= b_rk[:, None]
            store_tile(kg + at_t * K + o_c, b_k * b_eg, K, n_rows, n_k, BT, BK)
            # rows past the chunk have g = g_L, so the exponent is never above 0
            if q.dtype.element_ty == tl.float32:
                b_rest = tl.cumsum(b_a, 0, reverse=True) - b_a
            else:
                b_rest = b_last[None, :] - b_g
            store_tile(kr + at_t * K + o_c, b_k * tl.exp2(b_rest), K, n_rows, n_k, BT, BK)
