// What hopper.cuh keeps in shared memory: where each tile lies, how tasks and packed sequences are found, copies into
// panels of 64 columns.
#pragma once

#include "access.cuh"

namespace kda {

struct HopperTile {
    static constexpr int kThreads = 512, kGroups = kThreads / 128;
    // CTA i starts i times as many cycles late: in step, all would load, then all compute while memory rests.
    static constexpr int kStartStep = 120;
    static constexpr int kHead = 128, kPanels = 2;
    static constexpr int kPanel = kRows * 128;  // bytes of 64 rows of 64 columns
    static constexpr int kTile = kPanels * kPanel;
    static constexpr int kStatePanel = kHead * 128, kState = kPanels * kStatePanel;
    static constexpr int kDo = 0, kVNew = kDo + kTile, kDv = kVNew + kTile, kV = kDv + kTile;
    static constexpr int kA = kV + kTile;
    static constexpr int kQ = kA + kPanel, kK = kQ + kTile;  // kg takes k's place
    static constexpr int kDw = kK + kTile;                   // and M, M A^T those of dw's panels
    static constexpr int kG = kDw + kTile;                   // fp32, rows of 512 bytes
    static constexpr int kH = kG + kRows * kHead * 4, kDh = kH + kState;
    static constexpr int kPartial = kDh + kState;                // [kGroups][kRows] fp32 of db
    static constexpr int kColumns = kPartial + kGroups * kRows * 4;  // [4][kHead] fp32: sum_rows k dk1 of 16 rows each
    static constexpr int kHdh = kColumns + 4 * kHead * 4;  // [2][kHead] fp32: sum_v h dh of this task and the next
    static constexpr int kLast = kHdh + 2 * kHead * 4;           // [kHead] fp32: dg of row L, without kColumns
    static constexpr int kBeta = kLast + kHead * 4;              // [2][kRows] fp32: of this task and the next
    static constexpr int kScratch = kBeta + 2 * kRows * 4;       // of packed_span
    static constexpr int kTasks = kScratch + (kThreads / 32 + 2) * 8;  // [2] of Origin: this task's and the next one's
    static constexpr int kTable = kTasks + 2 * 16;  // [kTableSize] of Sequence
    static constexpr int kTableSize = 512;          // one more than the sequences it serves
    static constexpr int kBytesTotal = kTable + kTableSize * 8;
    static_assert(kBytesTotal <= 232448, "what a block can have on sm_90");
};

// Index and rows of a task. Its first rows in the tensors wait in shared memory until they are needed: of the
// value-head tensors, and of q and k in elements.
struct Task {
    int index, C;
    uint32_t origin;

    __device__ __forceinline__ int64_t row0() const { return shared_i64(origin); }
    __device__ __forceinline__ int64_t qk0() const { return shared_i64(origin + 8); }
};

__device__ __forceinline__ int state_position(int k) {  // of key column k; see the card
    return (k & ~15) | (k >> 1 & 1) << 3 | (k >> 2 & 3) << 1 | (k & 1);
}

// Byte of piece c (16 bytes, 4 floats) of row r of g: neighbouring rows lie in different halves of the banks.
__device__ __forceinline__ uint32_t g_at(int r, int c) {
    return r * 512 + ((c ^ ((r & 1) << 2 | (r >> 1 & 3))) << 4);
}
// Byte of 16-bit column c of row r in panels of kRowsOf rows.
template <int kRowsOf = kRows>
__device__ __forceinline__ uint32_t panel_at(int r, int c) {
    return (c >> 6) * (kRowsOf * 128) + r * 128 + (((c >> 3 & 7) ^ (r & 7)) << 4) + (c & 7) * 2;
}

// [64][128] 16-bit of global memory into panels, zeros from row C on.
template <class T>
__device__ __forceinline__ void fill_panels(uint32_t to, const T* src, int stride, int C, int tid) {
    const int r = tid / 16, c = tid % 16;
    const uint32_t dst = to + panel_at(r, 8 * c);
    src += r * stride + 8 * c;
    copy16_async(dst, src, r < C);
    copy16_async(dst + 32 * 128, src + 32 * stride, r + 32 < C);
}

template <class T>
__device__ __forceinline__ void fill_state(uint32_t to, const T* src, int tid) {
    const int r = tid / 16, c = tid % 16;
    const uint32_t dst = to + panel_at<HopperTile::kHead>(state_position(r), 8 * c);
#pragma unroll
    for (int i = 0; i < 4; ++i) copy16_async(dst + i * 32 * 128, src + (r + 32 * i) * HopperTile::kHead + 8 * c, true);
}

// Packed sequences by number: the first chunk and the first token of each, and those past the last one.
struct Sequences {
    uint32_t table;
    int N;

    // By one warp; a barrier must pass before it is read.
    __device__ __forceinline__ void make(const WyParams& p) const {
        const int lane = lane_id();
        int before = 0;
#pragma unroll 1
        for (int n0 = 0; n0 <= N; n0 += 32) {
            const int n = n0 + lane;
            int start = 0, count = 0;
            if (n <= N) start = static_cast<int>(index_at(p.cu_seqlens, p.cu_i64, n));
            if (n < N) count = (static_cast<int>(index_at(p.cu_seqlens, p.cu_i64, n + 1)) - start + p.BT - 1) / p.BT;
            int end = count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int x = __shfl_up_sync(~0u, end, d);
                if (lane >= d) end += x;
            }
            if (n <= N) set_shared_u32x2(table + 8 * n, before + end - count, start);
            before += __shfl_sync(~0u, end, 31);
        }
    }
    __device__ __forceinline__ int tokens() const { return shared_u32(table + 8 * N + 4); }
    __device__ __forceinline__ Span span(int i_chunk, int BT) const {
        int n = 0;
#pragma unroll 1
        for (int end = N; end - n > 1;) {  // the last sequence whose first chunk is not past this one
            const int middle = (n + end) / 2;
            if (static_cast<int>(shared_u32(table + 8 * middle)) <= i_chunk) {
                n = middle;
            } else {
                end = middle;
            }
        }
        uint32_t first[2], next[2];
        shared_u32x2(first, table + 8 * n), shared_u32x2(next, table + 8 * n + 8);
        const int start = static_cast<int>(first[1]) + (i_chunk - static_cast<int>(first[0])) * BT;
        const int rows = static_cast<int>(next[1]) - start;
        return {start, rows < 0 ? 0 : rows < BT ? rows : BT};
    }
};

// The sums of two values over 32 lanes, the first in the lower half of them, the second in the upper.
__device__ __forceinline__ float sum_2_over_lanes(float x, float y) {
    const bool upper = lane_id() & 16;
    const float got = __shfl_xor_sync(~0u, upper ? x : y, 16);
    float s = (upper ? y : x) + got;
    s += __shfl_xor_sync(~0u, s, 4);
    s += __shfl_xor_sync(~0u, s, 8);
    return sum_over_t(s);
}

}  // namespace kda
