// From the raw inputs of a chunk and value head to what the formulas are about: r, b, and g, in fp32. Forward and
// backward call the same functions, so that they work with the same bits.
//
//   r = 1 / sqrt(sum_d x^2 + 1e-6), of q and of k        b = c sigmoid(beta), or beta as given
//   a = log2 of a token's decay, from g as given by one of three gates        g = inclusive sum of a over the chunk
//
// Tokens past a chunk's last: a = 0, so that row 63 of g is row L in every chunk; b = 0.
// A token's a counts as kLeastDecay where it is less: 2^-128 is 0 to exp2_fast, and sums of a stay small enough for
// differences of g to be right to 2^-12.
#pragma once

#include "../common/mma.cuh"
#include "../common/tiles.h"
#include "params.h"

namespace kda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLeastDecay = -128.f;
constexpr int kRawThreads = 256;  // of a CTA that calls these functions, every thread of it

// The chunk and value head of this CTA, one of NT HV. rows is 0 where there is nothing to do.
struct ChunkHead {
    int64_t row;    // of the chunk's first token, counted over [B, T]
    int64_t entry;  // of this chunk and head in the workspace arrays
    int rows, hv, h;
};

__device__ __forceinline__ ChunkHead chunk_head(const KdaParams& p) {
    const unsigned entry = blockIdx.x, heads = p.HV, hv = entry % heads, n = entry / heads;
    const int head = static_cast<int>(hv), h = p.HV == p.H ? head : head / (p.HV / p.H);
    if (p.cu_seqlens == nullptr) {  // as the table has it, without waiting for it
        const unsigned per_sequence = static_cast<unsigned>((p.T + kRows - 1) / kRows), i = n % per_sequence;
        const int64_t at = int64_t{i} * kRows, left = p.T - at;
        return {n / per_sequence * p.T + at, entry, left < kRows ? static_cast<int>(left) : kRows, head, h};
    }
    const KdaChunk* chunk = p.chunks + n;
    return {chunk->row, entry, chunk->rows, head, h};
}

// 16-byte pieces of [rows][kCols], neighbouring rows `stride` elements apart, by cp.async; zeros in the rows after.
template <class T, int kCols>
__device__ __forceinline__ void copy_rows(const Tile<T, kCols>& s, const T* src, int64_t stride, int rows) {
    constexpr int kPieces = kCols / Tile<T, kCols>::kPerPiece, kStep = kRawThreads / kPieces;
    const int r0 = threadIdx.x / kPieces, col = threadIdx.x % kPieces * Tile<T, kCols>::kPerPiece;
    src += r0 * stride + col;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i, src += kStep * stride)
        copy16_async(s.at(r0 + i * kStep, 0, col), src, r0 + i * kStep < rows);
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal_fast(1.f + exp2_fast(-kLog2E * x)); }

// log(1 + e^x), to 3 ulp at both ends: with y = e^-|x| the polynomial is log(1 + y) / y on [0, 1] to 2^-25.
__device__ __forceinline__ float softplus(float x) {
    constexpr float kTerms[] = {5.232694559e-3f,  -2.950524352e-2f, 7.822596282e-2f,  -1.366324723e-1f, 1.910600811e-1f,
                                -2.484298199e-1f, 3.331909776e-1f,  -4.999949336e-1f, 9.999999404e-1f};
    const float y = exp2_fast(-kLog2E * fabsf(x));
    float sum = kTerms[0];
#pragma unroll
    for (int i = 1; i < 9; ++i) sum = fmaf(sum, y, kTerms[i]);
    return fmaf(sum, y, fmaxf(x, 0.f));
}

// r of the 64 rows of x into fp32 at `out`; 1 where the norm is not asked for. 8 lanes share a row.
template <class T, int kK>
__device__ __forceinline__ void inverse_norms(uint32_t out, const Tile<T, kK>& x, bool wanted) {
    const int l = threadIdx.x % 8;
#pragma unroll
    for (int r = threadIdx.x / 8; r < kRows; r += kRawThreads / 8) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kK / 64; ++i) {
            float piece[4];
            shared_f32x4(piece, x.at(r, 0, 64 * i + 8 * l));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 v = unpack2<T>(__float_as_uint(piece[j]));
                sum = fmaf(v.x, v.x, sum);
                sum = fmaf(v.y, v.y, sum);
            }
        }
#pragma unroll
        for (int i = 1; i < 8; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (l == 0) set_shared_f32(out + 4 * r, wanted ? reciprocal_sqrt_fast(sum + 1e-6f) : 1.f);
    }
}

// b of the 64 rows into fp32 at `out`.
template <class T>
__device__ __forceinline__ void write_strengths(uint32_t out, const KdaParams& p, const ChunkHead& c) {
    const int r = threadIdx.x;
    if (r >= kRows) return;
    float b = 0.f;
    if (r < c.rows) {
        const int64_t at = (c.row + r) * p.HV + c.hv;
        b = p.beta_f32 ? static_cast<const float*>(p.beta)[at] : to_float(static_cast<const T*>(p.beta)[at]);
        if (p.beta_sigmoid) b = p.beta_scale * sigmoid(b);
    }
    set_shared_f32(out + 4 * r, b);
}

// exp(A_log) of a value head; 1 without a gate.
__device__ __forceinline__ float gate_rate(const KdaParams& p, int hv) {
    return p.gate == Gate::Pregated ? 1.f : expf(p.A_log[hv]);
}

// a, from z = g as given + dt_bias, without its least value.
template <Gate kGate>
__device__ __forceinline__ float unbounded_log2_decay(const KdaParams& p, float rate, float z) {
    return kGate == Gate::Pregated   ? kLog2E * z
           : kGate == Gate::Softplus ? -(kLog2E * rate) * softplus(z)
                                     : (kLog2E * p.lower_bound) * sigmoid(rate * z);
}
// dt_bias of channels col and col + 1; 0 where there is none.
__device__ __forceinline__ float2 gate_bias(const KdaParams& p, int hv, int col) {
    float x[2] = {0.f, 0.f};
    if (p.gate != Gate::Pregated && p.dt_bias != nullptr) global_f32x2(x, p.dt_bias + int64_t{hv} * p.K + col);
    return make_float2(x[0], x[1]);
}

}  // namespace kda
