// The scans of chunk_kda: what goes from chunk to chunk. Forward: o, ht. Backward: h, v_new, and dh, dv_new, dh0.
//
// Formula, over the chunks of a sequence (docs/kda_math.md sections 3 and 4):
//   forward   S = h0;   v_new = u - w S    o = qd S + Aqk v_new    S <- decay S + kr^T v_new;   ht = S
//   state     the same without o and ht; S at the chunk's start is h
//   reverse   from the last chunk, dS = dht;   dh = dS    dv_new = Aqk^T do + kr dS
//             dS <- decay dS + qd^T do - w^T dv_new;   dh0 = dS
// Grid: N HV V / kSlice CTAs a scan, slices fastest; the backward launch holds the reverse scans, then the state scans.
//   An empty sequence has CTAs too, which hand h0 to ht and dht to dh0.
// Tile: common/tiles.h. A warp carries S^T [16 value columns][K] in fp32, as accumulators of its update. All products
//   are transposed: rounded to 16 bits, accumulators lie just as the first operand of the next product does, S^T for
//   v_new^T = u^T - S^T w^T and o^T = S^T qd^T + v_new^T Aqk^T, v_new^T for the latter and S^T += v_new^T kr. So a
//   chunk passes through a warp's registers alone, warps exchange nothing, and the one barrier a chunk is about the
//   copies.
// Value columns: row g of the 16 x n accumulators is column 2 g, row g + 8 column 2 g + 1. A lane then holds neighbours
//   in memory of o, the states and the images: full 32-byte sectors without a shuffle.
// Bytes per chunk and CTA, 16-bit, K = V = 128: 56 KB of key tiles and Aqk (state: 32 KB), and slices of u or do and of
//   the outputs. The CTAs of one head read the same key tiles at about the same time.
// Must hold: K = V = kHead; 16-byte aligned pointers; rows of tiles past a chunk's last are zero, and Aqk above its
//   diagonal, where products are left out.
// Fixed order of every sum, no atomics; slices of either width give the same bits. Rounded to 16 bits: S and dS for the
// products, v_new, dv_new.
#pragma once

#include "../common/mma.cuh"
#include "../common/tiles.h"
#include "params.h"

