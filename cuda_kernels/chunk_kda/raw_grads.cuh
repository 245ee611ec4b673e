// What kda_grads does beside its products: a chunk's rows into shared memory and their norms, g by columns, a tile of P
// or D, and the ways back through norm and gate (docs/kda_math.md section 7).
#pragma once

#include "../common/lanes.cuh"
#include "raw.cuh"

namespace kda {

template <int kValue>
struct Int {
    static constexpr int value = kValue;
};

// 64 rows as they lie in memory, by cp.async.
template <class T, int kCols>
__device__ __forceinline__ void copy_image(const Tile<T, kCols>& s, const void* tiles, int64_t entry) {
    const T* src = static_cast<const T*>(tiles) + entry * kRows * kCols + threadIdx.x * 8;
#pragma unroll
    for (int i = 0; i < kRows * kCols / 8 / kRawThreads; ++i)
        copy16_async(s.base + (threadIdx.x + i * kRawThreads) * 16, src + i * kRawThreads * 8, true);
}

// The chunk and head as thread 0 wrote it, so that it need not stay in registers.
__device__ __forceinline__ void keep(uint32_t a, const ChunkHead& c) {
    set_shared_u32(a, static_cast<uint32_t>(c.row));
    set_shared_u32(a + 4, static_cast<uint32_t>(c.row >> 32));
    set_shared_u32(a + 8, c.rows);
    set_shared_u32(a + 12, c.hv);
    set_shared_u32(a + 16, c.h);
}
__device__ __forceinline__ ChunkHead kept(uint32_t a) {
    return {shared_i64(a), blockIdx.x, static_cast<int>(shared_u32(a + 8)), static_cast<int>(shared_u32(a + 12)),
            static_cast<int>(shared_u32(a + 16))};
}

// Row of a warp's [64][8] fp32 place that holds row r: lanes of different segments meet different banks.
template <int kSegmentRows>
__device__ __forceinline__ int decay_row(int r) {
    return r ^ (r / kSegmentRows & 3);
}

// g of channels k0 .. k0 + 7 by one warp, into its own place at `out`: the sums of ChunkDecays<T, kD>, bit for bit.
template <class T, int kD>
__device__ __forceinline__ void warp_decays(uint32_t out, const KdaParams& p, const ChunkHead& c, int k0, int lane) {
    using All = ChunkDecays<T, kD>;
    constexpr int kSegments = All::kSegments, kSegmentRows = All::kSegmentRows;
    constexpr int kChannels = kSegments / 4, kLanes = 8 / kChannels;  // of a lane; of a segment
    const int segment = lane / kLanes, channel = lane % kLanes * kChannels;
    const int64_t at = ((c.row + segment * kSegmentRows) * p.HV + c.hv) * kD + k0 + channel;
    const int64_t stride = int64_t{p.HV} * kD;
    const auto slot = [&](int i) {
        return out + decay_row<kSegmentRows>(segment * kSegmentRows + i) * 32 + channel * 4;
    };
    {
        float x[kSegmentRows][kChannels] = {};
#pragma unroll
        for (int i = 0; i < kSegmentRows; ++i)
            if (segment * kSegmentRows + i < c.rows)
#pragma unroll
                for (int j = 0; j < kChannels; ++j)
                    x[i][j] = p.g_f32 ? static_cast<const float*>(p.g)[at + i * stride + j]
                                      : to_float(static_cast<const T*>(p.g)[at + i * stride + j]);
#pragma unroll
        for (int i = 0; i < kSegmentRows; ++i)
#pragma unroll
            for (int j = 0; j < kChannels; ++j) set_shared_f32(slot(i) + 4 * j, x[i][j]);
    }
    const float rate = gate_rate(p, c.hv);
    float bias[kChannels], sum[kChannels] = {};
#pragma unroll
    for (int j = 0; j < kChannels; ++j)
        bias[j] = p.gate != Gate::Pregated && p.dt_bias != nullptr
                      ? p.dt_bias[int64_t{c.hv} * kD + k0 + channel + j]
                      : 0.f;
#pragma unroll 4
    for (int i = 0; i < kSegmentRows; ++i)
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
            if (segment * kSegmentRows + i < c.rows)
                sum[j] += log2_decay(p, rate, shared_f32(slot(i) + 4 * j) + bias[j]);
            set_shared_f32(slot(i) + 4 * j, sum[j]);
        }
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
        float before = 0.f;
#pragma unroll
        for (int i = 0; i < kSegments; ++i) {
            const float s = __shfl_sync(~0u, sum[j], i * kLanes + lane % kLanes);
            if (i < segment) before += s;
        }
#pragma unroll 4
        for (int i = 0; i < kSegmentRows; ++i)
            set_shared_f32(slot(i) + 4 * j, before + shared_f32(slot(i) + 4 * j));
    }
}

