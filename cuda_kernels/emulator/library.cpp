// What Python calls, through ctypes: each kernel's launch, on host memory.
#include <cstring>
#include <type_traits>

#include "../chunk_kda/launch.h"
#include "../wy_dqkg/launch.h"

namespace kda {

namespace emulator {
extern int multiprocessors;
}

// Weak: a library may hold one main dtype or one kernel alone.
__attribute__((weak)) cudaError_t launch_f16(const WyParams& p, bool aligned, cudaStream_t stream);
__attribute__((weak)) cudaError_t launch_bf16(const WyParams& p, bool aligned, cudaStream_t stream);
__attribute__((weak)) cudaError_t launch_f32(const WyParams& p, bool aligned, cudaStream_t stream);

__attribute__((weak)) cudaError_t kda_plan(const KdaParams& p, cudaStream_t stream);
__attribute__((weak)) cudaError_t kda_prepare(const KdaParams& p, bool backward, cudaStream_t stream);
__attribute__((weak)) cudaError_t kda_scan_forward(const KdaParams& p, cudaStream_t stream);
__attribute__((weak)) cudaError_t kda_scan_backward(const KdaParams& p, cudaStream_t stream);
__attribute__((weak)) cudaError_t kda_grads(const KdaParams& p, cudaStream_t stream);
__attribute__((weak)) cudaError_t kda_reduce(const KdaParams& p, cudaStream_t stream);
__attribute__((weak)) cudaError_t kda_clear_tail(const KdaParams& p, bool backward, cudaStream_t stream);

static_assert(std::is_standard_layout_v<WyParams> && std::is_standard_layout_v<KdaParams>, "ctypes mirrors them");

namespace {

cudaError_t prepare_forward(const KdaParams& p, cudaStream_t stream) { return kda_prepare(p, false, stream); }
cudaError_t prepare_backward(const KdaParams& p, cudaStream_t stream) { return kda_prepare(p, true, stream); }
cudaError_t tail_forward(const KdaParams& p, cudaStream_t stream) { return kda_clear_tail(p, false, stream); }
cudaError_t tail_backward(const KdaParams& p, cudaStream_t stream) { return kda_clear_tail(p, true, stream); }

struct Stage {
    const char* name;
    cudaError_t (*launch)(const KdaParams&, cudaStream_t);
    bool present;
};

}  // namespace

}  // namespace kda

extern "C" {

// How many multiprocessors kernels of sm_90a shall find; 0: the general ones run.
void kda_emulator_hopper(int multiprocessors) { kda::emulator::multiprocessors = multiprocessors; }

size_t kda_emulator_wy_params_bytes() { return sizeof(kda::WyParams); }

int kda_emulator_wy_dqkg(const kda::WyParams* p, int aligned) {
    const auto launch = p->main == kda::Main::F16    ? kda::launch_f16
                        : p->main == kda::Main::BF16 ? kda::launch_bf16
                                                     : kda::launch_f32;
    return launch == nullptr ? cudaErrorNotSupported : launch(*p, aligned != 0, nullptr);
}

size_t kda_emulator_chunk_kda_params_bytes() { return sizeof(kda::KdaParams); }

int kda_emulator_chunk_kda(const kda::KdaParams* p, const char* name) {
    const kda::Stage stages[] = {
        {"plan", kda::kda_plan, kda::kda_plan != nullptr},
        {"prepare_forward", kda::prepare_forward, kda::kda_prepare != nullptr},
        {"prepare_backward", kda::prepare_backward, kda::kda_prepare != nullptr},
        {"scan_forward", kda::kda_scan_forward, kda::kda_scan_forward != nullptr},
        {"scan_backward", kda::kda_scan_backward, kda::kda_scan_backward != nullptr},
        {"grads", kda::kda_grads, kda::kda_grads != nullptr},
        {"reduce", kda::kda_reduce, kda::kda_reduce != nullptr},
        {"tail_forward", kda::tail_forward, kda::kda_clear_tail != nullptr},
        {"tail_backward", kda::tail_backward, kda::kda_clear_tail != nullptr},
    };
    for (const kda::Stage& stage : stages)
        if (std::strcmp(stage.name, name) == 0 && stage.present) return stage.launch(*p, nullptr);
    return cudaErrorNotSupported;
}

}  // extern "C"
