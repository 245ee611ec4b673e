// Exchanges and sums among the lanes of a warp, lane = 4 g + t as the tensor core's accumulators have it.
#pragma once

#include "mma.cuh"

namespace kda {

// Swaps a bit of the lane with a bit of the index of w: one step of a transposition within groups of 4 lanes.
template <int kLaneBit, int kIndexBit>
__device__ __forceinline__ void exchange(uint32_t (&w)[4]) {
    const bool upper = lane_id() & kLaneBit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i & kIndexBit) continue;
        const uint32_t got = __shfl_xor_sync(~0u, upper ? w[i] : w[i + kIndexBit], kLaneBit);
        w[i] = upper ? got : w[i];
        w[i + kIndexBit] = upper ? w[i + kIndexBit] : got;
    }
}
// Word j of lane t goes to word t of lane j, within each group of 4 lanes.
__device__ __forceinline__ void transpose4(uint32_t (&w)[4]) {
    exchange<1, 1>(w);
    exchange<2, 2>(w);
}

__device__ __forceinline__ float sum_over_t(float x) {  // the 4 lanes of a row
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float sum_over_g(float x) {  // the 8 lanes of a column
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}

}  // namespace kda
