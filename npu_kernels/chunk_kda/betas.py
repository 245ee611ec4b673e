"""Stage 8, dbeta: the parts of db together, and the sigmoid's backward.

Formula, per token and value head, with Y of stage 4 and c * sigmoid(beta) = b:

    db = sum_v Y * v_new / b                                      where |b| >= 2^-8
       = db_v + sum over K blocks of (db_k + db_p)                elsewhere
    dbeta = db, or with SIGMOID db * c * sigmoid(beta) * sigmoid(-beta)

Y is the gradient of a token's write d = b (v - S^T k), S the state before it, and v_new is d: both lines are Y . d / b.
The second one takes v - S^T k in three parts, which cancel where the state already holds v: up to 1.0e-2 of db in bf16.
The first one has no such parts, but cannot have b = 0.

Grid: persistent, 1-D, vector cores only. Task (block of BR rows, value head): a program owns their dbeta.
Tile: BR rows. Bytes per task: reads (3 + NS + NK) x BR fp32 and beta [BR]; writes dbeta [BR].
Must hold: stages 5, 6 and 7 ran before; db_v, db_s and b [HV, B*T], db_k [NS, HV, B*T], db_p [NK, HV, B*T]; beta and
dbeta [B, T, HV]; rows of no sequence hold garbage here and are zeroed after.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.chunk_kda.gates import sigmoid
from mindspeed_kda.npu_kernels.common import load_row

MIN_B = tl.constexpr(2.0**-8)


@triton.jit(do_not_specialize=["R"])
def betas(
    beta, b, db_v, db_s, db_k, db_p, dbeta, beta_scale, R, HV: tl.constexpr, BR: tl.constexpr, NS: tl.constexpr,
    NK: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    o_r = tl.arange(0, BR)
    for i_task in range(tl.program_id(0), tl.cdiv(R, BR) * HV, tl.num_programs(0)):
        i_r = i_task // HV
        i_h = i_task - i_r * HV
        row = tl.cast(i_r, tl.int64) * BR
        n_rows = tl.cast(tl.minimum(R - row, BR), tl.int32)
        at_t = tl.cast(i_h, tl.int64) * R + row
        b_db = load_row(db_v + at_t, n_rows, BR)
        for i_k in range(NS):
            b_db += load_row(db_k + tl.cast(i_k * HV, tl.int64) * R + at_t, n_rows, BR)
        for i_k in range(NK):
            b_db += load_row(db_p + tl.cast(i_k * HV, tl.int64) * R + at_t, n_rows, BR)
        b_b = load_row(b + at_t, n_rows, BR)
        m_short = tl.abs(b_b) >= MIN_B
        b_db = tl.where(m_short, load_row(db_s + at_t, n_rows, BR) / tl.where(m_short, b_b, 1.0), b_db)
        if SIGMOID:
            b_z = tl.load(beta + row * HV + i_h + o_r * HV, mask=o_r < n_rows, other=0.0).to(tl.float32)  # [BR]
            b_db *= beta_scale * sigmoid(b_z) * sigmoid(-b_z)
        tl.store(dbeta + row * HV + i_h + o_r * HV, b_db.to(dbeta.dtype.element_ty), mask=o_r < n_rows)
