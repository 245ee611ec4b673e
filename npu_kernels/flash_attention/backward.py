"""Backward: dK and dV with key blocks outside, dQ with query blocks outside, P recomputed from lse.

Formula, per pair of blocks, with r = rowsum(dO * O):

    P = 2^(S log2 e - lse log2 e);  dP = dO V^T;  dS = P * (dP - r) [* (1 - (S / c)^2)]
    dV += P^T dO;  dK += dS^T Q (scale at the end);  dQ += dS K (scale at the end)

Grid: 1-D; a program per task on a GPU, persistent elsewhere. Tasks: preprocess and dQ (sequence, query head, block of
rows); dK and dV (sequence, key head, block of keys), whose program walks the head's query heads in order, so that no
sum depends on timing. ATOMIC adds dQ there too, in fp32 and in any order, which spares dQ's own pass its two products.
Tile: BM rows, BN keys, BD and BDV columns (tiling.ATTENTION).
Bytes per task: dK and dV: k, v [BN, D + DV] once; q, do [rows that see it, D + DV], lse and r for each query head.
dQ: q, do [BM, D + DV] once; k, v [keys seen, D + DV].
Must hold: every tensor contiguous; lse from forward; r from preprocess; rows of no sequence are filled beforehand;
with ATOMIC dq is fp32 and 0, and is scaled afterwards. RELOAD on Ascend, where a product may overwrite its left
operand: what stays on chip elsewhere (k and v of dK and dV, q and do of dQ) is then read in every round.

dK and dV take S and dS keys first, [BN, BM]: what a product leaves in registers is then what the next one wants as its
left operand, and nothing is turned.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import load_row, load_tile, store_row, store_tile
from mindspeed_kda.npu_kernels.flash_attention.blocks import (
    below_lse,
    decode_pair,
    decode_task,
    load_block,
    load_line,
    probability,
    products,
    row_offset,
    scores,
    sees,
    span,
)


@triton.jit(do_not_specialize=["TQ", "TK", "MB", "n_tasks"])
def flash_attention_bwd_kernel_preprocess(
    do, o, r, cu_q, cu_k, blocks, TQ, TK, MB, n_tasks,
    H: tl.constexpr, DV: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    for i_task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_n, i_h, i_m = decode_task(i_task, blocks, MB, H, PACKED, False)
        row = i_m * BM
        begin_q, n_q, _begin_k, _n_k = decode_pair(i_n, cu_q, cu_k, TQ, TK, PACKED)
        if row < n_q:
            at_q = ((begin_q + row) * H + i_h) * DV
            b_o = load_tile(o + at_q, H * DV, n_q - row, DV, BM, BDV).to(tl.float32)  # [BM, BDV]
            b_do = load_tile(do + at_q, H * DV, n_q - row, DV, BM, BDV).to(tl.float32)  # [BM, BDV]
            store_row(r + row_offset(i_n, i_h, begin_q, row, TQ, H, PACKED), tl.sum(b_o * b_do, 1), n_q - row, BM)


@triton.jit
def _add_dq(p, b_dst, b_k, n_rows, H: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr,
            BD: tl.constexpr):  # fmt: skip
    """Adds dS K into fp32 rows of dq, in any order. Atomics are what deterministic=False allows, here alone."""
    b_dq = tl.dot(tl.trans(b_dst), b_k, input_precision="ieee")  # [BM, BD]
    o_r = tl.arange(0, BM)
    o_c = tl.arange(0, BD)
    o_dq = o_r[:, None] * (H * D) + o_c[None, :]
    if MASKED:
        tl.atomic_add(p + o_dq, b_dq, mask=(o_r < n_rows)[:, None] & (o_c < D)[None, :], sem="relaxed")
    elif D == BD:
        tl.atomic_add(p + o_dq, b_dq, sem="relaxed")
    else:
        tl.atomic_add(p + o_dq, b_dq, mask=(o_c < D)[None, :], sem="relaxed")


@triton.jit
def _dkdv_step(b_dk, b_dv, b_k, b_v, p_k, p_v, p_q, p_do, p_lse, p_r, p_dq, row, key, n_q, n_k, left, right, factor,
               cap, inner, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
               HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, CAP: tl.constexpr, ATOMIC: tl.constexpr,
               RELOAD: tl.constexpr,
               PARTS: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
               BDV: tl.constexpr):  # fmt: skip
    EXACT: tl.constexpr = p_q.dtype.element_ty == tl.float32
    at = tl.cast(row, tl.int64) * H
    b_kl = b_k
    b_vl = b_v
    if RELOAD:
        b_kl = load_tile(p_k, HK * D, n_k - key, D, BN, BD)  # [BN, BD]
        b_vl = load_tile(p_v, HK * DV, n_k - key, DV, BN, BDV)  # [BN, BDV]
    b_q = load_block(p_q + at * D, H * D, n_q - row, D, BM, BD, not MASKED)  # [BM, BD]
    b_lse = load_line(p_lse + row, n_q - row, BM, not MASKED)  # [BM]
    b_s = products(b_kl, b_q, PARTS, BN, BM, BD)  # [BN, BM]
    b_x, b_t = scores(b_s, factor, cap, inner, CAP, EXACT)
    b_d, b_lost = below_lse(b_x, b_lse[None, :], EXACT)
    if MASKED:
        # before exp2: a score outside the mask may exceed lse by any amount
        o_m = (row + tl.arange(0, BM))[None, :]
        o_n = (key + tl.arange(0, BN))[:, None]
        b_d = tl.where(sees(o_m, o_n, n_q, n_k, left, right, HAS_LEFT, HAS_RIGHT), b_d, float("-inf"))
    b_p = probability(b_d, b_lost, EXACT)
    b_do = load_block(p_do + at * DV, H * DV, n_q - row, DV, BM, BDV, not MASKED)  # [BM, BDV]
    b_r = load_line(p_r + row, n_q - row, BM, not MASKED)  # [BM]
    b_ds = b_p * (tl.dot(b_vl, tl.trans(b_do), input_precision="ieee") - b_r[None, :])
    if CAP:
        b_ds = b_ds * (1.0 - b_t * b_t)
    b_dv += tl.dot(b_p.to(b_do.dtype), b_do, input_precision="ieee")
    b_ds = b_ds.to(b_q.dtype)
    if ATOMIC:
        _add_dq(p_dq + at * D, b_ds, b_k, n_q - row, H, D, MASKED, BM, BD)
    b_dk += tl.dot(b_ds, b_q, input_precision="ieee")
    return b_dk, b_dv


@triton.jit(do_not_specialize=["TQ", "TK", "NB", "n_tasks", "left", "right"])
def flash_attention_bwd_kernel_dkdv(
    q, k, v, do, lse, r, dq, dk, dv, cu_q, cu_k, blocks, TQ, TK, NB, n_tasks, left, right, scale, factor, cap, inner,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, CAP: tl.constexpr, ATOMIC: tl.constexpr, PACKED: tl.constexpr, RELOAD: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = H // HK
    for i_task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        # the first keys first: with causal they are seen by the most rows
        i_n, i_hk, i_k = decode_task(i_task, blocks, NB, HK, PACKED, False)
        key = i_k * BN
        begin_q, n_q, begin_k, n_k = decode_pair(i_n, cu_q, cu_k, TQ, TK, PACKED)
        if key < n_k:
            at_k = tl.cast(begin_k + key, tl.int64) * HK + i_hk
            p_k = k + at_k * D
            p_v = v + at_k * DV
            b_k = load_tile(p_k, HK * D, n_k - key, D, BN, BD)  # [BN, BD]
            b_v = load_tile(p_v, HK * DV, n_k - key, DV, BN, BDV)  # [BN, BDV]
            b_dk = tl.zeros([BN, BD], dtype=tl.float32)
            b_dv = tl.zeros([BN, BDV], dtype=tl.float32)
            # seen from a key, the window's sides change places
            begin, a, c, end = span(
                key, tl.minimum(n_k - key, BN), n_q - n_k, n_q, right, left, HAS_RIGHT, HAS_LEFT, BM
            )
            if key + BN > n_k:  # keys that are not there are masked: added into dq, they would count
                a = begin
                c = begin
            for i_g in range(G):
                i_h = i_hk * G + i_g
                at_q = tl.cast(begin_q, tl.int64) * H + i_h
                p_q = q + at_q * D
                p_do = do + at_q * DV
                p_dq = dq
                if ATOMIC:
                    p_dq = dq + at_q * D
                at_l = row_offset(i_n, i_h, begin_q, 0, TQ, H, PACKED)
                if HAS_RIGHT:
                    for row in range(begin, a, BM):
                        b_dk, b_dv = _dkdv_step(b_dk, b_dv, b_k, b_v, p_k, p_v, p_q, p_do, lse + at_l, r + at_l, p_dq,
                                                row, key, n_q, n_k, left, right, factor, cap, inner, H, HK, D, DV,
                                                HAS_LEFT, HAS_RIGHT, CAP, ATOMIC, RELOAD, PARTS, True,
                                                BM, BN, BD, BDV)  # fmt: skip
                for row in range(a, c, BM):
                    b_dk, b_dv = _dkdv_step(b_dk, b_dv, b_k, b_v, p_k, p_v, p_q, p_do, lse + at_l, r + at_l, p_dq,
                                            row, key, n_q, n_k, left, right, factor, cap, inner, H, HK, D, DV,
                                            HAS_LEFT, HAS_RIGHT, CAP, ATOMIC, RELOAD, PARTS, False,
                                            BM, BN, BD, BDV)  # fmt: skip
                for row in range(c, end, BM):
                    b_dk, b_dv = _dkdv_step(b_dk, b_dv, b_k, b_v, p_k, p_v, p_q, p_do, lse + at_l, r + at_l, p_dq,
                                            row, key, n_q, n_k, left, right, factor, cap, inner, H, HK, D, DV,
                                            HAS_LEFT, HAS_RIGHT, CAP, ATOMIC, RELOAD, PARTS, True,
                                            BM, BN, BD, BDV)  # fmt: skip
            store_tile(dk + at_k * D, b_dk * scale, HK * D, n_k - key, D, BN, BD)
            store_tile(dv + at_k * DV, b_dv, HK * DV, n_k - key, DV, BN, BDV)


@triton.jit
def _dq_step(b_dq, b_q, b_do, b_lse, b_r, p_q, p_do, p_k, p_v, row, key, n_q, n_k, left, right, factor, cap, inner,
             H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr,
             HAS_RIGHT: tl.constexpr, CAP: tl.constexpr, RELOAD: tl.constexpr,
             PARTS: tl.constexpr, MASKED: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr):  # fmt: skip
    EXACT: tl.constexpr = p_q.dtype.element_ty == tl.float32
    at = tl.cast(key, tl.int64) * HK
    if RELOAD:
        b_q = load_tile(p_q, H * D, n_q - row, D, BM, BD)  # [BM, BD]
        b_do = load_tile(p_do, H * DV, n_q - row, DV, BM, BDV)  # [BM, BDV]
    b_k = load_block(p_k + at * D, HK * D, n_k - key, D, BN, BD, not MASKED)  # [BN, BD]
    b_v = load_block(p_v + at * DV, HK * DV, n_k - key, DV, BN, BDV, not MASKED)  # [BN, BDV]
    b_s = products(b_q, b_k, PARTS, BM, BN, BD)  # [BM, BN]
    b_x, b_t = scores(b_s, factor, cap, inner, CAP, EXACT)
    b_d, b_lost = below_lse(b_x, b_lse[:, None], EXACT)
    if MASKED:
        o_m = (row + tl.arange(0, BM))[:, None]
        o_n = (key + tl.arange(0, BN))[None, :]
        b_d = tl.where(sees(o_m, o_n, n_q, n_k, left, right, HAS_LEFT, HAS_RIGHT), b_d, float("-inf"))
    b_p = probability(b_d, b_lost, EXACT)
    b_ds = b_p * (tl.dot(b_do, tl.trans(b_v), input_precision="ieee") - b_r[:, None])
    if CAP:
        b_ds = b_ds * (1.0 - b_t * b_t)
    return b_dq + tl.dot(b_ds.to(b_k.dtype), b_k, input_precision="ieee")


@triton.jit(do_not_specialize=["TQ", "TK", "MB", "n_tasks", "left", "right"])
def flash_attention_bwd_kernel_dq(
    q, k, v, do, lse, r, dq, cu_q, cu_k, blocks, TQ, TK, MB, n_tasks, left, right, scale, factor, cap, inner,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, CAP: tl.constexpr, PACKED: tl.constexpr, RELOAD: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    for i_task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_n, i_h, i_m = decode_task(i_task, blocks, MB, H, PACKED, True)
        row = i_m * BM
        begin_q, n_q, begin_k, n_k = decode_pair(i_n, cu_q, cu_k, TQ, TK, PACKED)
        if row < n_q:
            at_q = tl.cast(begin_q + row, tl.int64) * H + i_h
            at_k = tl.cast(begin_k, tl.int64) * HK + i_h // (H // HK)
            at_l = row_offset(i_n, i_h, begin_q, row, TQ, H, PACKED)
            p_q = q + at_q * D
            p_do = do + at_q * DV
            p_k = k + at_k * D
            p_v = v + at_k * DV
            b_q = load_tile(p_q, H * D, n_q - row, D, BM, BD)  # [BM, BD]
            b_do = load_tile(p_do, H * DV, n_q - row, DV, BM, BDV)  # [BM, BDV]
            b_lse = load_row(lse + at_l, n_q - row, BM)  # [BM]
            b_r = load_row(r + at_l, n_q - row, BM)  # [BM]
            b_dq = tl.zeros([BM, BD], dtype=tl.float32)
            begin, a, c, end = span(
                row, tl.minimum(n_q - row, BM), n_k - n_q, n_k, left, right, HAS_LEFT, HAS_RIGHT, BN
            )
            if HAS_LEFT:
                for key in range(begin, a, BN):
                    b_dq = _dq_step(b_dq, b_q, b_do, b_lse, b_r, p_q, p_do, p_k, p_v, row, key, n_q, n_k, left, right,
                                    factor, cap, inner, H, HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, RELOAD, PARTS, True,
                                    BM, BN, BD, BDV)  # fmt: skip
            for key in range(a, c, BN):
                b_dq = _dq_step(b_dq, b_q, b_do, b_lse, b_r, p_q, p_do, p_k, p_v, row, key, n_q, n_k, left, right,
                                factor, cap, inner, H, HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, RELOAD, PARTS, False,
                                BM, BN, BD, BDV)  # fmt: skip
            for key in range(c, end, BN):
                b_dq = _dq_step(b_dq, b_q, b_do, b_lse, b_r, p_q, p_do, p_k, p_v, row, key, n_q, n_k, left, right,
                                factor, cap, inner, H, HK, D, DV, HAS_LEFT, HAS_RIGHT, CAP, RELOAD, PARTS, True,
                                BM, BN, BD, BDV)  # fmt: skip
            store_tile(dq + at_q * D, b_dq * scale, H * D, n_q - row, D, BM, BD)
