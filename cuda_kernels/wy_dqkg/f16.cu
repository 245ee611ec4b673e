#include "launch.cuh"

namespace kda {

cudaError_t launch_f16(const WyParams& p, bool aligned, cudaStream_t stream) {
    return p.state_f32 ? launch_state<half, float>(p, aligned, stream) : launch_state<half, half>(p, aligned, stream);
}

}  // namespace kda
