"""Backward: dK and dV with key blocks outside, dQ with query blocks outside, P recomputed from lse.

Formula, per pair of blocks, with r = rowsum(dO * O):

    P = 2^(S log2 e - lse log2 e);  dP = dO V^T;  dS = P * (dP - r) [* (1 - (S / c)^2)]
    dV += P^T dO;  dK += dS^T Q (scale at the end);  dQ += dS K (scale at the end)

Grid: persistent, 1-D. Tasks: preprocess and dQ (sequence, block of rows, query head); dK and dV (sequence, block of
keys, key head), whose program walks the head's query heads in order, so that no sum depends on timing.
Tile: BM rows, BN keys, BD and BDV columns.
Bytes per task: dK and dV: k, v [BN, D + DV] once; q, do [rows that see it, D + DV], lse and r for each query head.
dQ: q, do [BM, D + DV] once; k, v [keys seen, D + DV].
Must hold: every tensor contiguous; lse from forward; r from preprocess; rows of no sequence are filled beforehand.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import load_row, load_tile, store_row, store_tile
from mindspeed_kda.npu_kernels.flash_attention.blocks import LOG2E, decode_pair, scores, sees, span


@triton.jit
def _row_offset(i_n, i_h, begin_q, row, TQ, H: tl.constexpr, PACKED: tl.constexpr):
    """Where row ``row`` of a sequence stands in [B, H, TQ], int64."""
    if PACKED:
        at = tl.cast(i_h, tl.int64) * TQ + begin_q + row
    else:
        at = (tl.cast(i_n, tl.int64) * H + i_h) * TQ + row
    return at


@triton.jit(do_not_specialize=["TQ", "TK", "MB", "n_tasks"])
def flash_attention_bwd_kernel_preprocess(
    do, o, r, cu_q, cu_k, TQ, TK, MB, n_tasks,
    H: tl.constexpr, DV: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    for i_task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_b = i_task // H
        i_h = i_task - i_b * H
        i_n = i_b // MB
        row = (i_b - i_n * MB) * BM
        begin_q, n_q, _begin_k, _n_k = decode_pair(i_n, cu_q, cu_k, TQ, TK, PACKED)
        if row < n_q:
            at_q = ((begin_q + row) * H + i_h) * DV
            b_o = load_tile(o + at_q, H * DV, n_q - row, DV, BM, BDV).to(tl.float32)  # [BM, BDV]
            b_do = load_tile(do + at_q, H * DV, n_q - row, DV, BM, BDV).to(tl.float32)  # [BM, BDV]
            store_row(r + _row_offset(i_n, i_h, begin_q, row, TQ, H, PACKED), tl.sum(b_o * b_do, 1), n_q - row, BM)


@triton.jit
def _p_ds(b_q, b_k, b_v, b_do, b_lse, b_r, row, key, n_q, n_k, left, right, scale, softcap,
          HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """P and dS of a block, [BM, BN]. Masked before exp2: a score outside the mask may exceed lse by any amount."""
    b_s, b_t = scores(b_q, b_k, scale, softcap, CAP)
    b_x = b_s - (b_lse * LOG2E)[:, None]
    if MASKED:
        m_s = sees(row, key, n_q, n_k, left, right, HAS_LEFT, HAS_RIGHT, BM, BN)
        b_x = tl.where(m_s, b_x, float("-inf"))
    b_p = tl.exp2(b_x)
    b_ds = b_p * (tl.dot(b_do, tl.trans(b_v), input_precision="ieee") - b_r[:, None])
    if CAP:
        b_ds = b_ds * (1.0 - b_t * b_t)
    return b_p, b_ds


@triton.jit
def _dkdv_step(b_dk, b_dv, b_k, b_v, p_q, p_do, p_lse, p_r, row, key, n_q, n_k, left, right, scale, softcap,
               H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
               CAP: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
               BDV: tl.constexpr):  # fmt: skip
    at = tl.cast(row, tl.int64) * H
    b_q = load_tile(p_q + at * D, H * D, n_q - row, D, BM, BD)  # [BM, BD]
    b_do = load_tile(p_do + at * DV, H * DV, n_q - row, DV, BM, BDV)  # [BM, BDV]
    b_lse = load_row(p_lse + row, n_q - row, BM)  # [BM]
    b_r = load_row(p_r + row, n_q - row, BM)  # [BM]
    b_p, b_ds = _p_ds(b_q, b_k, b_v, b_do, b_lse, b_r, row, key, n_q, n_k, left, right, scale, softcap,
                      HAS_LEFT, HAS_RIGHT, CAP, MASKED, BM, BN)  # fmt: skip
    b_dv += tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, input_precision="ieee")
    b_dk += tl.dot(tl.trans(b_ds.to(b_q.dtype)), b_q, input_precision="ieee")
    return b_dk, b_dv


@triton.jit(do_not_specialize=["TQ", "TK", "NB", "n_tasks", "left", "right"])
def flash_attention_bwd_kernel_dkdv(
    q, k, v, do, lse, r, dk, dv, cu_q, cu_k, TQ, TK, NB, n_tasks, left, right, scale, softcap,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, CAP: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = H // HK
    for i_task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_b = i_task // HK
        i_hk = i_task - i_b * HK
        i_n = i_b // NB
        key = (i_b - i_n * NB) * BN
        begin_q, n_q, begin_k, n_k = decode_pair(i_n, cu_q, cu_k, TQ, TK, PACKED)
        if key < n_k:
            at_k = (tl.cast(begin_k, tl.int64) + key) * HK + i_hk
            b_k = load_tile(k + at_k * D, HK * D, n_k - key, D, BN, BD)  # [BN, BD]
            b_v = load_tile(v + at_k * DV, HK * DV, n_k - key, DV, BN, BDV)  # [BN, BDV]
            b_dk = tl.zeros([BN, BD], dtype=tl.float32)
            b_dv = tl.zeros([BN, BDV], dtype=tl.float32)
            # seen from a key, the window's sides change places
            begin, a, c, end = span(
                key, tl.minimum(n_k - key, BN), n_q - n_k, n_q, right, left, HAS_RIGHT, HAS_LEFT, BM
            )
            for i_g in range(G):
                i_h = i_hk * G + i_g
                p_q = q + (tl.cast(begin_q, tl.int64) * H + i_h) * D
                p_do = do + (tl.cast(begin_q, tl.int64) * H + i_h) * DV
                at_l = _row_offset(i_n, i_h, begin_q, 0, TQ, H, PACKED)
                for row in range(begin, a, BM):
                    b_dk, b_dv = _dkdv_step(b_dk, b_dv, b_k, b_v, p_q, p_do, lse + at_l, r + at_l, row, key, n_q, n_k,
                                            left, right, scale, softcap, H, D, DV, HAS_LEFT, HAS_RIGHT, CAP, True,
                                            BM, BN, BD, BDV)  # fmt: skip
                for row in range(a, c, BM):
                    b_dk, b_dv = _dkdv_step(b_dk, b_dv, b_k, b_v, p_q, p_do, lse + at_l, r + at_l, row, key, n_q, n_k,
                                            left, right, scale, softcap, H, D, DV, HAS_LEFT, HAS_RIGHT, CAP, False,
                                            BM, BN, BD, BDV)  # fmt: skip
                for row in range(c, end, BM):
                    b_dk, b_dv = _dkdv_step(b_dk, b_dv, b_k, b_v, p_q, p_do, lse + at_l, r + at_l, row, key, n_q, n_k,
                                            left, right, scale, softcap, H, D, DV, HAS_LEFT, HAS_RIGHT, CAP, True,
                                            BM, BN, BD, BDV)  # fmt: skip
            store_tile(dk + at_k * D, b_dk * scale, HK * D, n_k - key, D, BN, BD)
            store_tile(dv + at_k * DV, b_dv, HK * DV, n_k - key, DV, BN, BDV)


@triton.jit
def _dq_step(b_dq, b_q, b_do, b_lse, b_r, p_k, p_v, row, key, n_q, n_k, left, right, scale, softcap,
             HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
             CAP: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
             BDV: tl.constexpr):  # fmt: skip
    at = tl.cast(key, tl.int64) * HK
    b_k = load_tile(p_k + at * D, HK * D, n_k - key, D, BN, BD)  # [BN, BD]
    b_v = load_tile(p_v + at * DV, HK * DV, n_k - key, DV, BN, BDV)  # [BN, BDV]
    _b_p, b_ds = _p_ds(b_q, b_k, b_v, b_do, b_lse, b_r, row, key, n_q, n_k, left, right, scale, softcap,
                      HAS_LEFT, HAS_RIGHT, CAP, MASKED, BM, BN)  # fmt: skip
    return b_dq + tl.dot(b_ds.to(b_k.dtype), b_k, input_precision="ieee")


@triton.jit(do_not_specialize=["TQ", "TK", "MB", "n_tasks", "left", "right"])
def flash_attention_bwd_kernel_dq(
    q, k, v, do, lse, r, dq, cu_q, cu_k, TQ, TK, MB, n_tasks, left, right, scale, softcap,
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
            at_l = _row_offset(i_n, i_h, begin_q, row, TQ, H, PACKED)
            p_k = k + (tl.cast(begin_k, tl.int64) * HK + i_hk) * D
            p_v = v + (tl.cast(begin_k, tl.int64) * HK + i_hk) * DV
            b_q = load_tile(q + at_q * D, H * D, n_q - row, D, BM, BD)  # [BM, BD]
            b_do = load_tile(do + at_q * DV, H * DV, n_q - row, DV, BM, BDV)  # [BM, BDV]
            b_lse = load_row(lse + at_l, n_q - row, BM)  # [BM]
            b_r = load_row(r + at_l, n_q - row, BM)  # [BM]
            b_dq = tl.zeros([BM, BD], dtype=tl.float32)
            begin, a, c, end = span(
                row, tl.minimum(n_q - row, BM), n_k - n_q, n_k, left, right, HAS_LEFT, HAS_RIGHT, BN
            )
            for key in range(begin, a, BN):
                b_dq = _dq_step(b_dq, b_q, b_do, b_lse, b_r, p_k, p_v, row, key, n_q, n_k, left, right, scale, softcap,
                                HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, True, BM, BN, BD, BDV)  # fmt: skip
            for key in range(a, c, BN):
                b_dq = _dq_step(b_dq, b_q, b_do, b_lse, b_r, p_k, p_v, row, key, n_q, n_k, left, right, scale, softcap,
                                HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, False, BM, BN, BD, BDV)  # fmt: skip
            for key in range(c, end, BN):
                b_dq = _dq_step(b_dq, b_q, b_do, b_lse, b_r, p_k, p_v, row, key, n_q, n_k, left, right, scale, softcap,
                                HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, True, BM, BN, BD, BDV)  # fmt: skip
            store_tile(dq + at_q * D, b_dq * scale, H * D, n_q - row, D, BM, BD)