namespace kda {

enum class Scan { Forward, State, Reverse };

struct ScanParams {
    KdaParams p;
    int64_t blocks;  // of one scan
    int stages;      // 2 or 3
};

// What a CTA scans.
struct ScanWork {
    int64_t first, row, state;  // chunk; token, counted over [B, T]; element of h0 and the like of this head
    int count, last_rows;       // chunks; rows of the last of them
    int hv, v0;                 // v0: the slice's first value column
};

template <class Cfg>
__device__ __forceinline__ ScanWork scan_work(const KdaParams& p, int64_t block) {
    const int64_t head = block / Cfg::kSlices, n = head / p.HV;
    const int64_t first = p.first_chunk[n];
    const int count = static_cast<int>(p.first_chunk[n + 1] - first);
    ScanWork s{first, 0, head * p.K * p.V, count, 0, static_cast<int>(head % p.HV),
               static_cast<int>(block % Cfg::kSlices) * (p.V / Cfg::kSlices)};
    if (count > 0) s.row = p.chunks[first].row, s.last_rows = p.chunks[first + count - 1].rows;
    return s;
}

// [64][kSlice] in shared memory as a tile of 64 columns: of 32, rows r and r + 32 share one of its rows.
template <class T, int kSlice>
struct ValueSlice {
    Tile<T, 64> tile;
    // Of element (row + down, col); down is a multiple of 8, and row + down % 32 less than 32.
    __device__ __forceinline__ uint32_t at(int row, int down, int col) const {
        return kSlice == 64 ? tile.at(row, down, col) : tile.at(row, down % 32, down / 32 * kSlice + col);
    }
};

template <class T, int kHead, int kSlice>
struct ScanStage {
    using Cfg = ScanTile<kHead, kSlice>;
    uint32_t base;
    __device__ __forceinline__ Tile<T, kHead> w() const { return {base + Cfg::kW}; }
    __device__ __forceinline__ Tile<T, kHead> kr() const { return {base + Cfg::kKr}; }
    __device__ __forceinline__ Tile<T, kHead> qd() const { return {base + Cfg::kQd}; }
    __device__ __forceinline__ Tile<T, kRows> Aqk() const { return {base + Cfg::kAqk}; }
    __device__ __forceinline__ ValueSlice<T, kSlice> value() const { return {{base + Cfg::kValue}}; }
    __device__ __forceinline__ uint32_t decay() const { return base + Cfg::kDecay; }
};

// Consecutive 16-byte pieces, `kStep` threads.
template <int kBytes, int kStep>
__device__ __forceinline__ void copy_pieces(uint32_t dst, const void* src, int64_t entry, int j) {
    const char* from = static_cast<const char*>(src) + entry * kBytes + 16 * j;
    constexpr int kPieces = kBytes / 16;
#pragma unroll
    for (int i = 0; i < kPieces / kStep; ++i) copy16_async(dst + 16 * j + 16 * kStep * i, from + 16 * kStep * i, true);
    if constexpr (kPieces % kStep != 0) {
        constexpr int kDone = kPieces / kStep * kStep;
        if (j < kPieces - kDone) copy16_async(dst + 16 * j + 16 * kDone, from + 16 * kDone, true);
    }
}

// Chunk c of the sequence into a stage, by the copying warps; j: the thread among them.
template <class T, int kHead, int kSlice, Scan kScan>
__device__ __forceinline__ void load_stage(const KdaParams& p, const ScanWork& s, int c, uint32_t base, int j) {
    using Cfg = ScanTile<kHead, kSlice>;
    constexpr int kStep = Cfg::kWorkers;
    const ScanStage<T, kHead, kSlice> stage{base};
    const int64_t entry = (s.first + c) * p.HV + s.hv, row = s.row + int64_t{kRows} * c;
    const int rows = c == s.count - 1 ? s.last_rows : kRows;

    if constexpr (kScan != Scan::Reverse) {
        copy_pieces<Cfg::kKeyTile, kStep>(base + Cfg::kW, p.w, entry, j);
        constexpr int kPieces = kSlice / 8, kRowStep = kStep / kPieces;
        static_assert(kRowStep % 8 == 0, "one permutation for all rows of a thread");
        const int r = j / kPieces, piece = j % kPieces;
        const char* from = static_cast<const char*>(p.u) + entry * (kRows * kHead * 2) + r * kHead * 2 +
                           swizzled(r & 7, s.v0 / 8 + piece);
#pragma unroll
        for (int i = 0; i < kRows / kRowStep; ++i)
            copy16_async(stage.value().at(r, i * kRowStep, 8 * piece), from + i * kRowStep * kHead * 2, true);
    }
    copy_pieces<Cfg::kKeyTile, kStep>(base + Cfg::kKr, p.kr, entry, j);
    if constexpr (kScan != Scan::State) {
        const int r = j / 8, col = j % 8 * 8;
        const T* from = static_cast<const T*>(p.Aqk) + ((row + r) * p.HV + s.hv) * kRows + col;
        const int64_t down = int64_t{kStep / 8} * p.HV * kRows;
#pragma unroll
        for (int i = 0; i < kRows / (kStep / 8); ++i, from += down)
            copy16_async(stage.Aqk().at(r, i * (kStep / 8), col), from, r + i * (kStep / 8) < rows);
    }
    if constexpr (kScan == Scan::Reverse) {
        constexpr int kPieces = kSlice / 8, kRowStep = kStep / kPieces;
        const int r = j / kPieces, col = j % kPieces * 8;
        const T* from = static_cast<const T*>(p.d_o) + ((row + r) * p.HV + s.hv) * kHead + s.v0 + col;
        const int64_t down = int64_t{kRowStep} * p.HV * kHead;
#pragma unroll
        for (int i = 0; i < kRows / kRowStep; ++i, from += down)
            copy16_async(stage.value().at(r, i * kRowStep, col), from, r + i * kRowStep < rows);
    }
    if constexpr (kScan != Scan::State) copy_pieces<Cfg::kKeyTile, kStep>(base + Cfg::kQd, p.qd, entry, j);
    if constexpr (kScan == Scan::Reverse) copy_pieces<Cfg::kKeyTile, kStep>(base + Cfg::kW, p.w, entry, j);
    copy_pieces<kHead * 4, kStep>(base + Cfg::kDecay, p.decay, entry, j);
}

// Accumulators of 16 rows and 8 kN columns, rounded: of each tile of 8 columns the pairs of row g and of row g + 8.
template <class T, int kN>
__device__ __forceinline__ void pack(uint32_t (&x)[kN][2], const float (&d)[kN][4]) {
#pragma unroll
    for (int n = 0; n < kN; ++n) x[n][0] = pack2<T>(d[n][0], d[n][1]), x[n][1] = pack2<T>(d[n][2], d[n][3]);
}
template <int kN>
__device__ __forceinline__ void scale(float (&d)[kN][4], float factor) {
    if (factor == 1.f) return;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) d[n][i] *= factor;
}
// As the first operand, the columns being the reduction: step i.
template <class T, int kN>
__device__ __forceinline__ FragA<T> as_a(const uint32_t (&x)[kN][2], int i) {
    return {{x[2 * i][0], x[2 * i][1], x[2 * i + 1][0], x[2 * i + 1][1]}};
}
__device__ __forceinline__ uint32_t low_halves(uint32_t x, uint32_t y) { return (x & 0xffffu) | (y << 16); }
__device__ __forceinline__ uint32_t high_halves(uint32_t x, uint32_t y) { return (x >> 16) | (y & 0xffff0000u); }

