// Runs CUDA kernels on a host, one CTA after the other, every thread of a CTA a fiber on one core.
//
// A fiber runs until it meets others: __syncthreads, or an operation of its whole warp (__syncwarp, shuffles, ldmatrix,
// mma.sync), which the last lane to arrive carries out for all 32. The schedule is who runs next: 0 takes the next lane
// and then the next warp and CTA, 1 the previous ones. Where both give the same bits, no result depended on that order.
//
// What a GPU leaves undefined ends the launch with a message, or shows as NaN:
//   shared memory holds 0xff before a CTA starts; accesses by address are checked for bounds and alignment
//   cp.async fills its destination with 0xff and copies at the wait of its own thread, so a missing wait reads NaN
//   a thread that reads or writes by address what another wrote, or writes what another read, with no __syncthreads (or,
//     in one warp, __syncwarp) between them is a race, whatever the schedule
//   lanes of a warp in different operations, threads that wait for ever, cp.async still on its way at the end
//   global accesses outside of memory from allocate(), which lies between pages that nobody may touch
// mma.sync: exact products, summed in double and rounded once; the tensor core's own rounding is a little coarser.

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device.h"

namespace kda {

uint3 threadIdx, blockIdx, gridDim;
constexpr int kSharedBytes = 232448;  // the most that a block can have on sm_90
alignas(1024) char smem[kSharedBytes];

namespace emulator {

int shared_limit = kSharedBytes;

namespace {

constexpr int kMaxThreads = 1024, kStackBytes = 256 << 10;
constexpr int kCell = 2;  // bytes whose last readers and writer are remembered together

enum State { kReady, kInWarp, kInBarrier, kDone };

struct Copy {
    uint32_t dst;
    const void* src;
    bool valid;
    int group;
};
struct Sum {  // of a wgmma not yet waited for
    float* d;
    float value;
};
struct Fiber {
    jmp_buf at;
    ucontext_t context;
    State state;
    bool started;
    int group;  // of the next cp.async
    std::vector<Copy> copies;
    std::vector<uint32_t> unfenced;  // cells written since this thread's last fence_async_proxy
    std::vector<Sum> sums;
    bool fenced, committed;  // wgmma_fence since the last wait; no wgmma since the last commit
};
using WarpWork = void (*)(void* const* lanes);
struct Warp {
    const char* operation;
    int arrived, ready;
    uint32_t epoch;  // __syncwarps so far
    void* lanes[32];
};
// Accesses of the CTA's present epoch; those of earlier ones are ordered before anything now.
struct Access {
    uint32_t epoch, warp_epoch;
    int16_t thread;  // kWholeWarp plus a warp: all its lanes
    bool lanes, warps;  // more than one lane, more than one warp
};
struct Cell {
    Access read, written;
    bool unfenced;  // by its last writer
};
constexpr int kWholeWarp = kMaxThreads;

Fiber fibers[kMaxThreads];
Warp warps[kMaxThreads / 32];
Cell cells[kSharedBytes / kCell];
char* stacks = nullptr;
int n_threads = 0, shared_bytes = 0, current = 0, live = 0, in_barrier = 0, schedule = 0;
uint32_t epoch = 0;  // of the CTA: barriers so far, over all CTAs
void (*kernel)(const void*) = nullptr;
const void* params = nullptr;
sigjmp_buf host;
jmp_buf cta;
char message[512];

int step(int i, int n) { return schedule == 0 ? (i + 1 == n ? 0 : i + 1) : (i == 0 ? n - 1 : i - 1); }

void yield();

void thread_main() {
    kernel(params);
    if (!fibers[current].copies.empty()) fail("cp.async still on its way at the end of a thread");
    if (!fibers[current].sums.empty()) fail("wgmma still on its way at the end of a thread");
    Fiber& f = fibers[current];
    f.state = kDone;
    --warps[current / 32].ready;
    --live;
    yield();
}

__attribute__((noinline)) void enter(int i) {
    current = i;
    threadIdx.x = i;
    if (fibers[i].started) _longjmp(fibers[i].at, 1);
    fibers[i].started = true;
    setcontext(&fibers[i].context);
    std::abort();
}

void release_barrier() {
    in_barrier = 0;
    ++epoch;
    for (int i = 0; i < n_threads; ++i)
        if (fibers[i].state == kInBarrier) fibers[i].state = kReady, ++warps[i / 32].ready;
}

// Leaves the running fiber for the next that can run; returns when it is this one's turn again.
__attribute__((noinline)) void yield() {
    if (live == 0) _longjmp(cta, 1);
    if (in_barrier == live) release_barrier();
    if (fibers[current].state == kReady) return;
    int w = current / 32, i = current % 32;
    const int n_warps = n_threads / 32;
    for (int tried = 0; warps[w].ready == 0; ++tried) {
        if (tried == n_warps) {
            const char* operation = "none";
            for (int j = 0; j < n_warps; ++j)
                if (warps[j].arrived > 0) operation = warps[j].operation;
            fail("threads wait for ever: %d of %d in __syncthreads, others in %s", in_barrier, live, operation);
        }
        w = step(w, n_warps);
        i = schedule == 0 ? 31 : 0;
    }
    do i = step(i, 32);
    while (fibers[32 * w + i].state != kReady);
    if (_setjmp(fibers[current].at) == 0) enter(32 * w + i);
}

void warp_operation(const char* operation, void* lane, WarpWork work) {
    Warp& w = warps[current / 32];
    if (w.arrived == 0) w.operation = operation;
    if (w.operation != operation) fail("lanes of a warp in different operations: %s and %s", w.operation, operation);
    w.lanes[current % 32] = lane;
    if (++w.arrived == 32) {
        w.arrived = 0;
        work(w.lanes);
        for (int i = current / 32 * 32, end = i + 32; i < end; ++i) fibers[i].state = kReady;
        w.ready = 32;
    } else {
        fibers[current].state = kInWarp;
        --w.ready;
        yield();
    }
}

int warp_of(int thread) { return (thread >= kWholeWarp ? thread - kWholeWarp : thread / 32); }

bool unordered(const Access& a, int thread, uint32_t warp_epoch) {
    if (a.epoch != epoch) return false;
    if (a.warps || warp_of(a.thread) != warp_of(thread)) return true;
    return a.warp_epoch == warp_epoch && (a.lanes || a.thread != thread);
}

void touch(uint32_t a, int bytes, bool write, int thread) {
    const uint32_t warp_epoch = warps[warp_of(thread)].epoch;
    for (uint32_t i = a / kCell; i < (a + bytes + kCell - 1) / kCell; ++i) {
        Cell& c = cells[i];
        if (unordered(c.written, thread, warp_epoch))
            fail("race: thread %d %s shared byte %u, which thread %d has written since the last barrier",
                 current, write ? "writes" : "reads", i * kCell, c.written.thread);
        if (write) {
            if (unordered(c.read, thread, warp_epoch))
                fail("race: thread %d writes shared byte %u, which thread %d has read since the last barrier", current,
                     i * kCell, c.read.thread);
            c.written = {epoch, warp_epoch, static_cast<int16_t>(thread), false, false};
        } else if (c.read.epoch != epoch) {
            c.read = {epoch, warp_epoch, static_cast<int16_t>(thread), thread >= kWholeWarp, false};
        } else {
            c.read.warps |= warp_of(c.read.thread) != warp_of(thread);
            c.read.lanes = thread >= kWholeWarp ||
                           (c.read.warp_epoch == warp_epoch && (c.read.lanes || c.read.thread != thread));
            c.read.warp_epoch = warp_epoch;
            c.read.thread = static_cast<int16_t>(thread);
        }
    }
}

char* checked(uint32_t a, int bytes) {
    if (a % bytes != 0) fail("misaligned shared access of %d bytes at %u", bytes, a);
    if (a > static_cast<uint32_t>(shared_bytes - bytes))
        fail("shared access of %d bytes at %u, past the %d of the block", bytes, a, shared_bytes);
    return smem + a;
}

struct Matrices {
    uint32_t** x;
    uint32_t a;
};
template <bool kTrans>
void ldmatrix_work(void* const* lanes) {
    char rows[32][16];
    for (int l = 0; l < 32; ++l) {
        const uint32_t a = static_cast<const Matrices*>(lanes[l])->a;
        std::memcpy(rows[l], checked(a, 16), 16);
        touch(a, 16, false, kWholeWarp + current / 32);
    }
    for (int l = 0; l < 32; ++l) {
        const int g = l / 4, t = l % 4;
        for (int j = 0; j < 4; ++j) {
            uint32_t& x = *static_cast<const Matrices*>(lanes[l])->x[j];
            if (kTrans) {
                uint16_t low, high;
                std::memcpy(&low, rows[8 * j + 2 * t] + 2 * g, 2);
                std::memcpy(&high, rows[8 * j + 2 * t + 1] + 2 * g, 2);
                x = low | static_cast<uint32_t>(high) << 16;
            } else {
                std::memcpy(&x, rows[8 * j + g] + 4 * t, 4);
            }
        }
    }
}

struct Product {
    float* d;
    const uint32_t *a, *b;
};
struct HalfTable {
    float of[1 << 16];
    HalfTable() {
        for (int i = 0; i < 1 << 16; ++i) {
            const __half_raw raw{static_cast<unsigned short>(i)};
            of[i] = __half2float(raw);
        }
    }
};
float half_bits(uint32_t x) {
    static const HalfTable table;
    return table.of[x & 0xffff];
}
float bf16_bits(uint32_t x) { return __uint_as_float(x << 16); }
float tf32_bits(uint32_t x) { return __uint_as_float(x & 0xffffe000u); }

// Index of the reduction in which element e (0 or 1, where two share a register) of register half h of lane t stands.
template <float (*kValue)(uint32_t), int kDepth>
void mma_work(void* const* lanes) {
    constexpr int kPer = kDepth / 8;  // values of a register
    float a[16][kDepth], b[kDepth][8];
    for (int l = 0; l < 32; ++l) {
        const Product& p = *static_cast<const Product*>(lanes[l]);
        const int g = l / 4, t = l % 4;
        for (int h = 0; h < 2; ++h)
            for (int e = 0; e < kPer; ++e) {
                const int k = 4 * kPer * h + kPer * t + e;
                a[g][k] = kValue(p.a[2 * h] >> 16 * e);
                a[g + 8][k] = kValue(p.a[2 * h + 1] >> 16 * e);
                b[k][g] = kValue(p.b[h] >> 16 * e);
            }
    }
    double d[16][8] = {};
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < kDepth; ++k)
            for (int j = 0; j < 8; ++j) d[i][j] += static_cast<double>(a[i][k]) * b[k][j];
    for (int l = 0; l < 32; ++l)
        for (int e = 0; e < 4; ++e) {
            float& to = static_cast<const Product*>(lanes[l])->d[e];
            to = static_cast<float>(to + d[l / 4 + e / 2 * 8][l % 4 * 2 + e % 2]);
        }
}

// One warp's 16 rows of a warpgroup's product.
struct GroupProduct {
    float* d;
    int n;
    uint64_t a, b;
    bool add, bf16, trans_a, trans_b;
};
float wgmma_value(const GroupProduct& p, bool of_b, int i, int k) {
    const uint64_t descriptor = of_b ? p.b : p.a;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) fail("wgmma: expected the 128-byte swizzle and no offset");
    const uint32_t start = (descriptor & 0x3fff) << 4, next = (descriptor >> 32 & 0x3fff) << 4;
    const uint32_t at = (of_b ? p.trans_b : p.trans_a) ? start + k / 8 * next + k % 8 * 128 + i * 2
                                                       : start + i / 8 * next + i % 8 * 128 + k * 2;
    const uint32_t a = at ^ (at >> 7 & 7) << 4;
    uint16_t bits;
    std::memcpy(&bits, checked(a, 2), 2);
    if (cells[a / kCell].unfenced) fail("wgmma reads shared byte %u, written without fence_async_proxy since", a);
    touch(a, 2, false, kWholeWarp + current / 32);
    return p.bf16 ? bf16_bits(bits) : half_bits(bits);
}
void wgmma_work(void* const* lanes) {
    const GroupProduct& p = *static_cast<const GroupProduct*>(lanes[0]);
    float a[16][16];
    std::vector<float> b(16 * p.n);
    const int row0 = current / 32 % 4 * 16;
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k) a[i][k] = wgmma_value(p, false, row0 + i, k);
    for (int j = 0; j < p.n; ++j)
        for (int k = 0; k < 16; ++k) b[16 * j + k] = wgmma_value(p, true, j, k);
    for (int l = 0; l < 32; ++l) {
        const GroupProduct& q = *static_cast<const GroupProduct*>(lanes[l]);
        if (q.n != p.n || q.a != p.a || q.b != p.b || q.add != p.add) fail("wgmma: lanes of a warp disagree");
        std::vector<Sum>& sums = fibers[current / 32 * 32 + l].sums;
        for (int e = 0; e < p.n / 2; ++e) {
            const int i = l / 4 + e / 2 % 2 * 8, j = e / 4 * 8 + l % 4 * 2 + e % 2;
            double x = 0;
            for (int k = 0; k < 16; ++k) x += static_cast<double>(a[i][k]) * b[16 * j + k];
            Sum* sum = nullptr;
            for (Sum& s : sums)
                if (s.d == q.d + e) sum = &s;
            if (sum == nullptr) {
                sums.push_back({q.d + e, q.d[e]});
                sum = &sums.back();
            }
            sum->value = static_cast<float>(p.add ? sum->value + x : x);
            const uint32_t nan = ~0u;
            std::memcpy(q.d + e, &nan, 4);  // until the wait
        }
    }
}

