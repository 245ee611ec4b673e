// kda_grads: from what the scans left back to the raw inputs (K1), a chunk and value head a CTA.
//
// Formula (docs/kda_math.md sections 5 to 8; q, k after their norm, g in log2, L row 63, e = 2^g, n an anchor row):
//   Y = A^T dv_new            dv = b Y               P = scale tril(do v_new^T)      D = -stril(Y v_new^T)
//   Z = -e (Y h^T) + G        dq = scale e (do h^T) + Q + m k                        m = diag(P)
//   dk1 = 2^(g_L - g) (v_new dh^T)                   dk = dk1 + b Z + F + m q        db = sum_v Y v + sum_k k Z
//   Q_i = sum_{j < i} P_ij k_j 2^(g_i - g_j)         G_i the same of D
//   F_j = sum_{i > j} (P_ij q_i + b_i D_ij k_i) 2^(g_i - g_j)
//   da_t = sum_{s >= t} (q (dq - m k) + b k Z - k F)_s + sum_{s < t} (k dk1)_s + 2^(g_L) sum_v h dh
// and through norm, gate and sigmoid to the inputs (section 7).
// Pairs (pair_grads.cuh) go by halving: level S = 32, 16, ..., 1 takes the rows i with i & S against those of the other
//   half of their run of 2 S, both decayed to the boundary n between, f = 2^-|g - g_n|. In da the two terms of a pair
//   are the same product of the same rounded operands, P_ij (q_i f)(k_j f): those on one side of t cancel to fp32.
// Grid: NT HV CTAs of 8 warps, value heads fastest.
// Tile: 64 rows, K and V whole; key columns in passes of 64, 8 a warp (common/tiles.h).
// Bytes per chunk and head, K = V = 128: q k v do v_new dv_new 96 KB, g 16 or 32, A 8, h and dh 64; out dq dk dv 48, dg
//   16 or 32; q, k and g are read a second time at the end.
// On chip: h and dh go from memory into registers in the layout of the tensor core's B operand.
// Must hold: K = V = kD; images as params.h has them; rows past the chunk's are zero in v_new and dv_new.
// Fixed order of every sum, no atomics. Rounded to 16 bits: r q, r k, Y, P, D, the decayed operands of the pairs; dq
//   and dk once before the norm's backward.
#pragma once

#include "pair_grads.cuh"

