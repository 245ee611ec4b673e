// chunk_kda_bwd_wy_dqkg_fused: dq, dk, dv, db, dg, dA of one chunk and value head, each tensor read and written once.
//
// Formula (C rows, L the last of them, e = 2^g, b = beta; docs/kda_math.md section 5):
//   dq = scale e (do h^T)           dk1 = 2^(g_L - g) (v_new dh^T)      dw = -dv h^T         kg = k e
//   X = A^T dw     Y = A^T dv       dv_out = b Y                        db = sum_v Y v + sum_k X kg
//   dk = dk1 + b e X                dg = q dq - k dk1 + b kg X, on row L also 2^(g_L) sum_v h dh + sum_rows k dk1
//   M = stril((dv v^T + dw kg^T) diag(b))                               dA = -stril(A^T (M A^T))
// Grid: B NT HV CTAs, value heads fastest. A CTA of 8 warps owns one chunk of one value head.
// Tile: 64 rows, K and V whole (common/tiles.h).
// Bytes per chunk and head: each input and output once. At K = V = 128, BT = 64 and 16-bit: q k v v_new do dv 96 KB,
//   g 32 KB, A 8 KB, h and dh 64 KB (128 KB in fp32); out dq dk dg 96 KB, dv 16 KB, dA 16 KB.
// On chip: do, v_new, dv, A, k, q (later v, M, M A^T, kg, dw in their places) in shared memory by cp.async; h and dh
//   go from global memory into registers in the very layout of the tensor core's B operand, so sum_v h dh is taken
//   from unrounded values in the same lane; g and the outputs pass through registers alone.
// Must hold: kExact: K = kHeadK, V = kHeadV, state [K, V], every pointer 16-byte aligned. Otherwise K <= kHeadK and
//   V <= kHeadV of any value and either state layout, with element-wise access.
// Fixed order of every sum, no atomics. Rounded to 16 bits: h, dh (of fp32) for the products, dw, kg, M, M A^T, dv_out.
#pragma once

#include "lower.cuh"

