// The inverse of I + L of a chunk, L [64][64] below the diagonal, in fp32 in shared memory, by a CTA of 8 warps.
//
// Diagonal blocks of 16 rows by substitution; then -A22 L21 A11 joins blocks of 16, and halves of 32, on the tensor
// cores in split TF32. What lies right of a diagonal block may hold anything.
#pragma once

#include "../common/mma.cuh"
#include "../common/tiles.h"

namespace kda {

using Square = Tile<float, kRows>;

// Rows row0 .. row0 + 15 and 8 columns of x as the first operand, in the order of rows that col_b has.
__device__ __forceinline__ FragA<float> square_a(const Square& x, int l, int row0, int col0) {
    FragA<float> f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 y = load2(x, row0 + l / 4, 8 * i, col0 + l % 4 * 2);
        f.r[i] = __float_as_uint(y.x), f.r[2 + i] = __float_as_uint(y.y);
    }
    f.finish();
    return f;
}
// d as the first operand of a product over its 8 columns, in the same order.
__device__ __forceinline__ FragA<float> square_a(const float (&d)[4]) {
    FragA<float> f;
#pragma unroll
    for (int i = 0; i < 4; ++i) f.r[i / 2 + i % 2 * 2] = __float_as_uint(d[i]);
    f.finish();
    return f;
}
// A product of split numbers as three sums that do not wait for each other.
struct SplitSum {
    float part[3][4] = {};
    __device__ __forceinline__ void add(const FragA<float>& a, const FragB<float>& b) {
        mma_tf32(part[0], a.lo, b.r);
        mma_tf32(part[1], a.r, b.lo);
        mma_tf32(part[2], a.r, b.r);
    }
    __device__ __forceinline__ void get(float (&d)[4], float sign) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] = sign * ((part[0][i] + part[1][i]) + part[2][i]);
    }
};
__device__ __forceinline__ void square_store(const Square& x, int l, int row0, int col0, const float (&d)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) store2(x, row0 + l / 4, 8 * i, col0 + l % 4 * 2, d[2 * i], d[2 * i + 1]);
}

// The two blocks of 16 rows and columns from `n` on, I + L below the diagonal, become their inverses. By one warp, a
// column a lane.
__device__ __forceinline__ void invert_blocks(const Square& L, int lane, int n) {
    const int column = lane % 16, n0 = n + lane / 16 * 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float sum = 0.f;
#pragma unroll
        for (int j0 = 0; j0 < i; j0 += 4) {
            float row[4];
            load4(row, L, n0 + i, 0, n0 + j0);
#pragma unroll
            for (int j = j0; j < j0 + 4 && j < i; ++j) sum = fmaf(row[j - j0], x[j], sum);
        }
        x[i] = (i == column ? 1.f : 0.f) - sum;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i) store1(L, n0 + i, 0, n0 + column, x[i]);
    __syncwarp();
}
// Two inverted blocks of 16 rows from `n` on become one of 32. By one warp.
__device__ __forceinline__ void join_blocks(const Square& L, int lane, int n) {
    FragA<float> a[2];
    FragB<float> b[2][2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        a[j] = square_a(L, lane, n + 16, n + 16 + 8 * j);
        col_b(b[j], L, lane, n + 8 * j, n / 16 + 1);
    }
    SplitSum x[2], y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) x[j].add(a[i], b[j][i]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        float d[4];
        x[j].get(d, 1.f);
        a[j] = square_a(d);
        col_b(b[j], L, lane, n + 8 * j, n / 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) y[j].add(a[i], b[j][i]);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        float d[4];
        y[j].get(d, -1.f);
        square_store(L, lane, n + 16, n + 8 * j, d);
    }
}
// The part of the inverse that joins two inverted halves of 32 rows, -A22 L21 A11, a warp its rows 32 + 16 m .. and
// columns col0 .. col0 + 7, m = warp % 2, col0 = warp / 2 * 8: first A22 L21, kept in the square's upper right quarter,
// then, after a __syncthreads, the product in d.
__device__ __forceinline__ void join_halves_first(const Square& L, int lane, int warp) {
    const int m = warp % 2, col0 = warp / 2 * 8;
    SplitSum x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (i > m) break;  // right of A22's diagonal
        FragB<float> b[2];
        col_b(b, L, lane, col0, 2 + i);
        x.add(square_a(L, lane, 32 + 16 * m, 32 + 16 * i), b[0]);
        x.add(square_a(L, lane, 32 + 16 * m, 40 + 16 * i), b[1]);
    }
    float d[4];
    x.get(d, 1.f);
    square_store(L, lane, 16 * m, 32 + col0, d);
}
__device__ __forceinline__ void join_halves_second(float (&d)[4], const Square& L, int lane, int warp) {
    const int m = warp % 2, col0 = warp / 2 * 8;
    SplitSum y;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (i < warp / 4) continue;  // right of A11's diagonal
        FragB<float> b[2];
        col_b(b, L, lane, col0, i);
        y.add(square_a(L, lane, 16 * m, 32 + 16 * i), b[0]);
        y.add(square_a(L, lane, 16 * m, 40 + 16 * i), b[1]);
    }
    y.get(d, -1.f);
}

}  // namespace kda
