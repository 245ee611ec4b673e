// Torch operators over LibTorch's stable ABI: one binary for every torch from 2.10 on. Allocates the outputs; no file
// outside of this folder knows torch.
//
// The operator takes its arguments from the stack by hand: its host time counts, and TORCH_BOX would wrap each of 17
// tensors in a shared pointer.

#include <cmath>
#include <cstring>
#include <mutex>

#include "../wy_dqkg/launch.h"
#include "common.h"

namespace {

using namespace kda;

constexpr int kTensors = 11, kOutputs = 6;
const char* const kNames[kTensors] = {"q", "k", "v", "v_new", "g", "beta", "A", "h", "do", "dh", "dv"};

// All that the contract's checks and the backend's predicate look at in a call: equal signatures, equal answers.
class Signature {
 public:
    void add(int64_t x) {
        if (n_ < kWords) word_[n_] = x;
        ++n_;
    }
    void add(AtenTensorHandle t) {
        int32_t device_type = 0, device = 0, dtype = 0;
        int64_t rank = 0, *sizes = nullptr;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t, &device_type));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t, &device));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t, &dtype));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t, &rank));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t, &sizes));
        add(device_type), add(device), add(dtype), add(rank);
        for (int64_t i = 0; i < rank; ++i) add(sizes[i]);
    }
    bool operator==(const Signature& other) const {  // one that does not fit equals none
        return n_ == other.n_ && n_ <= kWords && std::memcmp(word_, other.word_, n_ * sizeof(int64_t)) == 0;
    }

 private:
    static constexpr int kWords = 128;  // a packed call with indices has 105
    int64_t word_[kWords];
    int n_ = 0;
};

// Signatures of the last calls that were checked.
class Signatures {
 public:
    bool has(const Signature& s) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return found(s);
    }
    void add(const Signature& s) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (found(s)) return;
        last_ = (last_ + 1) % kKept;
        kept_[last_] = s;
        if (count_ < kKept) ++count_;
    }

 private:
    bool found(const Signature& s) const {
        for (int i = 0; i < count_; ++i)
            if (kept_[(last_ + kKept - i) % kKept] == s) return true;
        return false;
    }

    static constexpr int kKept = 64;
    std::mutex mutex_;
    Signature kept_[kKept];
    int count_ = 0, last_ = kKept - 1;
};

// The handles of a call: inputs from the stack, outputs back to it.
struct Handles {
    AtenTensorHandle in[kTensors] = {}, out[kOutputs] = {};
    ~Handles() {
        for (AtenTensorHandle h : in) aoti_torch_delete_tensor_object(h);
        for (AtenTensorHandle h : out)
            if (h != nullptr) aoti_torch_delete_tensor_object(h);
    }
};

void* data_of(AtenTensorHandle t) {
    void* p = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(t, &p));
    return p;
}

// Tensors of fp32 one after the other in one allocation, or each in its own.
class Parts {
 public:
    Parts(int64_t bytes, bool apart, int32_t device) : device_(device) {
        if (!apart) pool_ = empty_handle({bytes / 4 + kOutputs * kAlign / 4}, aoti_torch_dtype_float32(), device);
    }
    Parts(const Parts&) = delete;
    Parts& operator=(const Parts&) = delete;
    ~Parts() {
        if (pool_ != nullptr) aoti_torch_delete_tensor_object(pool_);
    }
    template <size_t kRank>
    AtenTensorHandle take(const int64_t (&sizes)[kRank]) {
        const int32_t f32 = aoti_torch_dtype_float32();
        if (pool_ == nullptr) return empty_handle(sizes, f32, device_);
        int64_t strides[kRank], n = 1;
        for (size_t i = kRank; i-- > 0; n *= sizes[i]) strides[i] = n;
        AtenTensorHandle out = nullptr;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__alloc_from_pool(pool_, at_, f32, kRank, sizes, strides, &out));
        at_ += (n * 4 + kAlign - 1) / kAlign * kAlign;
        return out;
    }

 private:
    static constexpr int64_t kAlign = 256;
    AtenTensorHandle pool_ = nullptr;
    int64_t at_ = 0;
    int32_t device_;
};

