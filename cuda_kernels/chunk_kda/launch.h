// Launches of chunk_kda's kernels in the order of a training step. Each takes one launch unless it says otherwise.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace kda {

// chunks, first_chunk from cu_seqlens, or from B and T.
cudaError_t kda_plan(const KdaParams& p, cudaStream_t stream);
// From the inputs, a chunk and head a CTA: w, u, qd, kr, decay. In forward A and Aqk are computed and stored first; in
// backward A is read.
cudaError_t kda_prepare(const KdaParams& p, bool backward, cudaStream_t stream);
// Over the chunks of each sequence: o, ht.
cudaError_t kda_scan_forward(const KdaParams& p, cudaStream_t stream);
// One launch, two scans that do not depend on each other: h, v_new forwards in time; dh, dv_new, dh0 backwards (K2).
cudaError_t kda_scan_backward(const KdaParams& p, cudaStream_t stream);
// Back to the raw inputs, a chunk and head a CTA (K1): dv, dg, dbeta, and dq, dk (dq_head, dk_head where HV > H), and
// the parts of dA_log and ddt_bias.
cudaError_t kda_grads(const KdaParams& p, cudaStream_t stream);
// Sums in fixed order: dA_log and ddt_bias over chunks; dq and dk over the value heads of a group where HV > H.
cudaError_t kda_reduce(const KdaParams& p, cudaStream_t stream);
// Zeros o, or in backward dq, dk, dv, dg, dbeta, in rows past the last packed sequence. Dense inputs: no launch.
cudaError_t kda_clear_tail(const KdaParams& p, bool backward, cudaStream_t stream);

}  // namespace kda