// The transpose of x, 16 columns from `col` on, into an image of 8 kN rows.
template <class T, int kHead, int kN>
__device__ __forceinline__ void store_image(void* images, int64_t entry, int col, const uint32_t (&x)[kN][2]) {
    constexpr int kRowBytes = kHead * 2;
    const int g = lane_id() / 4, t = lane_id() % 4;
    char* image = static_cast<char*>(images) + entry * (8 * kN * kRowBytes);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        char* at = image + (2 * t + e) * kRowBytes + swizzled(2 * t + e, col / 8 + g / 4) + g % 4 * 4;
#pragma unroll
        for (int n = 0; n < kN; ++n)
            *reinterpret_cast<uint32_t*>(at + n * 8 * kRowBytes) =
                e == 0 ? low_halves(x[n][0], x[n][1]) : high_halves(x[n][0], x[n][1]);
    }
}

// The warp's columns of an fp32 state of one head, from column v on.
template <int kHead>
__device__ __forceinline__ void load_state(float (&S)[kHead / 8][4], const float* state, int v, bool v_first) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < kHead / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float x[2];
            if (v_first) {
                global_f32x2(x, state + (v + 2 * g + e) * kHead + 8 * n + 2 * t);
                S[n][2 * e] = x[0], S[n][2 * e + 1] = x[1];
            } else {
                global_f32x2(x, state + (8 * n + 2 * t + e) * kHead + v + 2 * g);
                S[n][e] = x[0], S[n][2 + e] = x[1];
            }
        }
}
template <int kHead>
__device__ __forceinline__ void store_state(const float (&S)[kHead / 8][4], float* state, int v, bool v_first) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < kHead / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (v_first) {
                store_global2(state + (v + 2 * g + e) * kHead + 8 * n + 2 * t, S[n][2 * e], S[n][2 * e + 1]);
            } else {
                store_global2(state + (8 * n + 2 * t + e) * kHead + v + 2 * g, S[n][e], S[n][2 + e]);
            }
        }
}

