// The last products of kernel.cuh: M, M A^T, dA = -stril(A^T (M A^T)), and the sum of db's parts, which rides along.
#pragma once

#include "access.cuh"

namespace kda {

// One step of rows m0 .. m0 + 15 of the first tile times rows n0 .. of the second, `tiles` groups of 16 of those.
template <class T, class Rows, class Columns>
__device__ __forceinline__ void add_part(float (&acc)[4][4], const Rows& s_rows, const Columns& s_cols, int lane,
                                         int m0, int n0, int tiles, int i) {
    const FragA<T> a = row_a(s_rows, lane, m0, i);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        if (n == tiles) break;
        FragB<T> b[2];
        row_b(b, s_cols, lane, n0 + 16 * n, i);
        mma(acc[2 * n], a, b[0]);
        mma(acc[2 * n + 1], a, b[1]);
    }
}

// dw_of and kg_of: their tiles by pass. v, dv, A, dw, kg and db's parts are whole, and what the tiles of M and M A^T
// (common/tiles.h) lie over is read.
template <class T, class Cfg, int kHeadV, class DwOf, class KgOf>
__device__ __forceinline__ void write_dA(const WyParams& p, char* smem, uint32_t s0, const DwOf& dw_of,
                                         const KgOf& kg_of, int warp, int lane, int64_t row0, int C) {
    constexpr int kWarps = Cfg::kWarps, kStep = 32 / sizeof(T), kVSteps = kHeadV / kStep, kCSteps = kRows / kStep;
    constexpr int kPassSteps = Cfg::kPassColumns / kStep;
    const Tile<T, kHeadV> s_dv{s0 + Cfg::kDv}, s_v{s0 + Cfg::kDo};
    const Tile<T, kRows> s_A{s0 + Cfg::kA}, s_M{s0 + Cfg::kM}, s_MA{s0 + Cfg::kMA};
    const float* s_partial = reinterpret_cast<float*>(smem + Cfg::kPartial);
    const float* s_beta = reinterpret_cast<float*>(smem + Cfg::kBeta);
    const int g = lane / 4, t = lane % 4, BT = p.BT, stride_A = p.HV * BT;

    // Parts of 16 rows and 32 columns, those right of the diagonal left out: parts of the left half go to warps 0 to 3
    // by rows, those of the right half to the last four in opposite order, which spreads the 16 x 16 tiles that have
    // something to do.
    constexpr int kLoop = sizeof(T) == 2 ? 8 : 4;  // steps per iteration: fp32 code must fit the instruction cache
    constexpr int kEvery = kWarps / 4;
    const auto part_row = [&](int part) { return 16 * (part == 0 ? warp % 4 : 3 - warp % 4); };
    const auto part_tiles = [](int m0, int n0) { return m0 < n0 ? 0 : m0 == n0 ? 1 : 2; };  // of 16 columns
    {
        float M[2 / kEvery][4][4] = {};
#pragma unroll
        for (int j = 0; j < 2 / kEvery; ++j) {
            const int part = warp / 4 + j, m0 = part_row(part), n0 = 32 * part, tiles = part_tiles(m0, n0);
            if (tiles == 0) continue;
#pragma unroll(kLoop)
            for (int i = 0; i < kVSteps; ++i) add_part<T>(M[j], s_dv, s_v, lane, m0, n0, tiles, i);
#pragma unroll
            for (int pass = 0; pass < Cfg::kPasses; ++pass)
#pragma unroll(kLoop)
                for (int i = 0; i < kPassSteps; ++i)
                    add_part<T>(M[j], dw_of(pass), kg_of(pass), lane, m0, n0, tiles, i);
        }
        if constexpr (!Cfg::kQkInShared) __syncthreads();  // M goes over v
#pragma unroll
        for (int j = 0; j < 2 / kEvery; ++j) {
            const int part = warp / 4 + j, m0 = part_row(part), n0 = 32 * part;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int col = n0 + 8 * n + 2 * t;
                const float b0 = s_beta[col], b1 = s_beta[col + 1];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int r = m0 + g + 8 * i;
                    store2(s_M, m0 + g, 8 * i, col, col < r ? M[j][n][2 * i] * b0 : 0.f,
                           col + 1 < r ? M[j][n][2 * i + 1] * b1 : 0.f);
                }
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < C) {
        float s = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) s += s_partial[w * kRows + threadIdx.x];
        p.db[row0 + static_cast<int64_t>(threadIdx.x) * p.HV] = s;
    }
#pragma unroll 1
    for (int part = warp / 4; part < 2; part += kEvery) {
        const int m0 = part_row(part), n0 = 32 * part;
        float MA[4][4] = {};
#pragma unroll(kLoop)
        for (int i = 0; i < kCSteps; ++i) {
            if (kStep * i > m0 + 15) break;  // M's columns beyond are 0
            const FragA<T> a = row_a(s_M, lane, m0, i);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                FragB<T> b[2];
                row_b(b, s_A, lane, n0 + 16 * n, i);
                mma(MA[2 * n], a, b[0]);
                mma(MA[2 * n + 1], a, b[1]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            store2(s_MA, m0 + g, 0, n0 + 8 * n + 2 * t, MA[n][0], MA[n][1]);
            store2(s_MA, m0 + g, 8, n0 + 8 * n + 2 * t, MA[n][2], MA[n][3]);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int part = warp / 4; part < 2; part += kEvery) {
        const int m0 = part_row(part), n0 = 32 * part, tiles = part_tiles(m0, n0);
        float dA[4][4] = {};
        if (tiles > 0) {
#pragma unroll(kLoop / 4)
            for (int i = 0; i < kCSteps / 2; ++i) {
                const FragA<T> a0 = col_a(s_A, lane, m0, 2 * i), a1 = col_a(s_A, lane, m0, 2 * i + 1);
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    if (n == 2 * tiles) break;
                    FragB<T> b[2];
                    col_b(b, s_MA, lane, n0 + 8 * n, i);
                    mma(dA[n], a0, b[0]);
                    mma(dA[n], a1, b[1]);
                }
            }
        }
        float* g_dA = p.dA + row0 * BT + n0 + 2 * t;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int col = n0 + 8 * n + 2 * t;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int r = m0 + g + 8 * i;
                const float x[2] = {col < r ? -dA[n][2 * i] : 0.f, col + 1 < r ? -dA[n][2 * i + 1] : 0.f};
                if (r < C && col < BT) store_run<true, 1>(g_dA + static_cast<int64_t>(r) * stride_A + 8 * n, 2, x);
            }
        }
    }
}

}  // namespace kda
