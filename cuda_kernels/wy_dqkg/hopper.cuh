// chunk_kda_bwd_wy_dqkg_fused on Hopper, for 16-bit inputs with K = V = 128: the formula of kernel.cuh, its products by
// wgmma from shared memory.
//
// Grid: one CTA per multiprocessor, or one per task where there are fewer. A CTA of 4 warpgroups takes every gridDim-th
//   task (chunk and value head, value heads fastest); in the products over key columns a warpgroup owns 32 of 128.
// Tile: 64 rows, K and V whole, as panels of 64 columns in the layout of the hardware's 128-byte swizzle.
// Bytes per task: as kernel.cuh. On chip: everything a task reads, once, 216 KB. Each buffer gets the next task's rows
//   by cp.async as soon as this one has read it for the last time, so that memory works while the products run. fp32
//   states pass through registers instead (whole rows of 512 bytes, a quarter at a time), where they are rounded and
//   sum_v h dh is taken.
// Order of key columns: position n = 16 j + 8 e + 2 t + b of a state's tile, and so of dq, dk, dw, X and kg, stands for
//   key column 16 j + 4 t + 2 e + b: a lane's four values are neighbours in memory.
// Must hold: K = V = 128, state [K, V], every pointer 16-byte aligned, NT > 0.
// Fixed order of every sum, no atomics. Rounded to 16 bits: as kernel.cuh.
#pragma once

#include "hopper_tile.cuh"

