// Chooses the instance for a call and launches it. Included by one translation unit per main dtype.
#pragma once

#include <cuda_runtime.h>

#include "hopper.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace kda {

template <class T, class S, int kHeadK, int kHeadV, bool kExact>
cudaError_t launch_instance(const WyParams& p, cudaStream_t stream) {
    using Cfg = WyTile<sizeof(T), kHeadK, kHeadV>;
    const int64_t chunks = p.cu_seqlens != nullptr && p.NT == 0 ? 1 : p.B * p.NT;
    return launch_kernel<wy_dqkg_kernel<T, S, kHeadK, kHeadV, kExact>>(chunks * p.HV, Cfg::kThreads, Cfg::kBytesTotal,
                                                                       stream, p);
}

template <class T, class S>
cudaError_t launch_state(const WyParams& p, bool aligned, cudaStream_t stream) {
    if constexpr (sizeof(T) == 2) {
        const int64_t ctas = hopper_multiprocessors<wy_dqkg_hopper_kernel<T, S>>();
        if (aligned && !p.v_first && p.K == 128 && p.V == 128 && ctas > 0) {
            const int64_t tasks = p.B * p.NT * p.HV;
            if (tasks == 0 || tasks >= int64_t{1} << 30) return launch_instance<T, S, 128, 128, false>(p, stream);
            return launch_kernel<wy_dqkg_hopper_kernel<T, S>>(tasks < ctas ? tasks : ctas, HopperTile::kThreads,
                                                              HopperTile::kBytesTotal, stream, p);
        }
    }
    if (aligned && !p.v_first && p.K == 128 && p.V == 128) return launch_instance<T, S, 128, 128, true>(p, stream);
    if (aligned && !p.v_first && p.K == 64 && p.V == 64) return launch_instance<T, S, 64, 64, true>(p, stream);
    return launch_instance<T, S, 128, 128, false>(p, stream);
}

}  // namespace kda
