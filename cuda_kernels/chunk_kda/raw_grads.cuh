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

// A warp's place of fp32 [64][8] by rows, where neighbouring rows of 8 or 16 rows' distance meet different banks.
__device__ __forceinline__ uint32_t row_of(uint32_t place, int r) { return place + (r ^ (r / 16 & 3)) * 32; }

// Sums along the rows of such a place by a warp, each lane 16 rows of a column.
struct ColumnSums {
    // Row 16 (lane / 8) + i; written so that four addresses serve all.
    static __device__ __forceinline__ uint32_t at(uint32_t place, int lane, int i) {
        return place + lane % 8 * 4 + lane / 8 * 512 + (i % 4 ^ lane / 8) * 32 + i / 4 * 128;
    }
    // x[i]: row 16 (lane / 8) + i, added up from the first row on, or with kUp from the last one back; with the row's
    // own where kOwn.
    template <bool kUp, bool kOwn>
    static __device__ __forceinline__ void sum(float (&x)[16], uint32_t place, int lane) {
        float total = 0.f;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            const int i = kUp ? 15 - n : n;
            const float own = shared_f32(at(place, lane, i));
            x[i] = kOwn ? total + own : total;
            total += own;
        }
        float before = 0.f;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int segment = kUp ? 3 - n : n;
            const float s = __shfl_sync(~0u, total, segment * 8 + lane % 8);
            if (kUp ? segment > lane / 8 : segment < lane / 8) before += s;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] += before;
    }
    static __device__ __forceinline__ void store(const float (&x)[16], uint32_t place, int lane) {
#pragma unroll
        for (int i = 0; i < 16; ++i) set_shared_f32(at(place, lane, i), x[i]);
    }
};

// g as given of channels col, col + 1 in rows first + 8 i, all on their way at once; past the chunk's last row, that.
template <class T, int kCount>
__device__ __forceinline__ void raw_gates(float2 (&x)[kCount], const KdaParams& p, const ChunkHead& c, int first,
                                          int col, int heads) {
    const int64_t at = (c.row * heads + c.hv) * p.K + col, stride = int64_t{heads} * p.K;
    const auto offset = [&](int i) { return at + (first + 8 * i < c.rows ? first + 8 * i : c.rows - 1) * stride; };
    if (p.g_f32) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float y[2];
            global_f32x2(y, static_cast<const float*>(p.g) + offset(i));
            x[i] = make_float2(y[0], y[1]);
        }
    } else {
        uint32_t y[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            y[i] = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(p.g) + offset(i)));
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = unpack2<T>(y[i]);
    }
}

// g of channels k0 .. k0 + 7 by one warp, into its place.
template <class T>
__device__ __forceinline__ void warp_decays(uint32_t place, const KdaParams& p, const ChunkHead& c, int k0, int lane) {
    const int g = lane / 4, col = k0 + lane % 4 * 2;
    float2 x[8];
    raw_gates<T>(x, p, c, g, col, p.HV);
    const float rate = gate_rate(p, c.hv);
    const float2 bias = gate_bias(p, c.hv, col);
    const auto apply = [&](const auto& decay) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 a = make_float2(decay(x[i].x + bias.x), decay(x[i].y + bias.y));
            x[i] = make_float2(a.x < kLeastDecay ? kLeastDecay : a.x, a.y < kLeastDecay ? kLeastDecay : a.y);
        }
    };
    if (p.gate == Gate::Pregated) {
        apply([&](float z) { return unbounded_log2_decay<Gate::Pregated>(p, rate, z); });
    } else if (p.gate == Gate::Softplus) {
        apply([&](float z) { return unbounded_log2_decay<Gate::Softplus>(p, rate, z); });
    } else {
        apply([&](float z) { return unbounded_log2_decay<Gate::LowerBound>(p, rate, z); });
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const bool there = 8 * i + g < c.rows;
        set_shared_f32x2(row_of(place, 8 * i + g) + lane % 4 * 8, there ? x[i].x : 0.f, there ? x[i].y : 0.f);
    }
    __syncwarp();
    float sums[16];
    ColumnSums::sum<false, true>(sums, place, lane);
    ColumnSums::store(sums, place, lane);
}

