// Products of all pairs of rows of a chunk, each with its own decay 2^(g_i - g_j), on the tensor cores.
//
// Levels. For s = 1, 2, 4, ..., 32 the chunk falls into blocks of 2 s rows. A pair of the upper and the lower half of
//   one block is split at the halves' border, n its last row below: 2^(g_i - g_j) = 2^(g_i - g_n) 2^(g_n - g_j). Every
//   pair i > j belongs to one s, so at each level a row has one factor, which multiplies q and k (upper half) or k
//   (lower half) before the tensor core takes their products. The pairs i = j need no factor.
// Factors. d = 2^a of each token, the one exponential per element. 2^(g_i - g_n) and 2^(g_n - g_j) are products of the
//   tokens' d, those of blocks of 2 s rows from those of s by at most one multiplication: no difference of large sums,
//   no exponent above 0, and at most 64 roundings of fp32.
#pragma once

#include "raw.cuh"

namespace kda {

constexpr int kSegment = 8, kSegments = kRows / kSegment;

__device__ __forceinline__ float2 operator*(float2 x, float2 y) { return make_float2(x.x * y.x, x.y * y.y); }
__device__ __forceinline__ float2 operator*(float2 x, float y) { return make_float2(x.x * y, x.y * y); }

// A thread's channels, and the kUnits segments of 8 rows in which it owns them.
template <int kK>
struct Units {
    static constexpr int kUnits = kSegments * (kK / 2) / kRawThreads;
    static __device__ __forceinline__ int col() { return threadIdx.x % (kK / 2) * 2; }
    static __device__ __forceinline__ int segment(int u) {
        return threadIdx.x / (kK / 2) + u * (kRawThreads / (kK / 2));
    }
};

template <int kK>
struct Decays {
    using Own = Units<kK>;
    float2 x[Own::kUnits][kSegment];  // g as given, then d

