// The table of chunks: which rows of [B, T] each chunk holds.
//
// Formula: sequence n has ceil(length / 64) chunks, in order; first_chunk[n] counts those of the sequences before it.
// Grid: dense inputs, a thread a chunk or sequence. Packed, one CTA: it sums the counts of 256 sequences at a time,
//   then finds each chunk's sequence by halving first_chunk.
// Bytes: 16 NT + 4 (N + 1) written; packed, cu_seqlens read twice.
// Must hold: packed, NT = T / 64 + N is at least the number of chunks; those past the last hold no row.
#include "launch.h"

#include "../common/device.cuh"
#include "../common/tiles.h"

namespace kda {

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t bound_of(const KdaParams& p, int64_t n) {
    return p.cu_i64 ? static_cast<const int64_t*>(p.cu_seqlens)[n] : static_cast<const int32_t*>(p.cu_seqlens)[n];
}

}  // namespace

__global__ void __launch_bounds__(kThreads) kda_plan_dense_kernel(const __grid_constant__ KdaParams p) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t per_sequence = (p.T + kRows - 1) / kRows;
    if (i <= p.N) p.first_chunk[i] = static_cast<int32_t>(i * per_sequence);
    if (i >= p.NT) return;
    const int64_t n = i / per_sequence, at = i % per_sequence * kRows, left = p.T - at;
    p.chunks[i] = {n * p.T + at, static_cast<int32_t>(left < kRows ? left : kRows), static_cast<int32_t>(n)};
}

__global__ void __launch_bounds__(kThreads) kda_plan_packed_kernel(const __grid_constant__ KdaParams p) {
    extern __shared__ __align__(128) char smem[];
    const uint32_t s_sums = static_cast<uint32_t>(__cvta_generic_to_shared(smem));  // of each warp's sequences
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t before = 0;  // chunks of the sequences of earlier rounds
    for (int64_t n0 = 0; n0 < p.N; n0 += kThreads) {
        const int64_t n = n0 + threadIdx.x;
        const int64_t length = n < p.N ? bound_of(p, n + 1) - bound_of(p, n) : 0;
        const uint32_t count = length > 0 ? static_cast<uint32_t>((length + kRows - 1) / kRows) : 0;
        uint32_t sum = count;  // over this warp's sequences up to this one
        for (int i = 1; i < 32; i *= 2) {
            const uint32_t x = __shfl_up_sync(~0u, sum, i);
            if (lane >= i) sum += x;
        }
        if (lane == 31) set_shared_u32(s_sums + 4 * warp, sum);
        __syncthreads();
        uint32_t all = before;
        for (int w = 0; w < kThreads / 32; ++w) {
            const uint32_t x = shared_u32(s_sums + 4 * w);
            if (w < warp) sum += x;
            all += x;
        }
        if (n < p.N) p.first_chunk[n] = static_cast<int32_t>(before + sum - count);
        before = all;
        __syncthreads();
    }
    if (threadIdx.x == 0) p.first_chunk[p.N] = static_cast<int32_t>(before);
    __syncthreads();
    for (int64_t i = threadIdx.x; i < p.NT; i += kThreads) {
        KdaChunk chunk = {0, 0, 0};
        if (i < before) {
            int low = 0, high = p.N;  // first_chunk[low] <= i < first_chunk[high]
            while (high - low > 1) {
                const int middle = low + (high - low) / 2;
                (p.first_chunk[middle] <= i ? low : high) = middle;
            }
            const int64_t row = bound_of(p, low) + (i - p.first_chunk[low]) * kRows, left = bound_of(p, low + 1) - row;
            chunk = {row, static_cast<int32_t>(left < kRows ? left : kRows), low};
        }
        p.chunks[i] = chunk;
    }
}

cudaError_t kda_plan(const KdaParams& p, cudaStream_t stream) {
    if (p.cu_seqlens != nullptr) return launch_kernel<kda_plan_packed_kernel>(1, kThreads, kThreads / 8, stream, p);
    const int64_t n = p.NT > p.N ? p.NT : int64_t{p.N} + 1;
    return launch_kernel<kda_plan_dense_kernel>((n + kThreads - 1) / kThreads, kThreads, 0, stream, p);
}

}  // namespace kda
