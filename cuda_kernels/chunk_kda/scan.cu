// Launches of the scans. Card and kernels: scan.cuh.
#include "scan.cuh"

#include "launch.h"

namespace kda {

namespace {

template <class T, int kHead, int kSlice>
cudaError_t launch_slices(const KdaParams& p, bool backward, cudaStream_t stream) {
    using Cfg = ScanTile<kHead, kSlice>;
    const int64_t blocks = int64_t{p.N} * p.HV * Cfg::kSlices;
    const int stages = Cfg::kStages * Cfg::kStageBytes <= shared_limit() ? Cfg::kStages : Cfg::kStages - 1;
    const ScanParams a{p, blocks, stages};
    const int shared = stages * Cfg::kStageBytes;
    if (backward) {
        constexpr auto kKernel = kda_scan_backward_kernel<T, kHead, kSlice>;
        return launch_kernel<kKernel>(2 * blocks, Cfg::kThreads, shared, stream, a);
    }
    return launch_kernel<kda_scan_forward_kernel<T, kHead, kSlice>>(blocks, Cfg::kThreads, shared, stream, a);
}

template <class T, int kHead>
cudaError_t launch_head(const KdaParams& p, bool backward, cudaStream_t stream) {
    const int64_t narrow = int64_t{p.N} * p.HV * ScanTile<kHead, 32>::kSlices * (backward ? 2 : 1);
    return narrow <= kNarrowScans ? launch_slices<T, kHead, 32>(p, backward, stream)
                                  : launch_slices<T, kHead, 64>(p, backward, stream);
}

cudaError_t launch(const KdaParams& p, bool backward, cudaStream_t stream) {
    if (p.K != p.V || (p.K != 64 && p.K != 128)) return cudaErrorInvalidValue;
    switch (p.main) {
        case Main::F16:
            return p.K == 64 ? launch_head<half, 64>(p, backward, stream) : launch_head<half, 128>(p, backward, stream);
        case Main::BF16:
            return p.K == 64 ? launch_head<bf16, 64>(p, backward, stream) : launch_head<bf16, 128>(p, backward, stream);
        default:
            return cudaErrorInvalidValue;
    }
}

}  // namespace

cudaError_t kda_scan_forward(const KdaParams& p, cudaStream_t stream) { return launch(p, false, stream); }
cudaError_t kda_scan_backward(const KdaParams& p, cudaStream_t stream) { return launch(p, true, stream); }

}  // namespace kda
