// Tensor-core products on swizzled shared-memory tiles, with one interface for 16-bit and split-TF32 operands.
//
// A product advances in steps of 32 bytes along the reduction: 16 indices of a 16-bit operand, 8 of an fp32 one.
//   row operand:    the reduction runs along the tile's rows (ldmatrix)
//   column operand: the reduction runs down the tile's columns (ldmatrix.trans; element loads in fp32)
// In fp32, column operands take rows 2t, 2t + 1 (t = lane % 4) where the instruction's layout says t, t + 4: the order
// of a sum's terms is free as long as both operands agree, and this one meets 32 different banks. So both operands of
// a product are row operands, or both are column operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "device.cuh"

namespace kda {

using half = __half;
using bf16 = __nv_bfloat16;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ half from_float<half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

template <class T>
__device__ __forceinline__ uint32_t pack2(float x, float y);
template <>
__device__ __forceinline__ uint32_t pack2<half>(float x, float y) {
    half2 p = __floats2half2_rn(x, y);
    return reinterpret_cast<uint32_t&>(p);
}
template <>
__device__ __forceinline__ uint32_t pack2<bf16>(float x, float y) {
    __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<uint32_t&>(p);
}

template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t p);
template <>
__device__ __forceinline__ float2 unpack2<half>(uint32_t p) {
    return __half22float2(reinterpret_cast<half2&>(p));
}
template <>
__device__ __forceinline__ float2 unpack2<bf16>(uint32_t p) {
    return make_float2(__uint_as_float(p << 16), __uint_as_float(p & 0xffff0000u));
}

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

// A lane's address part for a piece (16 bytes) of a swizzled row: the piece index xor the row modulo 8. `lane_xor` and
// `row_xor` depend on the lane, `piece` is a constant once loops are unrolled, so few registers hold all addresses.
__device__ __forceinline__ uint32_t swizzled(int lane_xor, int piece) {
    return ((lane_xor ^ (piece & 7)) << 4) + (piece >> 3) * 128;
}

// [kRows][kCols] in shared memory, the 16-byte pieces of a row permuted so that row operands, column operands and
// copies all meet 32 different banks.
template <class T, int kCols>
struct Tile {
    static constexpr int kPerPiece = 16 / sizeof(T);
    static constexpr int kRowBytes = kCols * sizeof(T);
    static_assert(kRowBytes % 128 == 0, "the permutation works on 8 pieces");
    uint32_t base;  // shared-space address

    // Of element (row + down, col); down is a multiple of 8 and, unrolled, becomes an instruction's immediate.
    __device__ __forceinline__ uint32_t at(int row, int down, int col) const {
        return base + row * kRowBytes + swizzled(row & 7, col / kPerPiece) + (col % kPerPiece) * int(sizeof(T)) +
               down * kRowBytes;
    }
};

// Two neighbouring elements (col even).
template <int kCols>
__device__ __forceinline__ float2 load2(const Tile<float, kCols>& s, int row, int down, int col) {
    return shared_f32x2(s.at(row, down, col));
}
template <class T, int kCols>
__device__ __forceinline__ float2 load2(const Tile<T, kCols>& s, int row, int down, int col) {
    return unpack2<T>(shared_u32(s.at(row, down, col)));
}
template <int kCols>
__device__ __forceinline__ void load4(float (&x)[4], const Tile<float, kCols>& s, int row, int down, int col) {
    shared_f32x4(x, s.at(row, down, col));
}
template <int kCols>
__device__ __forceinline__ void store2(const Tile<float, kCols>& s, int row, int down, int col, float x, float y) {
    set_shared_f32x2(s.at(row, down, col), x, y);
}
template <class T, int kCols>
__device__ __forceinline__ void store2(const Tile<T, kCols>& s, int row, int down, int col, float x, float y) {
    set_shared_u32(s.at(row, down, col), pack2<T>(x, y));
}
template <class T, int kCols>
__device__ __forceinline__ void store1(const Tile<T, kCols>& s, int row, int down, int col, T x) {
    if constexpr (sizeof(T) == 4) {
        set_shared_f32(s.at(row, down, col), x);
    } else {
        set_shared_u16(s.at(row, down, col), reinterpret_cast<uint16_t&>(x));
    }
}

// One step of an operand: kRegs = 4 for the 16 rows of the first, 2 for the 8 columns of the second. fp32: the tensor
// core reads the upper 19 bits of r, and lo is what they leave out, so x = r + lo to 2^-21.
template <class T, int kRegs>
struct Frag {
    uint32_t r[kRegs];
    __device__ __forceinline__ void finish() {}
};
template <int kRegs>
struct Frag<float, kRegs> {
    uint32_t r[kRegs], lo[kRegs];
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < kRegs; ++i)
            lo[i] = __float_as_uint(__uint_as_float(r[i]) - __uint_as_float(r[i] & 0xffffe000u));
    }
};
template <class T>
using FragA = Frag<T, 4>;
template <class T>
using FragB = Frag<T, 2>;

