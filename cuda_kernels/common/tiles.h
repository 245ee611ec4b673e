// The only table of tile sizes and shared-memory budgets, read by the kernels, their launches and the tests.
#pragma once

#include <cuda_fp16.h>

namespace kda {

constexpr int kRows = 64;  // rows of a tile: the largest chunk

// One CTA handles one chunk of one value head. A warp owns all 64 rows of 8 kTilesN key columns per pass, so what it
// reads of do, v_new and dv from shared memory serves that many columns.
//
// 16-bit: two passes of 64 key columns, so that the three fp32 accumulators of a pass take 48 registers and two CTAs of
// 128 registers a thread share a multiprocessor. fp32: the split operands double the work per shared-memory read, so
// each read serves 16 columns in one pass; one CTA per multiprocessor at K = V = 128, two at 64.
template <int kBytes, int kHeadK, int kHeadV>
struct WyTile {
    static constexpr int kWarps = 8;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kTilesN = (kBytes == 4 && kHeadK == 128) ? 2 : 1;
    static constexpr int kPassColumns = 8 * kWarps * kTilesN;
    static constexpr int kPasses = kHeadK / kPassColumns;
    static constexpr int kBlocksPerSm = (kBytes == 4 && kHeadK == 128) ? 1 : 2;
    // Blocks (two steps each) of h and dh in flight per lane: all of a pass, 64 registers, where 16-bit operands meet
    // an fp32 state; two elsewhere, which measures better than four.
    template <int kStateBytes>
    static constexpr int kStateDepth = kBytes == 2 && kStateBytes == 4 ? 4 : 2;
    // CTA i of the first that find a multiprocessor of their own starts i times as many cycles late: in step, all would
    // load, then all compute while memory rests.
    static constexpr int kStartStep = kBlocksPerSm == 1 ? 60 : 0;
    // Groups of 16 rows of g in flight per lane.
    static constexpr int kGroupsAhead = kBytes == 2 ? 4 : 2;
    // q and k by cp.async with the other tiles, each where dw and kg of its pass go later; in fp32, where shared memory
    // is short, by each lane when it needs them.
    static constexpr bool kQkInShared = kBytes == 2;

    // Shared memory. v takes the place of do, M and M A^T those of tiles that are done with.
    static constexpr int kValueTile = kRows * kHeadV * kBytes;
    static constexpr int kPassTile = kRows * kPassColumns * kBytes;
    static constexpr int kDo = 0;
    static constexpr int kVNew = kDo + kValueTile;
    static constexpr int kDv = kVNew + kValueTile;
    static constexpr int kA = kDv + kValueTile;
    static constexpr int kSide = kA + kRows * kRows * kBytes;  // dw and kg of each pass, or kg alone
    static constexpr int kPartial = kSide + (kQkInShared ? 2 * kPasses : 1) * kPassTile;  // [kWarps][kRows] fp32 of db
    static constexpr int kBeta = kPartial + kWarps * kRows * 4;                           // [kRows] fp32
    static constexpr int kOrigin = kBeta + kRows * 4;  // first rows of the tensors, 2 x 64 bits
    static constexpr int kBytesTotal = kOrigin + 16;
    static constexpr int kM = kQkInShared ? kVNew : kDo;  // over v where v_new's place holds an operand of M
    static constexpr int kMA = kQkInShared ? kDo : kVNew;

    static_assert(kHeadK % kPassColumns == 0, "the passes cover the key columns");
    static_assert(kQkInShared || (kPasses == 1 && kPassTile <= kValueTile), "dw fits in v_new's place");
    static_assert(kRows * kRows * kBytes <= kValueTile, "M and M A^T fit in a value tile");
};

// What w and qd of chunk_kda are stored times (chunk_kda/params.h).
template <class T>
constexpr float kStoredScale = 1.f;
template <>
constexpr float kStoredScale<__half> = 256.f;

// chunk_kda's scans. A warp carries the state of 16 value columns and all key columns, kHead = K = V, in registers
// through the chunks of a sequence; a CTA has such warps for kSlice columns and as many that copy the chunks' operands
// into kStages places in turn. A narrow slice occupies more multiprocessors where there are few heads; a wide one
// fetches the key tiles fewer times. Which one it is changes no result.
template <int kHead, int kSlice>
struct ScanTile {
    static constexpr int kWarps = kSlice / 16;  // of each kind
    static constexpr int kWorkers = 32 * kWarps;
    static constexpr int kThreads = 2 * kWorkers;
    static constexpr int kSlices = kHead / kSlice;

    // A stage: 16-bit tiles of a chunk, the slice's part of u or do, the decay.
    static constexpr int kKeyTile = kRows * kHead * 2;
    static constexpr int kW = 0;
    static constexpr int kKr = kW + kKeyTile;
    static constexpr int kQd = kKr + kKeyTile;
    static constexpr int kAqk = kQd + kKeyTile;
    static constexpr int kValue = kAqk + kRows * kRows * 2;
    static constexpr int kDecay = kValue + kRows * kSlice * 2;
    static constexpr int kStageBytes = kDecay + kHead * 4;
    static constexpr int kStages = 3;  // 2 where the device has no room for 3

