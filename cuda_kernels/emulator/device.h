// Twins of common/device.cuh, and of the CUDA built-ins the kernels use, for a host build of the same kernel sources.
// Included in device.cuh's place where KDA_EMULATED is defined. What they check and how threads run: emulator.cpp.
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef __launch_bounds__  // CUDA's headers name it for nvcc alone
#define __launch_bounds__(...)
#endif

namespace kda {

extern uint3 threadIdx, blockIdx, gridDim;  // of the thread that runs
extern char smem[];                // shared memory of the CTA that runs

namespace emulator {

extern int shared_limit;  // bytes a CTA may ask for

char* shared(uint32_t a, int bytes, bool write);  // checks bounds, alignment and, against other threads, order
void copy16(uint32_t dst, const void* src, bool valid);
void commit();
void wait(int pending);
void barrier();
void warp_barrier();
uint64_t shuffle(uint64_t x, int from);  // x of lane `from`
void ldmatrix(uint32_t* (&x)[4], uint32_t a, bool trans);
void mma_f16(float* d, const uint32_t* a, const uint32_t* b);
void mma_bf16(float* d, const uint32_t* a, const uint32_t* b);
void mma_tf32(float* d, const uint32_t* a, const uint32_t* b);
void wgmma(float* d, int n, uint64_t a, uint64_t b, bool add, bool bf16, bool trans_a, bool trans_b);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait();
void fence_async_proxy();
extern int multiprocessors;  // for kernels of sm_90a; 0: those are not to run
cudaError_t launch(int64_t blocks, int threads, int shared, void (*thread)(const void*), const void* p);
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

template <class T>
T load(uint32_t a) {
    T x;
    std::memcpy(&x, shared(a, sizeof(T), false), sizeof(T));
    return x;
}
template <class T>
void store(uint32_t a, T x) {
    std::memcpy(shared(a, sizeof(T), true), &x, sizeof(T));
}
// A global access wider than an element must be aligned to its own size.
template <int kBytes>
void check_aligned(const void* p) {
    if (reinterpret_cast<uintptr_t>(p) % kBytes != 0) fail("misaligned global access of %d bytes at %p", kBytes, p);
}
template <class T>
T shuffle_as(T x, int from) {
    static_assert(sizeof(T) <= 8, "a register or two");
    uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof(T));
    bits = shuffle(bits, from);
    std::memcpy(&x, &bits, sizeof(T));
    return x;
}
inline void check_full(unsigned mask) {
    if (mask != ~0u) fail("a warp operation with mask %08x: only whole warps are emulated", mask);
}
template <auto kKernel, class Params>
void thread_of(const void* p) {
    kKernel(*static_cast<const Params*>(p));
}

}  // namespace emulator

