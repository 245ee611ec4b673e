"""Stage 9, dq and dk of query/key heads: the sum over a group's value heads, and the norm's backward.

Formula, per token and query/key head, over the value heads hv of its group; x is q or k, r its reciprocal norm:

    dy = sum_hv dx_hv          y = x * r          dx = r * (dy - y * sum_d y * dy)          (dx = dy without a norm)

Grid: persistent, 1-D, vector cores only. Task (block of BR rows, head): a program owns the rows' dq and dk.
Tile: BR x BS, K whole (tiling.py). Runs only where stage 7 could not finish alone: HV > H, or a norm with K > BK.
Bytes per task: reads GROUP x 2 x [BR, K] fp32, q and k [BR, K], r_q and r_k [BR]; writes dq and dk [BR, K].
Must hold: stage 7 ran before; dq_hv and dk_hv are workspace [HV, B*T, K]; rows of no sequence hold garbage here and are
zeroed after.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.common import load_row, load_tile, store_tile


@triton.jit
def _finish(x, r, dx_hv, dx, at_in, at_out, at_r, R, n_rows, H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
            BR: tl.constexpr, BS: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    b_dy = tl.zeros([BR, BS], dtype=tl.float32)
    for i_g in range(GROUP):
        b_dy += load_tile(dx_hv + (at_in + tl.cast(i_g, tl.int64) * R) * K, K, n_rows, K, BR, BS)  # [BR, BS]
    if NORM:
        b_r = load_row(r + at_r, n_rows, BR)[:, None]
        b_y = load_tile(x + at_out, H * K, n_rows, K, BR, BS).to(tl.float32) * b_r  # [BR, BS]
        b_dy = b_r * (b_dy - b_y * tl.sum(b_y * b_dy, 1)[:, None])
    store_tile(dx + at_out, b_dy, H * K, n_rows, K, BR, BS)


@triton.jit(do_not_specialize=["R"])
def heads(
    q, k, rq, rk, dq_hv, dk_hv, dq, dk, R, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BR: tl.constexpr,
    BS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HV // H
    for i_task in range(tl.program_id(0), tl.cdiv(R, BR) * H, tl.num_programs(0)):
        i_r = i_task // H
        i_h = i_task - i_r * H
        row = tl.cast(i_r, tl.int64) * BR
        n_rows = tl.cast(tl.minimum(R - row, BR), tl.int32)
        at_in = tl.cast(i_h * GROUP, tl.int64) * R + row
        at_out = (row * H + i_h) * K
        at_r = tl.cast(i_h, tl.int64) * R + row
        _finish(q, rq, dq_hv, dq, at_in, at_out, at_r, R, n_rows, H, GROUP, K, BR, BS, NORM)
        _finish(k, rk, dk_hv, dk, at_in, at_out, at_r, R, n_rows, H, GROUP, K, BR, BS, NORM)