// dx and the term of dA_log of one element from da and z = x + dt_bias. da of a token whose decay counts as kLeastDecay
// is 0: no product reaches across it.
__device__ __forceinline__ void gate_backward(float& dx, float& dlog, const KdaParams& p, float rate, float z,
                                              float da) {
    if (p.gate == Gate::Pregated) {
        dx = kLog2E * z < kLeastDecay ? 0.f : da, dlog = 0.f;
    } else if (p.gate == Gate::Softplus) {
        const float a = -rate * softplus(z);
        if (kLog2E * a < kLeastDecay) da = 0.f;
        dx = -da * (rate * sigmoid(z)), dlog = da == 0.f ? 0.f : da * a;
    } else {
        const float y = rate * z, s = sigmoid(y), a = p.lower_bound * s;
        if (kLog2E * a < kLeastDecay) da = 0.f;
        dx = da * p.lower_bound * (s * sigmoid(-y)) * rate, dlog = dx * z;
    }
}

// One tile of 16 x 16 of P (mirror false) or of D^T (true), at rows m0 and columns n0: s_a s_b^T, times `scale`. Of a
// tile on the diagonal P has the elements left of it, D^T those right of it.
template <class T, int kD>
__device__ __forceinline__ void pair_tile(const Tile<T, kRows>& out, uint32_t diagonal, const Tile<T, kD>& s_a,
                                          const Tile<T, kD>& s_b, int m0, int n0, float scale, bool mirror, int lane) {
    float x[2][4] = {};
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
        const FragA<T> a = row_a(s_a, lane, m0, i);
        FragB<T> b[2];
        row_b(b, s_b, lane, n0, i);
        mma(x[0], a, b[0]);
        mma(x[1], a, b[1]);
    }
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = m0 + 8 * i + g, col = n0 + 8 * n + 2 * t;
            const float x0 = scale * x[n][2 * i], x1 = scale * x[n][2 * i + 1];
            if ((col + 1 > r) == mirror) store2(out, m0 + g, 8 * i, col, x0, x1);
            if (!mirror && (r & ~1) == col) set_shared_f32(diagonal + 4 * r, r == col ? x0 : x1);
        }
}

// The norm's backward of 64 rows: dy of a tile and x from memory, into `out` (main) or `head` (fp32, a value head's).
template <class T, int kD>
__device__ __forceinline__ void norm_backward(const KdaParams& p, const ChunkHead& c, const Tile<T, kD>& dy,
                                              const void* x, uint32_t norms, void* out, float* head) {
    constexpr int kPieces = kD / 8, kStep = kRawThreads / kPieces;
    const int r0 = threadIdx.x / kPieces, col = threadIdx.x % kPieces * 8;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
        const int r = r0 + i * kStep;
        const int64_t row = c.row + r, at = (row * p.H + c.h) * kD + col;
        float piece[4], y[8], d[8], sum = 0.f;
        shared_f32x4(piece, dy.at(r0, i * kStep, col));
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (p.qk_l2norm && r < c.rows) raw = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(x) + at));
        const float norm = shared_f32(norms + 4 * r);
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 v = unpack2<T>(words[j]), w = unpack2<T>(__float_as_uint(piece[j]));
            y[2 * j] = norm * v.x, y[2 * j + 1] = norm * v.y;
            d[2 * j] = w.x, d[2 * j + 1] = w.y;
            sum = fmaf(y[2 * j], w.x, sum);
            sum = fmaf(y[2 * j + 1], w.y, sum);
        }
#pragma unroll
        for (int j = 1; j < kPieces; j *= 2) sum += __shfl_xor_sync(~0u, sum, j);
#pragma unroll
        for (int j = 0; j < 8; ++j) d[j] = norm * (d[j] - y[j] * sum);
        if (r >= c.rows) continue;
        if (head != nullptr) {
            float* to = head + (row * p.HV + c.hv) * kD + col;
            store_global4(to, d[0], d[1], d[2], d[3]);
            store_global4(to + 4, d[4], d[5], d[6], d[7]);
        } else {
            *reinterpret_cast<uint4*>(static_cast<T*>(out) + at) = make_uint4(
                pack2<T>(d[0], d[1]), pack2<T>(d[2], d[3]), pack2<T>(d[4], d[5]), pack2<T>(d[6], d[7]));
        }
    }
}

// r of 64 rows, and the rows times it.
template <class T, int kD>
__device__ __forceinline__ void normalize(uint32_t norms, const Tile<T, kD>& x, bool wanted) {
    inverse_norms(norms, x, wanted);
    __syncwarp();
    if (!wanted) return;
#pragma unroll
    for (int r = threadIdx.x / 8; r < kRows; r += kRawThreads / 8) {
        const float norm = shared_f32(norms + 4 * r);
#pragma unroll
        for (int i = 0; i < kD / 64; ++i) {
            const int col = 64 * i + threadIdx.x % 8 * 8;
            float piece[4];
            shared_f32x4(piece, x.at(r, 0, col));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 v = unpack2<T>(__float_as_uint(piece[j]));
                set_shared_u32(x.at(r, 0, col) + 4 * j, pack2<T>(norm * v.x, norm * v.y));
            }
        }
    }
}

}  // namespace kda
