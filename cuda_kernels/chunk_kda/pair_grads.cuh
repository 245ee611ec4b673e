// What the pairs of rows of a chunk give to dq, dk, db and da, for a warp's 8 key columns: Q, G and F of grads.cuh.
#pragma once

#include "raw_grads.cuh"

namespace kda {

// Accumulators: row 16 m + 8 i + g, column 2 t + j at [m][2 i + j].
template <class T, int kD>
struct PairGrads {
    const float (&gv)[4][4];
    float (&dq)[4][4], (&dk)[4][4], (&dg)[4][4];
    Tile<T, kRows> s_PD;     // P below the diagonal, D^T above it
    uint32_t a_q, a_k, a_b;  // of this lane's first row: q and k of its two columns, b
    uint32_t a_db;           // the warp's share of db, of this lane's first row
    uint32_t place;          // of the operands, four of 8 x 8, each 8 rows of a column operand
    int lane, g, t;

    __device__ __forceinline__ float2 pair_of(uint32_t a, int m, int i) const {
        return unpack2<T>(shared_u32(a + (16 * m + 8 * i) * Tile<T, kD>::kRowBytes));
    }
    __device__ __forceinline__ float strength_of(int m, int i) const {
        return shared_f32(a_b + (16 * m + 8 * i) * 4);
    }
    __device__ __forceinline__ void add_db(float x, int m, int i) const {
        x = sum_over_t(x);
        const uint32_t to = a_db + (16 * m + 8 * i) * 4;
        if (t == 0) set_shared_f32(to, shared_f32(to) + x);
    }
    static __device__ __forceinline__ float decay(float x, float at_n) { return exp2_fast(-fabsf(x - at_n)); }