struct Shuffle {
    uint64_t x;
    int from;
    uint64_t got;
};

void on_fault(int, siginfo_t* info, void*) {
    std::snprintf(message, sizeof(message), "global access outside of the tensors, at %p", info->si_addr);
    siglongjmp(host, 1);
}

}  // namespace

void fail(const char* format, ...) {
    char what[400];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(what, sizeof(what), format, arguments);
    va_end(arguments);
    std::snprintf(message, sizeof(message), "%s (block %u, thread %d)", what, blockIdx.x, current);
    siglongjmp(host, 1);
}

int multiprocessors = 0;

char* shared(uint32_t a, int bytes, bool write) {
    char* p = checked(a, bytes);
    touch(a, bytes, write, current);
    if (write && multiprocessors > 0)
        for (uint32_t i = a / kCell; i < (a + bytes + kCell - 1) / kCell; ++i) {
            cells[i].unfenced = true;
            fibers[current].unfenced.push_back(i);
        }
    return p;
}
void fence_async_proxy() {
    for (uint32_t i : fibers[current].unfenced)
        if (cells[i].written.thread == current) cells[i].unfenced = false;
    fibers[current].unfenced.clear();
}
void wgmma(float* d, int n, uint64_t a, uint64_t b, bool add, bool bf16, bool trans_a, bool trans_b) {
    static const char* name = "wgmma";
    if (!fibers[current].fenced) fail("wgmma without wgmma_fence");
    fibers[current].committed = false;
    GroupProduct p{d, n, a, b, add, bf16, trans_a, trans_b};
    warp_operation(name, &p, wgmma_work);
}
void wgmma_fence() { fibers[current].fenced = true; }
void wgmma_commit() { fibers[current].committed = true; }
void wgmma_wait() {
    Fiber& f = fibers[current];
    if (!f.committed) fail("wgmma_wait before wgmma_commit");
    for (const Sum& s : f.sums) *s.d = s.value;
    f.sums.clear();
    f.fenced = false;
}

