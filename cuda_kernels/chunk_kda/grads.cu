#include "grads.cuh"

#include "launch.h"

namespace kda {

namespace {

template <class T, int kD>
cudaError_t launch_grads(const KdaParams& p, cudaStream_t stream) {
    using Cfg = KdaGradsTile<kD>;
    return launch_kernel<kda_grads_kernel<T, kD>>(p.NT * p.HV, Cfg::kThreads, Cfg::kBytesTotal, stream, p);
}

template <class T>
cudaError_t launch_grads(const KdaParams& p, cudaStream_t stream) {
    if (p.K != p.V) return cudaErrorInvalidValue;
    return p.K == 64    ? launch_grads<T, 64>(p, stream)
           : p.K == 128 ? launch_grads<T, 128>(p, stream)
                        : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t kda_grads(const KdaParams& p, cudaStream_t stream) {
    return p.main == Main::F16    ? launch_grads<half>(p, stream)
           : p.main == Main::BF16 ? launch_grads<bf16>(p, stream)
                                  : cudaErrorInvalidValue;
}

}  // namespace kda