namespace kda {

template <class T, int kD>
__global__ void __launch_bounds__(KdaGradsTile<kD>::kThreads, KdaGradsTile<kD>::kBlocksPerSm)
    kda_grads_kernel(const __grid_constant__ KdaParams p) {
    using Cfg = KdaGradsTile<kD>;
    static_assert(Cfg::kThreads == kRawThreads, "raw.cuh counts on it");
    constexpr int kBlocks = kD / 32, kY = kD / 64;

    extern __shared__ __align__(128) char smem[];
    const uint32_t s0 = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    const Tile<T, kD> s_do{s0 + Cfg::kDo}, s_v_new{s0 + Cfg::kVNew}, s_Y{s0 + Cfg::kY}, s_q{s0 + Cfg::kQ},
        s_k{s0 + Cfg::kK}, s_v{s0 + Cfg::kV};
    const Tile<T, kRows> s_A{s0 + Cfg::kA}, s_PD{s0 + Cfg::kA};  // P below the diagonal, D^T above it
    const uint32_t s_beta = s0 + Cfg::kBeta, s_diagonal = s0 + Cfg::kDiagonal;

    ChunkHead c = chunk_head(p);
    if (c.rows == 0) return;
    int warp = threadIdx.x / 32, lane = lane_id(), g = lane / 4, t = lane % 4;
    // Made again where they are used: registers are short in between.
    const auto forget_places = [&] {
        const int thread = threadIdx.x + shared_u32(s0 + Cfg::kZero);  // read: no compiler knows what it is
        warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    };
    const auto stage_of = [&] { return s0 + Cfg::kV + warp * Cfg::kStage; };
    const auto db_of = [&](int row) { return s0 + Cfg::kDb + (warp * kRows + row) * 4; };
    const int64_t value0 = (c.row * p.HV + c.hv) * kD;

    copy_image(s_Y, p.dv_new, c.entry);
    copy_rows(s_A, static_cast<const T*>(p.A) + (c.row * p.HV + c.hv) * kRows, int64_t{p.HV} * kRows, c.rows);
    copy_rows(s_v, static_cast<const T*>(p.v) + value0, int64_t{p.HV} * kD, c.rows);
    copy_commit();
    copy_rows(s_do, static_cast<const T*>(p.d_o) + value0, int64_t{p.HV} * kD, c.rows);
    copy_image(s_v_new, p.v_new, c.entry);
    copy_rows(s_q, static_cast<const T*>(p.q) + (c.row * p.H + c.h) * kD, int64_t{p.H} * kD, c.rows);
    copy_rows(s_k, static_cast<const T*>(p.k) + (c.row * p.H + c.h) * kD, int64_t{p.H} * kD, c.rows);
    copy_commit();
    write_strengths<T>(s_beta, p, c);
    if (threadIdx.x == 0) {
        keep(s0 + Cfg::kHere, c);
        set_shared_u32(s0 + Cfg::kBase, s0);
        set_shared_u32(s0 + Cfg::kZero, 0);
    }
    copy_wait<1>();
    __syncthreads();  // dv_new, A, v and b are there

    {  // Y of this warp's value columns, over dv_new; b Y over v
        float Y[4][kY][4] = {};
        const int n0 = warp * 8 * kY;
        FragB<T> b[kY][2][2];
#pragma unroll
        for (int n = 0; n < kY; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) col_b(b[n][i], s_Y, lane, n0 + 8 * n, i);
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int i = m; i < 4; ++i) {  // A is lower triangular
                const FragA<T> a = col_a(s_A, lane, 16 * m, i);
#pragma unroll
                for (int n = 0; n < kY; ++n) mma(Y[m][n], a, b[n][i / 2][i % 2]);
            }
        __syncwarp();
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float strength = shared_f32(s_beta + 4 * (16 * m + 8 * i + g));
                float db = 0.f;
#pragma unroll
                for (int n = 0; n < kY; ++n) {
                    const float y0 = Y[m][n][2 * i], y1 = Y[m][n][2 * i + 1];
                    const int col = n0 + 8 * n + 2 * t;
                    const float2 v = load2(s_v, g, 16 * m + 8 * i, col);
                    db += y0 * v.x + y1 * v.y;
                    store2(s_Y, g, 16 * m + 8 * i, col, y0, y1);
                    store2(s_v, g, 16 * m + 8 * i, col, strength * y0, strength * y1);
                }
                db = sum_over_t(db);
                if (t == 0) set_shared_f32(db_of(g) + (16 * m + 8 * i) * 4, db);
            }
    }
    copy_wait<0>();
    __syncthreads();  // Y and b Y are whole; all else is there; A is read

    {
        constexpr int kPieces = kD / 8, kStep = kRawThreads / kPieces;
        const int r0 = threadIdx.x / kPieces, col = threadIdx.x % kPieces * 8;
        T* to = static_cast<T*>(p.dv) + value0 + int64_t{r0} * p.HV * kD + col;
#pragma unroll
        for (int i = 0; i < kRows / kStep; ++i) {
            float x[4];
            shared_f32x4(x, s_v.at(r0, i * kStep, col));
            if (r0 + i * kStep < c.rows)
                store_global4(reinterpret_cast<float*>(to + int64_t{i} * kStep * p.HV * kD), x[0], x[1], x[2], x[3]);
        }
    }
    normalize(s0 + Cfg::kNormQ, s_q, p.qk_l2norm);
    normalize(s0 + Cfg::kNormK, s_k, p.qk_l2norm);
    // The lower triangle's 10 tiles of P by warps 0 to 3, the mirrored ones of D by the others.
#pragma unroll 1
    for (int j = 0, u = warp % 4; j < (u < 2 ? 3 : 2); ++j) {
        const int i = 16 * (u < 2 ? 3 - u : u == 2 ? 1 : 3 - 3 * j), k = u == 3 ? i : 16 * j;
        if (warp < 4) {
            pair_tile(s_PD, s_diagonal, s_do, s_v_new, i, k, p.scale, false, lane);
        } else {
            pair_tile(s_PD, s_diagonal, s_v_new, s_Y, k, i, -1.f, true, lane);
        }
    }
    __syncthreads();  // q, k, P and D are ready; b Y is read

    const auto first_column = [&] {  // of this warp in its pass
        return Cfg::kPasses == 1 ? warp * 8 : static_cast<int>(shared_u32(s0 + Cfg::kColumn + 4 * warp));
    };
    if (Cfg::kPasses > 1 && lane == 0) set_shared_u32(s0 + Cfg::kColumn + 4 * warp, warp * 8);
    __syncwarp();
