// Torch operators of chunk_kda: forward, backward, and the backward's two halves. One workspace a call, freed with it.
//
// Shapes and dtypes are those of mindspeed_kda/contracts/chunk_kda.py, which has checked them; how Python calls the
// operators: cuda_kernels/chunk_kda/plan.py. A tensor of no elements stands for an output that is not there.

#include <tuple>
#include <vector>

#include "../chunk_kda/launch.h"
#include "common.h"

namespace {

using namespace kda;

using Maybe = std::optional<Tensor>;

constexpr int64_t kChunk = 64;  // rows

// Regions of one allocation, each the place of an array of KdaParams.
class Workspace {
 public:
    template <class T>
    void add(T*& place, int64_t bytes) {
        regions_.push_back({[](void* at, void* base) { *static_cast<T**>(at) = static_cast<T*>(base); }, &place, size_});
        size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
    // Allocates on the device's current stream; the memory is that stream's again once this is gone.
    void allocate(int32_t device) {
        memory_ = empty({size_}, aoti_torch_dtype_uint8(), device);
        char* base = static_cast<char*>(memory_->data_ptr());
        for (const Region& r : regions_) r.set(r.place, base + r.offset);
    }

 private:
    static constexpr int64_t kAlignment = 256;
    struct Region {
        void (*set)(void* place, void* base);
        void* place;
        int64_t offset;
    };
    std::vector<Region> regions_;
    int64_t size_ = 0;
    std::optional<Tensor> memory_;
};

struct Options {
    double scale;
    int64_t gate;
    double lower_bound;
    bool beta_sigmoid;
    double beta_scale;
    bool qk_l2norm, v_first;
};

// One call: its parameters, workspace, and the device that it runs on.
struct Call {
    KdaParams p{};
    Workspace workspace;
    int32_t device, main_dtype;
    int64_t NT;
    bool aligned = true;