namespace kda {

template <class T, class S, int kHeadK, int kHeadV, bool kExact>
__global__ void __launch_bounds__(WyTile<sizeof(T), kHeadK, kHeadV>::kThreads,
                                  kExact ? WyTile<sizeof(T), kHeadK, kHeadV>::kBlocksPerSm : 1)
    wy_dqkg_kernel(const __grid_constant__ WyParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (sizeof(T) == 2 && kHeadK == 128 && kExact) {  // hopper.cuh serves these there
        __trap();
        return;
    }
#endif
    using Cfg = WyTile<sizeof(T), kHeadK, kHeadV>;
    constexpr int kN = Cfg::kTilesN, kThreads = Cfg::kThreads, kWarps = Cfg::kWarps;
    constexpr int kMT = kRows / 16;
    constexpr int kStep = 32 / sizeof(T);  // reduction indices of a step
    constexpr int kVSteps = kHeadV / kStep, kVBlocks = kVSteps / 2, kCSteps = kRows / kStep;
    constexpr int kWanted = Cfg::template kStateDepth<sizeof(S)>, kDepth = kWanted < kVBlocks ? kWanted : kVBlocks;
    static_assert(kVBlocks % kDepth == 0, "a pass ends with the slots in order");

    if constexpr (Cfg::kStartStep > 0) {
        if (blockIdx.x < multiprocessors()) idle(blockIdx.x * Cfg::kStartStep);
    }
    extern __shared__ __align__(1024) char smem[];
    const uint32_t s0 = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    const Tile<T, kHeadV> s_do{s0 + Cfg::kDo}, s_v_new{s0 + Cfg::kVNew}, s_dv{s0 + Cfg::kDv}, s_v{s0 + Cfg::kDo};
    const Tile<T, kRows> s_A{s0 + Cfg::kA};
    using PassTile = Tile<T, Cfg::kPassColumns>;
    const auto dw_of = [&](int pass) {
        return PassTile{s0 + (Cfg::kQkInShared ? Cfg::kSide + 2 * pass * Cfg::kPassTile : Cfg::kVNew)};
    };
    const auto kg_of = [&](int pass) {
        return PassTile{s0 + Cfg::kSide + (Cfg::kQkInShared ? (2 * pass + 1) * Cfg::kPassTile : 0)};
    };
    float* s_partial = reinterpret_cast<float*>(smem + Cfg::kPartial);
    float* s_beta = reinterpret_cast<float*>(smem + Cfg::kBeta);

    const int hv = blockIdx.x % p.HV;
    const int64_t i_bc = blockIdx.x / p.HV;
    const int warp = threadIdx.x / 32;
    int lane = lane_id(), g = lane / 4, t = lane % 4;

    int64_t token;
    int C;
    if (p.cu_seqlens == nullptr) {
        const int64_t i_c = i_bc % p.NT;
        token = i_bc / p.NT * p.T + i_c * p.BT;
        const int64_t left = p.T - i_c * p.BT;
        C = left < p.BT ? static_cast<int>(left) : p.BT;
    } else {
        constexpr bool kFew = sizeof(T) == 2 || kHeadK == 128;  // elsewhere its code would make others spill
        int64_t* scratch = reinterpret_cast<int64_t*>(smem);
        const Span span = i_bc < p.NT ? packed_span<kThreads, kFew>(p, i_bc, scratch) : Span{0, 0};
        token = span.start;
        C = span.rows;
        if (C == 0) {
            zero_unused_tokens<T, kThreads>(p, index_at(p.cu_seqlens, p.cu_i64, p.N), i_bc, hv);
            return;
        }
    }

    const int K = kExact ? kHeadK : p.K, V = kExact ? kHeadV : p.V, BT = p.BT;
    int64_t row0 = token * p.HV + hv;                           // of the value-head tensors
    const int64_t qk0 = (token * p.H + hv / (p.HV / p.H)) * K;  // of q and k
    const int stride_qk = p.H * K, stride_k = p.HV * K, stride_v = p.HV * V, stride_A = p.HV * BT;
    const int64_t state0 = static_cast<int64_t>(blockIdx.x) * K * V;
    // Column of a warp's 8 kN that index i of tile n stands for: a lane's pairs of all tiles are neighbours in memory.
    const auto column = [](int n, int i) { return i / 2 * 2 * kN + 2 * n + i % 2; };
    const StateReader<T, S, kExact> g_h(p.h, state0, K, V, p.v_first), g_dh(p.dh, state0, K, V, p.v_first);

    fill<kExact, kThreads>(s_do, static_cast<const T*>(p.d_o) + row0 * V, stride_v, C, V);
    fill<kExact, kThreads>(s_dv, static_cast<const T*>(p.dv) + row0 * V, stride_v, C, V);
    fill<kExact, kThreads>(s_v_new, static_cast<const T*>(p.v_new) + row0 * V, stride_v, C, V);
    copy_commit();
    {
        const T* A = static_cast<const T*>(p.A) + row0 * BT;
        if (kExact && C == BT) {
            fill<true, kThreads>(s_A, A, stride_A, C, BT);
        } else {
            fill<false, kThreads>(s_A, A, stride_A, C, C);  // columns past the tail may hold anything
        }
    }
    if constexpr (Cfg::kQkInShared) {
#pragma unroll
        for (int pass = 0; pass < Cfg::kPasses; ++pass) {
            const int64_t at = qk0 + pass * Cfg::kPassColumns;
            const int columns = K - pass * Cfg::kPassColumns;
            fill<kExact, kThreads>(dw_of(pass), static_cast<const T*>(p.q) + at, stride_qk, C, columns);
            fill<kExact, kThreads>(kg_of(pass), static_cast<const T*>(p.k) + at, stride_qk, C, columns);
        }
    }
    copy_commit();
    if (p.cu_seqlens != nullptr)
        zero_unused_tokens<T, kThreads>(p, index_at(p.cu_seqlens, p.cu_i64, p.N), i_bc, hv);
    // Read back where they are needed: two 64-bit numbers less in registers while the products run.
    if (threadIdx.x == 0) {
        reinterpret_cast<int64_t*>(smem + Cfg::kOrigin)[0] = row0;
        reinterpret_cast<int64_t*>(smem + Cfg::kOrigin)[1] = qk0;
    }
    if (threadIdx.x < kRows) {
        const int64_t at = row0 + static_cast<int64_t>(threadIdx.x) * p.HV;
        float b = 0.f;
        if (threadIdx.x < C) {
            b = p.beta_f32 ? static_cast<const float*>(p.beta)[at] : to_float(static_cast<const T*>(p.beta)[at]);
        }
        s_beta[threadIdx.x] = b;
    }

#pragma unroll 1
    for (int pass = 0; pass < Cfg::kPasses; ++pass) {
        const int kw = warp * 8 * kN, k0 = pass * Cfg::kPassColumns + kw;  // first key column of this warp
        const PassTile s_dw = dw_of(pass), s_kg = kg_of(pass);

        // do h^T, v_new dh^T, dv h^T for this warp's key columns.
        float dq[kMT][kN][4] = {}, dk[kMT][kN][4] = {}, dw[kMT][kN][4] = {};
        float hdh[kN] = {};
        {
            StateBlock<T, S> x_h[kDepth][kN], x_dh[kDepth][kN];
            const auto load_state = [&](int slot, int i_block) {
#pragma unroll
                for (int n = 0; n < kN; ++n) {
                    g_h.load(x_h[slot][n], k0 + column(n, g), i_block);
                    g_dh.load(x_dh[slot][n], k0 + column(n, g), i_block);
                }
            };
#pragma unroll
            for (int i = 0; i < kDepth; ++i) load_state(i, i);
            if (pass == 0) {
                copy_wait<1>();
                __syncthreads();  // do, dv and v_new have arrived
            }
            const int lane = forget(threadIdx.x % 32);
            constexpr int kUnroll = sizeof(T) == 2 ? kVBlocks : kDepth;
#pragma unroll 1
            for (int i0 = 0; i0 < kVBlocks; i0 += kUnroll) {
#pragma unroll
                for (int j = 0; j < kUnroll; ++j) {
                    const int i = i0 + j;
                    FragB<T> b_h[kN][2], b_dh[kN][2];
#pragma unroll
                    for (int n = 0; n < kN; ++n) {
                        hdh[n] = x_h[j % kDepth][n].dot(x_dh[j % kDepth][n], hdh[n]);
                        x_h[j % kDepth][n].frags(b_h[n]);
                        x_dh[j % kDepth][n].frags(b_dh[n]);
                    }
                    if (i + kDepth < kVBlocks) load_state(j % kDepth, i + kDepth);
#pragma unroll
                    for (int e = 0; e < 2; ++e)
#pragma unroll
                        for (int m = 0; m < kMT; ++m) {
                            const FragA<T> a_do = row_a(s_do, lane, 16 * m, 2 * i + e);
#pragma unroll
                            for (int n = 0; n < kN; ++n) mma(dq[m][n], a_do, b_h[n][e]);
                            const FragA<T> a_dv = row_a(s_dv, lane, 16 * m, 2 * i + e);
#pragma unroll
                            for (int n = 0; n < kN; ++n) mma(dw[m][n], a_dv, b_h[n][e]);
                            const FragA<T> a_v_new = row_a(s_v_new, lane, 16 * m, 2 * i + e);
#pragma unroll
                            for (int n = 0; n < kN; ++n) mma(dk[m][n], a_v_new, b_dh[n][e]);
                        }
                }
            }
        }

        // g (and q, k) of this lane's elements, kAhead groups of 16 rows ahead of their use, and g of row L. Those of
        // row r are the 2 kN columns from k0 + 2 kN t on, `cols` of which exist, at `at + r stride_k`.
        constexpr int kAhead = Cfg::kGroupsAhead, kRun = 2 * kN;
        const int col = k0 + kRun * t, cols = K - col;
        const int64_t row0 = shared_i64(s0 + Cfg::kOrigin), at = row0 * K + col;
        float gv[kAhead][2][kRun], g_last[kRun];
        Run<T, kN> qv[kAhead][2], kv[kAhead][2];
        const auto load_rows = [&](int m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int r = 16 * m + 8 * i + g;
#pragma unroll
                for (int j = 0; j < kRun; ++j) gv[m % kAhead][i][j] = 0.f;
                if (r < C) load_run<kExact, kN>(gv[m % kAhead][i], p.g + at + static_cast<int64_t>(r) * stride_k, cols);
                if constexpr (!Cfg::kQkInShared) {
                    const int64_t at_qk =
                        shared_i64(s0 + Cfg::kOrigin + 8) + static_cast<int64_t>(r) * stride_qk + col;
                    qv[m % kAhead][i].zero(), kv[m % kAhead][i].zero();
                    if (r < C) {
                        qv[m % kAhead][i].template load<kExact>(static_cast<const T*>(p.q) + at_qk, cols);
                        kv[m % kAhead][i].template load<kExact>(static_cast<const T*>(p.k) + at_qk, cols);
                    }
                }
            }
        };
        load_run<kExact, kN>(g_last, p.g + at + static_cast<int64_t>(C - 1) * stride_k, cols);
#pragma unroll
        for (int m = 0; m < kAhead; ++m) load_rows(m);
        if (pass == 0) copy_wait<0>();
        if (pass == 0 || pass == Cfg::kPasses - 1) __syncthreads();
        if (pass == Cfg::kPasses - 1) {
            fill<kExact, kThreads>(s_v, static_cast<const T*>(p.v) + row0 * V, stride_v, C, V);
            copy_commit();
        }

        // dw = -dv h^T, rounded, into shared memory (over q, which moves to registers first), then X = A^T dw from it.
        // dw and kg lie there in tile order: the lane's pair of tile n at column 8 n + 2 t.
        uint32_t q_pair[kMT][2];
#pragma unroll
        for (int m = 0; m < kMT; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if constexpr (Cfg::kQkInShared) q_pair[m][i] = shared_u32(s_dw.at(g, 16 * m + 8 * i, kw + 2 * t));
#pragma unroll
                for (int n = 0; n < kN; ++n)
                    store2(s_dw, g, 16 * m + 8 * i, kw + 8 * n + 2 * t, -dw[m][n][2 * i], -dw[m][n][2 * i + 1]);
            }
        __syncwarp();
        FragB<T> b_dw[kN][kCSteps / 2][2];
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int i = 0; i < kCSteps / 2; ++i) col_b(b_dw[n][i], s_dw, lane, kw + 8 * n, i);

