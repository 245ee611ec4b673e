"""Forward: O = softmax(S) V and the log-sum-exp of each row, key block by key block.

Formula, per query head and block of rows, over the key blocks that the mask leaves:

    S = scale Q K^T (capped);  m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P
    O = O 2^(m - m') + P V;  at the end O / l and lse = (m + log2 l) ln 2

Grid: persistent, 1-D. Task (sequence, block of rows, query head): a program owns its rows of o and lse.
Tile: BM x BD of q, BN x BD of k, BN x BDV of v.
Bytes per task: q [BM, D] once; k, v [keys seen, D + DV]; o [BM, DV], lse [BM] fp32.
Must hold: every tensor contiguous; rows that belong to no sequence are filled beforehand.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import load_tile, store_row, store_tile
from mindspeed_kda.npu_kernels.flash_attention.blocks import LN2, decode_pair, scores, sees, span


@triton.jit
def _step(b_o, b_l, b_m, b_q, p_k, p_v, row, key, n_q, n_k, left, right, scale, softcap,
          HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
          CAP: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
          BDV: tl.constexpr):  # fmt: skip
    at = tl.cast(key, tl.int64) * HK
    b_k = load_tile(p_k + at * D, HK * D, n_k - key, D, BN, BD)  # [BN, BD]
    b_v = load_tile(p_v + at * DV, HK * DV, n_k - key, DV, BN, BDV)  # [BN, BDV]
    b_s, _b_t = scores(b_q, b_k, scale, softcap, CAP)
    if MASKED:
        m_s = sees(row, key, n_q, n_k, left, right, HAS_LEFT, HAS_RIGHT, BM, BN)
        b_s = tl.where(m_s, b_s, float("-inf"))
    b_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_safe[:, None])
    b_a = tl.exp2(b_m - b_safe)
    b_l = b_l * b_a + tl.sum(b_p, 1)
    b_o = b_o * b_a[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
    return b_o, b_l, b_new


@triton.jit(do_not_specialize=["TQ", "TK", "MB", "n_tasks", "left", "right"])
def flash_attention_fwd_kernel(
    q, k, v, o, lse, cu_q, cu_k, TQ, TK, MB, n_tasks, left, right, scale, softcap,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, CAP: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    for i_task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_b = i_task // H
        i_h = i_task - i_b * H
        i_n = i_b // MB
        row = (i_b - i_n * MB) * BM
        begin_q, n_q, begin_k, n_k = decode_pair(i_n, cu_q, cu_k, TQ, TK, PACKED)
        if row < n_q:
            i_hk = i_h // (H // HK)
            at_q = (begin_q + row) * H + i_h
            p_k = k + (tl.cast(begin_k, tl.int64) * HK + i_hk) * D
            p_v = v + (tl.cast(begin_k, tl.int64) * HK + i_hk) * DV
            b_q = load_tile(q + at_q * D, H * D, n_q - row, D, BM, BD)  # [BM, BD]
            b_o = tl.zeros([BM, BDV], dtype=tl.float32)
            b_l = tl.zeros([BM], dtype=tl.float32)
            b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
            begin, a, c, end = span(
                row, tl.minimum(n_q - row, BM), n_k - n_q, n_k, left, right, HAS_LEFT, HAS_RIGHT, BN
            )
            for key in range(begin, a, BN):
                b_o, b_l, b_m = _step(b_o, b_l, b_m, b_q, p_k, p_v, row, key, n_q, n_k, left, right, scale, softcap,
                                      HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, True, BM, BN, BD, BDV)  # fmt: skip
            for key in range(a, c, BN):
                b_o, b_l, b_m = _step(b_o, b_l, b_m, b_q, p_k, p_v, row, key, n_q, n_k, left, right, scale, softcap,
                                      HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, False, BM, BN, BD, BDV)  # fmt: skip
            for key in range(c, end, BN):
                b_o, b_l, b_m = _step(b_o, b_l, b_m, b_q, p_k, p_v, row, key, n_q, n_k, left, right, scale, softcap,
                                      HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, True, BM, BN, BD, BDV)  # fmt: skip
            b_d = tl.where(b_l == 0.0, 1.0, b_l)
            b_lse = tl.where(b_l == 0.0, float("-inf"), (b_m + tl.log2(b_d)) * LN2)
            store_tile(o + at_q * DV, b_o / b_d[:, None], H * DV, n_q - row, DV, BM, BDV)
            # lse is [B, H, TQ]; packed calls have one batch
            if PACKED:
                at_l = tl.cast(i_h, tl.int64) * TQ + begin_q + row
            else:
                at_l = (tl.cast(i_n, tl.int64) * H + i_h) * TQ + row
            store_row(lse + at_l, b_lse, n_q - row, BM)