// Shapes and dtypes are those of mindspeed_kda/contracts/wy_dqkg.py. With `checked` they have been checked and the
// backend's predicate said yes, which is remembered. Without it the call runs only if one like it was checked before
// and its tensors are contiguous; else the outputs are undefined tensors, None to Python.
void wy_dqkg(StableIValue* stack, uint64_t, uint64_t) {
    using torch::stable::detail::to;
    static Signatures& known = *new Signatures;  // lives as long as the process: threads may run at its end

    Handles t;
    for (int i = 0; i < kTensors; ++i) t.in[i] = to<AtenTensorHandle>(stack[i]);
    const auto cu_seqlens = to<std::optional<Tensor>>(stack[kTensors]);
    const auto chunk_indices = to<std::optional<Tensor>>(stack[kTensors + 1]);
    const auto scale = to<std::optional<double>>(stack[kTensors + 2]);
    const auto chunk_size = to<int64_t>(stack[kTensors + 3]);
    const bool v_first = to<bool>(stack[kTensors + 4]), checked = to<bool>(stack[kTensors + 5]);

    WyParams p{};
    const void** const pointers[kTensors] = {&p.q,    &p.k, &p.v, &p.v_new, reinterpret_cast<const void**>(&p.g),
                                             &p.beta, &p.A, &p.h, &p.d_o,   &p.dh,
                                             &p.dv};
    Signature signature;
    bool aligned = true, contiguous = true;
    for (int i = 0; i < kTensors; ++i) {
        signature.add(t.in[i]);
        bool yes = false;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(t.in[i], &yes));
        STD_TORCH_CHECK(yes || !checked, kNames[i], ": expected a contiguous tensor");
        contiguous = contiguous && yes;
        if (yes) {
            *pointers[i] = data_of(t.in[i]);
            aligned = aligned && reinterpret_cast<uintptr_t>(*pointers[i]) % 16 == 0;
        }
    }
    int64_t *q = nullptr, *v = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.in[0], &q));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.in[2], &v));
    int64_t rank = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t.in[0], &rank));
    // As Python computes it, to the bit.
    const double factor = scale.has_value() ? *scale : rank == 4 ? std::pow(static_cast<double>(q[3]), -0.5) : 0.;
    int64_t factor_bits;
    std::memcpy(&factor_bits, &factor, sizeof(factor_bits));
    signature.add(factor_bits), signature.add(chunk_size), signature.add(v_first);
    for (const auto* x : {&cu_seqlens, &chunk_indices}) {
        signature.add(x->has_value());
        if (!x->has_value()) continue;
        signature.add((*x)->get());
        contiguous = contiguous && (*x)->is_contiguous();
    }
    if (!checked && !(contiguous && known.has(signature))) {
        for (auto& out : t.out) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&out));
    } else {
        int32_t device = 0, main_dtype = 0, state = 0, beta = 0;
        int64_t* h = nullptr;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.in[0], &device));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.in[0], &main_dtype));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.in[7], &state));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.in[5], &beta));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.in[7], &h));
        const int32_t f32 = aoti_torch_dtype_float32();
        p.main = main_dtype == aoti_torch_dtype_float16()    ? Main::F16
                 : main_dtype == aoti_torch_dtype_bfloat16() ? Main::BF16
                                                             : Main::F32;
        const int64_t B = q[0], T = q[1], K = q[3], HV = v[2], V = v[3], BT = chunk_size;
        p.B = B, p.T = T, p.NT = h[1];
        p.H = static_cast<int32_t>(q[2]), p.K = static_cast<int32_t>(K), p.HV = static_cast<int32_t>(HV);
        p.V = static_cast<int32_t>(V), p.BT = static_cast<int32_t>(BT);
        p.N = cu_seqlens.has_value() ? static_cast<int32_t>(cu_seqlens->size(0) - 1) : 0;
        p.scale = static_cast<float>(factor);
        p.state_f32 = state == f32, p.beta_f32 = beta == f32, p.v_first = v_first;
        p.cu_seqlens = index_pointer(cu_seqlens, "cu_seqlens", p.cu_i64);
        p.chunk_indices = index_pointer(chunk_indices, "chunk_indices", p.indices_i64);

        const OnDevice on(device);
        // A repeated call takes the five fp32 outputs from one allocation: each of its own costs 1.3 us of host time.
        // A checked one gives each its own, since outputs of operators that torch.compile knows may not share memory.
        Parts parts(B * T * HV * (3 * K + BT + 1) * 4, checked || B * T == 0, device);
        t.out[0] = parts.take({B, T, HV, K});
        t.out[1] = parts.take({B, T, HV, K});
        t.out[2] = empty_handle({B, T, HV, V}, main_dtype, device);
        t.out[3] = parts.take({B, T, HV});
        t.out[4] = parts.take({B, T, HV, K});
        t.out[5] = parts.take({B, T, HV, BT});
        if (B * T > 0) {
            p.dq = static_cast<float*>(data_of(t.out[0])), p.dk = static_cast<float*>(data_of(t.out[1]));
            p.dv_out = data_of(t.out[2]), p.db = static_cast<float*>(data_of(t.out[3]));
            p.dg = static_cast<float*>(data_of(t.out[4])), p.dA = static_cast<float*>(data_of(t.out[5]));
            const auto launch = p.main == Main::F16 ? launch_f16 : p.main == Main::BF16 ? launch_bf16 : launch_f32;
            OnDevice::check(launch(p, aligned, current_stream(device)));
        }
        if (checked) known.add(signature);
    }
    for (int i = 0; i < kOutputs; ++i) {
        stack[i] = torch::stable::detail::from(t.out[i]);
        t.out[i] = nullptr;
    }
}

}  // namespace

STABLE_TORCH_LIBRARY(mindspeed_kda_cuda, m) {
    m.def(
        "wy_dqkg(Tensor q, Tensor k, Tensor v, Tensor v_new, Tensor g, Tensor beta, Tensor A, Tensor h, Tensor d_o, "
        "Tensor dh, Tensor dv, Tensor? cu_seqlens, Tensor? chunk_indices, float? scale, int chunk_size, "
        "bool state_v_first, bool checked) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(mindspeed_kda_cuda, CUDA, m) { m.impl("wy_dqkg", &wy_dqkg); }
