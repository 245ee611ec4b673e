// Every instruction that C++ does not name, and the launch. With KDA_EMULATED defined the twins of emulator/device.h
// take this header's place, so that the kernels run on a host; no other file of a kernel may hold inline assembly.
#pragma once

#ifdef KDA_EMULATED
#include "../emulator/device.h"
#else

#include <cuda_runtime.h>

#include <cstdint>

namespace kda {

// The same number, of which the compiler knows nothing: addresses made from it are not kept in registers from earlier.
__device__ __forceinline__ int forget(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ uint32_t shared_u32(uint32_t a) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(a) : "memory");
    return x;
}

__device__ __forceinline__ float shared_f32(uint32_t a) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(a) : "memory");
    return x;
}
__device__ __forceinline__ void shared_u32x2(uint32_t (&x)[2], uint32_t a) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(a) : "memory");
}
__device__ __forceinline__ void shared_u32x4(uint32_t (&x)[4], uint32_t a) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(a)
                 : "memory");
}

__device__ __forceinline__ int64_t shared_i64(uint32_t a) {
    int64_t x;
    asm volatile("ld.shared.s64 %0, [%1];" : "=l"(x) : "r"(a) : "memory");
    return x;
}

__device__ __forceinline__ float2 shared_f32x2(uint32_t a) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(a) : "memory");
    return x;
}
__device__ __forceinline__ void shared_f32x4(float (&x)[4], uint32_t a) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(a)
                 : "memory");
}
__device__ __forceinline__ void set_shared_f32x2(uint32_t a, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void set_shared_f32x4(uint32_t a, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
__device__ __forceinline__ void set_shared_f32(uint32_t a, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory");
}
__device__ __forceinline__ void set_shared_u32(uint32_t a, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory");
}
__device__ __forceinline__ void set_shared_u32x2(uint32_t a, uint32_t x, uint32_t y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void set_shared_i64(uint32_t a, int64_t x) {
    asm volatile("st.shared.s64 [%0], %1;" ::"r"(a), "l"(x) : "memory");
}
__device__ __forceinline__ void set_shared_u16(uint32_t a, uint16_t x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"(x) : "memory");
}

__device__ __forceinline__ void ldmatrix(uint32_t& x0, uint32_t& x1, uint32_t& x2, uint32_t& x3, uint32_t a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3)
                 : "r"(a)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(uint32_t& x0, uint32_t& x1, uint32_t& x2, uint32_t& x3, uint32_t a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x0), "=r"(x1), "=r"(x2), "=r"(x3)
                 : "r"(a)
                 : "memory");
}

// d[16 x 8] += a b over 16 (TF32: 8) indices. d[0], d[1]: row g = lane / 4, columns 2t, 2t + 1; d[2], d[3]: row g + 8.
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Warpgroups of sm_90a. Four warps multiply 64 rows of a by 8 to 256 columns of b over 16 indices. Both lie in shared
// memory as rows of 128 bytes under the 128-byte swizzle (the address's bits 4 to 6 xor bits 7 to 9), groups of 8 rows
// next to each other. Not transposed: a row or column of the operand lies in a row, its 16 indices in 32 neighbouring
// bytes. Transposed: an index lies in a row, the operand's rows or columns in its neighbouring bytes. d is laid out as
// mma_f16's, by groups of 8 columns: warp w of the four has rows 16 w to 16 w + 15. It is not to be touched before
// wgmma_wait and wgmma_done.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t a) {
    constexpr uint64_t kStep = 1024 >> 4;  // to the next 8 rows
    return uint64_t{1} << 62 | kStep << 32 | kStep << 16 | (a & 0x3ffff) >> 4;
}
template <bool kTransA, bool kTransB>
__device__ __forceinline__ void wgmma_f16(float (&d)[16], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1, %19, %20;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0));
}
template <bool kTransA, bool kTransB>
__device__ __forceinline__ void wgmma_bf16(float (&d)[16], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1, %19, %20;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0));
}
template <bool kTransA, bool kTransB>
__device__ __forceinline__ void wgmma_f16(float (&d)[8], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, p, 1, 1, %11, %12;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0));
}
template <bool kTransA, bool kTransB>
__device__ __forceinline__ void wgmma_bf16(float (&d)[8], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, p, 1, 1, %11, %12;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0));
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Keeps reads of d behind the wait.
template <int kN>
__device__ __forceinline__ void wgmma_done(float (&d)[kN]) {
#pragma unroll
    for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// This thread's stores to shared memory so far, cp.async that it has waited for included, before wgmma reads them.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 16 bytes, global to shared; zeros, and no access to `src`, where `valid` is false.
__device__ __forceinline__ void copy16_async(uint32_t dst, const void* src, bool valid) {
    const int n = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
// Neighbouring floats in one access (the compiler may split the store of a float2, and then writes half sectors).
__device__ __forceinline__ void store_global2(float* p, float x, float y) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_global4(float* p, float x, float y, float z, float w) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
// 2^x to 2 ulp; 0 below 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1 / x to 1 ulp; 0 where that is below 2^-126.
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1 / sqrt(x) to 2 ulp, x normal.
__device__ __forceinline__ float reciprocal_sqrt_fast(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Multiprocessors of the device.
__device__ __forceinline__ int multiprocessors() {
    int n;
    asm("mov.u32 %0, %nsmid;" : "=r"(n));
    return n;
}
// Lets a number of cycles pass.
__device__ __forceinline__ void idle(int cycles) {
    const int64_t start = clock64();
    while (clock64() - start < cycles) {
    }
}
// Neighbouring floats that no thread writes while the kernel runs.
__device__ __forceinline__ void global_f32x4(float (&x)[4], const float* p) {
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "l"(p));
}
__device__ __forceinline__ void global_f32x2(float (&x)[2], const float* p) {
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "l"(p));
}

// The most shared memory a block can have on the current device; 0 where that cannot be told.
inline int shared_limit() {
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess ? bytes : 0;
}

// Launches a kernel on the current device, `shared` bytes of dynamic shared memory a block.
template <auto kKernel, class Params>
cudaError_t launch_kernel(int64_t blocks, int threads, int shared, cudaStream_t stream, const Params& p) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    static bool prepared[64] = {};  // per device; setting it twice from two threads is harmless
    if (device >= 64 || !prepared[device]) {
        error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        if (error != cudaSuccess) return error;
        if (device < 64) prepared[device] = true;
    }
    kKernel<<<static_cast<unsigned>(blocks), threads, shared, stream>>>(p);
    return cudaGetLastError();
}

// Multiprocessors of the current device where it runs kKernel's code for sm_90a; 0 where it has other code.
template <auto kKernel>
int hopper_multiprocessors() {
    static int known[64] = {};  // per device: one more than the answer
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    if (device < 64 && known[device] > 0) return known[device] - 1;
    cudaFuncAttributes of{};
    int count = 0;
    const bool hopper = cudaFuncGetAttributes(&of, kKernel) == cudaSuccess && of.ptxVersion == 90 &&
                        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
    if (device < 64) known[device] = hopper ? count + 1 : 1;
    return hopper ? count : 0;
}

}  // namespace kda

#endif
