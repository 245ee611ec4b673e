"""Stage 8, dbeta: the parts of db together, and the sigmoid's backward.

Formula, per token and value head, with Y of stage 4 and c * sigmoid(beta) = b:

    db = db_v + sum over K blocks of (db_k + db_p)
    dbeta = db, or with SIGMOID db * c * sigmoid(beta) * sigmoid(-beta)

Y is the gradient of a token's write d = b (v - S^T k), S the state before it, and v_new is d, so that db = Y . d / b as
well: one product in place of three, but of a v_new that was rounded twice on its way (b (v - kg h), then A times it).
In bf16 at -5 per token that is 5.5e-3 of dbeta against 2.1e-3 for the parts (benchmarks/dbeta_roundings.py), and b = 0
would be a case of its own.

Grid: persistent, 1-D, vector cores only. Task (block of BR rows, value head): a program owns their dbeta.
Tile: BR rows. Bytes per task: reads (1 + NS + NK) x BR fp32 and beta [BR]; writes dbeta [BR].
Must hold: stages 5, 6 and 7 ran before; db_v [HV, B*T], db_k [NS, HV, B*T], db_p [NK, HV, B*T]; beta and
dbeta [B, T, HV]; rows of no sequence hold garbage here and are zeroed after.
"""

import triton
import triton.language as tl

from mindspeed_kda.npu_kernels.chunk_kda.gates import sigmoid
from mindspeed_kda.npu_kernels.common import load_row


@triton.jit(do_not_specialize=["R"])
def betas(
    beta, db_v, db_k, db_p, dbeta, beta_scale, R, HV: tl.constexpr, BR: tl.constexpr, NS: tl.constexpr,
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
        if SIGMOID:
            b_z = tl.load(beta + row * HV + i_h + o_r * HV, mask=o_r < n_rows, other=0.0).to(tl.float32)  # [BR]
            b_db *= beta_scale * sigmoid(b_z) * sigmoid(-b_z)
        tl.store(dbeta + row * HV + i_h + o_r * HV, b_db.to(dbeta.dtype.element_ty), mask=o_r < n_rows)