    Call(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Maybe& A_log,
         const Maybe& dt_bias, const Maybe& cu_seqlens, const Options& o)
        : device(q.get_device_index()), main_dtype(dtype_of(q)) {
        p.main = main_of(q);
        p.B = q.size(0), p.T = q.size(1);
        p.H = static_cast<int32_t>(q.size(2)), p.K = static_cast<int32_t>(q.size(3));
        p.HV = static_cast<int32_t>(v.size(2)), p.V = static_cast<int32_t>(v.size(3));
        STD_TORCH_CHECK(p.main != Main::F32 && p.K == p.V && (p.K == 64 || p.K == 128),
                        "q: expected float16 or bfloat16 and K = V of 64 or 128");
        p.N = static_cast<int32_t>(cu_seqlens.has_value() ? cu_seqlens->size(0) - 1 : p.B);
        p.NT = NT = cu_seqlens.has_value() ? p.T / kChunk + p.N : p.B * ((p.T + kChunk - 1) / kChunk);
        p.q = given(q, "q"), p.k = given(k, "k"), p.v = given(v, "v"), p.g = given(g, "g");
        p.beta = given(beta, "beta");
        p.A_log = given_f32(A_log, "A_log"), p.dt_bias = given_f32(dt_bias, "dt_bias");
        p.cu_seqlens = index_pointer(cu_seqlens, "cu_seqlens", p.cu_i64);
        p.g_f32 = g.scalar_type() == ScalarType::Float, p.beta_f32 = beta.scalar_type() == ScalarType::Float;
        p.scale = static_cast<float>(o.scale), p.lower_bound = static_cast<float>(o.lower_bound);
        p.beta_scale = static_cast<float>(o.beta_scale), p.gate = static_cast<Gate>(o.gate);
        p.beta_sigmoid = o.beta_sigmoid, p.qk_l2norm = o.qk_l2norm, p.v_first = o.v_first;
        workspace.add(p.chunks, NT * static_cast<int64_t>(sizeof(KdaChunk)));
        workspace.add(p.first_chunk, (int64_t{p.N} + 1) * 4);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    const void* given(const Tensor& t, const char* name) {
        const void* at = pointer(t, name, aligned);
        STD_TORCH_CHECK(aligned, name, ": expected an address that 16 divides");
        return at;
    }
    const float* given_f32(const Maybe& t, const char* name) {
        return t.has_value() ? static_cast<const float*>(given(*t, name)) : nullptr;
    }

    int64_t key_tiles() const { return NT * p.HV * kChunk * p.K * 2; }
    int64_t value_tiles() const { return NT * p.HV * kChunk * p.V * 2; }
    int64_t state_images() const { return NT * p.HV * p.K * p.V * 2; }

    Tensor like_states() const {
        return p.v_first ? out({p.N, p.HV, p.V, p.K}, aoti_torch_dtype_float32())
                         : out({p.N, p.HV, p.K, p.V}, aoti_torch_dtype_float32());
    }
    Tensor nothing() const { return out({0}, aoti_torch_dtype_float32()); }
    Tensor states_or_nothing(bool wanted) const { return wanted ? like_states() : nothing(); }
    template <size_t kRank>
    Tensor out(const int64_t (&sizes)[kRank], int32_t dtype) const {
        return empty(sizes, dtype, device);
    }

    void add_prepared() {
        workspace.add(p.w, key_tiles()), workspace.add(p.u, value_tiles());
        workspace.add(p.qd, key_tiles()), workspace.add(p.kr, key_tiles());
        workspace.add(p.decay, NT * p.HV * p.K * 4);
    }
    void add_sums() {
        workspace.add(p.dA_log_part, NT * p.HV * 4), workspace.add(p.ddt_bias_part, NT * p.HV * p.K * 4);
    }
    // v_new over u: a CTA of the scan reads its slice of a chunk before it writes it. Where heads share a query and key,
    // dq and dk of each value head lie over w and u, qd and kr instead, which nothing reads after the scans.
    void add_backward() {
        add_prepared(), add_sums();
        workspace.add(p.h, state_images()), workspace.add(p.dh, state_images());
        workspace.add(p.dv_new, value_tiles());
        if (p.HV > p.H) workspace.add(p.v_new, value_tiles());
    }
    void place_over_tiles() {
        if (p.HV > p.H) {
            p.dq_head = static_cast<float*>(p.w), p.dk_head = static_cast<float*>(p.qd);
        } else {
            p.v_new = p.u;
        }
    }
    void add_heads() {
        if (p.HV == p.H) return;
        const int64_t bytes = p.B * p.T * p.HV * p.K * 4;
        workspace.add(p.dq_head, bytes), workspace.add(p.dk_head, bytes);
    }

    void plan(cudaStream_t stream) { OnDevice::check(kda_plan(p, stream)); }
    void prepare(bool backward, cudaStream_t stream) {
        if (NT > 0) OnDevice::check(kda_prepare(p, backward, stream));
    }
    void scan(bool backward, cudaStream_t stream) {
        if (p.N > 0) OnDevice::check(backward ? kda_scan_backward(p, stream) : kda_scan_forward(p, stream));
    }
    void grads(cudaStream_t stream) {
        if (NT > 0) OnDevice::check(kda_grads(p, stream));
        OnDevice::check(kda_reduce(p, stream));
    }
    void clear_tail(bool backward, cudaStream_t stream) {
        if (p.T > 0) OnDevice::check(kda_clear_tail(p, backward, stream));
    }
};

float* f32_of(const Tensor& t) { return t.numel() > 0 ? static_cast<float*>(t.data_ptr()) : nullptr; }

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Maybe& A_log,
    const Maybe& dt_bias, const Maybe& initial_state, const Maybe& cu_seqlens, double scale, int64_t gate,
    double lower_bound, bool beta_sigmoid, double beta_scale, bool qk_l2norm, bool state_v_first,
    bool output_final_state, bool keep) {
    const OnDevice on(q.get_device_index());
    Call c(q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
           {scale, gate, lower_bound, beta_sigmoid, beta_scale, qk_l2norm, state_v_first});
    c.p.h0 = c.given_f32(initial_state, "initial_state");
    Tensor o = c.out({c.p.B, c.p.T, c.p.HV, c.p.V}, c.main_dtype), ht = c.states_or_nothing(output_final_state);
    Tensor A = c.out({keep ? c.p.B : 0, c.p.T, c.p.HV, kChunk}, c.main_dtype);
    Tensor Aqk = c.out({keep ? c.p.B : 0, c.p.T, c.p.HV, kChunk}, c.main_dtype);
    c.p.o = o.data_ptr(), c.p.ht = f32_of(ht);
    c.add_prepared();
    if (keep) {
        c.p.A = A.data_ptr(), c.p.Aqk = Aqk.data_ptr();
    } else {
        const int64_t bytes = c.p.B * c.p.T * c.p.HV * kChunk * 2;
        c.workspace.add(c.p.A, bytes), c.workspace.add(c.p.Aqk, bytes);
    }
    c.workspace.allocate(c.device);
    const cudaStream_t stream = current_stream(c.device);
    c.plan(stream);
    c.prepare(false, stream);
    c.scan(false, stream);
    c.clear_tail(false, stream);
    return {std::move(o), std::move(ht), std::move(A), std::move(Aqk)};
}

// The gradients of the inputs: outputs of backward and of its second half.
struct Grads {
    Tensor dq, dk, dv, dg, dbeta, dA_log, ddt_bias;

