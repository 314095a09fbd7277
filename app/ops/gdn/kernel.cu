// Projection replay of OneLA 3.4 in one kernel: shared-context projection on tensor cores, replay of the ancestors'
// records, the update, the output and the new record. No state of a beam exists anywhere.
//
// build: K=128 V=128,512 VT=128 BF16=0,1 OUT32=0,1 WGMMA=0 STAGED=0,1 spill=32
// build: K=256 V=128,512 VT=64 BF16=0,1 OUT32=0,1 WGMMA=0 STAGED=0
// build: K=128 V=128,512 VT=128 BF16=0,1 OUT32=0,1 WGMMA=1 STAGED=1 arch=sm_90a spill=32
// build: K=256 V=128,512 VT=64 BF16=0,1 OUT32=0,1 WGMMA=1 STAGED=0 arch=sm_90a
//
// Compiled with -DK -DV -DVT -DBF16 (0: float16 inputs) -DOUT32 (1: float32 output) -DWGMMA (1: sm_90a, whose warpgroups
// read S_ctx from shared memory once for four warps; 0: mma.sync of sm_80 and later, once for each) -DSTAGED (1, with K 128
// and 112 KiB of shared memory: q, k and v of a warp's next beams are on their way while it has the ones before).
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
#define AHEAD (K == 128)   // the next key is on its way while one is multiplied
#define GROUPS (THREADS / 128)  // warpgroups, of 32 beams each
#define KS (K / 16)
#define KP (K / 32)
#define VJ (VT / 32)
#define VH (K == 128 ? 64 : 32)  // columns whose accumulators are in registers at a time
#define NT (VH / 8)
#define HJ (VH / 32)
#define STEPS 4  // pieces of S_ctx that a thread loads before it converts them; two ancestors a thread of a quad: 8 in all

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

// Keeps the compiler from unpacking before a loop what fits the registers only packed.
__device__ __forceinline__ void packed_here(uint4 (&x)[KP]) {
#pragma unroll
    for (int p = 0; p < KP; p++) asm volatile("" : "+r"(x[p].x), "+r"(x[p].y), "+r"(x[p].z), "+r"(x[p].w));
}

__device__ __forceinline__ u32 word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// Beyond float16's range a delta is held at its largest value; NaN stays NaN.
__device__ __forceinline__ float held(float x) { return fabsf(x) > 65504.f ? copysignf(65504.f, x) : x; }

// A row's ancestor in one column. Whatever a tombstone holds stays inside of the slots.
__device__ __forceinline__ int ancestor(const int* ancestry, int row, int columns, int t, int compact, i64 slots) {
    if (t >= columns) return 0;
    const int slot = compact ? row : ancestry[(i64)row * columns + t];
    return slot < 0 ? 0 : slot >= slots ? (int)slots - 1 : slot;
}

__device__ __forceinline__ void load_key(uint4 (&x)[KP], const unsigned short* past) {
#pragma unroll
    for (int p = 0; p < KP; p++) x[p] = load_ancestor(past + 32 * p);
}

// 16 bytes into shared memory behind the thread's back; only the thread that asked for them reads them.
__device__ __forceinline__ void stage(uint4* to, const unsigned short* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void staged_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// At v nothing else is under way.
__device__ __forceinline__ void staged_wait_all() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// A thread's share of its beam's q and k, and of v, if there is such a beam.
__device__ __forceinline__ void stage_qk(uint4* to, const unsigned short* q, int hk, bool there) {
    if (there)
#pragma unroll
        for (int p = 0; p < KP; p++) {
            stage(to + p * THREADS, q + 32 * p);
            stage(to + (KP + p) * THREADS, q + hk * K + 32 * p);
        }
    staged_group();
}

__device__ __forceinline__ void stage_v(uint4* to, const unsigned short* v, bool there) {
    if (there)
#pragma unroll
        for (int J = 0; J < VJ; J++) stage(to + (2 * KP + J) * THREADS, v + 32 * J);
    staged_group();
}

// At q and k only v, the newest group, may still be under way.
__device__ __forceinline__ void staged_wait() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// Where 4 rows by 4 columns of S_ctx begin: a warp takes 4 rows of k by 32 columns at a time, its threads by v4 and c.
__device__ __forceinline__ void piece(int i, int& k, int& v) {
    const int c = i & 3, v4 = (i >> 2) & 7, rest = i >> 5, s = rest / VJ;
    k = 32 * (s >> 1) + 8 * c + 4 * (s & 1), v = 32 * (rest % VJ) + 4 * v4;
}

__device__ __forceinline__ void store_state(uint4* packed, const uint4 (&x)[4], int i) {
    const int c = i & 3, v4 = (i >> 2) & 7, rest = i >> 5, J = rest % VJ, s = rest / VJ;
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const int in8 = (4 * v4 + m) & 7, n = 2 * (v4 >> 1) + (in8 & 1), j = 4 * J + (in8 >> 1);
        float f[4], h0, h1, h2, h3;
#pragma unroll
        for (int e = 0; e < 4; e++) f[e] = __uint_as_float(word(x[e], m));
        uint4 b;
        b.x = pack(f[0], f[1]), b.y = pack(f[2], f[3]);
        unpack(b.x, h0, h1), unpack(b.y, h2, h3);
        b.z = pack(f[0] - h0, f[1] - h1), b.w = pack(f[2] - h2, f[3] - h3);
#if WGMMA
        place(packed, 0, s, 0, j, n, c) = b.x, place(packed, 0, s, 1, j, n, c) = b.y;
        place(packed, 1, s, 0, j, n, c) = b.z, place(packed, 1, s, 1, j, n, c) = b.w;
#else
        packed[(j * KS + s) * 32 + n * 4 + c] = b;
#endif
    }
}

