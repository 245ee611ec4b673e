// Torch operators over LibTorch's stable ABI: one binary for every torch from 2.10 on. Allocates the outputs; no file
// outside of this folder knows torch.

#include <tuple>

#include "../wy_dqkg/launch.h"
#include "common.h"

namespace {

using namespace kda;

using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Shapes and dtypes are those of mindspeed_kda/contracts/wy_dqkg.py, which has checked them.
Grads wy_dqkg(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& v_new, const Tensor& g,
              const Tensor& beta, const Tensor& A, const Tensor& h, const Tensor& d_o, const Tensor& dh,
              const Tensor& dv, const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& chunk_indices,
              double scale, bool state_v_first) {
    kda::WyParams p{};
    p.main = main_of(q);
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
    const int32_t main_dtype = dtype_of(v);
    const int64_t K = p.K, V = p.V, HV = p.HV, BT = p.BT;
    Tensor dq = empty({p.B, p.T, HV, K}, f32, device), dk = empty({p.B, p.T, HV, K}, f32, device);
    Tensor dv_out = empty({p.B, p.T, HV, V}, main_dtype, device), db = empty({p.B, p.T, HV}, f32, device);
    Tensor dg = empty({p.B, p.T, HV, K}, f32, device), dA = empty({p.B, p.T, HV, BT}, f32, device);
    if (p.B * p.T > 0) {
        p.dq = static_cast<float*>(dq.data_ptr()), p.dk = static_cast<float*>(dk.data_ptr());
        p.dv_out = dv_out.data_ptr(), p.db = static_cast<float*>(db.data_ptr());
        p.dg = static_cast<float*>(dg.data_ptr()), p.dA = static_cast<float*>(dA.data_ptr());
        const OnDevice on(device);
        const auto launch = p.main == kda::Main::F16    ? kda::launch_f16
                            : p.main == kda::Main::BF16 ? kda::launch_bf16
                                                        : kda::launch_f32;
        OnDevice::check(launch(p, aligned, current_stream(device)));
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
