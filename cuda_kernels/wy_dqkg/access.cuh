// What the op's kernel reads and writes in global memory: chunks of packed sequences, tiles, states, pairs of elements.
#pragma once

#include "../common/lanes.cuh"
#include "../common/mma.cuh"
#include "../common/params.h"
#include "../common/tiles.h"

namespace kda {

// First token, number of rows and sequence end of a chunk.
struct Span {
    int64_t start;
    int rows;
};

__device__ __forceinline__ int64_t index_at(const void* p, bool is_i64, int64_t i) {
    return is_i64 ? static_cast<const int64_t*>(p)[i] : static_cast<const int32_t*>(p)[i];
}

// Chunk i_chunk of packed sequences; without chunk_indices the CTA scans the sequences, kThreads at a time. kFew: where
// they are few, each warp does so for itself.
template <int kThreads, bool kFew>
__device__ __forceinline__ Span packed_span(const WyParams& p, int64_t i_chunk, int64_t* scratch) {
    int64_t i_n = -1, i_c = 0;
    if (p.chunk_indices != nullptr) {
        i_n = index_at(p.chunk_indices, p.indices_i64, 2 * i_chunk);
        i_c = index_at(p.chunk_indices, p.indices_i64, 2 * i_chunk + 1);
    } else if (kFew && p.N <= 128) {
        const int lane = threadIdx.x % 32;
        int64_t before = 0;
        for (int n0 = 0; n0 < p.N && i_n < 0; n0 += 32) {
            const int n = n0 + lane;
            int64_t count = 0;
            if (n < p.N) {
                const int64_t len = index_at(p.cu_seqlens, p.cu_i64, n + 1) - index_at(p.cu_seqlens, p.cu_i64, n);
                count = (len + p.BT - 1) / p.BT;
            }
            int64_t end = before + count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int64_t x = __shfl_up_sync(~0u, end, d);
                if (lane >= d) end += x - before;
            }
            // Of the lane whose sequence has the chunk: its number, which those before it have not reached.
            int reached = i_chunk >= end;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) reached += __shfl_xor_sync(~0u, reached, d);
            if (reached < 32) {
                const int64_t first = __shfl_sync(~0u, end - count, reached);
                i_n = n0 + reached;
                i_c = i_chunk - first;
            }
            before = __shfl_sync(~0u, end, 31);
        }
        if (i_n >= p.N) i_n = -1;
    } else {
        constexpr int kWarps = kThreads / 32;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int64_t before = 0;
        if (threadIdx.x == 0) scratch[kWarps] = -1;
        for (int n0 = 0; n0 < p.N; n0 += kThreads) {
            const int n = n0 + threadIdx.x;
            int64_t count = 0;
            if (n < p.N) {
                const int64_t len = index_at(p.cu_seqlens, p.cu_i64, n + 1) - index_at(p.cu_seqlens, p.cu_i64, n);
                count = (len + p.BT - 1) / p.BT;
            }
            int64_t end = count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int64_t x = __shfl_up_sync(~0u, end, d);
                if (lane >= d) end += x;
            }
            if (lane == 31) scratch[warp] = end;
            __syncthreads();
            int64_t total = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                if (w < warp) end += scratch[w];
                total += scratch[w];
            }
            end += before;
            if (i_chunk < end && i_chunk >= end - count) {
                scratch[kWarps] = n;
                scratch[kWarps + 1] = i_chunk - (end - count);
            }
            before += total;
            __syncthreads();
            if (i_chunk < before) break;
        }
        __syncthreads();
        i_n = scratch[kWarps];
        i_c = scratch[kWarps + 1];
        __syncthreads();
    }
    if (i_n < 0) return {0, 0};
    const int64_t start = index_at(p.cu_seqlens, p.cu_i64, i_n) + i_c * p.BT;
    const int64_t rows = index_at(p.cu_seqlens, p.cu_i64, i_n + 1) - start;
    return {start, static_cast<int>(rows < 0 ? 0 : rows < p.BT ? rows : p.BT)};
}