template <class T, int kHead, int kSlice, Scan kScan>
__device__ __forceinline__ void scan(const ScanParams& a, int64_t block) {
    using Cfg = ScanTile<kHead, kSlice>;
    constexpr int kKTiles = kHead / 8, kKSteps = kHead / 16, kCTiles = kRows / 8, kCSteps = kRows / 16;
    extern __shared__ __align__(128) char smem[];
    const uint32_t s0 = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    const KdaParams& p = a.p;
    const ScanWork work = scan_work<Cfg>(p, block);
    const auto chunk_at = [&](int i) { return kScan == Scan::Reverse ? work.count - 1 - i : i; };

    if (threadIdx.x >= Cfg::kWorkers) {  // the copying warps: stages - 1 chunks ahead
        const int j = threadIdx.x - Cfg::kWorkers;
        int next = 0, place = 0;
        const auto load_next = [&] {
            if (next < work.count)
                load_stage<T, kHead, kSlice, kScan>(p, work, chunk_at(next), s0 + place * Cfg::kStageBytes, j);
            copy_commit();
            ++next;
            place = place == a.stages - 1 ? 0 : place + 1;
        };
        for (int i = 0; i < a.stages - 1; ++i) load_next();
#pragma unroll 1
        for (int i = 0; i < work.count; ++i) {
            if (a.stages == 3) {
                copy_wait<1>();
            } else {
                copy_wait<0>();
            }
            __syncthreads();  // chunk i has arrived, and chunk i - 1 is done with
            load_next();
        }
        return;
    }

    const int l = lane_id(), g = l / 4, t = l % 4;
    const int vw = threadIdx.x / 32 * 16, v = work.v0 + vw;  // the warp's first column, in the slice and of all
    float S[kKTiles][4] = {};
    const float* start = kScan == Scan::Reverse ? p.dht : p.h0;
    if (start != nullptr) load_state<kHead>(S, start + work.state, v, p.v_first);
    // In the reverse scan q 2^g and w add to the state, which is times what those are stored times meanwhile.
    constexpr float kStored = kStoredScale<T>, kAdded = kScan == Scan::Reverse ? kStored : 1.f;
    uint32_t S16[kKTiles][2];
    pack<T>(S16, S);

    int place = 0;
#pragma unroll 1
    for (int i_chunk = 0; i_chunk < work.count; ++i_chunk) {
        const int c = chunk_at(i_chunk);
        const int64_t entry = (work.first + c) * p.HV + work.hv;
        __syncthreads();
        const ScanStage<T, kHead, kSlice> stage{s0 + place * Cfg::kStageBytes};
        place = place == a.stages - 1 ? 0 : place + 1;
        if constexpr (kScan == Scan::State) store_image<T, kHead>(p.h, entry, v, S16);
        if constexpr (kScan == Scan::Reverse) store_image<T, kHead>(p.dh, entry, v, S16);
#pragma unroll
        for (int n = 0; n < kKTiles; ++n) {
            float2 d = shared_f32x2(stage.decay() + 4 * (8 * n + 2 * t));
            d.x *= kAdded, d.y *= kAdded;
            S[n][0] *= d.x, S[n][1] *= d.y, S[n][2] *= d.x, S[n][3] *= d.y;
        }

        if constexpr (kScan != Scan::Reverse) {
            float v_new[kCTiles][4] = {};  // w S, then v_new, transposed
#pragma unroll
            for (int i = 0; i < kKSteps; ++i)
#pragma unroll
                for (int j = 0; j < kCSteps; ++j) {
                    FragB<T> b[2];
                    row_b(b, stage.w(), l, 16 * j, i);
                    mma(v_new[2 * j], as_a<T>(S16, i), b[0]);
                    mma(v_new[2 * j + 1], as_a<T>(S16, i), b[1]);
                }
#pragma unroll
            for (int n = 0; n < kCTiles; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float2 u = unpack2<T>(shared_u32(stage.value().at(2 * t + e, 8 * n, vw + 2 * g)));
                    v_new[n][e] = u.x - v_new[n][e] / kStored, v_new[n][2 + e] = u.y - v_new[n][2 + e] / kStored;
                }
            uint32_t v16[kCTiles][2];
            pack<T>(v16, v_new);

            if constexpr (kScan == Scan::State) {
                store_image<T, kHead>(p.v_new, entry, v, v16);
            } else {
                float o[kCTiles][4] = {};  // transposed
#pragma unroll
                for (int i = 0; i < kKSteps; ++i)
#pragma unroll
                    for (int j = 0; j < kCSteps; ++j) {
                        FragB<T> b[2];
                        row_b(b, stage.qd(), l, 16 * j, i);
                        mma(o[2 * j], as_a<T>(S16, i), b[0]);
                        mma(o[2 * j + 1], as_a<T>(S16, i), b[1]);
                    }
                scale(o, 1.f / kStored);
#pragma unroll
                for (int i = 0; i < kCSteps; ++i)
#pragma unroll
                    for (int j = i; j < kCSteps; ++j) {
                        FragB<T> b[2];
                        row_b(b, stage.Aqk(), l, 16 * j, i);
                        mma(o[2 * j], as_a<T>(v16, i), b[0]);
                        mma(o[2 * j + 1], as_a<T>(v16, i), b[1]);
                    }
                const int left = (c == work.count - 1 ? work.last_rows : kRows) - 2 * t;  // from row 2 t on
                const int64_t row = work.row + int64_t{kRows} * c + 2 * t;
                T* at = static_cast<T*>(p.o) + (row * p.HV + work.hv) * kHead + v + 2 * g;
                const int down = p.HV * kHead;
#pragma unroll
                for (int n = 0; n < kCTiles; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const uint32_t x = pack2<T>(o[n][e], o[n][2 + e]);
                        if (8 * n + e < left) *reinterpret_cast<uint32_t*>(at + int64_t{8 * n + e} * down) = x;
                    }
            }
#pragma unroll
            for (int i = 0; i < kCSteps / 2; ++i)
#pragma unroll
                for (int n = 0; n < kKTiles; ++n) {
                    FragB<T> b[2];
                    col_b(b, stage.kr(), l, 8 * n, i);
                    mma(S[n], as_a<T>(v16, 2 * i), b[0]);
                    mma(S[n], as_a<T>(v16, 2 * i + 1), b[1]);
                }
        } else {
            uint32_t do16[kCTiles][2];  // do, transposed
#pragma unroll
            for (int n = 0; n < kCTiles; ++n) {
                const uint32_t x = shared_u32(stage.value().at(2 * t, 8 * n, vw + 2 * g));
                const uint32_t y = shared_u32(stage.value().at(2 * t + 1, 8 * n, vw + 2 * g));
                do16[n][0] = low_halves(x, y), do16[n][1] = high_halves(x, y);
            }
            float dv[kCTiles][4] = {};  // of v_new, transposed
#pragma unroll
            for (int i = 0; i < kKSteps; ++i)
#pragma unroll
                for (int j = 0; j < kCSteps; ++j) {
                    FragB<T> b[2];
                    row_b(b, stage.kr(), l, 16 * j, i);
                    mma(dv[2 * j], as_a<T>(S16, i), b[0]);
                    mma(dv[2 * j + 1], as_a<T>(S16, i), b[1]);
                }
#pragma unroll
            for (int i = 0; i < kCSteps / 2; ++i)
#pragma unroll
                for (int n = 0; n < 4 * i + 4; ++n) {
                    FragB<T> b[2];
                    col_b(b, stage.Aqk(), l, 8 * n, i);
                    if (n < 4 * i + 2) mma(dv[n], as_a<T>(do16, 2 * i), b[0]);
                    mma(dv[n], as_a<T>(do16, 2 * i + 1), b[1]);
                }
            uint32_t dv16[kCTiles][2];
            pack<T>(dv16, dv);
            store_image<T, kHead>(p.dv_new, entry, v, dv16);
#pragma unroll
            for (int i = 0; i < kCSteps / 2; ++i)
#pragma unroll
                for (int n = 0; n < kKTiles; ++n) {
                    FragB<T> b[2];
                    col_b(b, stage.qd(), l, 8 * n, i);
                    mma(S[n], as_a<T>(do16, 2 * i), b[0]);
                    mma(S[n], as_a<T>(do16, 2 * i + 1), b[1]);
                }
#pragma unroll
            for (int n = 0; n < kCTiles; ++n) dv16[n][0] ^= 0x80008000u, dv16[n][1] ^= 0x80008000u;  // - dv
#pragma unroll
            for (int i = 0; i < kCSteps / 2; ++i)
#pragma unroll
                for (int n = 0; n < kKTiles; ++n) {
                    FragB<T> b[2];
                    col_b(b, stage.w(), l, 8 * n, i);
                    mma(S[n], as_a<T>(dv16, 2 * i), b[0]);
                    mma(S[n], as_a<T>(dv16, 2 * i + 1), b[1]);
                }
        }
        scale(S, 1.f / kAdded);
        pack<T>(S16, S);
    }
    float* end = kScan == Scan::Forward ? p.ht : kScan == Scan::Reverse ? p.dh0 : nullptr;
    if (end != nullptr) store_state<kHead>(S, end + work.state, v, p.v_first);
}

template <class T, int kHead, int kSlice>
__global__ void __launch_bounds__(ScanTile<kHead, kSlice>::kThreads, 1)
    kda_scan_forward_kernel(const __grid_constant__ ScanParams a) {
    scan<T, kHead, kSlice, Scan::Forward>(a, blockIdx.x);
}

// The reverse scans, which do more, begin first.
template <class T, int kHead, int kSlice>
__global__ void __launch_bounds__(ScanTile<kHead, kSlice>::kThreads, 1)
    kda_scan_backward_kernel(const __grid_constant__ ScanParams a) {
    if (blockIdx.x < a.blocks) {
        scan<T, kHead, kSlice, Scan::Reverse>(a, blockIdx.x);
    } else {
        scan<T, kHead, kSlice, Scan::State>(a, blockIdx.x - a.blocks);
    }
}

}  // namespace kda
