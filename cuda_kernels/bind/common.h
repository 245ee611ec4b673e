// What the torch operators share: the device of a call, its stream, outputs, pointers, errors.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "../common/params.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // its name in headers before torch 2.12
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

// Lives in libtorch_cuda.so; the headers of a CPU-only torch do not declare it.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace kda {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The device of the tensors, current while this lives.
class OnDevice {
 public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&before_));
        if (device != before_) {
            check(cudaSetDevice(device));
        } else {
            before_ = -1;
        }
    }
    ~OnDevice() {
        if (before_ >= 0) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

    static void check(cudaError_t error) {
        STD_TORCH_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
    }

 private:
    int before_ = -1;
};

template <size_t kRank>
inline AtenTensorHandle empty_handle(const int64_t (&sizes)[kRank], int32_t dtype, int32_t device) {
    int64_t strides[kRank];
    int64_t n = 1;
    for (size_t i = kRank; i-- > 0; n *= sizes[i] > 0 ? sizes[i] : 1) strides[i] = n;
    AtenTensorHandle out = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(kRank, sizes, strides, dtype, aoti_torch_device_type_cuda(), device, &out));
    return out;
}
template <size_t kRank>
inline Tensor empty(const int64_t (&sizes)[kRank], int32_t dtype, int32_t device) {
    return Tensor(empty_handle(sizes, dtype, device));
}

inline const void* pointer(const Tensor& t, const char* name, bool& aligned) {
    STD_TORCH_CHECK(t.is_contiguous(), name, ": expected a contiguous tensor");
    const void* p = t.data_ptr();
    aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
    return p;
}

inline const void* index_pointer(const std::optional<Tensor>& t, const char* name, bool& is_i64) {
    if (!t.has_value()) return nullptr;
    STD_TORCH_CHECK(t->is_contiguous(), name, ": expected a contiguous tensor");
    is_i64 = t->scalar_type() == ScalarType::Long;
    return t->data_ptr();
}

inline Main main_of(const Tensor& t) {
    const auto type = t.scalar_type();
    return type == ScalarType::Half ? Main::F16 : type == ScalarType::BFloat16 ? Main::BF16 : Main::F32;
}

inline int32_t dtype_of(const Tensor& t) {
    int32_t dtype = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    return dtype;
}

inline cudaStream_t current_stream(int32_t device) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return static_cast<cudaStream_t>(stream);
}

}  // namespace kda