// Zeros in the outputs of tokens from `first` on, which belong to no sequence; the chunks of a head share them.
template <class T, int kThreads>
__device__ __forceinline__ void zero_unused_tokens(const WyParams& p, int64_t first, int64_t i_chunk, int hv) {
    for (int64_t t = first + i_chunk; t < p.T; t += p.NT > 0 ? p.NT : 1) {
        const int64_t row = t * p.HV + hv;
        for (int i = threadIdx.x; i < p.K; i += kThreads) {
            p.dq[row * p.K + i] = 0.f;
            p.dk[row * p.K + i] = 0.f;
            p.dg[row * p.K + i] = 0.f;
        }
        for (int i = threadIdx.x; i < p.V; i += kThreads) static_cast<T*>(p.dv_out)[row * p.V + i] = from_float<T>(0.f);
        for (int i = threadIdx.x; i < p.BT; i += kThreads) p.dA[row * p.BT + i] = 0.f;
        if (threadIdx.x == 0) p.db[row] = 0.f;
    }
}

// [rows][cols] of global memory into a tile, zeros elsewhere. kVector: 16-byte pieces by cp.async.
template <bool kVector, int kThreads, class T, int kCols>
__device__ __forceinline__ void fill(const Tile<T, kCols>& s, const T* src, int stride, int rows, int cols) {
    if constexpr (kVector) {
        constexpr int kPieces = kCols / Tile<T, kCols>::kPerPiece;
        constexpr int kStep = kThreads / kPieces;  // rows between two pieces of a thread
        static_assert(kStep % 4 == 0, "a thread keeps its place in the permutation, or swaps it with that 4 pieces on");
        const int r0 = threadIdx.x / kPieces, c = threadIdx.x % kPieces;
        if (c * Tile<T, kCols>::kPerPiece >= cols) rows = 0;
        const uint32_t dst = s.at(r0, 0, c * Tile<T, kCols>::kPerPiece);
        const T* p = src + static_cast<int64_t>(r0) * stride + c * Tile<T, kCols>::kPerPiece;
#pragma unroll
        for (int i = 0; i < kRows / kStep; ++i, p += static_cast<int64_t>(kStep) * stride)
            copy16_async((dst ^ (i * kStep % 8 * 16)) + i * kStep * Tile<T, kCols>::kRowBytes, p,
                         r0 + i * kStep < rows);
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < kRows * kCols; i += kThreads) {
            const int r = i / kCols, c = i % kCols;
            store1(s, r, 0, c, r < rows && c < cols ? src[static_cast<int64_t>(r) * stride + c] : from_float<T>(0.f));
        }
    }
}

// One lane's share of a key column of a state over two steps of the reduction over V: kPieces pieces of 16 bytes, piece
// i from byte 64 i + 16 t on, so that 4 lanes ask for 64 neighbouring bytes at a time.
template <class T, class S>
struct StateBlock {
    static constexpr int kValues = 16 / sizeof(T);
    static constexpr int kPieces = kValues * sizeof(S) / 16;
    static constexpr int kPerPiece = kValues / kPieces;
    uint4 x[kPieces];

    __device__ __forceinline__ S value(int i) const { return reinterpret_cast<const S*>(x)[i]; }
    // Value column within the block of value i of lane t.
    __device__ __forceinline__ static int column(int i, int t) {
        return i / kPerPiece * 4 * kPerPiece + kPerPiece * t + i % kPerPiece;
    }

    __device__ __forceinline__ void load(const S* p) {  // p: the block's first value column plus kPerPiece t
#pragma unroll
        for (int i = 0; i < kPieces; ++i) x[i] = __ldg(reinterpret_cast<const uint4*>(p) + 4 * i);
    }
    // As the tensor core wants it: lane t has word t of each 16 bytes of the operand.
    __device__ __forceinline__ void frags(FragB<T> (&f)[2]) const {
        uint32_t w[4];
        if constexpr (kPieces == 1) {
            w[0] = x[0].x, w[1] = x[0].y, w[2] = x[0].z, w[3] = x[0].w;
            transpose4(w);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) w[i] = pack2<T>(value(2 * i), value(2 * i + 1));
            exchange<1, 1>(w);  // a piece of 4 fp32 values is half of the operand's 16 bytes
            exchange<2, 1>(w);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            f[i].r[0] = w[2 * i], f[i].r[1] = w[2 * i + 1];
            f[i].finish();
        }
    }
    __device__ __forceinline__ float dot(const StateBlock& other, float sum) const {
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum += to_float(value(i)) * to_float(other.value(i));
        return sum;
    }
};

