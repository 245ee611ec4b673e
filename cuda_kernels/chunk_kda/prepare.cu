// From the raw inputs to what the scans read: everything of a chunk that does not depend on the state.
//
// Formula (k, q after their norm, b the strengths, g the running sum of a; docs/kda_math.md section 3):
//   L_ij = b_i sum_d k_i k_j 2^(g_i - g_j), j < i         Aqk_ij = scale sum_d q_i k_j 2^(g_i - g_j), j <= i
//   A = (I + L)^-1      w = (A diag(b)) (k 2^g)      u = (A diag(b)) v
//   qd = scale q 2^g    kr = k 2^(g_L - g)           decay = 2^g_L
// Pairs: pairs.cuh. Inverse: inverse.cuh.
// Grid: NT HV CTAs of 256 threads, value heads fastest. A thread owns two channels of 8 rows, once or twice, while
//   factors are made; warps own blocks of pairs, then 16 or 32 columns of w or u.
// Tile: 64 rows, K and V whole (common/tiles.h).
// Bytes of a chunk and head at K = V = 128: q k v 48 KB, g 16 or 32 KB read, w u qd kr 64 KB written; A and Aqk, 16 KB,
//   written in forward; A, 8 KB, read in backward.
// Must hold: K = V = kHead, every pointer 16-byte aligned, no a above 0.
// Rounded to 16 bits: the operands of each level, A, A diag(b), k 2^g. Forward and backward give the same bits.
#include "inverse.cuh"
#include "launch.h"
#include "pairs.cuh"