// This block's columns of S_ctx, float32 [K, V] in memory, as hi and lo fragments in shared memory.
__device__ __forceinline__ void load_state(const float* state, uint4* packed) {
#pragma unroll 1
    for (int start = threadIdx.x; start < K / 4 * (VT / 4); start += STEPS * THREADS) {
        uint4 x[STEPS][4];
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int k, v;
            piece(start + i * THREADS, k, v);
#pragma unroll
            for (int e = 0; e < 4; e++) x[i][e] = load_ancestor(state + (i64)(k + e) * V + v);
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) store_state(packed, x[i], start + i * THREADS);
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
    extern __shared__ uint4 packed[];  // the state's fragments, then each thread's staged q, k and v
    const int split = blockIdx.x % splits, rest = blockIdx.x / splits;
    const int tile_v = rest % (V / VT), h = rest / (V / VT) % hv, r = rest / (V / VT) / hv;
    const int begin = row_start[r], end = row_start[r + 1];
    if (begin + split * GROUPS * 32 >= end) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, c = lane & 3, quad = lane & ~3;
    const int hq = h / (hv / hk), stride = splits * GROUPS * 32;
    const int beam = warp % 4 * 8 + (lane >> 2);
    int tile = begin + (split * GROUPS + warp / 4) * 32, row = min(tile + beam, end - 1);
    const int at_q = hq * K + 8 * c, at_v = 2 * hk * K + h * V + tile_v * VT + 8 * c;
#if STAGED
    uint4* mine = packed + VT / 8 * KS * 32 + threadIdx.x;
    stage_qk(mine, window + (i64)row * channels + at_q, hk, true);
    stage_v(mine, window + (i64)row * channels + at_v, true);
#endif
    int slot0 = ancestor(ancestry, row, columns, first + c, compact, slots);
    int slot1 = ancestor(ancestry, row, columns, first + c + 4, compact, slots);
    load_state(s_ctx + ((i64)r * hv + h) * K * V + tile_v * VT, packed);
#if WGMMA
    fence_async();
#endif
    __syncthreads();

    while (tile < end) {
        const bool live = tile + beam < end;
        const int next_row = min(tile + stride + beam, end - 1);
#if !STAGED
        const unsigned short* own = window + (i64)row * channels;
#endif
        const float log_decay = log_alpha[(i64)row * hv + h];
        const i64 written = (i64)into * slots + row;
        uint4 q[KP], k[KP];
        float qq = 0.f, kk = 0.f, qk = 0.f;
#if STAGED
        staged_wait();
#endif
#pragma unroll
        for (int p = 0; p < KP; p++) {
#if STAGED
            q[p] = mine[p * THREADS], k[p] = mine[(KP + p) * THREADS];
#else
            q[p] = load_once(own + at_q + 32 * p), k[p] = load_once(own + at_q + hk * K + 32 * p);
#endif
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

        // How much of each ancestor's delta belongs to u_q and to u_k: k_j . q and k_j . k times the decay of all that came
        // later. Thread c of a quad keeps ancestors c and c + 4.
        const int count = columns - first;
        const float a0 = c < count ? alpha[((i64)(first + c) * slots + slot0) * hv + h] : 1.f;
        const float a1 = c + 4 < count ? alpha[((i64)(first + c + 4) * slots + slot1) * hv + h] : 1.f;
        float q0 = 0.f, q1 = 0.f, k0 = 0.f, k1 = 0.f, kept = 1.f;
        uint4 x[KP];
        const unsigned short* past = key + ((i64)first * slots + __shfl_sync(0xffffffffu, slot0, quad)) * hk * K + at_q;
        if (AHEAD && count) load_key(x, past);
#pragma unroll 1
        for (int j = 0; j < count; j++) {
            const int from = __shfl_sync(0xffffffffu, j + 1 < 4 ? slot0 : slot1, quad + ((j + 1) & 3));
            if (!AHEAD) load_key(x, past);
            past = key + ((i64)(first + j + 1) * slots + from) * hk * K + at_q;
            float cq = 0.f, ck = 0.f;
            packed_here(q), packed_here(k);
#pragma unroll
            for (int p = 0; p < KP; p++) {
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    float x0, x1, y0, y1, z0, z1;
                    unpack_half(word(x[p], w), x0, x1);
                    unpack(word(q[p], w), y0, y1), unpack(word(k[p], w), z0, z1);
                    cq += x0 * y0 + x1 * y1, ck += x0 * z0 + x1 * z1;
                }
                if (AHEAD && j + 1 < count) x[p] = load_ancestor(past + 32 * p);
            }
            cq = quad_sum(cq) * rq, ck = quad_sum(ck) * rk;
            if (c == j) q0 = cq, k0 = ck;
            if (c + 4 == j) q1 = cq, k1 = ck;
        }
#pragma unroll 1
        for (int j = count - 1; j >= 0; j--) {
            if (c == j) q0 *= kept, k0 *= kept;
            if (c + 4 == j) q1 *= kept, k1 *= kept;
            kept *= __shfl_sync(0xffffffffu, j < 4 ? a0 : a1, quad + (j & 3));
        }

        if (live && into >= 0 && tile_v == 0) {
            if (c == 0) alpha[written * hv + h] = expf(log_decay);
            if (h % (hv / hk) == 0) {  // one value head of a group writes the key
#pragma unroll
                for (int p = 0; p < KP; p++) {
                    u32 y[4];
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        float y0, y1;
                        unpack(word(k[p], w), y0, y1);
                        y[w] = pack_half(y0 * rk, y1 * rk);
                    }
                    *(uint4*)(key + written * hk * K + at_q + 32 * p) = make_uint4(y[0], y[1], y[2], y[3]);
                }
            }
        }

        const float gate = beta[(i64)row * hv + h];
        const float decay = expf(log_decay), uq = rq * kept, uk = rk * kept;
#pragma unroll 1
        for (int half = 0; half < VT / VH; half++) {
            __syncwarp();
            const int column = h * V + tile_v * VT + half * VH + 8 * c;
#if STAGED
#pragma unroll
            for (int p = 0; p < KP; p++) q[p] = mine[p * THREADS], k[p] = mine[(KP + p) * THREADS];
#endif
            uint4 d[HJ];
            const unsigned short* wrote =
                delta + ((i64)first * slots + __shfl_sync(0xffffffffu, slot0, quad)) * hv * V + column;
            if (count)
#pragma unroll
                for (int J = 0; J < HJ; J++) d[J] = load_ancestor(wrote + 32 * J);
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
#if STAGED
            if (half == VT / VH - 1) stage_qk(mine, window + (i64)next_row * channels + at_q, hk, tile + stride < end);
#endif
#pragma unroll
            for (int j = 0; j < NT; j++) u[j][0] *= uq, u[j][1] *= uq, u[j][2] *= uk, u[j][3] *= uk;

#pragma unroll 1
            for (int j = 0; j < count; j++) {
                const float cq = __shfl_sync(0xffffffffu, j < 4 ? q0 : q1, quad + (j & 3));
                const float ck = __shfl_sync(0xffffffffu, j < 4 ? k0 : k1, quad + (j & 3));
                const int from = __shfl_sync(0xffffffffu, j + 1 < 4 ? slot0 : slot1, quad + ((j + 1) & 3));
                wrote = delta + ((i64)(first + j + 1) * slots + from) * hv * V + column;
#pragma unroll
                for (int J = 0; J < HJ; J++) {
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        float d0, d1;
                        unpack_half(word(d[J], w), d0, d1);
                        float(&y)[4] = u[4 * J + w];
                        y[0] += d0 * cq, y[1] += d1 * cq, y[2] += d0 * ck, y[3] += d1 * ck;
                    }
                    if (j + 1 < count) d[J] = load_ancestor(wrote + 32 * J);
                }
            }

#if STAGED
            if (half == 0) staged_wait_all();
#endif
            const i64 at = (i64)row * hv * V + column;
            unsigned short* write = delta + written * hv * V + column;
#pragma unroll
            for (int J = 0; J < HJ; J++) {
#if STAGED
                const uint4 v = mine[(2 * KP + half * HJ + J) * THREADS];
#else
                const uint4 v = load_once(own + at_v + half * VH + 32 * J);
#endif
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
#if STAGED
        stage_v(mine, window + (i64)next_row * channels + at_v, tile + stride < end);
#endif
        slot0 = ancestor(ancestry, next_row, columns, first + c, compact, slots);
        slot1 = ancestor(ancestry, next_row, columns, first + c + 4, compact, slots);
        tile += stride, row = next_row;
    }
}
