"""Stage 3, the state recurrence, and the output with it.

Formula, chunk after chunk of one sequence and value head, h the state at a chunk's start:

    hf = first * h        v_new = A (b * (v - kg hf))        o = qg hf + Aqk v_new        h <- decay * h + kr^T v_new

Grid: persistent, 1-D. Task (sequence, value head, V block): a program owns the [K, BV] columns of the state for the
whole sequence; nothing else is sequential. A sequence of n tokens takes ceil(n / BT) steps.
Tile: K whole (BS = power of two), BV from tiling.py.
Bytes per step and V block: reads kg, kr [BT, K], A [BT, BT], v [BT, BV], first and decay [K], b [BT], with OUT also qg
[BT, K] and Aqk [BT, BT]; writes o [BT, BV] with OUT, h [K, BV] and v_new [BT, BV] with KEEP.
Fused: w = A (b k E^g) and u = A (b v) are never formed (a pass that reads k, g, v, A and writes w, u: 2 x BT x (K + V)
elements less, again in backward), and with OUT neither h nor v_new is stored (NT x K x V + T x V elements less). The
operands come decayed from stage 1, so that the chain between two steps is three products and one subtraction.
Must hold: stages 1 and 2 ran before; h0 and ht fp32, [N, HV, K, V] or V-first; h is workspace [slots, HV, K, V], v_new
[HV, B*T, V], o [B, T, HV, V].
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import (
    decode_sequence,
    load_row,
    load_state,
    load_tile,
    state_offset,
    store_state,
    store_tile,
)


@triton.jit(do_not_specialize=["T", "NT", "R", "n_seqs"])
def scan(
    v, A, Aqk, qg, kg, kr, first, decay, b, h0, o, ht, h, v_new, cu_seqlens, T, NT, R, n_seqs,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
    HAS_H0: tl.constexpr, HAS_HT: tl.constexpr, OUT: tl.constexpr, KEEP: tl.constexpr, V_FIRST: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    main = v.dtype.element_ty
    for i_task in range(tl.program_id(0), n_seqs * HV * NV, tl.num_programs(0)):
        i_s = i_task // NV
        o_v = (i_task - i_s * NV) * BV
        n_v = V - o_v
        i_n = i_s // HV
        i_h = i_s - i_n * HV
        begin, n_tokens, slot = decode_sequence(i_n, cu_seqlens, T, NT, BT, PACKED)
        at_state = tl.cast(i_s, tl.int64) * (K * V) + state_offset(0, o_v, K, V, V_FIRST)
        b_h = tl.zeros([BS, BV], dtype=tl.float32)
        if HAS_H0:
            b_h += load_state(h0 + at_state, K, n_v, K, V, BS, BV, V_FIRST)  # [BS, BV]

        for i_t in range((n_tokens + BT - 1) // BT):
            row = begin + i_t * BT
            n_rows = tl.minimum(n_tokens - i_t * BT, BT)
            at_t = tl.cast(i_h, tl.int64) * R + row
            at_v = (row * HV + i_h) * V + o_v
            at_chunk = (slot + i_t) * HV + i_h
            if KEEP:
                store_tile(h + at_chunk * (K * V) + o_v, b_h, V, K, n_v, BS, BV)
            b_hf = (b_h * load_row(first + at_chunk * K, K, BS)[:, None]).to(main)
            b_kg = load_tile(kg + at_t * K, K, n_rows, K, BT, BS)  # [BT, BS]
            b_c = tl.dot(b_kg, b_hf, input_precision="ieee")
            b_v = load_tile(v + at_v, HV * V, n_rows, n_v, BT, BV).to(tl.float32)  # [BT, BV]
            b_c = (load_row(b + at_t, n_rows, BT)[:, None] * (b_v - b_c)).to(main)
            b_A = load_tile(A + at_t * BT, BT, n_rows, BT, BT, BT)  # [BT, BT]
            b_vn = tl.dot(b_A, b_c, input_precision="ieee").to(main)
            if KEEP:
                store_tile(v_new + at_t * V + o_v, b_vn, V, n_rows, n_v, BT, BV)
            if OUT:
                b_qg = load_tile(qg + at_t * K, K, n_rows, K, BT, BS)  # [BT, BS]
                b_o = tl.dot(b_qg, b_hf, input_precision="ieee")
                b_P = load_tile(Aqk + at_t * BT, BT, n_rows, BT, BT, BT)  # [BT, BT]
                b_o = tl.dot(b_P, b_vn, b_o, input_precision="ieee")
                store_tile(o + at_v, b_o, HV * V, n_rows, n_v, BT, BV)
            b_kr = load_tile(kr + at_t * K, K, n_rows, K, BT, BS)  # [BT, BS]
            b_h *= load_row(decay + at_chunk * K, K, BS)[:, None]
            b_h += tl.dot(tl.trans(b_kr), b_vn, input_precision="ieee")
        if HAS_HT:
            store_state(ht + at_state, b_h, K, n_v, K, V, BS, BV, V_FIRST)
