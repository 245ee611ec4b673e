// Zeros in the rows that belong to no sequence: those from cu_seqlens[N] on.
//
// Formula: x[t] = 0 for t >= cu_seqlens[N]; x = o, or dq, dk, dv, dg, dbeta.
// Grid: kBlocks CTAs, which take the rows in turn; none is launched for dense inputs.
// Bytes: those rows written once, nothing read but one bound.
// Must hold: 16 divides the bytes of every row but dbeta's.
#include "launch.h"

#include "../common/device.cuh"

namespace kda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 256;

struct Tail {
    KdaParams p;
    int64_t blocks;
    bool backward;
};

__device__ void clear(void* x, int64_t row, int64_t bytes) {
    float* at = reinterpret_cast<float*>(static_cast<char*>(x) + row * bytes);
    for (int64_t i = threadIdx.x; i < bytes / 16; i += kThreads) store_global4(at + 4 * i, 0.f, 0.f, 0.f, 0.f);
}

__global__ void __launch_bounds__(kThreads) kda_tail_kernel(const __grid_constant__ Tail a) {
    const KdaParams& p = a.p;
    const int64_t end = p.cu_i64 ? static_cast<const int64_t*>(p.cu_seqlens)[p.N]
                                 : static_cast<const int32_t*>(p.cu_seqlens)[p.N];
    for (int64_t row = end + blockIdx.x; row < p.T; row += a.blocks) {
        if (!a.backward) {
            clear(p.o, row, int64_t{2} * p.HV * p.V);
            continue;
        }
        clear(p.dq, row, int64_t{2} * p.H * p.K);
        clear(p.dk, row, int64_t{2} * p.H * p.K);
        clear(p.dv, row, int64_t{2} * p.HV * p.V);
        clear(p.dg, row, int64_t{p.g_f32 ? 4 : 2} * p.HV * p.K);
        uint16_t* dbeta = static_cast<uint16_t*>(p.dbeta);
        const int64_t words = int64_t{p.beta_f32 ? 2 : 1} * p.HV;  // of 16 bits
        for (int64_t i = threadIdx.x; i < words; i += kThreads) dbeta[row * words + i] = 0;
    }
}

}  // namespace

cudaError_t kda_clear_tail(const KdaParams& p, bool backward, cudaStream_t stream) {
    if (p.cu_seqlens == nullptr) return cudaSuccess;
    const int64_t blocks = p.T < kBlocks ? p.T : kBlocks;
    return launch_kernel<kda_tail_kernel>(blocks, kThreads, 0, stream, Tail{p, blocks, backward});
}

}  // namespace kda