void copy16(uint32_t dst, const void* src, bool valid) {
    if (valid) check_aligned<16>(src);
    std::memset(shared(dst, 16, true), 0xff, 16);
    fibers[current].copies.push_back({dst, src, valid, fibers[current].group});
}
void commit() { ++fibers[current].group; }
void wait(int pending) {
    Fiber& f = fibers[current];
    size_t done = 0;
    for (; done < f.copies.size() && f.copies[done].group < f.group - pending; ++done) {
        const Copy& c = f.copies[done];
        char* to = shared(c.dst, 16, true);
        c.valid ? std::memcpy(to, c.src, 16) : std::memset(to, 0, 16);
    }
    f.copies.erase(f.copies.begin(), f.copies.begin() + done);
}

void barrier() {
    if (fibers[current].state != kReady) std::abort();
    fibers[current].state = kInBarrier;
    --warps[current / 32].ready;
    ++in_barrier;
    yield();
}
void warp_barrier() {
    static const char* name = "__syncwarp";
    warp_operation(name, nullptr, [](void* const*) { ++warps[current / 32].epoch; });
}
uint64_t shuffle(uint64_t x, int from) {
    static const char* name = "a shuffle";
    Shuffle s{x, from, 0};
    warp_operation(name, &s, [](void* const* lanes) {
        for (int l = 0; l < 32; ++l) {
            Shuffle& to = *static_cast<Shuffle*>(lanes[l]);
            to.got = static_cast<const Shuffle*>(lanes[to.from])->x;
        }
    });
    return s.got;
}
void ldmatrix(uint32_t* (&x)[4], uint32_t a, bool trans) {
    static const char *name = "ldmatrix", *name_trans = "ldmatrix.trans";
    Matrices m{x, a};
    warp_operation(trans ? name_trans : name, &m, trans ? ldmatrix_work<true> : ldmatrix_work<false>);
}
void mma_f16(float* d, const uint32_t* a, const uint32_t* b) {
    static const char* name = "mma f16";
    Product p{d, a, b};
    warp_operation(name, &p, mma_work<half_bits, 16>);
}
void mma_bf16(float* d, const uint32_t* a, const uint32_t* b) {
    static const char* name = "mma bf16";
    Product p{d, a, b};
    warp_operation(name, &p, mma_work<bf16_bits, 16>);
}
void mma_tf32(float* d, const uint32_t* a, const uint32_t* b) {
    static const char* name = "mma tf32";
    Product p{d, a, b};
    warp_operation(name, &p, mma_work<tf32_bits, 8>);
}

