#include "launch.cuh"

namespace kda {

cudaError_t launch_bf16(const WyParams& p, bool aligned, cudaStream_t stream) {
    return p.state_f32 ? launch_state<bf16, float>(p, aligned, stream) : launch_state<bf16, bf16>(p, aligned, stream);
}

}  // namespace kda
