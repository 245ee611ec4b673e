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
__device__ __forceinline__ void square_store(const Square& x, int l, int row0, int col0, const float (&d)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) store2(x, row0 + l / 4, 8 * i, col0 + l % 4 * 2, d[2 * i], d[2 * i + 1]);
}

// The block of 16 rows and columns from `n` on, I + L below the diagonal, becomes its inverse. By one warp.
__device__ __forceinline__ void invert_block(const Square& L, int lane, int n) {
    const int column = lane % 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float sum = 0.f;
#pragma unroll
        for (int j0 = 0; j0 < i; j0 += 4) {
            float row[4];
            load4(row, L, n + i, 0, n + j0);
#pragma unroll
            for (int j = j0; j < j0 + 4 && j < i; ++j) sum = fmaf(row[j - j0], x[j], sum);
        }
        x[i] = (i == column ? 1.f : 0.f) - sum;
    }
    __syncwarp();
    if (lane < 16) {
#pragma unroll
        for (int i = 0; i < 16; ++i) store1(L, n + i, 0, n + column, x[i]);
    }
}
// Two inverted blocks of 16 rows from `n` on become one of 32. By one warp.
__device__ __forceinline__ void join_blocks(const Square& L, int lane, int n) {
    float x[2][4] = {}, y[2][4] = {};
    FragB<float> b[2];
    const FragA<float> a0 = square_a(L, lane, n + 16, n + 16), a1 = square_a(L, lane, n + 16, n + 24);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        col_b(b, L, lane, n + 8 * j, n / 16 + 1);
        mma(x[j], a0, b[0]);
        mma(x[j], a1, b[1]);
    }
    const FragA<float> x0 = square_a(x[0]), x1 = square_a(x[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        col_b(b, L, lane, n + 8 * j, n / 16);
        mma(y[j], x0, b[0]);
        mma(y[j], x1, b[1]);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y[j][i] = -y[j][i];
        square_store(L, lane, n + 16, n + 8 * j, y[j]);
    }
}
// Two inverted halves of 32 rows: 16 rows and 8 columns a warp, first of A22 L21, kept in the square's upper right
// quarter, then of -A22 L21 A11. By the CTA.
__device__ __forceinline__ void join_halves(const Square& L, int lane, int warp) {
    const int m = warp % 2, col0 = warp / 2 * 8;
    float x[4] = {}, y[4] = {};
    FragB<float> b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (i > m) break;  // right of A22's diagonal
        col_b(b, L, lane, col0, 2 + i);
        mma(x, square_a(L, lane, 32 + 16 * m, 32 + 16 * i), b[0]);
        mma(x, square_a(L, lane, 32 + 16 * m, 40 + 16 * i), b[1]);
    }
    square_store(L, lane, 16 * m, 32 + col0, x);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (i < warp / 4) continue;  // right of A11's diagonal
        col_b(b, L, lane, col0, i);
        mma(y, square_a(L, lane, 16 * m, 32 + 16 * i), b[0]);
        mma(y, square_a(L, lane, 16 * m, 40 + 16 * i), b[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = -y[i];
    square_store(L, lane, 32 + 16 * m, col0, y);
}

}  // namespace kda