// dx and the term of dA_log of one element from da and z = x + dt_bias. da of a token whose decay counts as kLeastDecay
// is 0: no product reaches across it.
template <Gate kGate>
__device__ __forceinline__ void gate_backward(float& dx, float& dlog, const KdaParams& p, float rate, float z,
                                              float da) {
    if constexpr (kGate == Gate::Pregated) {
        dx = kLog2E * z < kLeastDecay ? 0.f : da, dlog = 0.f;
    } else if constexpr (kGate == Gate::Softplus) {
        const float a = -rate * softplus(z);
        if (kLog2E * a < kLeastDecay) da = 0.f;
        dx = -da * (rate * sigmoid(z)), dlog = da == 0.f ? 0.f : da * a;
    } else {
        const float y = rate * z, s = sigmoid(y), a = p.lower_bound * s;
        if (kLog2E * a < kLeastDecay) da = 0.f;
        dx = da * p.lower_bound * (s * sigmoid(-y)) * rate, dlog = dx * z;
    }
}

// From da in a warp's place to dg of its channels, and this lane's sums: of dx of its two channels, and of dA_log.
template <class T>
__device__ __forceinline__ void gates_backward(float2& sum_dx, float& dlog, uint32_t place, const KdaParams& p,
                                               const ChunkHead& c, int col, int lane,
                                               int heads) {
    constexpr int kCount = 4;  // rows of a lane at a time
    const int t = lane % 4;
    const float rate = gate_rate(p, c.hv);
    const float2 bias = gate_bias(p, c.hv, col);
    sum_dx = make_float2(0.f, 0.f), dlog = 0.f;
#pragma unroll 1
    for (int first = lane / 4; first < c.rows; first += 8 * kCount) {
        float2 x[kCount], da[kCount], dx[kCount];
        raw_gates<T>(x, p, c, first, col, heads);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            da[i] = shared_f32x2(row_of(place, first + 8 * i) + 8 * t);
            if (first + 8 * i >= c.rows) da[i] = make_float2(0.f, 0.f);
        }
        const auto apply = [&](const auto& backward) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                float2 log_term;
                backward(dx[i].x, log_term.x, x[i].x + bias.x, da[i].x);
                backward(dx[i].y, log_term.y, x[i].y + bias.y, da[i].y);
                dlog += log_term.x + log_term.y;
                sum_dx.x += dx[i].x, sum_dx.y += dx[i].y;
            }
        };
        if (p.gate == Gate::Pregated) {
            apply([&](float& d, float& l, float z, float a) { gate_backward<Gate::Pregated>(d, l, p, rate, z, a); });
        } else if (p.gate == Gate::Softplus) {
            apply([&](float& d, float& l, float z, float a) { gate_backward<Gate::Softplus>(d, l, p, rate, z, a); });
        } else {
            apply([&](float& d, float& l, float z, float a) { gate_backward<Gate::LowerBound>(d, l, p, rate, z, a); });
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (first + 8 * i >= c.rows) continue;
            const int64_t at = ((c.row + first + 8 * i) * heads + c.hv) * p.K + col;
            if (p.g_f32) {
                store_global2(static_cast<float*>(p.dg) + at, dx[i].x, dx[i].y);
            } else {
                *reinterpret_cast<uint32_t*>(static_cast<T*>(p.dg) + at) = pack2<T>(dx[i].x, dx[i].y);
            }
        }
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
    uint4 raw[kRows / kStep];  // all on their way at once
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
        const int r = r0 + i * kStep < c.rows ? r0 + i * kStep : c.rows - 1;
        raw[i] = make_uint4(0, 0, 0, 0);
        if (p.qk_l2norm)
            raw[i] = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(x) +
                                                          ((c.row + r) * p.H + c.h) * kD + col));
    }
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
        const int r = r0 + i * kStep;
        const int64_t row = c.row + r, at = (row * p.H + c.h) * kD + col;
        float piece[4], y[8], d[8], sum = 0.f;
        shared_f32x4(piece, dy.at(r0, i * kStep, col));
        const float norm = shared_f32(norms + 4 * r);
        const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
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
