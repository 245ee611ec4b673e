"""Small kernels that trip one rule of the compile gate each, and two that trip none. Imported by the gate's workers."""

import triton
import triton.language as tl


@triton.jit
def clean_vector(x, y, o, T, BT: tl.constexpr):
    for i in range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        r = i * BT + tl.arange(0, BT)
        b_x = tl.load(x + r, mask=r < T, other=0.0).to(tl.float32)
        b_y = tl.load(y + r, mask=r < T, other=0.0).to(tl.float32)
        tl.store(o + r, tl.exp2(b_x) * b_y, mask=r < T)


@triton.jit
def clean_mix(x, y, o, T, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    o_v = tl.arange(0, V)
    for i in range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        r = i * BT + tl.arange(0, BT)
        m_t = (r < T)[:, None]
        b_o = tl.zeros([BT, V], dtype=tl.float32)
        for i_k in range(K // BK):
            o_k = i_k * BK + tl.arange(0, BK)
            b_x = tl.load(x + r[:, None] * K + o_k[None, :], mask=m_t, other=0.0)
            b_y = tl.load(y + o_k[:, None] * V + o_v[None, :])
            b_o += tl.dot(b_x, b_y, input_precision="ieee")
        tl.store(o + r[:, None] * V + o_v[None, :], tl.exp2(b_o), mask=m_t)


@triton.jit
def metadata(x, cu_seqlens, o, N, BT: tl.constexpr):
    for i in range(tl.program_id(0), N, tl.num_programs(0)):
        bos = tl.load(cu_seqlens + i)
        n = tl.load(cu_seqlens + i + 1) - bos
        r = tl.arange(0, BT)
        b_x = tl.load(x + bos + r, mask=r < n, other=0.0)
        tl.store(o + bos + r, b_x * 2.0, mask=r < n)


@triton.jit
def three_tiles(x, o, SIZE: tl.constexpr):
    r = tl.arange(0, SIZE)
    b_1 = tl.load(x + r)
    b_2 = tl.load(x + SIZE + r)
    b_3 = tl.load(x + 2 * SIZE + r)
    tl.store(o + r, tl.exp(b_1) * b_2 + tl.exp(b_2) * b_3 + tl.exp(b_3) * b_1)


@triton.jit
def sum_of_two(x, y, o, n, SIZE: tl.constexpr):
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        r = i * SIZE + tl.arange(0, SIZE)
        tl.store(o + r, tl.load(x + r) + tl.load(y + r))


@triton.jit
def wide_product(x, y, o, N: tl.constexpr, K: tl.constexpr):
    r = tl.arange(0, N)
    o_k = tl.arange(0, K)
    b_x = tl.load(x + r[:, None] * K + o_k[None, :])
    b_y = tl.load(y + o_k[:, None] * N + r[None, :])
    tl.store(o + r[:, None] * N + r[None, :], tl.dot(b_x, b_y, input_precision="ieee"))


@triton.jit
def chained_sums(x, y, z, o, n, N: tl.constexpr, ONE: tl.constexpr):
    r = tl.arange(0, N)
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        p = i * N * N + r[:, None] * N + r[None, :]
        b_o = tl.zeros([N, N], dtype=tl.float32)
        for j in range(ONE):
            b_o = tl.dot(tl.load(x + p + j), tl.load(y + p + j), b_o, input_precision="ieee")
        for j in range(ONE):
            b_z = tl.load(z + p + j).to(tl.float32)
            b_o = tl.dot(tl.load(x + p + j), tl.exp2(b_z).to(x.dtype.element_ty), b_o, input_precision="ieee")
        tl.store(o + p, tl.exp2(b_o))


@triton.jit
def tf32(x, o, N: tl.constexpr):
    r = tl.arange(0, N)
    p = r[:, None] * N + r[None, :]
    b_x = tl.load(x + p)
    tl.store(o + p, tl.dot(b_x, b_x, input_precision="tf32"))


@triton.jit
def clamped_rows(x, o, T, BT: tl.constexpr, K: tl.constexpr, HOW: tl.constexpr):
    o_k = tl.arange(0, K)
    for i in range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        r = i * BT + tl.arange(0, BT)
        if HOW == "minimum":
            row = tl.minimum(r, T - 1)
        elif HOW == "where":
            row = tl.where(r < T, r, 0)
        else:
            row = r % T
        b_x = tl.load(x + row[:, None] * K + o_k[None, :], mask=(r < T)[:, None], other=0.0)
        tl.store(o + r[:, None] * K + o_k[None, :], b_x * 2.0, mask=(r < T)[:, None])


@triton.jit
def gathered_rows(x, index, o, T, BT: tl.constexpr, K: tl.constexpr):
    o_k = tl.arange(0, K)
    for i in range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        r = i * BT + tl.arange(0, BT)
        row = tl.load(index + r, mask=r < T, other=0)
        b_x = tl.load(x + row[:, None] * K + o_k[None, :], mask=(r < T)[:, None], other=0.0)
        tl.store(o + r[:, None] * K + o_k[None, :], b_x * 2.0, mask=(r < T)[:, None])


@triton.jit
def wide_compare(x, index, o, T, BT: tl.constexpr):
    for i in range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        r = tl.cast(i * BT + tl.arange(0, BT), tl.int64)
        tl.store(o + r, tl.where(tl.load(index + r) < r, tl.load(x + r), 0.0))
