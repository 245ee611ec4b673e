// Sums over what kda_grads leaves by chunk and by value head.
//
// Formula: dA_log[hv] = sum over chunks of dA_log_part; ddt_bias[hv, k] the same of ddt_bias_part; where HV > H
//   dq[t, h] = sum over the group's value heads of dq_head[t, hv], dk the same.
// Grid: HV K / 32 CTAs for the parameters, 32 channels of a value head each, the first of a head also its dA_log; after
//   them, where HV > H, CTAs that own kBlockRows rows of dq and dk.
// Order: thread s of 32 sums chunks s, s + 32, ...; then the 32 sums one after the other. Heads of a group in order.
// Bytes: the parts once; dq_head and dk_head read and dq and dk written once.
// Must hold: K is a multiple of 32. Rows past the last packed sequence are neither read nor written.
#include "launch.h"

#include "../common/mma.cuh"

namespace kda {

namespace {

constexpr int kThreads = 256;
constexpr int kChannels = 32, kSlices = kThreads / (kChannels / 4);
constexpr int kBlockRows = 8;

struct Sums {
    KdaParams p;
    int64_t parameter_blocks;
};

// dA_log of value head hv, by the whole CTA.
__device__ void sum_log(const KdaParams& p, int hv, int64_t chunks, uint32_t s0) {
    float sum = 0.f;
    for (int64_t i = threadIdx.x; i < chunks; i += kThreads) sum += p.dA_log_part[i * p.HV + hv];
    for (int i = 1; i < 32; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (threadIdx.x % 32 == 0) set_shared_f32(s0 + threadIdx.x / 32 * 4, sum);
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.f;
        for (int w = 0; w < kThreads / 32; ++w) sum += __uint_as_float(shared_u32(s0 + 4 * w));
        p.dA_log[hv] = sum;
    }
    __syncthreads();
}

__device__ void sum_bias(const KdaParams& p, int hv, int k0, int64_t chunks, uint32_t s0) {
    const int slice = threadIdx.x / (kChannels / 4), channel = threadIdx.x % (kChannels / 4) * 4;
    float sum[4] = {};
#pragma unroll 4
    for (int64_t i = slice; i < chunks; i += kSlices) {
        float x[4];
        global_f32x4(x, p.ddt_bias_part + (i * p.HV + hv) * p.K + k0 + channel);
        for (int j = 0; j < 4; ++j) sum[j] += x[j];
    }
    for (int j = 0; j < 4; ++j) set_shared_f32(s0 + (slice * kChannels + channel + j) * 4, sum[j]);
    __syncthreads();
    if (threadIdx.x < kChannels) {
        float all = 0.f;
        for (int i = 0; i < kSlices; ++i) all += __uint_as_float(shared_u32(s0 + (i * kChannels + threadIdx.x) * 4));
        p.ddt_bias[int64_t{hv} * p.K + k0 + threadIdx.x] = all;
    }
}

template <class T>
__device__ void sum_heads(const KdaParams& p, void* out, const float* head, int64_t row0, int64_t end) {
    const int group = p.HV / p.H, pieces = p.H * p.K / 4;
    for (int i = threadIdx.x; i < kBlockRows * pieces; i += kThreads) {
        const int64_t row = row0 + i / pieces;
        if (row >= end) return;
        const int col = i % pieces * 4, h = col / p.K, k = col % p.K;
        float sum[4] = {};
        for (int n = 0; n < group; ++n) {
            float x[4];
            global_f32x4(x, head + (row * p.HV + h * group + n) * p.K + k);
            for (int j = 0; j < 4; ++j) sum[j] += x[j];
        }
        uint2 packed = make_uint2(pack2<T>(sum[0], sum[1]), pack2<T>(sum[2], sum[3]));
        *reinterpret_cast<uint2*>(static_cast<T*>(out) + row * p.H * p.K + col) = packed;
    }
}

}  // namespace

template <class T>
__global__ void __launch_bounds__(kThreads) kda_reduce_kernel(const __grid_constant__ Sums a) {
    extern __shared__ __align__(128) char smem[];
    const uint32_t s0 = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    const KdaParams& p = a.p;
    if (blockIdx.x < a.parameter_blocks) {
        const int per_head = p.K / kChannels, hv = blockIdx.x / per_head, k0 = blockIdx.x % per_head * kChannels;
        const int64_t chunks = p.first_chunk[p.N];
        if (k0 == 0) sum_log(p, hv, chunks, s0);
        if (p.ddt_bias != nullptr) sum_bias(p, hv, k0, chunks, s0);
        return;
    }
    const int64_t row0 = (blockIdx.x - a.parameter_blocks) * kBlockRows;
    const int64_t end = p.cu_seqlens == nullptr ? p.B * p.T
                        : p.cu_i64             ? static_cast<const int64_t*>(p.cu_seqlens)[p.N]
                                               : static_cast<const int32_t*>(p.cu_seqlens)[p.N];
    sum_heads<T>(p, p.dq, p.dq_head, row0, end);
    sum_heads<T>(p, p.dk, p.dk_head, row0, end);
}

namespace {

template <class T>
cudaError_t launch_reduce(const KdaParams& p, cudaStream_t stream) {
    const int64_t parameters = p.gate == Gate::Pregated ? 0 : int64_t{p.HV} * (p.K / kChannels);
    const int64_t rows = p.HV > p.H ? (p.B * p.T + kBlockRows - 1) / kBlockRows : 0;
    if (parameters + rows == 0) return cudaSuccess;
    return launch_kernel<kda_reduce_kernel<T>>(parameters + rows, kThreads, kThreads * 16, stream, Sums{p, parameters});
}

}  // namespace

cudaError_t kda_reduce(const KdaParams& p, cudaStream_t stream) {
    return p.main == Main::F16    ? launch_reduce<half>(p, stream)
           : p.main == Main::BF16 ? launch_reduce<bf16>(p, stream)
                                  : cudaErrorInvalidValue;
}

}  // namespace kda