    // Levels S = 32 and 16, whole tiles of 16 rows in a half: rows of the tiles m1 .. against those of m0 ...
    template <int kHalf, int m0>
    __device__ __forceinline__ void far_level() {
        constexpr int m1 = m0 + kHalf;
        float at_n[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) at_n[j] = __shfl_sync(~0u, gv[m1][j], t);
        const auto k_first = [&](float (&f)[2], int m, int i) {  // k f, packed
            const float2 k = pair_of(a_k, m, i);
            f[0] = decay(gv[m][2 * i], at_n[0]), f[1] = decay(gv[m][2 * i + 1], at_n[1]);
            return pack2<T>(k.x * f[0], k.y * f[1]);
        };
        __syncwarp();  // what was in the place is read
#pragma unroll
        for (int m = m0; m < m1; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float f[2];
                set_shared_u32(place + 4 * lane + (2 * (m - m0) + i) * 128, k_first(f, m, i));
            }
        __syncwarp();
        FragB<T> first[2];
        ldmatrix_trans(first[0].r[0], first[0].r[1], first[1].r[0], first[1].r[1], place + 16 * lane);
#pragma unroll
        for (int m = m1; m < m1 + kHalf; ++m) {
            float x[4] = {}, y[4] = {};
#pragma unroll
            for (int n = m0; n < m1; ++n) {
                mma(x, row_a(s_PD, lane, 16 * m, n), first[n - m0]);
                mma(y, col_a(s_PD, lane, 16 * m, n), first[n - m0]);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 q = pair_of(a_q, m, i), k = pair_of(a_k, m, i);
                const float strength = strength_of(m, i);
                float f[2], db = 0.f;
#pragma unroll
                for (int j = 0; j < 2; ++j) f[j] = decay(gv[m][2 * i + j], at_n[j]);
                const uint32_t U = pack2<T>(q.x * f[0], q.y * f[1]);
                const uint32_t W = pack2<T>(strength * (k.x * f[0]), strength * (k.y * f[1]));
                set_shared_u32(place + 4 * lane + i * 128, U);
                set_shared_u32(place + 4 * lane + 256 + i * 128, W);
                const float2 u = unpack2<T>(U), w = unpack2<T>(W);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int e = 2 * i + j;
                    const float z = f[j] * y[e];
                    dq[m][e] = fmaf(f[j], x[e], dq[m][e]);
                    dk[m][e] = fmaf(strength, z, dk[m][e]);
                    db = fmaf(j ? k.y : k.x, z, db);
                    dg[m][e] = fmaf(j ? u.y : u.x, x[e], dg[m][e]);
                    dg[m][e] = fmaf(j ? w.y : w.x, y[e], dg[m][e]);
                }
                add_db(db, m, i);
            }
            __syncwarp();
            FragB<T> U, W;
            ldmatrix_trans(U.r[0], U.r[1], W.r[0], W.r[1], place + 16 * lane);
#pragma unroll
            for (int n = m0; n < m1; ++n) {
                float F[4] = {};
                mma(F, col_a(s_PD, lane, 16 * n, m), U);
                mma(F, row_a(s_PD, lane, 16 * n, m), W);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float f[2];
                    const float2 u = unpack2<T>(k_first(f, n, i));
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int e = 2 * i + j;
                        dk[n][e] = fmaf(f[j], F[e], dk[n][e]);
                        dg[n][e] = fmaf(-(j ? u.y : u.x), F[e], dg[n][e]);
                    }
                }
            }
        }
    }

    // Levels inside a tile of 16 rows: one product of P with U and one of D with W give both halves' sums. Then the
    // tile's dq and dk go over q and k, and its db to the warp's share.
    template <int m>
    __device__ __forceinline__ void near_levels() {
        const FragA<T> rows = row_a(s_PD, lane, 16 * m, m), cols = col_a(s_PD, lane, 16 * m, m);
        float kx[4], db[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 x = pair_of(a_k, m, i);
            kx[2 * i] = x.x, kx[2 * i + 1] = x.y;
        }
        // U, W and f of rows 16 m + 8 i + g: in the place, and packed.
        const auto operands = [&](int i, bool second, float w, const float (&f)[4], uint32_t& U, uint32_t& W) {
            const float2 x = pair_of(second ? a_q : a_k, m, i);
            U = pack2<T>(x.x * f[2 * i], x.y * f[2 * i + 1]);
            W = pack2<T>(w * (kx[2 * i] * f[2 * i]), w * (kx[2 * i + 1] * f[2 * i + 1]));
            set_shared_u32(place + 4 * lane + i * 128, U);
            set_shared_u32(place + 4 * lane + 256 + i * 128, W);
        };
        {  // S = 8: rows g are the first half, rows g + 8 the second
            float f[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) f[e] = decay(gv[m][e], __shfl_sync(~0u, gv[m][2 + e % 2], t));
            uint32_t U[2], W[2];
            __syncwarp();
            operands(0, false, 1.f, f, U[0], W[0]);
            const float b = strength_of(m, 1);
            operands(1, true, b, f, U[1], W[1]);
            __syncwarp();
            FragB<T> b_U, b_W;
            ldmatrix_trans(b_U.r[0], b_U.r[1], b_W.r[0], b_W.r[1], place + 16 * lane);
            const FragA<T> a_P{{0u, rows.r[1], cols.r[2], 0u}}, a_D{{0u, cols.r[1], rows.r[2], 0u}};
            float x[4] = {}, y[4] = {};
            mma(x, a_P, b_U);
            mma(y, a_D, b_W);
            const float2 u = unpack2<T>(U[0]), v = unpack2<T>(U[1]), w = unpack2<T>(W[1]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float F = x[j] + y[j], z = f[2 + j] * y[2 + j];
                dk[m][j] = fmaf(f[j], F, dk[m][j]);
                dg[m][j] = fmaf(-(j ? u.y : u.x), F, dg[m][j]);
                dq[m][2 + j] = fmaf(f[2 + j], x[2 + j], dq[m][2 + j]);
                dk[m][2 + j] = fmaf(b, z, dk[m][2 + j]);
                dg[m][2 + j] = fmaf(j ? v.y : v.x, x[2 + j], dg[m][2 + j]);
                dg[m][2 + j] = fmaf(j ? w.y : w.x, y[2 + j], dg[m][2 + j]);
                db[1] = fmaf(kx[2 + j], z, db[1]);
            }
        }
#pragma unroll 1
        for (int S = 4; S >= 1; S /= 2) {
            const bool second = (g & S) != 0;
            const float in_second = second ? 1.f : 0.f, in_first = 1.f - in_second, sign = in_second - in_first;
            const int boundary = ((g & (-2 * S)) + S) * 4 + t;
            float f[4], w[2];
            uint32_t U[2], W[2];
#pragma unroll
            for (int e = 0; e < 4; ++e) f[e] = decay(gv[m][e], __shfl_sync(~0u, gv[m][e], boundary));
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                w[i] = second ? strength_of(m, i) : 1.f;
                operands(i, second, w[i], f, U[i], W[i]);
            }
            __syncwarp();
            FragB<T> b_U, b_W;
            ldmatrix_trans(b_U.r[0], b_U.r[1], b_W.r[0], b_W.r[1], place + 16 * lane);
            // Of this lane's columns 2 t and 2 t + 1, which differ in bit 0, those that row g meets at this level.
            const int apart = (g ^ 2 * t) & (8 - S);
            const uint32_t met = (apart == S ? 0xffffu : 0u) | ((apart ^ (S & 1)) == S ? 0xffff0000u : 0u);
            const FragA<T> a_P{
                {(second ? rows.r[0] : cols.r[0]) & met, 0u, 0u, (second ? rows.r[3] : cols.r[3]) & met}};
            const FragA<T> a_D{
                {(second ? cols.r[0] : rows.r[0]) & met, 0u, 0u, (second ? cols.r[3] : rows.r[3]) & met}};
            float x[4] = {}, y[4] = {};
            mma(x, a_P, b_U);
            mma(y, a_D, b_W);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 u = unpack2<T>(U[i]), v = unpack2<T>(W[i]);
                float sum = 0.f;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int e = 2 * i + j;
                    const float of_q = f[e] * x[e], of_k = f[e] * y[e];
                    dq[m][e] = fmaf(in_second, of_q, dq[m][e]);
                    dk[m][e] = fmaf(in_first, of_q, dk[m][e]);
                    dk[m][e] = fmaf(w[i], of_k, dk[m][e]);
                    dg[m][e] = fmaf(sign, fmaf(j ? v.y : v.x, y[e], (j ? u.y : u.x) * x[e]), dg[m][e]);
                    sum = fmaf(kx[e], of_k, sum);
                }
                db[i] = fmaf(in_second, sum, db[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int down = (16 * m + 8 * i) * Tile<T, kD>::kRowBytes;
            set_shared_u32(a_q + down, pack2<T>(dq[m][2 * i], dq[m][2 * i + 1]));
            set_shared_u32(a_k + down, pack2<T>(dk[m][2 * i], dk[m][2 * i + 1]));
            add_db(db[i], m, i);
        }
    }
};

}  // namespace kda