cudaError_t launch(int64_t blocks, int threads, int bytes, void (*thread)(const void*), const void* p) {
    message[0] = 0;
    if (blocks < 1 || threads < 32 || threads > kMaxThreads || threads % 32 != 0 || bytes > shared_limit) {
        std::snprintf(message, sizeof(message), "launch of %lld blocks of %d threads and %d bytes",
                      static_cast<long long>(blocks), threads, bytes);
        return cudaErrorInvalidConfiguration;
    }
    if (stacks == nullptr)
        stacks = static_cast<char*>(mmap(nullptr, static_cast<size_t>(kMaxThreads) * kStackBytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    gridDim.x = static_cast<unsigned>(blocks);
    n_threads = threads, shared_bytes = bytes, kernel = thread, params = p;
    for (int i = 0; i < threads; ++i) {
        Fiber& f = fibers[i];
        f.copies.clear(), f.unfenced.clear(), f.sums.clear();
        getcontext(&f.context);
    }
    static char alternate[64 << 10];
    stack_t stack{}, stack_before{};
    stack.ss_sp = alternate, stack.ss_size = sizeof(alternate);
    struct sigaction action {}, segv_before {}, bus_before {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaltstack(&stack, &stack_before);
    sigaction(SIGSEGV, &action, &segv_before);
    sigaction(SIGBUS, &action, &bus_before);
    volatile cudaError_t error = cudaSuccess;
    if (sigsetjmp(host, 1) == 0) {
        for (volatile int64_t n = 0; n < blocks; n = n + 1) {
            blockIdx.x = static_cast<unsigned>(schedule == 0 ? n : blocks - 1 - n);
            std::memset(smem, 0xff, sizeof(smem));
            for (Cell& c : cells) c.unfenced = false;
            ++epoch;
            live = threads, in_barrier = 0;
            for (int i = 0; i < threads; ++i) {
                Fiber& f = fibers[i];
                f.state = kReady, f.started = false, f.group = 0, f.fenced = f.committed = false;
                f.context.uc_stack.ss_sp = stacks + static_cast<size_t>(i) * kStackBytes;
                f.context.uc_stack.ss_size = kStackBytes;
                f.context.uc_link = nullptr;
                makecontext(&f.context, thread_main, 0);
            }
            for (int w = 0; w < threads / 32; ++w) warps[w].arrived = 0, warps[w].ready = 32;
            if (_setjmp(cta) == 0) enter(schedule == 0 ? 0 : threads - 1);
            for (int i = shared_bytes; i < kSharedBytes; ++i)
                if (smem[i] != static_cast<char>(0xff)) fail("shared byte %d written, past the %d", i, shared_bytes);
        }
    } else {
        error = cudaErrorLaunchFailure;
    }
    sigaction(SIGSEGV, &segv_before, nullptr);
    sigaction(SIGBUS, &bus_before, nullptr);
    sigaltstack(&stack_before, nullptr);
    return error;
}

}  // namespace emulator
}  // namespace kda

extern "C" {

void kda_emulator_schedule(int schedule) { kda::emulator::schedule = schedule; }
void kda_emulator_shared_limit(int bytes) { kda::emulator::shared_limit = bytes; }
const char* kda_emulator_message() { return kda::emulator::message; }

// `bytes` of 0xff that end (up to 15 bytes of alignment) at a page nobody may touch, and begin after another.
void* kda_emulator_allocate(size_t bytes) {
    const size_t page = sysconf(_SC_PAGESIZE), room = (bytes + page - 1) / page * page;
    char* p = static_cast<char*>(mmap(nullptr, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (p == MAP_FAILED || mprotect(p + page, room, PROT_READ | PROT_WRITE) != 0) return nullptr;
    std::memset(p + page, 0xff, room);
    return p + page + (room - bytes) / 16 * 16;
}
void kda_emulator_free(void* p, size_t bytes) {
    const size_t page = sysconf(_SC_PAGESIZE), room = (bytes + page - 1) / page * page;
    munmap(reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) / page * page) - page, room + 2 * page);
}

}  // extern "C"
