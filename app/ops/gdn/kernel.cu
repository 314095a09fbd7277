// Projection replay of OneLA 3.4 in one kernel: shared-context projection on tensor cores, replay of the ancestors'
// records, the update, the output and the new record. No state of a beam exists anywhere.
//
// build: K=128 V=128,512 VT=128 BF16=0,1 OUT32=0,1 WGMMA=0 spill=8
// build: K=256 V=128,512 VT=64 BF16=0,1 OUT32=0,1 WGMMA=0
// build: K=128 V=128,512 VT=128 BF16=0,1 OUT32=0,1 WGMMA=1 arch=sm_90a spill=8
// build: K=256 V=128,512 VT=64 BF16=0,1 OUT32=0,1 WGMMA=1 arch=sm_90a
//
// Compiled with -DK -DV -DVT -DBF16 (0: float16 inputs) -DOUT32 (1: float32 output) -DWGMMA (1: sm_90a, whose warpgroups
// read S_ctx from shared memory once for four warps; 0: mma.sync of sm_80 and later, once for each).
//
// One block: one request, one value head, VT columns of its state, and a share of its beams. One warp: 8 beams at a time.
// In m16n8k16 the queries of the beams are rows 0-7 of A and their keys rows 8-15, so one thread holds u_q and u_k of the
// same beam and columns, and all that follows is its own business but for the dot products, which a quad shares.
//
// S_ctx is float32; as hi + lo in 16 bit (relative 2^-17) it takes two products. Inside a fragment the K and V indices are
// permuted so that every access to q, k, v, records and outputs is 16 bytes and a quad covers 64:
//     physical k = 32 (s / 2) + 8 c + 4 (s % 2) + {0, 1 | 2, 3}        s: step of 16 of K, c = lane % 4
//     physical v = 32 (j / 4) + 8 (n / 2) + 2 (j % 4) + n % 2          j: tile of 8 of V, n: column of the tile
//
// No header is included: conversions are single instructions, and NVRTC then needs no toolkit beside it.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define THREADS (K == 128 ? 256 : 128)  // with K 256, q and k alone are 64 registers
#define BLOCKS (K == 128 ? 2 : 3)
#define AHEAD (K == 128)
#define GROUPS (THREADS / 128)  // warpgroups, of 32 beams each
#define KS (K / 16)
#define KP (K / 32)
#define VJ (VT / 32)
#define VH (K == 128 ? 64 : 32)  // columns whose accumulators are in registers at a time
#define NT (VH / 8)
#define HJ (VH / 32)
#define DEPTH 8  // ancestors that fit the coefficients' place in shared memory

__device__ __forceinline__ void unpack_half(u32 x, float& a, float& b) {
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
}

__device__ __forceinline__ u32 pack_half(float a, float b) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
    return x;
}

__device__ __forceinline__ u32 pack_bfloat(float a, float b) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
    return x;
}

#if BF16
__device__ __forceinline__ void unpack(u32 x, float& a, float& b) {
    a = __uint_as_float(x << 16);
    b = __uint_as_float(x & 0xffff0000u);
}
#define pack pack_bfloat
#define MMA_TYPES "bf16.bf16"
#else
#define unpack unpack_half
#define pack pack_half
#define MMA_TYPES "f16.f16"
#endif

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPES ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#if WGMMA
#define LEAD (NT * 128)  // bytes from 8 of K to the next 8, in core matrices of 8 columns by 16 bytes without swizzle

#if VH == 64
#define ACCUMULATORS "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define OPERANDS "{%32,%33,%34,%35}, %36"
#define FIRST "%37"
#define SHAPE "m64n64k16"
#else
#define ACCUMULATORS "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define OPERANDS "{%16,%17,%18,%19}, %20"
#define FIRST "%21"
#define SHAPE "m64n32k16"
#endif
#define REGISTERS(j) "+f"(u[j][0]), "+f"(u[j][1]), "+f"(u[j][2]), "+f"(u[j][3])