    // Rows past the chunk's last read that one; finish() knows them.
    template <class T>
    __device__ __forceinline__ void load(const KdaParams& p, const ChunkHead& c) {
        const int stride = p.HV * kK;
        const int64_t at = (c.row * p.HV + c.hv) * kK + Own::col();
        const auto each = [&](const auto& read) {
#pragma unroll
            for (int u = 0; u < Own::kUnits; ++u)
#pragma unroll
                for (int i = 0; i < kSegment; ++i) {
                    const int r = Own::segment(u) * kSegment + i, last = c.rows - 1;
                    x[u][i] = read(int64_t{r < last ? r : last} * stride);
                }
        };
        if (p.g_f32) {
            each([src = static_cast<const float*>(p.g) + at](int64_t offset) {
                float y[2];
                global_f32x2(y, src + offset);
                return make_float2(y[0], y[1]);
            });
        } else {
            each([src = static_cast<const T*>(p.g) + at](int64_t offset) {
                return unpack2<T>(*reinterpret_cast<const uint32_t*>(src + offset));
            });
        }
    }
    template <Gate kGate>
    __device__ __forceinline__ void apply(const KdaParams& p, const ChunkHead& c) {
        const float rate = gate_rate(p, c.hv);
        const float2 bias = gate_bias(p, c.hv, Own::col());
#pragma unroll
        for (int u = 0; u < Own::kUnits; ++u)
#pragma unroll
            for (int i = 0; i < kSegment; ++i) {
                x[u][i].x = exp2_fast(unbounded_log2_decay<kGate>(p, rate, x[u][i].x + bias.x));
                x[u][i].y = exp2_fast(unbounded_log2_decay<kGate>(p, rate, x[u][i].y + bias.y));
            }
        if (c.rows == kRows) return;
#pragma unroll
        for (int u = 0; u < Own::kUnits; ++u)
#pragma unroll
            for (int i = 0; i < kSegment; ++i)
                if (Own::segment(u) * kSegment + i >= c.rows) x[u][i] = make_float2(1.f, 1.f);
    }
    // d of the owned elements, and the product over each segment into fp32 [kSegments][kK] at `totals`.
    __device__ __forceinline__ void finish(uint32_t totals, const KdaParams& p, const ChunkHead& c) {
        if (p.gate == Gate::Pregated) {
            apply<Gate::Pregated>(p, c);
        } else if (p.gate == Gate::Softplus) {
            apply<Gate::Softplus>(p, c);
        } else {
            apply<Gate::LowerBound>(p, c);
        }
#pragma unroll
        for (int u = 0; u < Own::kUnits; ++u) {
            float2 product = x[u][0];
#pragma unroll
            for (int i = 1; i < kSegment; ++i) product = product * x[u][i];
            set_shared_f32x2(totals + (Own::segment(u) * kK + Own::col()) * 4, product.x, product.y);
        }
    }
};

// [96][kK], the operands of a level: q and k of the upper halves' rows, k of the lower halves'. A row's place in its
// part is its number without the bit s.
template <class T, int kK>
struct Level {
    static constexpr int kQUpper = 0, kKUpper = 32, kKLower = 64;
    Tile<T, kK> x;
};
__device__ __forceinline__ int without_bit(int x, int s) { return x / (2 * s) * s + x % s; }
__device__ __forceinline__ int with_bit(int x, int s, int bit) { return x / s * (2 * s) + bit * s + x % s; }

// Levels 1, 2 and 4 of a unit: R_i = 2^(g_i - g_n) in the upper half of a block, C_i = 2^(g_n - g_i) in the lower one.
template <class T, int kK>
__device__ __forceinline__ void write_small_levels(uint32_t operands, int level_bytes, int segment, int col,
                                                   const float2 (&d)[kSegment], const float2 (&q)[kSegment],
                                                   const float2 (&k)[kSegment]) {
    float2 R[kSegment], C[kSegment];
#pragma unroll
    for (int i = 0; i < kSegment; ++i) R[i] = d[i], C[i] = make_float2(1.f, 1.f);
#pragma unroll
    for (int l = 0; l < 3; ++l) {
        const int s = 1 << l;
        const Tile<T, kK> x{operands + l * level_bytes};
#pragma unroll
        for (int i = 0; i < kSegment; ++i) {
            const int r = segment * (kSegment / 2) + without_bit(i, s);
            if (i & s) {
                const float2 y = q[i] * R[i], z = k[i] * R[i];
                store2(x, r, Level<T, kK>::kQUpper, col, y.x, y.y);
                store2(x, r, Level<T, kK>::kKUpper, col, z.x, z.y);
            } else {
                const float2 z = s == 1 ? k[i] : k[i] * C[i];
                store2(x, r, Level<T, kK>::kKLower, col, z.x, z.y);
            }
        }
#pragma unroll
        for (int n = 0; n < kSegment; n += 2 * s) {
            const float2 low = R[n + s - 1], up = R[n + 2 * s - 1];  // over the whole lower and upper half
#pragma unroll
            for (int i = 0; i < s; ++i) {
                R[n + s + i] = R[n + s + i] * low;
                C[n + i] = s == 1 ? up : C[n + i] * up;
            }
        }
    }
}

// Product of the totals of the kCount segments beside those `segment` is one of. `totals`: of the thread's channels.
template <int kCount, int kK>
__device__ __forceinline__ float2 totals_beside(uint32_t totals, int segment) {
    totals += ((segment ^ kCount) & -kCount) * (kK * 4);
    float2 x = shared_f32x2(totals);
#pragma unroll
    for (int i = 1; i < kCount; ++i) x = x * shared_f32x2(totals + i * (kK * 4));
    return x;
}

// r of the rows of q and of k into fp32 [kRows] each at `out`; 1 where the norm is not asked for. Two warps share 16
// rows: one takes the tensor core's q q^T, the other k k^T, and of it the diagonal.
template <class T, int kK>
__device__ __forceinline__ void write_inverse_norms(uint32_t out, const Tile<T, kK>& q, const Tile<T, kK>& k,
                                                    bool wanted) {
    const int lane = lane_id(), warp = threadIdx.x / 32, g = lane / 4;
    const int row0 = warp / 2 * 16;
    const Tile<T, kK> x = warp % 2 == 0 ? q : k;
    float low[4] = {}, high[4] = {};
#pragma unroll
    for (int i = 0; i < kK / 16; ++i) {
        const FragA<T> a = row_a(x, lane, row0, i);
        mma(low, a, FragB<T>{{a.r[0], a.r[2]}});
        mma(high, a, FragB<T>{{a.r[1], a.r[3]}});
    }
    if (g / 2 != lane % 4) return;  // the lane's columns are 2 (lane % 4) and the next
    const float sums[2] = {g % 2 ? low[1] : low[0], g % 2 ? high[3] : high[2]};
#pragma unroll
    for (int i = 0; i < 2; ++i)
        set_shared_f32(out + (warp % 2 * kRows + row0 + 8 * i + g) * 4,
                       wanted ? reciprocal_sqrt_fast(sums[i] + 1e-6f) : 1.f);
}

// Rows row0 .. row0 + 7 of x as columns of the second operand, steps 2 i and 2 i + 1.
template <class T, int kK>
__device__ __forceinline__ void row_b8(FragB<T> (&f)[2], const Tile<T, kK>& x, int l, int row0, int i) {
    ldmatrix(f[0].r[0], f[0].r[1], f[1].r[0], f[1].r[1],
             x.base + (l % 8 + row0) * Tile<T, kK>::kRowBytes + swizzled((l / 8) ^ (l & 7), 4 * i));
}
// Rows row0 .. row0 + 7 and row0 + 32 .. row0 + 39 of x as the first operand, step i.
template <class T, int kK>
__device__ __forceinline__ FragA<T> upper_a(const Tile<T, kK>& x, int l, int row0, int i) {
    FragA<T> f;
    ldmatrix(f.r[0], f.r[1], f.r[2], f.r[3],
             x.base + (l % 8 + (l / 8 & 1) * 32 + row0) * Tile<T, kK>::kRowBytes +
                 swizzled((l / 16) ^ (l & 7), 2 * i));
    return f;
}

// A level of up to 8 rows a half, in 16 rows of the chunk: d[0], d[1] are q's products, d[2], d[3] those of k.
template <class T, int kK>
__device__ __forceinline__ void add_level(float (&d)[4], const Tile<T, kK>& x, int l, int group) {
#pragma unroll
    for (int i = 0; i < kK / 32; ++i) {
        FragB<T> b[2];
        row_b8(b, x, l, Level<T, kK>::kKLower + 8 * group, i);
#pragma unroll
        for (int e = 0; e < 2; ++e) mma(d, upper_a(x, l, 8 * group, 2 * i + e), b[e]);
    }
}
// 16 rows times 8 rows of x.
template <class T, int kK>
__device__ __forceinline__ void add_16x8(float (&d)[4], const Tile<T, kK>& x, int l, int row_a0, int row_b0) {
#pragma unroll
    for (int i = 0; i < kK / 32; ++i) {
        FragB<T> b[2];
        row_b8(b, x, l, row_b0, i);
#pragma unroll
        for (int e = 0; e < 2; ++e) mma(d, row_a(x, l, row_a0, 2 * i + e), b[e]);
    }
}
// 16 rows times 16 rows.
template <class T, int kK>
__device__ __forceinline__ void add_16x16(float (&d0)[4], float (&d1)[4], const Tile<T, kK>& x, const Tile<T, kK>& y,
                                          int l, int row_x0, int row_y0) {
#pragma unroll
    for (int i = 0; i < kK / 16; ++i) {
        FragB<T> b[2];
        row_b(b, y, l, row_y0, i);
        const FragA<T> a = row_a(x, l, row_x0, i);
        mma(d0, a, b[0]);
        mma(d1, a, b[1]);
    }
}

}  // namespace kda