namespace kda {

template <class T, int kHead, bool kBackward>
__global__ void __launch_bounds__(kRawThreads, KdaPrepareTile<kHead, kBackward>::kBlocksPerSm)
    kda_prepare_kernel(const __grid_constant__ KdaParams p) {
    using Cfg = KdaPrepareTile<kHead, kBackward>;
    using Own = Units<kHead>;
    using HeadTile = Tile<T, kHead>;
    const ChunkHead c = chunk_head(p);
    if (c.rows == 0) return;

    extern __shared__ __align__(128) char smem[];
    const uint32_t s0 = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    const HeadTile s_q{s0 + Cfg::kQ}, s_k{s0 + Cfg::kK}, s_v{s0 + Cfg::kV};
    const Tile<T, kRows> s_A{s0 + Cfg::kA}, s_Ab{s0 + Cfg::kAb}, s_Aqk{s0 + Cfg::kAqk};
    const Square s_L{s0 + Cfg::kL};
    const uint32_t s_totals = s0 + Cfg::kTotals, s_rq = s0 + Cfg::kPerRow, s_rk = s_rq + 4 * kRows,
                   s_b = s_rk + 4 * kRows;
    const int lane = lane_id(), warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;

    const int64_t qk0 = (c.row * p.H + c.h) * kHead, stride_qk = int64_t{p.H} * kHead;
    const int64_t row0 = c.row * p.HV + c.hv;  // of the value-head tensors; the next one is HV further
    copy_rows(s_q, static_cast<const T*>(p.q) + qk0, stride_qk, c.rows);
    copy_rows(s_k, static_cast<const T*>(p.k) + qk0, stride_qk, c.rows);
    copy_commit();
    const auto load_v = [&] {
        copy_rows(s_v, static_cast<const T*>(p.v) + row0 * kHead, int64_t{p.HV} * kHead, c.rows);
    };
    if constexpr (kBackward) {
        copy_rows(s_Ab, static_cast<const T*>(p.A) + row0 * kRows, int64_t{p.HV} * kRows, c.rows);
        load_v();
        copy_commit();
    }
    Decays<kHead> decays;
    decays.template load<T>(p, c);
    write_strengths<T>(s_b, p, c);
    decays.finish(s_totals, p, c);
    copy_wait<kBackward ? 1 : 0>();
    __syncthreads();  // q and k have arrived
    write_inverse_norms(s_rq, s_q, s_k, p.qk_l2norm);

    // q and k of a unit, then after their norm.
    const auto load_raw = [&](const HeadTile& x, int segment, float2(&out)[kSegment]) {
#pragma unroll
        for (int i = 0; i < kSegment; ++i) out[i] = load2(x, segment * kSegment + i, 0, Own::col());
    };
    const auto load_unit = [&](const HeadTile& x, uint32_t r, int segment, float2(&out)[kSegment]) {
        float norm[2][4];
        shared_f32x4(norm[0], r + segment * kSegment * 4);
        shared_f32x4(norm[1], r + segment * kSegment * 4 + 16);
#pragma unroll
        for (int i = 0; i < kSegment; ++i)
            out[i] = load2(x, segment * kSegment + i, 0, Own::col()) * norm[i / 4][i % 4];
    };

    // A warp's products of pairs at the small levels, of q and k before their norm. Two warps share 16 rows of the
    // chunk: one takes levels 1 and 2, the other level 4 and the diagonal of q k^T, whose two halves of 8 columns are
    // two products.
    float small[3][4] = {};
    const int group = warp / 2;
    if constexpr (!kBackward) {
#pragma unroll
        for (int u = 0; u < Own::kUnits; ++u) {
            float2 q[kSegment], k[kSegment];
            load_raw(s_q, Own::segment(u), q);
            load_raw(s_k, Own::segment(u), k);
            write_small_levels<T, kHead>(s0 + Cfg::kOperands, Cfg::kLevel, Own::segment(u), Own::col(), decays.x[u], q,
                                         k);
        }
        __syncthreads();
        if (warp % 2 == 0) {
            add_level(small[0], HeadTile{s0 + Cfg::kOperands}, lane, group);
            add_level(small[1], HeadTile{s0 + Cfg::kOperands + Cfg::kLevel}, lane, group);
        } else {
            add_level(small[0], HeadTile{s0 + Cfg::kOperands + 2 * Cfg::kLevel}, lane, group);
            add_16x16(small[1], small[2], s_q, s_k, lane, 16 * group, 16 * group);
        }
    }
    __syncthreads();  // the norms are there; k and the small levels make room

    // Levels 8, 16 and 32, and the outputs that are elementwise: R and C of whole segments, times what lies between the
    // segment and the border of its block (before, after), at last between the segment and the chunk's ends.
    // A thread's first element in an image of qd or kr, but for the permutation.
    const int64_t image = c.entry * Cfg::kTile + Own::segment(0) * kSegment * HeadTile::kRowBytes;
    char* const qd = static_cast<char*>(p.qd) + image;
    char* const kr = static_cast<char*>(p.kr) + image;
    const auto store_image = [&](char* at, int u, int i, float2 x) {
        constexpr int kStep = Own::kUnits > 1 ? kRows / Own::kUnits * HeadTile::kRowBytes : 0;  // between units
        const uint32_t column = HeadTile{0}.at(i, 0, Own::col()) - i * HeadTile::kRowBytes;
        *reinterpret_cast<uint32_t*>(at + column + (u * kStep + i * HeadTile::kRowBytes)) = pack2<T>(x.x, x.y);
    };
#pragma unroll
    for (int u = 0; u < Own::kUnits; ++u) {
        const int segment = Own::segment(u), col = Own::col();
        const float2(&d)[kSegment] = decays.x[u];
        float2 k[kSegment];
        load_unit(s_k, s_rk, segment, k);
        const auto lower = [&](const auto& use) {  // k C
            float2 C = make_float2(1.f, 1.f);
#pragma unroll
            for (int i = kSegment - 1; i >= 0; --i) {
                use(i, k[i] * C);
                if (i > 0) C = C * d[i];
            }
        };
        const auto upper = [&](const auto& use) {  // q R, k R
            float2 q[kSegment], R = d[0];
            load_unit(s_q, s_rq, segment, q);
#pragma unroll
            for (int i = 0; i < kSegment; ++i) {
                if (i > 0) R = R * d[i];
                use(i, q[i] * R, k[i] * R);
            }
        };
        float2 q_upper[kSegment], k_upper[kSegment], k_lower[kSegment];
        if constexpr (!kBackward) {
            lower([&](int i, float2 x) { k_lower[i] = x; });
            upper([&](int i, float2 x, float2 y) { q_upper[i] = x, k_upper[i] = y; });
        }
        const uint32_t totals = s_totals + col * 4;
        float2 before = make_float2(1.f, 1.f), after = before;
        const auto write_level = [&](int l) {
            if constexpr (!kBackward) {
                const int s = 1 << l, r = without_bit(segment, s) * kSegment;
                const HeadTile x{s0 + Cfg::kOperands + l * Cfg::kLevel};
                if (segment & s) {
#pragma unroll
                    for (int i = 0; i < kSegment; ++i) {
                        const float2 y = q_upper[i] * before, z = k_upper[i] * before;
                        store2(x, r + i, Level<T, kHead>::kQUpper, col, y.x, y.y);
                        store2(x, r + i, Level<T, kHead>::kKUpper, col, z.x, z.y);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < kSegment; ++i) {
                        const float2 z = k_lower[i] * after;
                        store2(x, r + i, Level<T, kHead>::kKLower, col, z.x, z.y);
                    }
                }
            }
        };
        const auto extend = [&](float2 beside, int s) {
            if (segment & s) {
                before = before * beside;
            } else {
                after = after * beside;
            }
        };
        write_level(0);
        extend(totals_beside<1, kHead>(totals, segment), 1);
        write_level(1);
        extend(totals_beside<2, kHead>(totals, segment), 2);
        write_level(2);
        extend(totals_beside<4, kHead>(totals, segment), 4);
        const float2 scaled = before * (p.scale * kStoredScale<T>);
        const auto put_lower = [&](int i, float2 x) {
            store_image(kr, u, i, x * after);
        };
        const auto put_upper = [&](int i, float2 x, float2 y) {
            const int r = segment * kSegment + i;
            const float2 kg = y * before * kStoredScale<T>;
            store2(s_k, r, 0, col, kg.x, kg.y);
            store_image(qd, u, i, x * scaled);
        };
        if constexpr (kBackward) {
            lower(put_lower);
            upper(put_upper);
        } else {
#pragma unroll
            for (int i = 0; i < kSegment; ++i) {
                put_lower(i, k_lower[i]);
                put_upper(i, q_upper[i], k_upper[i]);
            }
        }
        if (segment == kSegments - 1) {
            const float2 all = before * shared_f32x2(totals + segment * kHead * 4);
            store_global2(p.decay + c.entry * kHead + col, all.x, all.y);
        }
    }

    if constexpr (kBackward) {
        copy_wait<0>();
        const int r0 = threadIdx.x / 8, col = threadIdx.x % 8 * 8;  // as copy_rows: a thread's own copies
        float b[2][4];
        shared_f32x4(b[0], s_b + col * 4);
        shared_f32x4(b[1], s_b + col * 4 + 16);
#pragma unroll
        for (int r = r0; r < kRows; r += kRawThreads / 8) {
            float x[4];
            shared_f32x4(x, s_Ab.at(r, 0, col));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 a = unpack2<T>(__float_as_uint(x[j]));
                x[j] = __uint_as_float(pack2<T>(a.x * b[j / 2][j % 2 * 2], a.y * b[j / 2][j % 2 * 2 + 1]));
            }
            set_shared_f32x4(s_Ab.at(r, 0, col), x);
        }
    } else {
        __syncthreads();
        // Warps 0 to 3: level 8, 16 rows of the chunk each, and level 16, a block's q or k. Warps 4 to 7: level 32, 16
        // rows of q or k.
        const int of_k = warp < 4 ? warp % 2 : warp / 2 % 2, part = warp < 4 ? warp / 2 : warp % 2;
        float far[4][4] = {};
        {
            const HeadTile x_8{s0 + Cfg::kOperands}, x_16{s0 + Cfg::kOperands + Cfg::kLevel},
                x_32{s0 + Cfg::kOperands + 2 * Cfg::kLevel};
            constexpr int kLower = Level<T, kHead>::kKLower;
            const int upper = Level<T, kHead>::kKUpper * of_k + 16 * part;
            if (warp < 4) {
                add_16x16(far[0], far[1], x_16, x_16, lane, upper, kLower + 16 * part);
                add_level(far[2], x_8, lane, warp);
            } else {
#pragma unroll
                for (int i = 0; i < kHead / 16; ++i) {
                    FragB<T> b[2][2];
                    row_b(b[0], x_32, lane, kLower, i);
                    row_b(b[1], x_32, lane, kLower + 16, i);
                    const FragA<T> a = row_a(x_32, lane, upper, i);
#pragma unroll
                    for (int j = 0; j < 4; ++j) mma(far[j], a, b[j / 2][j % 2]);
                }
            }
        }

        // L and Aqk, over q and the segments' totals.
        const auto of_row = [](uint32_t x, int row) { return __uint_as_float(shared_u32(x + 4 * row)); };
        const auto put = [&](bool k, int row, int col, float x, float y) {
            if (k) {
                const float b = of_row(s_b, row);
                store2(s_L, row, 0, col, b * x, b * y);
            } else {
                store2(s_Aqk, row, 0, col, p.scale * x, p.scale * y);
            }
        };
        const auto put_raw = [&](const float(&x)[4], int s) {  // s > 1: a lane's two columns are neighbours
            if (g / s != 2 * t / s) return;  // of different blocks
            const int row = 16 * group + with_bit(g, s, 1), col = 16 * group + with_bit(2 * t, s, 0);
            const float2 r = shared_f32x2(s_rk + 4 * col);
            const float q = of_row(s_rq, row), k = of_row(s_rk, row);
            put(false, row, col, q * (r.x * x[0]), q * (r.y * x[1]));
            put(true, row, col, k * (r.x * x[2]), k * (r.y * x[3]));
        };
        if (warp % 2 == 0) {
            if (g / 2 == t) {  // level 1: one of the lane's two columns
                const int row = 16 * group + 2 * g + 1;
                const bool second = g % 2;
                const float r = of_row(s_rk, row - 1), q = p.scale * of_row(s_rq, row),
                            k = of_row(s_b, row) * of_row(s_rk, row);
                store1(s_Aqk, row, 0, row - 1, from_float<T>(q * (r * (second ? small[0][1] : small[0][0]))));
                store1(s_L, row, 0, row - 1, k * (r * (second ? small[0][3] : small[0][2])));
            }
            put_raw(small[1], 2);
        } else {
            put_raw(small[0], 4);
            if (g / 2 == t) {
                const int row = 16 * group + g;
                const bool second = g % 2;
                const float x[2] = {second ? small[1][1] : small[1][0], second ? small[2][3] : small[2][2]};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float r_q = of_row(s_rq, row + 8 * i), r_k = of_row(s_rk, row + 8 * i);
                    store1(s_Aqk, row + 8 * i, 0, row + 8 * i, from_float<T>(p.scale * (r_q * (r_k * x[i]))));
                }
            }
        }
        if (warp < 4) {
            put(false, 16 * warp + 8 + g, 16 * warp + 2 * t, far[2][0], far[2][1]);
            put(true, 16 * warp + 8 + g, 16 * warp + 2 * t, far[2][2], far[2][3]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = (warp < 4 ? 32 * part + 16 : 32 + 16 * part) + 8 * i + g;
            const int col = (warp < 4 ? 32 * part : 0) + 2 * t;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (warp >= 4 || j < 2) put(of_k, row, col + 8 * j, far[j][2 * i], far[j][2 * i + 1]);
        }
        __syncthreads();
        load_v();
        copy_commit();

        if (warp < 2) {
            invert_blocks(s_L, lane, 32 * warp);
            join_blocks(s_L, lane, 32 * warp);
        } else {  // Aqk, without what was never written above its diagonal
            T* out = static_cast<T*>(p.Aqk) + row0 * kRows;
            const int64_t stride = int64_t{p.HV} * kRows;
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                const int r = threadIdx.x / 8 - 8 + 24 * i, col = threadIdx.x % 8 * 8;
                if (r >= c.rows) break;
                float x[4] = {};
                if (col <= r) {
                    shared_f32x4(x, s_Aqk.at(r, 0, col));
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int at = col + 2 * j;
                        const uint32_t mask = at < r ? ~0u : at == r ? 0xffffu : 0u;
                        x[j] = __uint_as_float(__float_as_uint(x[j]) & mask);
                    }
                }
                store_global4(reinterpret_cast<float*>(out + r * stride + col), x[0], x[1], x[2], x[3]);
            }
        }
        __syncthreads();

        // A and A diag(b) in 16 bits: the two halves' squares, 8 columns a thread, then what joins them.
        join_halves_first(s_L, lane, warp);
        if (const int r = threadIdx.x / 4, col = r / 32 * 32 + threadIdx.x % 4 * 8; col / 16 <= r / 16) {
            float x[4], xb[4];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float y[4], b[4];
                load4(y, s_L, r, 0, col + 4 * e);
                shared_f32x4(b, s_b + (col + 4 * e) * 4);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint32_t a = pack2<T>(y[2 * j], y[2 * j + 1]);
                    const float2 z = unpack2<T>(a);
                    x[2 * e + j] = __uint_as_float(a);
                    xb[2 * e + j] = __uint_as_float(pack2<T>(z.x * b[2 * j], z.y * b[2 * j + 1]));
                }
            }
            set_shared_f32x4(s_A.at(r, 0, col), x);
            set_shared_f32x4(s_Ab.at(r, 0, col), xb);
        }
        __syncthreads();
        float lower[4];
        join_halves_second(lower, s_L, lane, warp);
        const int col = warp / 2 * 8 + 2 * t;
        const float2 b = shared_f32x2(s_b + 4 * col);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = 32 + warp % 2 * 16 + g;
            const uint32_t a = pack2<T>(lower[2 * i], lower[2 * i + 1]);
            const float2 z = unpack2<T>(a);
            set_shared_u32(s_A.at(r, 8 * i, col), a);
            store2(s_Ab, r, 8 * i, col, z.x * b.x, z.y * b.y);
        }
        copy_wait<0>();
    }
    __syncthreads();

    // w and u, 16 or 32 columns a warp, over the columns of k 2^g and v that no other warp reads.
    constexpr int kN = kHead / 32;
    const HeadTile x{warp < 4 ? s_k.base : s_v.base};
    const int col0 = warp % 4 * (8 * kN);
    FragB<T> f[kN][2][2];
    FragA<T> a[10];  // of the lower triangle, by rows
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) col_b(f[n][i], x, lane, col0 + 8 * n, i);
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int i = 0; i <= m; ++i) a[m * (m + 1) / 2 + i] = row_a(s_Ab, lane, 16 * m, i);
    if constexpr (!kBackward) {
        T* out = static_cast<T*>(p.A) + row0 * kRows;
        const int64_t stride = int64_t{p.HV} * kRows;
        const int col = threadIdx.x % 8 * 8;
#pragma unroll
        for (int r = threadIdx.x / 8; r < kRows; r += kRawThreads / 8) {
            if (r >= c.rows) break;
            float y[4] = {};
            if (col <= r) shared_f32x4(y, s_A.at(r, 0, col));
            store_global4(reinterpret_cast<float*>(out + r * stride + col), y[0], y[1], y[2], y[3]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        float d[kN][4] = {};
#pragma unroll
        for (int i = 0; i <= m; ++i)
#pragma unroll
            for (int n = 0; n < kN; ++n) mma(d[n], a[m * (m + 1) / 2 + i], f[n][i / 2][i % 2]);
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                store2(x, g, 16 * m + 8 * i, col0 + 8 * n + 2 * t, d[n][2 * i], d[n][2 * i + 1]);
    }
    __syncwarp();
    char* const out = static_cast<char*>(warp < 4 ? p.w : p.u) + c.entry * Cfg::kTile;
    constexpr int kPieces = kN, kRowsAtOnce = 32 / kPieces;
#pragma unroll
    for (int r = lane / kPieces; r < kRows; r += kRowsAtOnce) {
        const uint32_t at = x.at(r, 0, col0 + lane % kPieces * 8);
        float y[4];
        shared_f32x4(y, at);
        store_global4(reinterpret_cast<float*>(out + (at - x.base)), y[0], y[1], y[2], y[3]);
    }
}

namespace {

template <class T, int kHead>
cudaError_t launch(const KdaParams& p, bool backward, cudaStream_t stream) {
    const int64_t blocks = p.NT * p.HV;
    return backward ? launch_kernel<kda_prepare_kernel<T, kHead, true>>(
                          blocks, kRawThreads, KdaPrepareTile<kHead, true>::kBytesTotal, stream, p)
                    : launch_kernel<kda_prepare_kernel<T, kHead, false>>(
                          blocks, kRawThreads, KdaPrepareTile<kHead, false>::kBytesTotal, stream, p);
}

}  // namespace

cudaError_t kda_prepare(const KdaParams& p, bool backward, cudaStream_t stream) {
    if (p.K != p.V || (p.K != 64 && p.K != 128) || p.main == Main::F32) return cudaErrorInvalidValue;
    if (p.main == Main::F16)
        return p.K == 64 ? launch<half, 64>(p, backward, stream) : launch<half, 128>(p, backward, stream);
    return p.K == 64 ? launch<bf16, 64>(p, backward, stream) : launch<bf16, 128>(p, backward, stream);
}

}  // namespace kda