// A state [K, V] (or [V, K] where kExact is false) by key column and block of two steps.
template <class T, class S, bool kExact>
struct StateReader {
    const S* base;
    int K, V;
    bool v_first;

    __device__ __forceinline__ StateReader(const void* state, int64_t at, int k, int v, bool first)
        : base(static_cast<const S*>(state) + at), K(k), V(v), v_first(first) {}

    __device__ __forceinline__ void load(StateBlock<T, S>& out, int i_k, int i_block) const {
        using Block = StateBlock<T, S>;
        const int i_v = 4 * Block::kValues * i_block, t = lane_id() % 4;
        if constexpr (kExact) {
            out.load(base + i_k * V + i_v + Block::kPerPiece * t);
        } else {
#pragma unroll
            for (int i = 0; i < Block::kValues; ++i) {
                const int v = i_v + Block::column(i, t);
                reinterpret_cast<S*>(out.x)[i] =
                    i_k < K && v < V ? base[v_first ? v * K + i_k : i_k * V + v] : from_float<S>(0.f);
            }
        }
    }
};

// 2 kN neighbouring elements of a row with `cols` elements left.
template <bool kExact, int kN>
__device__ __forceinline__ void load_run(float (&x)[2 * kN], const float* p, int cols) {
    if constexpr (kExact && kN == 2) {
        global_f32x4(x, p);
    } else if constexpr (kExact) {
        global_f32x2(x, p);
    } else {
#pragma unroll
        for (int i = 0; i < 2 * kN; ++i) x[i] = i < cols ? __ldg(p + i) : 0.f;
    }
}
// The same run of a main tensor, kept as it lies in memory.
template <class T, int kN>
struct Run {
    static constexpr int kWords = 2 * kN * sizeof(T) / 4;
    uint32_t w[kWords];

    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int i = 0; i < kWords; ++i) w[i] = 0;
    }
    template <bool kExact>
    __device__ __forceinline__ void load(const T* p, int cols) {
        if constexpr (kExact && kWords == 4) {
            const uint4 x = __ldg(reinterpret_cast<const uint4*>(p));
            w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
        } else if constexpr (kExact && kWords == 2) {
            const uint2 x = __ldg(reinterpret_cast<const uint2*>(p));
            w[0] = x.x, w[1] = x.y;
        } else {
            static_assert(!kExact, "kN is 1 or 2");
#pragma unroll
            for (int i = 0; i < 2 * kN; ++i)
                reinterpret_cast<T*>(w)[i] = i < cols ? p[i] : from_float<T>(0.f);
        }
    }
    __device__ __forceinline__ void floats(float (&x)[2 * kN]) const {
#pragma unroll
        for (int i = 0; i < 2 * kN; ++i) x[i] = to_float(reinterpret_cast<const T*>(w)[i]);
    }
};

template <bool kExact, int kN>
__device__ __forceinline__ void store_run(float* p, int cols, const float (&x)[2 * kN]) {
    if constexpr (kExact && kN == 2) {
        store_global4(p, x[0], x[1], x[2], x[3]);
    } else if constexpr (kExact) {
        store_global2(p, x[0], x[1]);
    } else {
#pragma unroll
        for (int i = 0; i < 2 * kN; ++i)
            if (i < cols) p[i] = x[i];
    }
}

template <bool kExact, class T>
__device__ __forceinline__ void store_pair(T* p, int cols, const float (&x)[2]) {
    if constexpr (!kExact) {
        if (cols > 0) p[0] = from_float<T>(x[0]);
        if (cols > 1) p[1] = from_float<T>(x[1]);
    } else if constexpr (sizeof(T) == 4) {
        store_global2(p, x[0], x[1]);
    } else {
        *reinterpret_cast<uint32_t*>(p) = pack2<T>(x[0], x[1]);
    }
}

// Adds a warp's share of db, rows 16 m + 8 i + g, to its sums in shared memory, in a fixed order.
template <int kMT>
__device__ __forceinline__ void add_db(float* sums, const float (&part)[kMT][2], int g, int t, bool first) {
#pragma unroll
    for (int m = 0; m < kMT; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float s = sum_over_t(part[m][i]);
            float* to = sums + 16 * m + 8 * i + g;
            if (t == 0) *to = first ? s : *to + s;
        }
}

}  // namespace kda
