// What the host hands to a launch: plain sizes and pointers, no framework types.
#pragma once

#include <cstdint>

namespace kda {

enum class Main : int { F16 = 0, BF16 = 1, F32 = 2 };

// One call of chunk_kda_bwd_wy_dqkg_fused. Every tensor is contiguous in the shape of its comment.
struct WyParams {
    const void* q;              // [B, T, H, K] main
    const void* k;              // [B, T, H, K] main
    const void* v;              // [B, T, HV, V] main
    const void* v_new;          // [B, T, HV, V] main
    const float* g;             // [B, T, HV, K], log2, inclusive cumsum within the chunk
    const void* beta;           // [B, T, HV] main or fp32
    const void* A;              // [B, T, HV, BT] main
    const void* h;              // [B, NT, HV, K, V] or [B, NT, HV, V, K], main or fp32
    const void* d_o;            // [B, T, HV, V] main
    const void* dh;             // as h
    const void* dv;             // [B, T, HV, V] main
    const void* cu_seqlens;     // [N + 1] int32 or int64, or null
    const void* chunk_indices;  // [NT, 2] int32 or int64, or null: found from cu_seqlens in the kernel
    float* dq;                  // [B, T, HV, K]
    float* dk;                  // [B, T, HV, K]
    void* dv_out;               // [B, T, HV, V] main
    float* db;                  // [B, T, HV]
    float* dg;                  // [B, T, HV, K]
    float* dA;                  // [B, T, HV, BT]
    int64_t B, T, NT;
    int32_t N, H, HV, K, V, BT;
    float scale;
    Main main;
    bool state_f32, beta_f32, v_first, cu_i64, indices_i64;
};

}  // namespace kda