    Grads(Call& c, const Tensor& g, const Tensor& beta, const Maybe& A_log, const Maybe& dt_bias)
        : dq(c.out({c.p.B, c.p.T, c.p.H, c.p.K}, c.main_dtype)),
          dk(c.out({c.p.B, c.p.T, c.p.H, c.p.K}, c.main_dtype)),
          dv(c.out({c.p.B, c.p.T, c.p.HV, c.p.V}, c.main_dtype)),
          dg(c.out({c.p.B, c.p.T, c.p.HV, c.p.K}, dtype_of(g))),
          dbeta(c.out({c.p.B, c.p.T, c.p.HV}, dtype_of(beta))),
          dA_log(A_log.has_value() ? c.out({c.p.HV}, aoti_torch_dtype_float32()) : c.nothing()),
          ddt_bias(dt_bias.has_value() ? c.out({c.p.HV, c.p.K}, aoti_torch_dtype_float32()) : c.nothing()) {
        c.p.dq = dq.data_ptr(), c.p.dk = dk.data_ptr(), c.p.dv = dv.data_ptr();
        c.p.dg = dg.data_ptr(), c.p.dbeta = dbeta.data_ptr();
        c.p.dA_log = f32_of(dA_log), c.p.ddt_bias = f32_of(ddt_bias);
    }
};

void give_recurrence(Call& c, const Maybe& initial_state, const Tensor& A, const Tensor& Aqk, const Tensor& d_o,
                     const Maybe& dht, const Tensor& dh0) {
    c.p.h0 = c.given_f32(initial_state, "initial_state"), c.p.dht = c.given_f32(dht, "dht");
    // Read only: the kernels that write them are not launched in backward.
    c.p.A = const_cast<void*>(c.given(A, "A")), c.p.Aqk = const_cast<void*>(c.given(Aqk, "Aqk"));
    c.p.d_o = c.given(d_o, "do"), c.p.dh0 = f32_of(dh0);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Maybe& A_log,
    const Maybe& dt_bias, const Maybe& initial_state, const Maybe& cu_seqlens, const Tensor& A, const Tensor& Aqk,
    const Tensor& d_o, const Maybe& dht, double scale, int64_t gate, double lower_bound, bool beta_sigmoid,
    double beta_scale, bool qk_l2norm, bool state_v_first) {
    const OnDevice on(q.get_device_index());
    Call c(q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
           {scale, gate, lower_bound, beta_sigmoid, beta_scale, qk_l2norm, state_v_first});
    Grads d(c, g, beta, A_log, dt_bias);
    Tensor dh0 = c.states_or_nothing(initial_state.has_value());
    give_recurrence(c, initial_state, A, Aqk, d_o, dht, dh0);
    c.add_backward();
    c.workspace.allocate(c.device);
    c.place_over_tiles();
    const cudaStream_t stream = current_stream(c.device);
    c.plan(stream);
    c.prepare(true, stream);
    c.scan(true, stream);
    c.grads(stream);
    c.clear_tail(true, stream);
    return {std::move(d.dq),    std::move(d.dk),     std::move(d.dv),       std::move(d.dg),
            std::move(d.dbeta), std::move(d.dA_log), std::move(d.ddt_bias), std::move(dh0)};
}

// K2 alone. h, dh and v_new, dv come as images; chunks that hold no row are left as they are.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd_recurrence(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Maybe& A_log,
    const Maybe& dt_bias, const Maybe& initial_state, const Maybe& cu_seqlens, const Tensor& A, const Tensor& Aqk,
    const Tensor& d_o, const Maybe& dht, double scale, int64_t gate, double lower_bound, bool beta_sigmoid,
    double beta_scale, bool qk_l2norm, bool state_v_first) {
    const OnDevice on(q.get_device_index());
    Call c(q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
           {scale, gate, lower_bound, beta_sigmoid, beta_scale, qk_l2norm, state_v_first});
    Tensor h = c.out({c.NT, c.p.HV, c.p.K, c.p.V}, c.main_dtype), dh = c.out({c.NT, c.p.HV, c.p.K, c.p.V}, c.main_dtype);
    Tensor v_new = c.out({c.NT, c.p.HV, kChunk, c.p.V}, c.main_dtype);
    Tensor dv = c.out({c.NT, c.p.HV, kChunk, c.p.V}, c.main_dtype);
    Tensor dh0 = c.states_or_nothing(initial_state.has_value());
    give_recurrence(c, initial_state, A, Aqk, d_o, dht, dh0);
    c.p.h = h.data_ptr(), c.p.dh = dh.data_ptr(), c.p.v_new = v_new.data_ptr(), c.p.dv_new = dv.data_ptr();
    c.add_prepared();
    c.workspace.allocate(c.device);
    const cudaStream_t stream = current_stream(c.device);
    c.plan(stream);
    c.prepare(true, stream);
    c.scan(true, stream);
    return {std::move(h), std::move(v_new), std::move(dh), std::move(dv), std::move(dh0)};
}

// K1 alone, from what K2 leaves as images.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> bwd_inputs(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Maybe& A_log,
    const Maybe& dt_bias, const Maybe& cu_seqlens, const Tensor& A, const Tensor& d_o, const Tensor& h,
    const Tensor& v_new, const Tensor& dh, const Tensor& dv, double scale, int64_t gate, double lower_bound,
    bool beta_sigmoid, double beta_scale, bool qk_l2norm) {
    const OnDevice on(q.get_device_index());
    Call c(q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
           {scale, gate, lower_bound, beta_sigmoid, beta_scale, qk_l2norm, false});
    Grads d(c, g, beta, A_log, dt_bias);
    c.p.A = const_cast<void*>(c.given(A, "A")), c.p.d_o = c.given(d_o, "do");
    c.p.h = const_cast<void*>(c.given(h, "h")), c.p.dh = const_cast<void*>(c.given(dh, "dh"));
    c.p.v_new = const_cast<void*>(c.given(v_new, "v_new")), c.p.dv_new = const_cast<void*>(c.given(dv, "dv"));
    c.add_sums(), c.add_heads();
    c.workspace.allocate(c.device);
    const cudaStream_t stream = current_stream(c.device);
    c.plan(stream);
    c.grads(stream);
    c.clear_tail(true, stream);
    return {std::move(d.dq), std::move(d.dk), std::move(d.dv), std::move(d.dg),
            std::move(d.dbeta), std::move(d.dA_log), std::move(d.ddt_bias)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mindspeed_kda_cuda, m) {
    m.def(
        "chunk_kda_forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
        "Tensor? initial_state, Tensor? cu_seqlens, float scale, int gate, float lower_bound, bool beta_sigmoid, "
        "float beta_scale, bool qk_l2norm, bool state_v_first, bool output_final_state, bool keep) "
        "-> (Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "chunk_kda_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
        "Tensor? initial_state, Tensor? cu_seqlens, Tensor A, Tensor Aqk, Tensor d_o, Tensor? dht, float scale, "
        "int gate, float lower_bound, bool beta_sigmoid, float beta_scale, bool qk_l2norm, bool state_v_first) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "chunk_kda_bwd_recurrence(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
        "Tensor? initial_state, Tensor? cu_seqlens, Tensor A, Tensor Aqk, Tensor d_o, Tensor? dht, float scale, "
        "int gate, float lower_bound, bool beta_sigmoid, float beta_scale, bool qk_l2norm, bool state_v_first) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "chunk_kda_bwd_inputs(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
        "Tensor? cu_seqlens, Tensor A, Tensor d_o, Tensor h, Tensor v_new, Tensor dh, Tensor dv, float scale, "
        "int gate, float lower_bound, bool beta_sigmoid, float beta_scale, bool qk_l2norm) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(mindspeed_kda_cuda, CUDA, m) {
    m.impl("chunk_kda_forward", TORCH_BOX(&forward));
    m.impl("chunk_kda_backward", TORCH_BOX(&backward));
    m.impl("chunk_kda_bwd_recurrence", TORCH_BOX(&bwd_recurrence));
    m.impl("chunk_kda_bwd_inputs", TORCH_BOX(&bwd_inputs));
}