    static_assert(kSlice % 32 == 0 && kHead % kSlice == 0, "slices cover the columns, 64 bytes a row or more");
};

// Scans of fewer CTAs of 32 columns than this take them, others CTAs of 64: the multiprocessors of an H100 or H200.
constexpr int kNarrowScans = 132;

// chunk_kda's prepare: one CTA a chunk and value head, K = V = kHead, 16-bit.
//
// Forward, two CTAs of up to 128 registers a thread share a multiprocessor: the operands of three levels of pairs at a
// time fill what its shared memory has left beside q and k, and what comes after the products of pairs lies in the
// place of what they are done with. Backward has no pairs.
template <int kHead, bool kBackward>
struct KdaPrepareTile {
    static constexpr int kBlocksPerSm = 2;
    static constexpr int kLevels = 3;  // at a time
    static constexpr int kTile = kRows * kHead * 2, kSquare = kRows * kRows * 2;
    static constexpr int kLevel = 3 * kTile / 2;  // 32 rows of q, 32 and 32 of k

    static constexpr int kQ = 0;
    static constexpr int kK = kQ + kTile;  // later k 2^g, then w
    static constexpr int kOperands = kK + kTile;
    static constexpr int kAb = kOperands;                         // A diag(b)
    static constexpr int kA = kAb + kSquare;                      // forward alone
    static constexpr int kV = kA + (kBackward ? 0 : kSquare);     // later u
    static constexpr int kTotals = kOperands + (kBackward ? kSquare + kTile : kLevels * kLevel);  // [8][kHead] fp32
    static constexpr int kAqk = kTotals;
    static constexpr int kTotalsBytes = 8 * kHead * 4;
    static constexpr int kPerRow = kTotals + (kBackward || kTotalsBytes > kSquare ? kTotalsBytes : kSquare);
    static constexpr int kEnd = kPerRow + 3 * kRows * 4;  // [kRows] fp32 each: r of q, r of k, b
    static constexpr bool kOverQ = kTile >= 2 * kSquare;
    static constexpr int kL = kOverQ ? kQ : kEnd;  // [kRows][kRows] fp32, inverted in place
    static constexpr int kBytesTotal = kEnd + (kOverQ || kBackward ? 0 : 2 * kSquare);
    static_assert(kBackward || kV + kTile <= kTotals, "A and v fit in the operands' place");
    static_assert(kBlocksPerSm * (kBytesTotal + 1024) <= 228 * 1024, "the CTAs fit a multiprocessor");
};

// chunk_kda's kda_grads, 16-bit, K = V = kHead: one CTA handles one chunk of one value head, two to a multiprocessor. A
// warp owns all 64 rows of 8 key columns a pass, so that what follows the products with the states stays inside it.
template <int kHead>
struct KdaGradsTile {
    static constexpr int kWarps = 8;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kBlocksPerSm = 2;
    static constexpr int kPassColumns = 8 * kWarps;
    static constexpr int kPasses = kHead / kPassColumns;

    // Shared memory. Y takes the place of dv_new; b Y that of v, then a warp's g, k dk1 and da; dq and dk those of q
    // and k; P and D that of A.
    static constexpr int kTile = kRows * kHead * 2;
    static constexpr int kStage = kRows * 8 * 4;  // of a warp: fp32 of its columns
    static constexpr int kPlace = 4 * 8 * 16;     // of a warp: 8 columns of 16 rows of two 16-bit operands
    static constexpr int kDo = 0;
    static constexpr int kVNew = kDo + kTile;
    static constexpr int kY = kVNew + kTile;
    static constexpr int kQ = kY + kTile;
    static constexpr int kK = kQ + kTile;
    static constexpr int kV = kK + kTile;
    static constexpr int kA = kV + (kTile > kWarps * kStage ? kTile : kWarps * kStage);
    static constexpr int kOperands = kA + kRows * kRows * 2;
    static constexpr int kDb = kOperands + kWarps * kPlace;  // [kWarps][kRows] fp32
    static constexpr int kBeta = kDb + kWarps * kRows * 4;   // [kRows] fp32: b
    static constexpr int kNormQ = kBeta + kRows * 4;        // r of q and of k
    static constexpr int kNormK = kNormQ + kRows * 4;
    static constexpr int kDiagonal = kNormK + kRows * 4;  // of P
    static constexpr int kLog = kDiagonal + kRows * 4;    // [kWarps] fp32 of dA_log
    static constexpr int kSums = kLog + kWarps * 4;       // [kWarps][8] fp32: sum_v h dh of a warp's columns
    static constexpr int kLast = kSums + kWarps * 32;     // and g of row L
    // What the start knew, for later: registers are short in between.
    static constexpr int kHere = kLast + kWarps * 32;  // the chunk and head, 24 bytes
    static constexpr int kBase = kHere + 24;           // the first shared-space address
    static constexpr int kZero = kBase + 4;
    static constexpr int kColumn = kBase + 8;          // [kWarps]: first column of the warp's pass
    static constexpr int kBytesTotal = kColumn + kWarps * 4;
};

}  // namespace kda