#pragma unroll 1
    while (true) {
        forget_places();
        int k0 = first_column();
        c = kept(s0 + Cfg::kHere);
        __syncwarp();
        warp_decays<T>(stage_of(), p, c, k0, lane);

        // do h^T, v_new dh^T and Y h^T for 8 key columns: row 16 m + 8 i + g, column 2 t + j in [m][2 i + j].
        float dq[4][4] = {}, dk[4][4] = {}, dg[4][4] = {};
        float h_dh = 0.f;
        {
            // Piece 4 i + t of row k0 + g lies at (4 i + t) xor g within its 8.
            const int64_t at = c.entry * kD * kD + (k0 + g) * kD;
            const T *h = static_cast<const T*>(p.h) + at, *dh = static_cast<const T*>(p.dh) + at;
            const auto piece = [&](const T* x, int i) {
                return __ldg(reinterpret_cast<const uint4*>(x + (i / 2) * 64 + (((4 * (i % 2) + t) ^ g) * 8)));
            };
            constexpr int kDepth = 2;
            uint4 x_h[kDepth], x_dh[kDepth];
#pragma unroll
            for (int i = 0; i < kDepth; ++i) x_h[i] = piece(h, i), x_dh[i] = piece(dh, i);
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
                FragB<T> b_h[2], b_dh[2];
                {
                    const uint4 x = x_h[i % kDepth], y = x_dh[i % kDepth];
                    uint32_t w[4] = {x.x, x.y, x.z, x.w}, u[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float2 v = unpack2<T>(w[j]), z = unpack2<T>(u[j]);
                        h_dh = fmaf(v.x, z.x, h_dh);
                        h_dh = fmaf(v.y, z.y, h_dh);
                    }
                    transpose4(w);
                    transpose4(u);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        b_h[j].r[0] = w[2 * j], b_h[j].r[1] = w[2 * j + 1];
                        b_dh[j].r[0] = u[2 * j], b_dh[j].r[1] = u[2 * j + 1];
                    }
                }
                if (i + kDepth < kBlocks) {
                    x_h[i % kDepth] = piece(h, i + kDepth);
                    x_dh[i % kDepth] = piece(dh, i + kDepth);
                }
#pragma unroll
                for (int e = 0; e < 2; ++e)
#pragma unroll
                    for (int m = 0; m < 4; ++m) {
                        mma(dq[m], row_a(s_do, lane, 16 * m, 2 * i + e), b_h[e]);
                        mma(dg[m], row_a(s_Y, lane, 16 * m, 2 * i + e), b_h[e]);
                        mma(dk[m], row_a(s_v_new, lane, 16 * m, 2 * i + e), b_dh[e]);
                    }
            }
        }

        h_dh = sum_over_t(h_dh);  // of column g
        if (t == 0) set_shared_f32(s0 + Cfg::kSums + (warp * 8 + g) * 4, h_dh);
        __syncwarp();  // the warp's g is whole
        forget_places();
        k0 = first_column();
        const int rows = shared_u32(s0 + Cfg::kHere + 8);
        const uint32_t s_stage = stage_of();
        float gv[4][4];
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 x = shared_f32x2(row_of(s_stage, 16 * m + 8 * i + g) + 8 * t);
                gv[m][2 * i] = x.x, gv[m][2 * i + 1] = x.y;
            }

        __syncwarp();  // the warp's g is read
        const uint32_t a_q = s_q.at(g, 0, k0 + 2 * t);
        PairGrads<T, kD> pairs{gv, dq, dk, dg, s_PD, a_q, a_q + (Cfg::kK - Cfg::kQ), s_beta + 4 * g, db_of(g),
                               s0 + Cfg::kOperands + warp * Cfg::kPlace, lane, g, t};
        {
            float last[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) last[j] = __shfl_sync(~0u, gv[3][2 + j], 28 + t);
            if (g == 0) set_shared_f32x2(s0 + Cfg::kLast + (warp * 8 + 2 * t) * 4, last[0], last[1]);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                if (rows <= 16 * m) break;  // all is 0 from here on
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float2 q = pairs.pair_of(pairs.a_q, m, i), k = pairs.pair_of(pairs.a_k, m, i);
                    const float strength = pairs.strength_of(m, i);
                    const float diagonal = shared_f32(s_diagonal + 4 * (16 * m + 8 * i + g));
                    float k_dk1[2], db = 0.f;
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int x = 2 * i + j;
                        const float qj = j ? q.y : q.x, kj = j ? k.y : k.x;
                        const float e = exp2_fast(gv[m][x]), dk1 = exp2_fast(last[j] - gv[m][x]) * dk[m][x];
                        const float z = -e * dg[m][x], from_state = e * (p.scale * dq[m][x]);
                        k_dk1[j] = kj * dk1;
                        db = fmaf(kj, z, db);
                        dq[m][x] = fmaf(diagonal, kj, from_state);
                        dk[m][x] = fmaf(diagonal, qj, fmaf(strength, z, dk1));
                        dg[m][x] = fmaf(qj, from_state, strength * (kj * z));
                    }
                    set_shared_f32x2(row_of(s_stage, 16 * m + 8 * i + g) + 8 * t, k_dk1[0], k_dk1[1]);
                    pairs.add_db(db, m, i);
                }
            }
        }

        // Tiles past the chunk's rows have nothing to add.
        if (rows > 32) pairs.template far_level<2, 0>();
        if (rows > 16) pairs.template far_level<1, 0>();
        pairs.template near_levels<0>();
        if (rows > 16) pairs.template near_levels<1>();
        if (rows > 48) pairs.template far_level<1, 2>();
        if (rows > 32) pairs.template near_levels<2>();
        if (rows > 48) pairs.template near_levels<3>();

        // da, and through the gate.
        forget_places();
        c = kept(s0 + Cfg::kHere);
        k0 = first_column();
        const uint32_t end_stage = shared_u32(s0 + Cfg::kBase) + Cfg::kV + warp * Cfg::kStage;  // read: see the end
        const int col = k0 + 2 * t;
        {
            float before[16], after[16];  // sums of k dk1 over earlier rows; of da's other terms from the row on
            ColumnSums::sum<false, false>(before, end_stage, lane);
            __syncwarp();
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    set_shared_f32x2(row_of(end_stage, 16 * m + 8 * i + g) + 8 * t, dg[m][2 * i], dg[m][2 * i + 1]);
            __syncwarp();
            ColumnSums::sum<true, true>(after, end_stage, lane);
            const float h_dh = exp2_fast(shared_f32(s0 + Cfg::kLast + (warp * 8 + lane % 8) * 4)) *
                               shared_f32(s0 + Cfg::kSums + (warp * 8 + lane % 8) * 4);
#pragma unroll
            for (int i = 0; i < 16; ++i) after[i] += before[i] + h_dh;
            ColumnSums::store(after, end_stage, lane);
            __syncwarp();
        }
        float2 sum_dx;
        float dlog;
        gates_backward<T>(sum_dx, dlog, end_stage, p, c, col, lane, p.HV + shared_u32(s0 + Cfg::kZero));
        if (p.gate != Gate::Pregated && p.dt_bias != nullptr) {
            const float x = sum_over_g(sum_dx.x), y = sum_over_g(sum_dx.y);
            if (g == 0) store_global2(p.ddt_bias_part + c.entry * kD + col, x, y);
        }
        if (p.gate != Gate::Pregated) {
            dlog = sum_over_g(sum_over_t(dlog));
            const uint32_t to = s0 + Cfg::kLog + 4 * warp;
            if (lane == 0) set_shared_f32(to, k0 < Cfg::kPassColumns ? dlog : shared_f32(to) + dlog);
        }
        k0 += Cfg::kPassColumns;
        if (k0 >= kD) break;
        __syncwarp();
        if (lane == 0) set_shared_u32(s0 + Cfg::kColumn + 4 * warp, k0);
        __syncwarp();
    }
    __syncthreads();  // dq, dk and the sums are whole

    c = kept(s0 + Cfg::kHere);
    const uint32_t base = shared_u32(s0 + Cfg::kBase);  // read, so that no address of the start is kept for here
    norm_backward(p, c, Tile<T, kD>{base + Cfg::kQ}, p.q, s0 + Cfg::kNormQ, p.dq, p.HV > p.H ? p.dq_head : nullptr);
    norm_backward(p, c, Tile<T, kD>{base + Cfg::kK}, p.k, s0 + Cfg::kNormK, p.dk, p.HV > p.H ? p.dk_head : nullptr);
    if (threadIdx.x < c.rows) {
        float s = 0.f;
#pragma unroll
        for (int w = 0; w < Cfg::kWarps; ++w) s += shared_f32(s0 + Cfg::kDb + (w * kRows + threadIdx.x) * 4);
        const int64_t at = (c.row + threadIdx.x) * p.HV + c.hv;
        if (p.beta_sigmoid) {
            const float x =
                p.beta_f32 ? static_cast<const float*>(p.beta)[at] : to_float(static_cast<const T*>(p.beta)[at]);
            s *= p.beta_scale * sigmoid(x) * sigmoid(-x);
        }
        if (p.beta_f32) {
            static_cast<float*>(p.dbeta)[at] = s;
        } else {
            static_cast<T*>(p.dbeta)[at] = from_float<T>(s);
        }
    }
    if (threadIdx.x == 0 && p.gate != Gate::Pregated) {
        float s = 0.f;
        for (int w = 0; w < Cfg::kWarps; ++w) s += shared_f32(s0 + Cfg::kLog + 4 * w);
        p.dA_log_part[c.entry] = s;
    }
}

}  // namespace kda
