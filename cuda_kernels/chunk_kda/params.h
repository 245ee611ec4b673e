// What the host hands to the kernels of chunk_kda: one struct for all of them, sizes and pointers alone.
//
// The chunk is 64 tokens. NT counts the chunks of all sequences together: B * ceil(T / 64) for dense inputs, the bound
// T / 64 + N for packed ones, whose chunks past the last one hold no row. Chunk i of head hv owns entry i * HV + hv of
// each workspace array.
//
// Images. A tile (w, u, qd, kr, v_new, dv) is [64][D] main, a state (h, dh) [K][V] main; both lie in memory exactly as
// Tile<T, D> (common/mma.cuh) lays them out in shared memory, so a copy of consecutive 16-byte pieces loads one. Rows
// of a tile past its chunk's last are zero: the scans know no tails. In fp16 w and qd are stored times 256, so that
// what a first token's decay of 2^-14 leaves is a normal number still.
#pragma once

#include <cstdint>

#include "../common/params.h"

namespace kda {

enum class Gate : int { Pregated = 0, Softplus = 1, LowerBound = 2 };

struct KdaChunk {
    int64_t row;       // of its first token, counted over [B, T]
    int32_t rows;      // 1 to 64; 0: no such chunk
    int32_t sequence;  // of N
};

struct KdaParams {
    // Inputs, contiguous.
    const void* q;           // [B, T, H, K] main
    const void* k;           // [B, T, H, K] main
    const void* v;           // [B, T, HV, V] main
    const void* g;           // [B, T, HV, K] main or fp32: raw, or the natural-log decay of a token
    const void* beta;        // [B, T, HV] main or fp32: logits with beta_sigmoid
    const float* A_log;      // [HV], or null with Gate::Pregated
    const float* dt_bias;    // [HV, K] or null (counts as 0)
    const float* h0;         // [N, HV, K, V], or [N, HV, V, K] with v_first; null: zero
    const void* cu_seqlens;  // [N + 1] int32 or int64, or null
    const void* d_o;         // [B, T, HV, V] main
    const float* dht;        // as h0; null: zero
    // Kept between forward and backward; row t is token t's row of its chunk's matrix, columns past the chunk zero.
    void* A;    // [B, T, HV, 64] main
    void* Aqk;  // [B, T, HV, 64] main
    // Outputs.
    void* o;          // [B, T, HV, V] main
    float* ht;        // as h0, or null: not wanted
    void* dq;         // [B, T, H, K] main
    void* dk;         // [B, T, H, K] main
    void* dv;         // [B, T, HV, V] main
    void* dg;         // [B, T, HV, K] as g
    void* dbeta;      // [B, T, HV] as beta
    float* dA_log;    // [HV] or null
    float* ddt_bias;  // [HV, K] or null
    float* dh0;       // as h0, or null: not wanted
    // Workspace.
    KdaChunk* chunks;      // [NT]
    int32_t* first_chunk;  // [N + 1]
    void* w;               // tiles [64][K]: A (b k 2^g)
    void* u;               // tiles [64][V]: A (b v)
    void* qd;              // tiles [64][K]: scale q 2^g
    void* kr;              // tiles [64][K]: k 2^(g_L - g)
    float* decay;          // [NT, HV, K]: 2^g_L
    void* h;               // states at the start of each chunk
    void* dh;              // gradients of the states at the end of each chunk
    void* v_new;           // tiles [64][V]: u - w h
    void* dv_new;          // tiles [64][V]: gradient of v_new (dv of the op)
    float* dq_head;        // [B, T, HV, K] of each value head, only where HV > H
    float* dk_head;        // [B, T, HV, K] of each value head, only where HV > H
    float* dA_log_part;    // [NT, HV]
    float* ddt_bias_part;  // [NT, HV, K]
    int64_t B, T, NT;
    int32_t N, H, HV, K, V;
    float scale, lower_bound, beta_scale;
    Main main;
    Gate gate;
    bool g_f32, beta_f32, v_first, qk_l2norm, beta_sigmoid, cu_i64;
};

}  // namespace kda
