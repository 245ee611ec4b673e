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
        float db[2] = {};
        const FragA<T> rows = row_a(s_PD, lane, 16 * m, m), cols = col_a(s_PD, lane, 16 * m, m);
        // One level. below, above: of this lane's two columns in rows g and g + 8 the pairs of the level whose row
        // is in the second half, and in the first; S = 8 has whole registers of them.
        const auto level = [&](auto is_8, int S, uint32_t below, uint32_t above) {
            constexpr bool k8 = decltype(is_8)::value;
            float f[4], kf[4], w[2];
            uint32_t U[2], W[2];
            const bool lane_second = (g & S) != 0;
            const int boundary = k8 ? t : ((g & (-2 * S)) + S) * 4 + t;
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool second = k8 ? i == 1 : lane_second;
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    f[2 * i + j] = decay(gv[m][2 * i + j],
                                         __shfl_sync(~0u, gv[m][k8 ? 2 + j : 2 * i + j], boundary));
                const float2 k = pair_of(a_k, m, i);
                kf[2 * i] = k.x * f[2 * i], kf[2 * i + 1] = k.y * f[2 * i + 1];
                w[i] = second ? strength_of(m, i) : 1.f;
                W[i] = pack2<T>(w[i] * kf[2 * i], w[i] * kf[2 * i + 1]);
                if (k8 && i == 0) {
                    U[i] = W[i];
                } else {
                    const float2 q = pair_of(second ? a_q : a_k, m, i);
                    U[i] = pack2<T>(q.x * f[2 * i], q.y * f[2 * i + 1]);
                }
                set_shared_u32(place + 4 * lane + i * 128, U[i]);
                set_shared_u32(place + 4 * lane + 256 + i * 128, W[i]);
            }
            __syncwarp();
            FragB<T> b_U, b_W;
            ldmatrix_trans(b_U.r[0], b_U.r[1], b_W.r[0], b_W.r[1], place + 16 * lane);
            FragA<T> a_P, a_D;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a_P.r[i] = k8 ? (i == 1 ? rows.r[1] : i == 2 ? cols.r[2] : 0u)
                           : i % 3 == 0 ? (rows.r[i] & below) | (cols.r[i] & above)
                                        : 0u;
                a_D.r[i] = k8 ? (i == 1 ? cols.r[1] : i == 2 ? rows.r[2] : 0u)
                           : i % 3 == 0 ? (cols.r[i] & below) | (rows.r[i] & above)
                                        : 0u;
            }
            float x[4] = {}, y[4] = {};
            mma(x, a_P, b_U);
            mma(y, a_D, b_W);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool second = k8 ? i == 1 : lane_second;
                const float2 u = unpack2<T>(U[i]), v = unpack2<T>(W[i]);
                float sum = 0.f;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int e = 2 * i + j;
                    const float in_second = second ? f[e] : 0.f, in_first = second ? 0.f : f[e];
                    const float pair = fmaf(j ? v.y : v.x, y[e], (j ? u.y : u.x) * x[e]);
                    dq[m][e] = fmaf(in_second, x[e], dq[m][e]);
                    dk[m][e] = fmaf(in_first, x[e], dk[m][e]);
                    dk[m][e] = fmaf(w[i] * f[e], y[e], dk[m][e]);
                    dg[m][e] += second ? pair : -pair;
                    sum = fmaf(kf[e], y[e], sum);
                }
                db[i] += second ? sum : 0.f;
            }
        };
        level(Int<1>(), 8, 0u, 0u);
#pragma unroll 1
        for (int S = 4; S >= 1; S /= 2) {
            const int apart = (g ^ 2 * t) & (8 - S);  // of column 2 t; that of 2 t + 1 differs in bit 0
            const uint32_t both = (apart == S ? 0xffffu : 0u) | ((apart ^ (S & 1)) == S ? 0xffff0000u : 0u);
            level(Int<0>(), S, g & S ? both : 0u, g & S ? 0u : both);
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