// l: the lane, in all four. Rows row0 .. row0 + 15 of a row operand, step i.
template <class T, int kCols>
__device__ __forceinline__ FragA<T> row_a(const Tile<T, kCols>& s, int l, int row0, int i) {
    FragA<T> f;
    ldmatrix(f.r[0], f.r[1], f.r[2], f.r[3],
             s.base + l % 16 * Tile<T, kCols>::kRowBytes + swizzled((l / 16) ^ (l & 7), 2 * i) +
                 row0 * Tile<T, kCols>::kRowBytes);
    f.finish();
    return f;
}
// Rows row0 .. row0 + 15 of a row operand as two groups of 8 columns of the second operand, step i.
template <class T, int kCols>
__device__ __forceinline__ void row_b(FragB<T> (&f)[2], const Tile<T, kCols>& s, int l, int row0, int i) {
    ldmatrix(f[0].r[0], f[0].r[1], f[1].r[0], f[1].r[1],
             s.base + (l % 8 + l / 16 * 8) * Tile<T, kCols>::kRowBytes + swizzled((l / 8 & 1) ^ (l & 7), 2 * i) +
                 row0 * Tile<T, kCols>::kRowBytes);
    f[0].finish();
    f[1].finish();
}

// Columns col0 .. col0 + 15 of a column operand as rows of the first operand, step i.
template <class T, int kCols>
__device__ __forceinline__ FragA<T> col_a(const Tile<T, kCols>& s, int l, int col0, int i) {
    FragA<T> f;
    if constexpr (sizeof(T) == 2) {
        ldmatrix_trans(f.r[0], f.r[1], f.r[2], f.r[3],
                       s.base + (l % 8 + l / 16 * 8) * Tile<T, kCols>::kRowBytes +
                           swizzled((l / 8 & 1) ^ (l & 7), col0 / 8) + 16 * i * Tile<T, kCols>::kRowBytes);
    } else {
        const int g = l / 4, t = l % 4;
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                f.r[2 * e + j] = shared_u32(s.base + 2 * t * Tile<T, kCols>::kRowBytes + g % 4 * 4 +
                                            swizzled((g / 4) ^ (2 * t), (col0 / 4 + 2 * j) ^ e) +
                                            (8 * i + e) * Tile<T, kCols>::kRowBytes);
        f.finish();
    }
    return f;
}
// Columns col0 .. col0 + 7 (col0 may depend on the warp) as columns of the second operand, steps 2 i and 2 i + 1.
template <class T, int kCols>
__device__ __forceinline__ void col_b(FragB<T> (&f)[2], const Tile<T, kCols>& s, int l, int col0, int i) {
    if constexpr (sizeof(T) == 2) {
        ldmatrix_trans(f[0].r[0], f[0].r[1], f[1].r[0], f[1].r[1],
                       s.base + l * Tile<T, kCols>::kRowBytes + swizzled(l & 7, col0 / 8) +
                           32 * i * Tile<T, kCols>::kRowBytes);
    } else {
        const int g = l / 4, t = l % 4;
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                f[j].r[e] = shared_u32(s.base + 2 * t * Tile<T, kCols>::kRowBytes + g % 4 * 4 +
                                       swizzled((g / 4) ^ (2 * t + e), col0 / 4) +
                                       (16 * i + 8 * j + e) * Tile<T, kCols>::kRowBytes);
        f[0].finish();
        f[1].finish();
    }
}

// d[16 x 8] += a b over one step.
__device__ __forceinline__ void mma(float (&d)[4], const FragA<half>& a, const FragB<half>& b) {
    mma_f16(d, a.r, b.r);
}
__device__ __forceinline__ void mma(float (&d)[4], const FragA<bf16>& a, const FragB<bf16>& b) {
    mma_bf16(d, a.r, b.r);
}
__device__ __forceinline__ void mma(float (&d)[4], const FragA<float>& a, const FragB<float>& b) {
    mma_tf32(d, a.lo, b.r);
    mma_tf32(d, a.r, b.lo);
    mma_tf32(d, a.r, b.r);
}

// d += a b, or a b alone, over 16 indices; see wgmma_operand. a and b: addresses in shared memory.
template <class T, bool kTransA, bool kTransB, int kN>
__device__ __forceinline__ void wgmma(float (&d)[kN], uint32_t a, uint32_t b, bool add) {
    if constexpr (std::is_same_v<T, half>) {
        wgmma_f16<kTransA, kTransB>(d, wgmma_operand(a), wgmma_operand(b), add);
    } else {
        wgmma_bf16<kTransA, kTransB>(d, wgmma_operand(a), wgmma_operand(b), add);
    }
}

}  // namespace kda
