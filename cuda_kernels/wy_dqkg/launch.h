// Entry points of the op, one per main dtype. `aligned`: every tensor starts at a multiple of 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include "../common/params.h"

namespace kda {

cudaError_t launch_f16(const WyParams& p, bool aligned, cudaStream_t stream);
cudaError_t launch_bf16(const WyParams& p, bool aligned, cudaStream_t stream);
cudaError_t launch_f32(const WyParams& p, bool aligned, cudaStream_t stream);

}  // namespace kda
