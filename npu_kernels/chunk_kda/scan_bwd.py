"""Stage 4, the reverse recurrence: gradient of the states, and Y, the gradient of b * (v - kg h).

Formula, from a sequence's last chunk to its first, dS starting at dht; per value head:

    dh = dS          Y = A^T (Aqk^T do + kr dS)          dS <- decay * dS + first * (qg^T do - kg^T (b * Y))

Grid: persistent, 1-D. Task (sequence, value head, V block): a program owns the [K, BV] columns of dS.
Tile: K whole (BS), BV from tiling.py.
Bytes per step and V block: reads qg, kg, kr [BT, K], A, Aqk [BT, BT], do [BT, BV], first and decay [K], b [BT];
writes dh [K, BV] and Y [BT, BV].
Fused: Aqk^T do (dv_loc) and A^T dv, which are passes of their own elsewhere; dv and w are never formed, since
w^T dv = kg^T (b * Y) (a pass over k, g, A and 3 x BT x V + BT x K elements less).
Must hold: stages 1 and 2 ran before; dht and dh0 fp32, [N, HV, K, V] or V-first; dh is workspace [slots, HV, K, V], Y
[HV, B*T, V]; do contiguous [B, T, HV, V].
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
def scan_bwd(
    do, A, Aqk, qg, kg, kr, first, decay, b, dht, dh0, dh, Y, cu_seqlens, T, NT, R, n_seqs,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
    HAS_DHT: tl.constexpr, HAS_DH0: tl.constexpr, V_FIRST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    main = do.dtype.element_ty
    for i_task in range(tl.program_id(0), n_seqs * HV * NV, tl.num_programs(0)):
        i_s = i_task // NV
        o_v = (i_task - i_s * NV) * BV
        n_v = V - o_v
        i_n = i_s // HV
        i_h = i_s - i_n * HV
        begin, n_tokens, slot = decode_sequence(i_n, cu_seqlens, T, NT, BT, PACKED)
        at_state = tl.cast(i_s, tl.int64) * (K * V) + state_offset(0, o_v, K, V, V_FIRST)
        b_dS = tl.zeros([BS, BV], dtype=tl.float32)
        if HAS_DHT:
            b_dS += load_state(dht + at_state, K, n_v, K, V, BS, BV, V_FIRST)  # [BS, BV]

        n_steps = (n_tokens + BT - 1) // BT
        for i_r in range(n_steps):
            i_t = n_steps - 1 - i_r
            row = begin + i_t * BT
            n_rows = tl.minimum(n_tokens - i_t * BT, BT)
            at_t = tl.cast(i_h, tl.int64) * R + row
            at_v = (row * HV + i_h) * V + o_v
            at_chunk = (slot + i_t) * HV + i_h
            b_dSm = b_dS.to(main)
            store_tile(dh + at_chunk * (K * V) + o_v, b_dSm, V, K, n_v, BS, BV)
            b_do = load_tile(do + at_v, HV * V, n_rows, n_v, BT, BV)  # [BT, BV]
            b_P = load_tile(Aqk + at_t * BT, BT, n_rows, BT, BT, BT)  # [BT, BT]
            b_dv = tl.dot(tl.trans(b_P), b_do, input_precision="ieee")
            b_kr = load_tile(kr + at_t * K, K, n_rows, K, BT, BS)  # [BT, BS]
            b_dv = tl.dot(b_kr, b_dSm, b_dv, input_precision="ieee").to(main)
            b_A = load_tile(A + at_t * BT, BT, n_rows, BT, BT, BT)  # [BT, BT]
            b_Y = tl.dot(tl.trans(b_A), b_dv, input_precision="ieee")
            store_tile(Y + at_t * V + o_v, b_Y, V, n_rows, n_v, BT, BV)
            b_Yb = (-load_row(b + at_t, n_rows, BT)[:, None] * b_Y).to(main)
            b_qg = load_tile(qg + at_t * K, K, n_rows, K, BT, BS)  # [BT, BS]
            b_u = tl.dot(tl.trans(b_qg), b_do, input_precision="ieee")
            b_kg = load_tile(kg + at_t * K, K, n_rows, K, BT, BS)  # [BT, BS]
            b_u = tl.dot(tl.trans(b_kg), b_Yb, b_u, input_precision="ieee")
            b_dS *= load_row(decay + at_chunk * K, K, BS)[:, None]
            b_dS += load_row(first + at_chunk * K, K, BS)[:, None] * b_u
        if HAS_DH0:
            store_state(dh0 + at_state, b_dS, K, n_v, K, V, BS, BV, V_FIRST)