// A warpgroup's product of one step of K: each warp's A is as in mma.sync, B is shared memory at `b`.
__device__ __forceinline__ void wgmma(float (&u)[NT][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, " FIRST ", 0; wgmma.mma_async.sync.aligned." SHAPE ".f32." MMA_TYPES
                 " " ACCUMULATORS ", " OPERANDS ", p, 1, 1, 0;}"
                 : REGISTERS(0), REGISTERS(1), REGISTERS(2), REGISTERS(3)
#if VH == 64
                   , REGISTERS(4), REGISTERS(5), REGISTERS(6), REGISTERS(7)
#endif
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_end() {
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

__device__ __forceinline__ u64 descriptor(const void* p) {
    return (u64)((u32)__cvta_generic_to_shared(p) >> 4) | (u64)(LEAD >> 4) << 16 | (u64)(128 >> 4) << 32;
}

__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where the pair of K of thread c belongs: term 0 hi, 1 lo; e 0, 1: the first and second 8 of step s; column n of tile j.
__device__ __forceinline__ u32& place(uint4* packed, int term, int s, int e, int j, int n, int c) {
    int row = ((j / NT * 2 + term) * (K / 8) + 2 * s + e) * LEAD + j % NT * 128 + n * 16 + c * 4;
    return *(u32*)((char*)packed + row);
}
#endif

// Read once: kept out of L1, where ancestors that siblings share should stay.
__device__ __forceinline__ uint4 load_once(const void* p) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

__device__ __forceinline__ uint4 load_ancestor(const void* p) {
    uint4 x;
    asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ u32 word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// Beyond float16's range a delta is held at its largest value; NaN stays NaN.
__device__ __forceinline__ float held(float x) { return fabsf(x) > 65504.f ? copysignf(65504.f, x) : x; }

// A row's ancestor of step t: its key, and its slot. Whatever a tombstone holds stays inside of the slots.
__device__ __forceinline__ int load_key(
    uint4 (&x)[KP], const unsigned short* key, const int* ancestry, int row, int columns, int t, int compact, i64 slots,
    int hk, int hq) {
    int slot = compact ? row : ancestry[(i64)row * columns + t];
    slot = slot < 0 ? 0 : slot >= slots ? (int)slots - 1 : slot;
    const unsigned short* past = key + ((t * slots + slot) * hk + hq) * K + 8 * (threadIdx.x & 3);
#pragma unroll
    for (int p = 0; p < KP; p++) x[p] = load_ancestor(past + 32 * p);
    return slot;
}

// This block's columns of S_ctx, float32 [K, V] in memory, as hi and lo fragments in shared memory.
__device__ __forceinline__ void load_state(const float* state, uint4* packed) {
    for (int i = threadIdx.x; i < K / 4 * (VT / 4); i += THREADS) {
        int c = i & 3, v4 = (i >> 2) & 7, rest = i >> 5;  // a warp: 4 rows of k by 32 columns
        int J = rest % VJ, s = rest / VJ;
        int k = 32 * (s >> 1) + 8 * c + 4 * (s & 1), v = 32 * J + 4 * v4;
        float x[4][4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float4 row = *(const float4*)(state + (i64)(k + e) * V + v);
            x[e][0] = row.x, x[e][1] = row.y, x[e][2] = row.z, x[e][3] = row.w;
        }
#pragma unroll
        for (int m = 0; m < 4; m++) {
            int in8 = (4 * v4 + m) & 7, n = 2 * (v4 >> 1) + (in8 & 1), j = 4 * J + (in8 >> 1);
            uint4 b;
            float h0, h1, h2, h3;
            b.x = pack(x[0][m], x[1][m]), b.y = pack(x[2][m], x[3][m]);
            unpack(b.x, h0, h1), unpack(b.y, h2, h3);
            b.z = pack(x[0][m] - h0, x[1][m] - h1), b.w = pack(x[2][m] - h2, x[3][m] - h3);
#if WGMMA
            place(packed, 0, s, 0, j, n, c) = b.x, place(packed, 0, s, 1, j, n, c) = b.y;
            place(packed, 1, s, 0, j, n, c) = b.z, place(packed, 1, s, 1, j, n, c) = b.w;
#else
            packed[(j * KS + s) * 32 + n * 4 + c] = b;
#endif
        }
    }
}

// window      [N, channels] 16 bit: q [HK, K], k [HK, K], v [HV, V] behind the convolution
// log_alpha, beta  [N, HV] float32
// s_ctx       [R, HV, K, V] float32
// alpha, delta, key   the records' slots: [steps, slots, HV] float32, [.., HV, V] and [.., HK, K] float16
// row_start   [R + 1], ancestry [N, columns] int32: columns first..columns-1 are replayed; compact: slots are the rows
// into        the step whose slots are written, -1 = none
// out         [N, HV, V]
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) replay(
    const unsigned short* __restrict__ window, int channels, const float* __restrict__ log_alpha,
    const float* __restrict__ beta, const float* __restrict__ s_ctx, float* alpha, unsigned short* delta,
    unsigned short* key, const int* __restrict__ row_start, const int* __restrict__ ancestry, int columns, int first,
    int compact, i64 slots, int into, int hk, int hv, int splits, void* __restrict__ out) {
    extern __shared__ uint4 packed[];  // the state's fragments, then DEPTH coefficients of each warp's 8 beams
    int split = blockIdx.x % splits, rest = blockIdx.x / splits;
    int tile_v = rest % (V / VT), h = rest / (V / VT) % hv, r = rest / (V / VT) / hv;
    int begin = row_start[r], end = row_start[r + 1];
    if (begin + split * GROUPS * 32 >= end) return;
    load_state(s_ctx + ((i64)r * hv + h) * K * V + tile_v * VT, packed);
#if WGMMA
    fence_async();
#endif
    __syncthreads();

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, c = lane & 3, g = lane >> 2;
    const int hq = h / (hv / hk);
    float4* weights = (float4*)(packed + VT / 8 * KS * 32) + (warp * 8 + g) * DEPTH;
    for (int tile = begin + (split * GROUPS + warp / 4) * 32; tile < end; tile += splits * GROUPS * 32) {
        const bool live = tile + warp % 4 * 8 + g < end;
        const int row = live ? tile + warp % 4 * 8 + g : end - 1;
        const unsigned short* own = window + (i64)row * channels;
        uint4 q[KP], k[KP];
        float qq = 0.f, kk = 0.f, qk = 0.f;
#pragma unroll
        for (int p = 0; p < KP; p++) {
            q[p] = load_once(own + hq * K + 32 * p + 8 * c);
            k[p] = load_once(own + (hk + hq) * K + 32 * p + 8 * c);
        }
#pragma unroll
        for (int p = 0; p < KP; p++)
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float q0, q1, k0, k1;
                unpack(word(q[p], w), q0, q1), unpack(word(k[p], w), k0, k1);
                qq += q0 * q0 + q1 * q1, kk += k0 * k0 + k1 * k1, qk += q0 * k0 + q1 * k1;
            }
        const float rq = rsqrtf(quad_sum(qq) + 1e-6f) * rsqrtf((float)K), rk = rsqrtf(quad_sum(kk) + 1e-6f);
        qk = quad_sum(qk) * rq * rk;

        // How much of each ancestor's delta belongs to u_q and to u_k: decay, k_j . q, k_j . k. The next key is on its way
        // while one is multiplied (AHEAD), where registers allow it.
        uint4 x[KP], next[KP];
        int slot = 0;
        if (AHEAD && first < columns) slot = load_key(x, key, ancestry, row, columns, first, compact, slots, hk, hq);
#pragma unroll 1
        for (int t = first; t < columns; t++) {
            if (!AHEAD) slot = load_key(x, key, ancestry, row, columns, t, compact, slots, hk, hq);
            const int found = slot;
            if (AHEAD && t + 1 < columns)
                slot = load_key(next, key, ancestry, row, columns, t + 1, compact, slots, hk, hq);
            float cq = 0.f, ck = 0.f;
#pragma unroll
            for (int p = 0; p < KP; p++)
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    float x0, x1, q0, q1, k0, k1;
                    unpack_half(word(x[p], w), x0, x1);
                    unpack(word(q[p], w), q0, q1), unpack(word(k[p], w), k0, k1);
                    cq += x0 * q0 + x1 * q1, ck += x0 * k0 + x1 * k1;
                }
            if (AHEAD)
#pragma unroll
                for (int p = 0; p < KP; p++) x[p] = next[p];
            cq = quad_sum(cq) * rq, ck = quad_sum(ck) * rk;
            if (c == 0) weights[t - first] = make_float4(alpha[(t * slots + found) * hv + h], cq, ck, __int_as_float(found));
        }
        __syncwarp();

        const float decay = expf(log_alpha[(i64)row * hv + h]), gate = beta[(i64)row * hv + h];
        const i64 mine = (i64)into * slots + row;
#pragma unroll 1
        for (int half = 0; half < VT / VH; half++) {
            __syncwarp();
            const int column = h * V + tile_v * VT + half * VH + 8 * c;
            float u[NT][4];
#pragma unroll
            for (int j = 0; j < NT; j++) u[j][0] = u[j][1] = u[j][2] = u[j][3] = 0.f;
#if WGMMA
            const u64 hi = descriptor(packed) + half * 2 * (K / 8) * (LEAD >> 4), lo = hi + K / 8 * (LEAD >> 4);
            wgmma_begin();
#endif
#pragma unroll
            for (int s = 0; s < KS; s++) {
                const u32 a0 = s & 1 ? q[s / 2].z : q[s / 2].x, a2 = s & 1 ? q[s / 2].w : q[s / 2].y;
                const u32 a1 = s & 1 ? k[s / 2].z : k[s / 2].x, a3 = s & 1 ? k[s / 2].w : k[s / 2].y;
#if WGMMA
                wgmma(u, a0, a1, a2, a3, hi + s * 2 * (LEAD >> 4), 1);
                wgmma(u, a0, a1, a2, a3, lo + s * 2 * (LEAD >> 4), 1);
#else
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    const uint4 b = packed[((half * NT + j) * KS + s) * 32 + lane];
                    mma(u[j], a0, a1, a2, a3, b.x, b.y);
                    mma(u[j], a0, a1, a2, a3, b.z, b.w);
                }
#endif
            }
#if WGMMA
            wgmma_end();
#endif
#pragma unroll
            for (int j = 0; j < NT; j++) u[j][0] *= rq, u[j][1] *= rq, u[j][2] *= rk, u[j][3] *= rk;

#pragma unroll 2
            for (int t = first; t < columns; t++) {
                const float4 by = weights[t - first];
                const i64 record = t * slots + __float_as_int(by.w);
                const unsigned short* wrote = delta + record * hv * V + column;
                uint4 d[HJ];
#pragma unroll
                for (int J = 0; J < HJ; J++) d[J] = load_ancestor(wrote + 32 * J);
#pragma unroll
                for (int J = 0; J < HJ; J++)
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        float d0, d1;
                        unpack_half(word(d[J], w), d0, d1);
                        float(&x)[4] = u[4 * J + w];
                        x[0] = by.x * x[0] + d0 * by.y, x[1] = by.x * x[1] + d1 * by.y;
                        x[2] = by.x * x[2] + d0 * by.z, x[3] = by.x * x[3] + d1 * by.z;
                    }
            }

            const unsigned short* value = own + 2 * hk * K + column;
            const i64 at = (i64)row * hv * V + column;
            unsigned short* write = delta + mine * hv * V + column;
#pragma unroll
            for (int J = 0; J < HJ; J++) {
                const uint4 v = load_once(value + 32 * J);
                u32 dd[4];
                float o[8];
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const float(&x)[4] = u[4 * J + w];
                    float v0, v1;
                    unpack(word(v, w), v0, v1);
                    const float d0 = gate * (v0 - decay * x[2]), d1 = gate * (v1 - decay * x[3]);
                    o[2 * w] = decay * x[0] + d0 * qk, o[2 * w + 1] = decay * x[1] + d1 * qk;
                    dd[w] = pack_half(held(d0), held(d1));
                }
                if (live) {
                    if (into >= 0) *(uint4*)(write + 32 * J) = make_uint4(dd[0], dd[1], dd[2], dd[3]);
#if OUT32
                    float4* to = (float4*)((float*)out + at + 32 * J);
                    to[0] = make_float4(o[0], o[1], o[2], o[3]), to[1] = make_float4(o[4], o[5], o[6], o[7]);
#else
                    *(uint4*)((unsigned short*)out + at + 32 * J) =
                        make_uint4(pack(o[0], o[1]), pack(o[2], o[3]), pack(o[4], o[5]), pack(o[6], o[7]));
#endif
                }
            }
        }
        if (live && into >= 0 && tile_v == 0) {
            if (c == 0) alpha[mine * hv + h] = decay;
            if (h % (hv / hk) == 0) {  // one value head of a group writes the key
#pragma unroll
                for (int p = 0; p < KP; p++) {
                    u32 y[4];
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        float k0, k1;
                        unpack(word(k[p], w), k0, k1);
                        y[w] = pack_half(k0 * rk, k1 * rk);
                    }
                    *(uint4*)(key + (mine * hk + hq) * K + 32 * p + 8 * c) = make_uint4(y[0], y[1], y[2], y[3]);
                }
            }
        }
        __syncwarp();  // the next tile writes the coefficients anew
    }
}
