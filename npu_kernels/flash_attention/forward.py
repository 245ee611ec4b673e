"""Forward: O = softmax(S) V and the log-sum-exp of each row, key block by key block.

Formula, per query head and block of rows, over the key blocks that the mask leaves:

    S = scale Q K^T (capped);  m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P
    O = O 2^(m - m') + P V;  at the end O / l and lse = (m + log2 l) ln 2

In fp32 S stays natural until it is a difference (blocks.power).

Grid: 1-D; a program per task on a GPU, persistent elsewhere. Task (sequence, query head, block of rows): a program owns
its rows of o and lse.
Tile: BM x BD of q, BN x BD of k, BN x BDV of v (tiling.ATTENTION).
Bytes per task: q [BM, D] once; k, v [keys seen, D + DV]; o [BM, DV], lse [BM] fp32.
Must hold: every tensor contiguous; rows that belong to no sequence are filled beforehand; RELOAD on Ascend, where a
product may overwrite its left operand: q is then read in every round.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import load_tile, store_row, store_tile
from mindspeed_kda.npu_kernels.flash_attention.blocks import (
    LN2,
    decode_pair,
    decode_task,
    load_block,
    power,
    products,
    row_offset,
    scores,
    sees,
    span,
)


@triton.jit
def _step(b_o, b_l, b_m, b_q, p_q, p_k, p_v, row, key, n_q, n_k, left, right, factor, cap, inner,
          H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr,
          HAS_RIGHT: tl.constexpr, CAP: tl.constexpr, RELOAD: tl.constexpr,
          PARTS: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr,
          BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr):  # fmt: skip
    EXACT: tl.constexpr = p_q.dtype.element_ty == tl.float32
    at = tl.cast(key, tl.int64) * HK
    if RELOAD:
        b_q = load_tile(p_q, H * D, n_q - row, D, BM, BD)  # [BM, BD]
    b_k = load_block(p_k + at * D, HK * D, n_k - key, D, BN, BD, not MASKED)  # [BN, BD]
    b_v = load_block(p_v + at * DV, HK * DV, n_k - key, DV, BN, BDV, not MASKED)  # [BN, BDV]
    b_s = products(b_q, b_k, PARTS, BM, BN, BD)
    b_x, _b_t = scores(b_s, factor, cap, inner, CAP, EXACT)
    if MASKED:
        o_m = (row + tl.arange(0, BM))[:, None]
        o_n = (key + tl.arange(0, BN))[None, :]
        b_x = tl.where(sees(o_m, o_n, n_q, n_k, left, right, HAS_LEFT, HAS_RIGHT), b_x, float("-inf"))
    b_new = tl.maximum(b_m, tl.max(b_x, 1))
    if MASKED:
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    else:
        b_safe = b_new
    b_p = power(b_x - b_safe[:, None], EXACT)
    b_a = power(b_m - b_safe, EXACT)
    b_l = b_l * b_a + tl.sum(b_p, 1)
    b_o = b_o * b_a[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
    return b_o, b_l, b_new


@triton.jit(do_not_specialize=["TQ", "TK", "MB", "n_tasks", "left", "right"])
def flash_attention_fwd_kernel(
    q, k, v, o, lse, cu_q, cu_k, blocks, TQ, TK, MB, n_tasks, left, right, factor, cap, inner,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, CAP: tl.constexpr, PACKED: tl.constexpr, RELOAD: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    for i_task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        # the last rows first: with causal they see the most keys
        i_n, i_h, i_m = decode_task(i_task, blocks, MB, H, PACKED, True)
        row = i_m * BM
        begin_q, n_q, begin_k, n_k = decode_pair(i_n, cu_q, cu_k, TQ, TK, PACKED)
        if row < n_q:
            at_q = tl.cast(begin_q + row, tl.int64) * H + i_h
            at_k = tl.cast(begin_k, tl.int64) * HK + i_h // (H // HK)
            p_q = q + at_q * D
            p_k = k + at_k * D
            p_v = v + at_k * DV
            b_q = load_tile(p_q, H * D, n_q - row, D, BM, BD)  # [BM, BD]
            b_o = tl.zeros([BM, BDV], dtype=tl.float32)
            b_l = tl.zeros([BM], dtype=tl.float32)
            b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
            begin, a, c, end = span(
                row, tl.minimum(n_q - row, BM), n_k - n_q, n_k, left, right, HAS_LEFT, HAS_RIGHT, BN
            )
            if HAS_LEFT:
                for key in range(begin, a, BN):
                    b_o, b_l, b_m = _step(b_o, b_l, b_m, b_q, p_q, p_k, p_v, row, key, n_q, n_k, left, right, factor,
                                          cap, inner, H, HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, RELOAD, PARTS, True,
                                          BM, BN, BD, BDV)  # fmt: skip
            for key in range(a, c, BN):
                b_o, b_l, b_m = _step(b_o, b_l, b_m, b_q, p_q, p_k, p_v, row, key, n_q, n_k, left, right, factor, cap,
                                      inner, H, HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, RELOAD, PARTS, False,
                                      BM, BN, BD, BDV)  # fmt: skip
            for key in range(c, end, BN):
                b_o, b_l, b_m = _step(b_o, b_l, b_m, b_q, p_q, p_k, p_v, row, key, n_q, n_k, left, right, factor, cap,
                                      inner, H, HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, RELOAD, PARTS, True,
                                      BM, BN, BD, BDV)  # fmt: skip
            b_d = tl.where(b_l == 0.0, 1.0, b_l)
            if q.dtype.element_ty == tl.float32:
                b_lse = b_m + tl.log2(b_d) * LN2
            else:
                b_lse = (b_m + tl.log2(b_d)) * LN2
            b_lse = tl.where(b_l == 0.0, float("-inf"), b_lse)
            store_tile(o + at_q * DV, b_o / b_d[:, None], H * DV, n_q - row, DV, BM, BDV)
            store_row(lse + row_offset(i_n, i_h, begin_q, row, TQ, H, PACKED), b_lse, n_q - row, BM)