        float db_part[kMT][2] = {};
        float column_sum[kRun] = {}, dg_last[kRun] = {};  // sum_rows k dk1; dg of row L without its sums
#pragma unroll
        for (int m = 0; m < kMT; ++m) {
            float X[kN][4] = {};
#pragma unroll
            for (int i = 0; i < kCSteps; ++i) {
                const FragA<T> a = col_a(s_A, lane, 16 * m, i);
#pragma unroll
                for (int n = 0; n < kN; ++n) mma(X[n], a, b_dw[n][i / 2][i % 2]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int r = 16 * m + 8 * i + g;
                const float b = s_beta[r];
                const int64_t at_r = at + static_cast<int64_t>(r) * stride_k;
                float kr[kRun], qr[kRun];
                if constexpr (Cfg::kQkInShared) {
                    static_assert(kN == 1, "q and k lie in shared memory in their own order");
                    const float2 x = unpack2<T>(q_pair[m][i]), y = load2(s_kg, g, 16 * m + 8 * i, kw + 2 * t);
                    qr[0] = x.x, qr[1] = x.y, kr[0] = y.x, kr[1] = y.y;
                } else {
                    qv[m % kAhead][i].floats(qr), kv[m % kAhead][i].floats(kr);
                }
                float o_dq[kRun], o_dk[kRun], o_dg[kRun], kdk[kRun], kg[kRun];
#pragma unroll
                for (int j = 0; j < kRun; ++j) {
                    const int n = j / 2, e = 2 * i + j % 2;
                    const float gr = gv[m % kAhead][i][j], decay = exp2_fast(gr), x = X[n][e];
                    kg[j] = kr[j] * decay;
                    o_dq[j] = decay * (p.scale * dq[m][n][e]);
                    const float dk1 = exp2_fast(g_last[j] - gr) * dk[m][n][e];
                    kdk[j] = kr[j] * dk1;
                    o_dk[j] = dk1 + b * (decay * x);
                    const float xkg = x * kg[j];
                    o_dg[j] = qr[j] * o_dq[j] - kdk[j] + b * xkg;
                    db_part[m][i] += xkg;
                }
#pragma unroll
                for (int n = 0; n < kN; ++n)
                    store2(s_kg, g, 16 * m + 8 * i, kw + 8 * n + 2 * t, kg[2 * n], kg[2 * n + 1]);
                if (r < C) {
                    store_run<kExact, kN>(p.dq + at_r, cols, o_dq);
                    store_run<kExact, kN>(p.dk + at_r, cols, o_dk);
                    if (r < C - 1) store_run<kExact, kN>(p.dg + at_r, cols, o_dg);
#pragma unroll
                    for (int j = 0; j < kRun; ++j) {
                        column_sum[j] += kdk[j];
                        if (r == C - 1) dg_last[j] = o_dg[j];
                    }
                }
            }
            if (m + kAhead < kMT) load_rows(m + kAhead);
        }
        add_db<kMT>(s_partial + warp * kRows, db_part, g, t, pass == 0);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
            const float s = sum_over_t(hdh[n]);  // of key column k0 + column(n, g)
#pragma unroll
            for (int j = 2 * n; j < 2 * n + 2; ++j) {
                const float h_dh = __shfl_sync(~0u, s, 4 * (2 * t + j % 2));
                dg_last[j] += exp2_fast(g_last[j]) * h_dh + sum_over_g(column_sum[j]);
            }
        }
        if (g == (C - 1) % 8) store_run<kExact, kN>(p.dg + at + static_cast<int64_t>(C - 1) * stride_k, cols, dg_last);
    }

    copy_wait<0>();
    __syncthreads();  // v has arrived; dw and kg are whole
    lane = forget(lane), g = lane / 4, t = lane % 4;
    row0 = shared_i64(s0 + Cfg::kOrigin);

    // Y = A^T dv for this warp's value columns.
    constexpr int kY = kHeadV / (8 * kWarps);
    {
        float db_part[kMT][2] = {};
        FragB<T> b_dv[kY][kCSteps / 2][2];
#pragma unroll
        for (int n = 0; n < kY; ++n)
#pragma unroll
            for (int i = 0; i < kCSteps / 2; ++i) col_b(b_dv[n][i], s_dv, lane, (warp * kY + n) * 8, i);
        T* g_dv = static_cast<T*>(p.dv_out) + row0 * V + warp * kY * 8;
#pragma unroll
        for (int m = 0; m < kMT; ++m) {
            float Y[kY][4] = {};
#pragma unroll
            for (int i = 0; i < kCSteps; ++i) {
                const FragA<T> a = col_a(s_A, lane, 16 * m, i);
#pragma unroll
                for (int n = 0; n < kY; ++n) mma(Y[n], a, b_dv[n][i / 2][i % 2]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int r = 16 * m + 8 * i + g;
                const float b = s_beta[r];
                T* to = g_dv + static_cast<int64_t>(r) * stride_v;
#pragma unroll
                for (int n = 0; n < kY; ++n) {
                    const float2 v = load2(s_v, g, 16 * m + 8 * i, (warp * kY + n) * 8 + 2 * t);
                    db_part[m][i] += Y[n][2 * i] * v.x + Y[n][2 * i + 1] * v.y;
                }
                if constexpr (kExact && kY == 4 && sizeof(T) == 2) {  // 16 bytes a lane, 64 neighbouring a row
                    uint32_t w[4];
#pragma unroll
                    for (int n = 0; n < 4; ++n) w[n] = pack2<T>(b * Y[n][2 * i], b * Y[n][2 * i + 1]);
                    transpose4(w);
                    if (r < C) *reinterpret_cast<uint4*>(to + 8 * t) = make_uint4(w[0], w[1], w[2], w[3]);
                } else {
#pragma unroll
                    for (int n = 0; n < kY; ++n) {
                        const float x[2] = {b * Y[n][2 * i], b * Y[n][2 * i + 1]};
                        if (r < C) store_pair<kExact>(to + 8 * n + 2 * t, V - (warp * kY + n) * 8 - 2 * t, x);
                    }
                }
            }
        }
        add_db<kMT>(s_partial + warp * kRows, db_part, g, t, false);
    }

    write_dA<T, Cfg, kHeadV>(p, smem, s0, dw_of, kg_of, warp, lane, row0, C);
}

}  // namespace kda