namespace kda {

template <class T, class S>
__global__ void __launch_bounds__(HopperTile::kThreads, 1) wy_dqkg_hopper_kernel(const __grid_constant__ WyParams p) {
#if defined(KDA_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Cfg = HopperTile;
    constexpr int K = Cfg::kHead, V = Cfg::kHead;
    constexpr bool kStateInShared = sizeof(S) == 2;  // by cp.async; fp32 through registers

    extern __shared__ __align__(1024) char smem[];
    const uint32_t s0 = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    int tid = 0, lane = 0, g = 0, t = 0, warp = 0, group = 0, wr = 0;
    // Addresses made from these are made anew after each call: kept over a task, they would not fit in registers.
    const auto forget_addresses = [&] {
        tid = forget(threadIdx.x);
        lane = tid % 32, g = lane / 4, t = lane % 4;
        warp = __shfl_sync(~0u, tid / 32, 0), group = warp / 4, wr = warp % 4;
    };
    forget_addresses();
    float* s_partial = reinterpret_cast<float*>(smem + Cfg::kPartial);
    float* s_columns = reinterpret_cast<float*>(smem + Cfg::kColumns);
    float* s_last = reinterpret_cast<float*>(smem + Cfg::kLast);
    const int BT = p.BT;
    const int n_tasks = static_cast<int>(p.B * p.NT * p.HV), n_chunks = static_cast<int>(p.NT);
    const int stride = p.HV * Cfg::kHead, stride_qk = p.H * K, stride_A = p.HV * BT;

    const Sequences sequences{s0 + Cfg::kTable, p.N};
    const auto with_table = [&] {
        return p.chunk_indices == nullptr && p.N > 0 && p.N < Cfg::kTableSize && p.T < int64_t{1} << 30;
    };
    if (p.cu_seqlens != nullptr && with_table()) {
        if (warp == 0) sequences.make(p);
        __syncthreads();
    }

    // The first task from `index` on that has rows; C = 0 where none is left. A barrier must pass before it is used.
    const auto find = [&](int index, int slot) {
        Task x{index, 0, s0 + Cfg::kTasks + 16 * slot};
        for (; x.index < n_tasks; x.index += gridDim.x) {
            const int i_bc = x.index / p.HV, hv = x.index - i_bc * p.HV;
            int64_t token;
            if (p.cu_seqlens == nullptr) {
                const int i_b = i_bc / n_chunks, i_c = i_bc - i_b * n_chunks;
                const int64_t left = p.T - static_cast<int64_t>(i_c) * BT;
                token = i_b * p.T + static_cast<int64_t>(i_c) * BT;
                x.C = left < BT ? static_cast<int>(left) : BT;
            } else {
                zero_unused_tokens<T, Cfg::kThreads>(
                    p, with_table() ? sequences.tokens() : index_at(p.cu_seqlens, p.cu_i64, p.N), i_bc, hv);
                const Span span =
                    with_table()
                        ? sequences.span(i_bc, BT)
                        : packed_span<Cfg::kThreads, false>(p, i_bc, reinterpret_cast<int64_t*>(smem + Cfg::kScratch));
                token = span.start;
                x.C = span.rows;
            }
            if (x.C > 0) {
                if (tid == 0) {
                    set_shared_i64(x.origin, token * p.HV + hv);
                    set_shared_i64(x.origin + 8, (token * p.H + hv / (p.HV / p.H)) * K);
                }
                break;
            }
        }
        if (x.index >= n_tasks) x.C = 0;
        return x;
    };
    const auto rows_of = [&](const void* base, const Task& x) { return static_cast<const T*>(base) + x.row0() * V; };
    // The next task's rows, as soon as this one's places are free; each is a group of cp.async. First of all what its
    // first products read: h, dh, do and v_new, then dv.
    const auto fill_first = [&](const Task& x) {
        if (x.C > 0) {
            if constexpr (kStateInShared) {
                fill_state(s0 + Cfg::kH, static_cast<const T*>(p.h) + x.index * int64_t{K * V}, tid);
                fill_state(s0 + Cfg::kDh, static_cast<const T*>(p.dh) + x.index * int64_t{K * V}, tid);
            }
            fill_panels(s0 + Cfg::kDo, rows_of(p.d_o, x), stride, x.C, tid);
            fill_panels(s0 + Cfg::kVNew, rows_of(p.v_new, x), stride, x.C, tid);
        }
        copy_commit();
    };
    const auto fill_dv = [&](const Task& x) {
        if (x.C > 0) fill_panels(s0 + Cfg::kDv, rows_of(p.dv, x), stride, x.C, tid);
        copy_commit();
    };
    const auto fill_rows = [&](const Task& x) {  // v, q and g
        if (x.C > 0) {
            fill_panels(s0 + Cfg::kV, rows_of(p.v, x), stride, x.C, tid);
            fill_panels(s0 + Cfg::kQ, static_cast<const T*>(p.q) + x.qk0(), stride_qk, x.C, tid);
            const int r = tid / 32, c = tid % 32;
            const float* src = p.g + x.row0() * K + r * stride + 4 * c;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                copy16_async(s0 + Cfg::kG + g_at(r, c) + i * 16 * 512, src + 16 * i * stride, r + 16 * i < x.C);
        }
        copy_commit();
    };
    const auto fill_k = [&](const Task& x) {
        if (x.C > 0) fill_panels(s0 + Cfg::kK, static_cast<const T*>(p.k) + x.qk0(), stride_qk, x.C, tid);
        copy_commit();
    };
    const auto fill_A = [&](const Task& x) {
        const T* A = static_cast<const T*>(p.A) + x.row0() * BT;
        if (x.C == kRows) {
            const int r = tid / 8, c = tid % 8;
            copy16_async(s0 + Cfg::kA + panel_at(r, 8 * c), A + r * stride_A + 8 * c, true);
        } else {  // columns past the tail may hold anything
#pragma unroll 1
            for (int i = tid; i < kRows * kRows; i += Cfg::kThreads) {
                const int r = i / kRows, c = i % kRows;
                const T a = r < x.C && c < x.C ? A[r * stride_A + c] : from_float<T>(0.f);
                set_shared_u16(s0 + Cfg::kA + panel_at(r, c), reinterpret_cast<const uint16_t&>(a));
            }
        }
        copy_commit();
    };
    const auto beta_of = [&](const Task& x) {
        if (tid >= x.C) return 0.f;
        const int64_t at = x.row0() + static_cast<int64_t>(tid) * p.HV;
        return p.beta_f32 ? static_cast<const float*>(p.beta)[at] : to_float(static_cast<const T*>(p.beta)[at]);
    };

    // fp32 states: warp w takes key columns 8 w .. 8 w + 7, a lane 4 values of each, two columns at a time. More than
    // 32 KB in flight would be more than the L1 left beside the shared memory holds, and block what comes after.
    float4 x_h[2], x_dh[2];
    const auto load_state = [&](int part, const Task& x) {
        if constexpr (!kStateInShared) {
            if (x.C > 0) {
                const int64_t at = x.index * int64_t{K * V} + (8 * warp + 2 * part) * V + 4 * lane;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    x_h[i] = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(p.h) + at + i * V));
                    x_dh[i] = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(p.dh) + at + i * V));
                }
            } else {  // so that no older value has to be kept
#pragma unroll
                for (int i = 0; i < 2; ++i) x_h[i] = x_dh[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            }
        }
    };
    // Rounded, into shared memory, where the products with the last states are done; sum_v h dh goes to `to`.
    const auto keep_state = [&](int part, int to) {
        if constexpr (!kStateInShared) {
            float dot[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float4 x = x_h[i], y = x_dh[i];
                dot[i] = x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
                const uint32_t at = panel_at<K>(state_position(8 * warp + 2 * part + i), 4 * lane);
                set_shared_u32x2(s0 + Cfg::kH + at, pack2<T>(x.x, x.y), pack2<T>(x.z, x.w));
                set_shared_u32x2(s0 + Cfg::kDh + at, pack2<T>(y.x, y.y), pack2<T>(y.z, y.w));
            }
            const float s = sum_2_over_lanes(dot[0], dot[1]);
            if ((lane & 15) == 0)
                set_shared_f32(s0 + Cfg::kHdh + (to * K + 8 * warp + 2 * part + lane / 16) * 4, s);
        }
    };

    idle(blockIdx.x * Cfg::kStartStep);
    int slot = 0;
    Task now = find(blockIdx.x, slot);
    if (now.C == 0) return;
    __syncthreads();
    fill_first(now);
    fill_dv(now);
    fill_rows(now);
    fill_k(now);
