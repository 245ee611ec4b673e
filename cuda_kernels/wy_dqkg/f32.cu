#include "launch.cuh"

namespace kda {

cudaError_t launch_f32(const WyParams& p, bool aligned, cudaStream_t stream) {
    return launch_state<float, float>(p, aligned, stream);
}

}  // namespace kda