inline void __syncthreads() { emulator::barrier(); }
inline void __syncwarp() { emulator::warp_barrier(); }
template <class T>
T __shfl_sync(unsigned mask, T x, int from) {
    emulator::check_full(mask);
    return emulator::shuffle_as(x, from & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits) {
    emulator::check_full(mask);
    return emulator::shuffle_as(x, (threadIdx.x % 32) ^ bits);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int down) {
    emulator::check_full(mask);
    const int lane = threadIdx.x % 32;
    return emulator::shuffle_as(x, lane < down ? lane : lane - down);
}
template <class T>
T __ldg(const T* p) {
    emulator::check_aligned<sizeof(T)>(p);
    return *p;
}
inline float __uint_as_float(uint32_t x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline size_t __cvta_generic_to_shared(const void* p) { return static_cast<const char*>(p) - smem; }

inline int forget(int x) { return x; }

inline uint32_t shared_u32(uint32_t a) { return emulator::load<uint32_t>(a); }
inline float shared_f32(uint32_t a) { return emulator::load<float>(a); }
inline void shared_u32x2(uint32_t (&x)[2], uint32_t a) { std::memcpy(x, emulator::shared(a, 8, false), 8); }
inline void shared_u32x4(uint32_t (&x)[4], uint32_t a) { std::memcpy(x, emulator::shared(a, 16, false), 16); }
inline int64_t shared_i64(uint32_t a) { return emulator::load<int64_t>(a); }
inline float2 shared_f32x2(uint32_t a) { return emulator::load<float2>(a); }
inline void shared_f32x4(float (&x)[4], uint32_t a) { std::memcpy(x, emulator::shared(a, 16, false), 16); }
inline void set_shared_f32x2(uint32_t a, float x, float y) { emulator::store(a, make_float2(x, y)); }
inline void set_shared_f32x4(uint32_t a, const float (&x)[4]) { std::memcpy(emulator::shared(a, 16, true), x, 16); }
inline void set_shared_f32(uint32_t a, float x) { emulator::store(a, x); }
inline void set_shared_u32(uint32_t a, uint32_t x) { emulator::store(a, x); }
inline void set_shared_u32x2(uint32_t a, uint32_t x, uint32_t y) { emulator::store(a, make_uint2(x, y)); }
inline void set_shared_i64(uint32_t a, int64_t x) { emulator::store(a, x); }
inline void set_shared_u16(uint32_t a, uint16_t x) { emulator::store(a, x); }

inline void ldmatrix(uint32_t& x0, uint32_t& x1, uint32_t& x2, uint32_t& x3, uint32_t a) {
    uint32_t* x[4] = {&x0, &x1, &x2, &x3};
    emulator::ldmatrix(x, a, false);
}
inline void ldmatrix_trans(uint32_t& x0, uint32_t& x1, uint32_t& x2, uint32_t& x3, uint32_t a) {
    uint32_t* x[4] = {&x0, &x1, &x2, &x3};
    emulator::ldmatrix(x, a, true);
}

inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { emulator::mma_f16(d, a, b); }
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { emulator::mma_bf16(d, a, b); }
inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { emulator::mma_tf32(d, a, b); }

inline uint64_t wgmma_operand(uint32_t a) {
    constexpr uint64_t kStep = 1024 >> 4;
    return uint64_t{1} << 62 | kStep << 32 | kStep << 16 | (a & 0x3ffff) >> 4;
}
template <bool kTransA, bool kTransB, int kN>
void wgmma_f16(float (&d)[kN], uint64_t a, uint64_t b, bool add) {
    emulator::wgmma(d, 2 * kN, a, b, add, false, kTransA, kTransB);
}
template <bool kTransA, bool kTransB, int kN>
void wgmma_bf16(float (&d)[kN], uint64_t a, uint64_t b, bool add) {
    emulator::wgmma(d, 2 * kN, a, b, add, true, kTransA, kTransB);
}
inline void wgmma_fence() { emulator::wgmma_fence(); }
inline void wgmma_commit() { emulator::wgmma_commit(); }
inline void wgmma_wait() { emulator::wgmma_wait(); }
template <int kN>
void wgmma_done(float (&)[kN]) {}
inline void fence_async_proxy() { emulator::fence_async_proxy(); }

inline void copy16_async(uint32_t dst, const void* src, bool valid) { emulator::copy16(dst, src, valid); }
inline void copy_commit() { emulator::commit(); }
template <int kPending>
void copy_wait() {
    emulator::wait(kPending);
}

inline void store_global2(float* p, float x, float y) {
    emulator::check_aligned<8>(p);
    p[0] = x, p[1] = y;
}
inline void store_global4(float* p, float x, float y, float z, float w) {
    emulator::check_aligned<16>(p);
    p[0] = x, p[1] = y, p[2] = z, p[3] = w;
}
inline void global_f32x4(float (&x)[4], const float* p) {
    emulator::check_aligned<16>(p);
    std::memcpy(x, p, 16);
}
inline void global_f32x2(float (&x)[2], const float* p) {
    emulator::check_aligned<8>(p);
    std::memcpy(x, p, 8);
}
inline int multiprocessors() { return 1; }
inline void idle(int) {}
inline float exp2_fast(float x) {
    const float y = exp2f(x);
    return y < FLT_MIN ? 0.f : y;  // results below the normal numbers are flushed; NaN stays
}

inline float reciprocal_fast(float x) {
    const float y = 1.f / x;
    return fabsf(y) < FLT_MIN ? copysignf(0.f, y) : y;
}

inline int shared_limit() { return emulator::shared_limit; }

inline float reciprocal_sqrt_fast(float x) { return 1.f / sqrtf(x); }

template <auto kKernel>
int hopper_multiprocessors() {
    return emulator::multiprocessors;
}

template <auto kKernel, class Params>
cudaError_t launch_kernel(int64_t blocks, int threads, int shared, cudaStream_t, const Params& p) {
    return emulator::launch(blocks, threads, shared, emulator::thread_of<kKernel, Params>, &p);
}

}  // namespace kda