#pragma unroll
    for (int part = 0; part < 3; ++part) load_state(part, now), keep_state(part, slot);
    load_state(3, now);
    if (tid < kRows) set_shared_f32(s0 + Cfg::kBeta + 4 * tid, beta_of(now));

#pragma unroll 1
    while (now.C > 0) {
        const int C = now.C;
        forget_addresses();
        const uint32_t s_beta = s0 + Cfg::kBeta + slot * kRows * 4;
        keep_state(3, slot);
        copy_wait<2>();  // v, q, g and k may still be on their way
        fence_async_proxy();
        __syncthreads();
        fill_A(now);
        forget_addresses();

        // dq = do h^T, dk = v_new dh^T, dw = dv h^T for the group's key columns.
        float dq[16], dk[16], dw[16];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t a = i / 4 * Cfg::kPanel + i % 4 * 32;
            const uint32_t b = i / 4 * Cfg::kStatePanel + i % 4 * 32 + group * 32 * 128;
            wgmma<T, false, false>(dq, s0 + Cfg::kDo + a, s0 + Cfg::kH + b, i > 0);
            wgmma<T, false, false>(dw, s0 + Cfg::kDv + a, s0 + Cfg::kH + b, i > 0);
            wgmma<T, false, false>(dk, s0 + Cfg::kVNew + a, s0 + Cfg::kDh + b, i > 0);
        }
        wgmma_commit();
        const Task next = find(now.index + gridDim.x, slot ^ 1);
        if constexpr (kStateInShared) {  // 4 lanes a key column
            const int n = tid / 4;
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // Odd rows start in the other half of a panel: 8 lanes meet 32 banks.
                const int c = 64 * (i / 2) + ((8 * t + 32 * (n & 1) + 32 * (i % 2)) & 63);
                const uint32_t at = panel_at<K>(n, c);
                uint32_t x[4], y[4];
                shared_u32x4(x, s0 + Cfg::kH + at), shared_u32x4(y, s0 + Cfg::kDh + at);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 a = unpack2<T>(x[j]), b = unpack2<T>(y[j]);
                    sum += a.x * b.x + a.y * b.y;
                }
            }
            sum = sum_over_t(sum);
            // Position n back to its key column.
            const int k = (n & ~15) | (n >> 1 & 3) << 2 | (n >> 3 & 1) << 1 | (n & 1);
            if (t == 0) set_shared_f32(s0 + Cfg::kHdh + (slot * K + k) * 4, sum);
        }
        wgmma_wait();
        wgmma_done(dq), wgmma_done(dk), wgmma_done(dw);
        copy_wait<0>();  // A too

        int r0 = 16 * wr + g;  // and r0 + 8
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                set_shared_u32(s0 + Cfg::kDw + panel_at(r0 + 8 * i, 32 * group + 8 * j + 2 * t),
                               pack2<T>(-dw[4 * j + 2 * i], -dw[4 * j + 2 * i + 1]));
        fence_async_proxy();
        __syncthreads();  // dw is whole; do, v_new and the states are read
        fill_first(next);
        forget_addresses();
        float next_beta = 0.f;
        if (tid < kRows) next_beta = beta_of(next);

        // X = A^T dw, Y = A^T dv, and the first part of M, dv v^T.
        float X[16], Y[16], M[8];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t b = group / 2 * Cfg::kPanel + group % 2 * 64 + i * 16 * 128;
            wgmma<T, true, true>(X, s0 + Cfg::kA + i * 16 * 128, s0 + Cfg::kDw + b, i > 0);
            wgmma<T, true, true>(Y, s0 + Cfg::kA + i * 16 * 128, s0 + Cfg::kDv + b, i > 0);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t a = i / 4 * Cfg::kPanel + i % 4 * 32, b = a + group * 16 * 128;
            wgmma<T, false, false>(M, s0 + Cfg::kDv + a, s0 + Cfg::kV + b, i > 0);
        }
        wgmma_commit();
        wgmma_wait();
        wgmma_done(X), wgmma_done(Y), wgmma_done(M);

        float db[2] = {};
        const int64_t v_at = now.row0() * V + 32 * group + 8 * t;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = r0 + 8 * i;
            const float b = shared_f32(s_beta + 4 * r);
            uint32_t w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float x = Y[4 * j + 2 * i], y = Y[4 * j + 2 * i + 1];
                const float2 v = unpack2<T>(shared_u32(s0 + Cfg::kV + panel_at(r, 32 * group + 8 * j + 2 * t)));
                db[i] += x * v.x + y * v.y;
                w[j] = pack2<T>(b * x, b * y);
            }
            transpose4(w);
            if (r < C)
                store_global4(reinterpret_cast<float*>(static_cast<T*>(p.dv_out) + v_at + r * stride),
                              __uint_as_float(w[0]), __uint_as_float(w[1]), __uint_as_float(w[2]),
                              __uint_as_float(w[3]));
        }
        load_state(0, next);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int col = 32 * group + 16 * j + 4 * t;  // first of four key columns
            uint32_t k_words[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) shared_u32x2(k_words[i], s0 + Cfg::kK + panel_at(r0 + 8 * i, col));
            __syncwarp();  // kg goes there in the order of positions, to other lanes' places
            float g_last[4], column_sum[4] = {};
            shared_f32x4(g_last, s0 + Cfg::kG + g_at(C - 1, col / 4));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int r = r0 + 8 * i;
                const float b = shared_f32(s_beta + 4 * r);
                float gr[4], o_dq[4], o_dk[4], o_dg[4], kg[4];
                shared_f32x4(gr, s0 + Cfg::kG + g_at(r, col / 4));
                uint32_t q_words[2];
                shared_u32x2(q_words, s0 + Cfg::kQ + panel_at(r, col));
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int n = 4 * (2 * j + e / 2) + 2 * i + e % 2;
                    const float2 kk = unpack2<T>(k_words[i][e / 2]), qq = unpack2<T>(q_words[e / 2]);
                    const float kr = e % 2 ? kk.y : kk.x, qr = e % 2 ? qq.y : qq.x;
                    const float decay = exp2_fast(gr[e]);
                    kg[e] = kr * decay;
                    o_dq[e] = decay * (p.scale * dq[n]);
                    const float dk1 = exp2_fast(g_last[e] - gr[e]) * dk[n], kdk = kr * dk1;
                    o_dk[e] = dk1 + b * (decay * X[n]);
                    const float xkg = X[n] * kg[e];
                    o_dg[e] = qr * o_dq[e] - kdk + b * xkg;
                    db[i] += xkg;
                    column_sum[e] += kdk;
                }
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    set_shared_u32(s0 + Cfg::kK + panel_at(r, 32 * group + 16 * j + 8 * e + 2 * t),
                                   pack2<T>(kg[2 * e], kg[2 * e + 1]));
                if (r < C) {
                    const int64_t at = now.row0() * K + r * stride + col;
                    store_global4(p.dq + at, o_dq[0], o_dq[1], o_dq[2], o_dq[3]);
                    store_global4(p.dk + at, o_dk[0], o_dk[1], o_dk[2], o_dk[3]);
                    if (r < C - 1) {
                        store_global4(p.dg + at, o_dg[0], o_dg[1], o_dg[2], o_dg[3]);
                    } else {
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            s_last[col + e] = o_dg[e] + exp2_fast(g_last[e]) *
                                                            shared_f32(s0 + Cfg::kHdh + (slot * K + col + e) * 4);
                    }
                }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float s = sum_over_g(column_sum[e]);
                if (g == 0) s_columns[wr * K + col + e] = s;
            }
            if (next.C > 0) keep_state(j, slot ^ 1);
            load_state(j + 1, next);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float s = sum_over_t(db[i]);
            if (t == 0) s_partial[group * kRows + r0 + 8 * i] = s;
        }
        if (tid < kRows) set_shared_f32(s0 + Cfg::kBeta + ((slot ^ 1) * kRows + tid) * 4, next_beta);
        fence_async_proxy();
        __syncthreads();  // kg is whole; dv, v, q and g are read
        fill_dv(next);
        fill_rows(next);
        forget_addresses();
        r0 = 16 * wr + g;

        // M = stril((dv v^T + dw kg^T) diag(b)): a group has 16 columns.
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t a = i / 4 * Cfg::kPanel + i % 4 * 32, b = a + group * 16 * 128;
            wgmma<T, false, false>(M, s0 + Cfg::kDw + a, s0 + Cfg::kK + b, true);
        }
        wgmma_commit();
        if (tid < K) {  // the last row of dg
            float s = s_last[tid];
#pragma unroll
            for (int i = 0; i < 4; ++i) s += s_columns[i * K + tid];
            p.dg[now.row0() * K + (C - 1) * stride + tid] = s;
        } else if (tid < K + C) {
            const int r = tid - K;
            float s = s_partial[r];
#pragma unroll
            for (int i = 1; i < Cfg::kGroups; ++i) s += s_partial[i * kRows + r];
            p.db[now.row0() + static_cast<int64_t>(r) * p.HV] = s;
        }
        if (next.C > 0) keep_state(2, slot ^ 1);
        load_state(3, next);
        wgmma_wait();
        wgmma_done(M);
        __syncthreads();  // dw and kg are read
        fill_k(next);
        forget_addresses();
        r0 = 16 * wr + g;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int col = 16 * group + 8 * e + 2 * t;
            const float b0 = shared_f32(s_beta + 4 * col), b1 = shared_f32(s_beta + 4 * col + 4);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int r = r0 + 8 * i;
                set_shared_u32(s0 + Cfg::kDw + panel_at(r, col),
                               pack2<T>(col < r ? M[4 * e + 2 * i] * b0 : 0.f,
                                        col + 1 < r ? M[4 * e + 2 * i + 1] * b1 : 0.f));
            }
        }
        fence_async_proxy();
        __syncthreads();
        float MA[8];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            wgmma<T, false, false>(MA, s0 + Cfg::kDw + 32 * i, s0 + Cfg::kA + group * 16 * 128 + 32 * i, i > 0);
        wgmma_commit(), wgmma_wait();
        wgmma_done(MA);
        // Column 8 e + 2 t + b goes to the position where a lane of the next product finds four neighbours.
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                set_shared_u32(s0 + Cfg::kDw + Cfg::kPanel +
                                   panel_at(r0 + 8 * i, 16 * group + 8 * (t & 1) + 4 * e + (t & 2)),
                               pack2<T>(MA[4 * e + 2 * i], MA[4 * e + 2 * i + 1]));
        fence_async_proxy();
        __syncthreads();
        float dA[8];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            wgmma<T, true, true>(dA, s0 + Cfg::kA + i * 16 * 128,
                                 s0 + Cfg::kDw + Cfg::kPanel + 32 * group + i * 16 * 128, i > 0);
        wgmma_commit(), wgmma_wait();
        wgmma_done(dA);
        const int col = 16 * group + 4 * t;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = r0 + 8 * i;
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = col + e < r ? -dA[4 * (e / 2) + 2 * i + e % 2] : 0.f;
            if (r < C && col < BT)
                store_global4(p.dA + now.row0() * BT + r * stride_A + col, x[0], x[1], x[2], x[3]);
        }
        now = next;
        slot ^= 1;
    }
    copy_wait<0>();
#endif
}

}  // namespace kda
