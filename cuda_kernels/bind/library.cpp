// Torch operators over LibTorch's stable ABI: one binary for every torch from 2.10 on. Allocates the outputs; the only
// file here that knows torch.

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <tuple>

#include "../wy_dqkg/launch.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // its name in headers before torch 2.12
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

// Lives in libtorch_cuda.so; the headers of a CPU-only torch do not declare it.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace {

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
Tensor empty(const int64_t (&sizes)[kRank], int32_t dtype, int32_t device) {
    int64_t strides[kRank];
    int64_t n = 1;
    for (size_t i = kRank; i-- > 0; n *= sizes[i] > 0 ? sizes[i] : 1) strides[i] = n;
    AtenTensorHandle out = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(kRank, sizes, strides, dtype, aoti_torch_device_type_cuda(), device, &out));
    return Tensor(out);
}

const void* pointer(const Tensor& t, const char* name, bool& aligned) {
    STD_TORCH_CHECK(t.is_contiguous(), name, ": expected a contiguous tensor");
    const void* p = t.data_ptr();
    aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
    return p;
}

const void* index_pointer(const std::optional<Tensor>& t, const char* name, bool& is_i64) {
    if (!t.has_value()) return nullptr;
    STD_TORCH_CHECK(t->is_contiguous(), name, ": expected a contiguous tensor");
    is_i64 = t->scalar_type() == ScalarType::Long;
    return t->data_ptr();
}

using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Shapes and dtypes are those of mindspeed_kda/contracts/wy_dqkg.py, which has checked them.
Grads wy_dqkg(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& v_new, const Tensor& g,
              const Tensor& beta, const Tensor& A, const Tensor& h, const Tensor& d_o, const Tensor& dh,
              const Tensor& dv, const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& chunk_indices,
              double scale, bool state_v_first) {
    kda::WyParams p{};
    const auto main = q.scalar_type();
    p.main = main == ScalarType::Half       ? kda::Main::F16
             : main == ScalarType::BFloat16 ? kda::Main::BF16
                                            : kda::Main::F32;
    p.B = q.size(0), p.T = q.size(1), p.NT = h.size(1);
    p.H = static_cast<int32_t>(q.size(2)), p.K = static_cast<int32_t>(q.size(3));
    p.HV = static_cast<int32_t>(v.size(2)), p.V = static_cast<int32_t>(v.size(3));
    p.BT = static_cast<int32_t>(A.size(3));
    p.N = cu_seqlens.has_value() ? static_cast<int32_t>(cu_seqlens->size(0) - 1) : 0;
    p.scale = static_cast<float>(scale);
    p.state_f32 = h.scalar_type() == ScalarType::Float;
    p.beta_f32 = beta.scalar_type() == ScalarType::Float;
    p.v_first = state_v_first;

    bool aligned = true;
    p.q = pointer(q, "q", aligned), p.k = pointer(k, "k", aligned), p.v = pointer(v, "v", aligned);
    p.v_new = pointer(v_new, "v_new", aligned), p.g = static_cast<const float*>(pointer(g, "g", aligned));
    p.beta = pointer(beta, "beta", aligned), p.A = pointer(A, "A", aligned), p.h = pointer(h, "h", aligned);
    p.d_o = pointer(d_o, "do", aligned), p.dh = pointer(dh, "dh", aligned), p.dv = pointer(dv, "dv", aligned);
    p.cu_seqlens = index_pointer(cu_seqlens, "cu_seqlens", p.cu_i64);
    p.chunk_indices = index_pointer(chunk_indices, "chunk_indices", p.indices_i64);

    const int32_t device = q.get_device_index(), f32 = aoti_torch_dtype_float32();
    int32_t main_dtype = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(v.get(), &main_dtype));
    const int64_t K = p.K, V = p.V, HV = p.HV, BT = p.BT;
    Tensor dq = empty({p.B, p.T, HV, K}, f32, device), dk = empty({p.B, p.T, HV, K}, f32, device);
    Tensor dv_out = empty({p.B, p.T, HV, V}, main_dtype, device), db = empty({p.B, p.T, HV}, f32, device);
    Tensor dg = empty({p.B, p.T, HV, K}, f32, device), dA = empty({p.B, p.T, HV, BT}, f32, device);
    if (p.B * p.T > 0) {
        p.dq = static_cast<float*>(dq.data_ptr()), p.dk = static_cast<float*>(dk.data_ptr());
        p.dv_out = dv_out.data_ptr(), p.db = static_cast<float*>(db.data_ptr());
        p.dg = static_cast<float*>(dg.data_ptr()), p.dA = static_cast<float*>(dA.data_ptr());
        const OnDevice on(device);
        void* stream = nullptr;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
        const auto launch = p.main == kda::Main::F16    ? kda::launch_f16
                            : p.main == kda::Main::BF16 ? kda::launch_bf16
                                                        : kda::launch_f32;
        OnDevice::check(launch(p, aligned, static_cast<cudaStream_t>(stream)));
    }
    return {std::move(dq), std::move(dk), std::move(dv_out), std::move(db), std::move(dg), std::move(dA)};
}

}  // namespace

STABLE_TORCH_LIBRARY(mindspeed_kda_cuda, m) {
    m.def(
        "wy_dqkg(Tensor q, Tensor k, Tensor v, Tensor v_new, Tensor g, Tensor beta, Tensor A, Tensor h, Tensor d_o, "
        "Tensor dh, Tensor dv, Tensor? cu_seqlens, Tensor? chunk_indices, float scale, bool state_v_first) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(mindspeed_kda_cuda, CUDA, m) { m.impl("wy_dqkg", TORCH_BOX(&wy_dqkg)); }
