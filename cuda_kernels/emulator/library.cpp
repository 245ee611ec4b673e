// What Python calls, through ctypes: each kernel's launch, on host memory.
#include <type_traits>

#include "../wy_dqkg/launch.h"

namespace kda {

// Weak: a library may hold one main dtype alone.
__attribute__((weak)) cudaError_t launch_f16(const WyParams& p, bool aligned, cudaStream_t stream);
__attribute__((weak)) cudaError_t launch_bf16(const WyParams& p, bool aligned, cudaStream_t stream);
__attribute__((weak)) cudaError_t launch_f32(const WyParams& p, bool aligned, cudaStream_t stream);

static_assert(std::is_standard_layout_v<WyParams>, "ctypes mirrors it");

}  // namespace kda

extern "C" {

size_t kda_emulator_wy_params_bytes() { return sizeof(kda::WyParams); }

int kda_emulator_wy_dqkg(const kda::WyParams* p, int aligned) {
    const auto launch = p->main == kda::Main::F16    ? kda::launch_f16
                        : p->main == kda::Main::BF16 ? kda::launch_bf16
                                                     : kda::launch_f32;
    return launch == nullptr ? cudaErrorNotSupported : launch(*p, aligned != 0, nullptr);
}

}  // extern "C"
