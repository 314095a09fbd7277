// Projection replay of OneLA 3.4 in one kernel: shared-context projection on tensor cores, replay of the ancestors'
// records, the update, the output and the new record. No state of a beam exists anywhere.
//
// build: K=128 V=128,512 VT=128 BF16=0,1 OUT32=0,1 WGMMA=0 STAGED=0,1 spill=96
// build: K=256 V=128,512 VT=64 BF16=0,1 OUT32=0,1 WGMMA=0 STAGED=0 spill=16
// build: K=128 V=128,512 VT=128 BF16=0,1 OUT32=0,1 WGMMA=1 STAGED=1 arch=sm_90a spill=32
// build: K=256 V=128,512 VT=128 BF16=0,1 OUT32=0,1 WGMMA=1 STAGED=0 arch=sm_90a spill=96
//
// Compiled with -DK -DV -DVT -DBF16 (0: float16 inputs) -DOUT32 (1: float32 output) -DWGMMA (1: sm_90a, whose warpgroups
// read S_ctx from shared memory once for four warps and whose copy engine brings it there; 0: mma.sync of sm_80 and later)
// -DSTAGED (1: q, k and v of a warp's next beams are on their way while it has the ones before; with the copy engine,
// and one block on a processor, so are the records of RING / 2 ancestors).
//
// A block takes items in turn: a request, a value head, VT columns of its state, and a share of its beams. One warp: 8
// beams at a time.
// In m16n8k16 the queries of the beams are rows 0-7 of A and their keys rows 8-15, so one thread holds u_q and u_k of the
// same beam and columns, and all that follows is its own business.
//
// S_ctx comes as hi + lo in 16 bit (relative 2^-17), which takes two products, in the order of `products.cuh`; its K and V
// indices are permuted so that every access to q, k, v, records and outputs is 16 bytes and a quad covers 64:
//     physical k = 32 (s / 2) + 8 c + 4 (s % 2) + {0, 1 | 2, 3}        s: step of 16 of K, c = lane % 4
//     physical v = 32 (j / 4) + 8 (n / 2) + 2 (j % 4) + n % 2          j: tile of 8 of V, n: column of the tile
//
// A step of few beams is a chain of waits, not of bytes: what a tile of beams needs is asked for a tile ahead, ancestors'
// slots first, and with programmatic launches S_ctx is on its way while the kernel before this one ends.

#define RING (WGMMA && STAGED ? 4 : 0)                    // units of 32 bytes of records that a thread has on their way
#define GROUPS (RING ? 4 : K == 128 ? 2 : WGMMA ? 3 : 1)  // warpgroups, of 32 beams each
#define BLOCKS (RING ? 1 : K == 128 ? 2 : WGMMA ? 1 : 3)  // of a processor
#define THREADS (GROUPS * 128)
#define VH (K == 128 ? 64 : 32)  // columns whose accumulators are in registers at a time
#define HALVES (VT / VH)
#define HJ (VH / 32)
#define VJ (VT / 32)

// part: prelude/half.cuh
// part: gdn/rows.cuh
// part: gdn/products.cuh

// Beyond float16's range a delta is held at its largest value; NaN stays NaN.
__device__ __forceinline__ u32 pack_held(float a, float b) {
    u32 x;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
    return x;
}

#if STAGED
// A thread's share of its beam's q and k, and of v, if there is such a beam; only the thread that asked reads them.
__device__ __forceinline__ void stage_qk(uint4* to, const u16* q, const u16* k, bool there) {
    if (there)
#pragma unroll
        for (int p = 0; p < KP; p++) stage(to + p * THREADS, q + 32 * p), stage(to + (KP + p) * THREADS, k + 32 * p);
    staged_group();
}

__device__ __forceinline__ void stage_v(uint4* to, const u16* v, bool there) {
    if (there)
#pragma unroll
        for (int J = 0; J < VJ; J++) stage(to + (2 * KP + J) * THREADS, v + 32 * J);
    staged_group();
}
#endif

// Until all but the newest groups of copies have come.
template <int newest>
__device__ __forceinline__ void staged_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(newest) : "memory");
}

// window      [N, channels] 16 bit: q [HK, K], k [HK, K], v [HV, V] behind the convolution
// own         [N, pitch] 16 bit: k [HK, K], in the window or, with `copied` 0, in its record already
// log_alpha, beta  [N, HV] float32
// s_ctx       [R, HV, K, V] float32 as two terms
// alpha, delta, key, norm   the records' slots: [steps, slots, HV] float32, [.., HV, V] float16, [.., HK, K] 16 bit,
//             [.., HK] float32
// row_start   [R + 1], ancestry [N, columns] int32: columns first..columns-1 are replayed; compact: slots are the rows
// into        the step whose slots are written, -1 = none
// splits      shares of a request's beams; items: of all requests, heads and columns
// out         [N, HV, V]
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) replay(
    const u16* __restrict__ window, i64 channels, const u16* __restrict__ own, i64 pitch,
    const float* __restrict__ log_alpha, const float* __restrict__ beta, const u16* __restrict__ s_ctx, float* alpha,
    u16* delta, u16* key, float* norm, const int* __restrict__ row_start, const int* __restrict__ ancestry, int columns,
    int first, int compact, i64 slots, int into, int copied, int hk, int hv, int splits, int items,
    void* __restrict__ out) {
    extern __shared__ __align__(128) uint4 state[];  // then each thread's staged q, k, v and records, then the barrier
    uint4* mine = state + STATE / 16 + threadIdx.x;
    uint4* ring = mine + THREADS * (2 * KP + VJ);
    const u32 barrier = shared_address(state + STATE / 16 + (STAGED ? THREADS * (2 * KP + VJ + RING * HJ) : 0));
#if RING
    float* parked = (float*)(state + STATE / 16 + THREADS * (2 * KP + VJ + RING * HJ) + 1) + threadIdx.x;
#endif
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, c = lane & 3, quad = lane & ~3;
    const int stride = splits * GROUPS * 32, count = columns - first, beam = warp % 4 * 8 + (lane >> 2);
    barrier_make(barrier);
#if RING
    for (int item = blockIdx.x, phase = 0; item < items; item += gridDim.x, phase ^= 1) {
        const bool fresh = item == blockIdx.x;
#else
    {
        const int item = blockIdx.x, phase = 0;
        const bool fresh = true;
#endif
        const int split = item % splits, rest = item / splits;
        const int tile_v = rest % (V / VT), h = rest / (V / VT) % hv, r = rest / (V / VT) / hv;
        const u16* wanted = s_ctx + (((i64)r * hv + h) * (V / VT) + tile_v) * (STATE / 2);
        if (fresh) state_begin(barrier, state, wanted);
        const int begin = row_start[r], end = row_start[r + 1];
        const int hq = h / (hv / hk), at_k = hq * K + 8 * c, at_v = h * V + tile_v * VT + 8 * c;
        int tile = begin + (split * GROUPS + warp / 4) * 32;
        int row = max(min(tile + beam, end - 1), 0);
        int slot0 = ancestor(ancestry, row, columns, first + c, compact, slots);
        int slot1 = ancestor(ancestry, row, columns, first + c + 4, compact, slots);
        float log_decay = now(log_alpha + (i64)row * hv + h), gate = now(beta + (i64)row * hv + h);
#if WGMMA
        if (fresh) {
            asm volatile("griddepcontrol.wait;" ::: "memory");  // what follows may come from the kernel before
            asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        }
#endif
#if STAGED
        stage_qk(mine, window + row * channels + at_k, own + row * pitch + at_k, tile < end);
        stage_v(mine, window + row * channels + 2 * hk * K + at_v, tile < end);
#endif
        if (!WGMMA) staged_wait<STAGED ? 2 : 0>();
        __syncthreads();
        if (!fresh) state_begin(barrier, state, wanted);  // nobody needs the one before any more

        while (tile < end) {
            const bool live = tile + beam < end, more = tile + stride < end;
            const int next_row = min(tile + stride + beam, end - 1);
            const i64 from0 = (first + c) * slots + slot0, from1 = (first + c + 4) * slots + slot1;
            uint4 q[KP], k[KP];
            // ancestor j of the quad's beam: where its key and its delta begin
            auto slot_of = [&](int j) {
                return (first + j) * slots + __shfl_sync(0xffffffffu, j < 4 ? slot0 : slot1, quad + (j & 3));
            };
            auto key_of = [&](int j) { return key + slot_of(j) * hk * K + at_k; };
            auto delta_of = [&](int j, int half) { return delta + slot_of(j) * hv * V + at_v + half * VH; };
#if RING
            // Two units a key, then one a delta of each half.
            auto bring = [&](int e) {
                if (e < (2 + HALVES) * count) {
                    const int i = e - 2 * count, half = i >= count;
                    const u16* from = e < 2 * count ? key_of(e >> 1) + (e & 1) * 64 : delta_of(i - half * count, half);
#pragma unroll
                    for (int J = 0; J < HJ; J++) stage(ring + ((e & (RING - 1)) * HJ + J) * THREADS, from + 32 * J);
                }
                staged_group();
            };
            if (count)
#pragma unroll
                for (int e = 0; e < RING; e++) bring(e);
#else
            uint4 x[KP], d[HJ];
            if (count) load_past(x, key_of(0));
#endif
            const float a0 = c < count ? alpha[from0 * hv + h] : 1.f, a1 = c + 4 < count ? alpha[from1 * hv + h] : 1.f;
            const float n0 = c < count ? norm[from0 * hk + hq] : 0.f, n1 = c + 4 < count ? norm[from1 * hk + hq] : 0.f;
            const int next0 = ancestor(ancestry, next_row, columns, first + c, compact, slots);
            const int next1 = ancestor(ancestry, next_row, columns, first + c + 4, compact, slots);
            const float next_decay = now(log_alpha + (i64)next_row * hv + h);
            const float next_gate = now(beta + (i64)next_row * hv + h);
#if STAGED
            if (RING && count) staged_wait<RING + 1>();  // v and records may still be under way
            else staged_wait<1>();
#pragma unroll
            for (int p = 0; p < KP; p++) q[p] = mine[p * THREADS], k[p] = mine[(KP + p) * THREADS];
#else
#pragma unroll
            for (int p = 0; p < KP; p++)
                q[p] = load_once(window + row * channels + at_k + 32 * p),
                k[p] = load_once(own + row * pitch + at_k + 32 * p);
#endif
            const float qq = products(q, k, q).q;
            const Pair with_k = products(q, k, k);
            const float rq = rsqrtf(qq + 1e-6f) * rsqrtf((float)K), rk = rsqrtf(with_k.k + 1e-6f);
            const float qk = with_k.q * rq * rk;
#if STAGED
            stage_qk(mine, window + next_row * channels + at_k, own + next_row * pitch + at_k, more);
#endif

            // How much of each ancestor's delta belongs to u_q and to u_k: k_j . q and k_j . k times the decay of all that
            // came later. Thread c of a quad keeps ancestors c and c + 4.
            float q0 = 0.f, q1 = 0.f, k0 = 0.f, k1 = 0.f, kept = 1.f;
#pragma unroll 1
            for (int j = 0; j < count; j++) {
#if RING
                uint4 x[KP];
                staged_wait<RING - 2>();
#pragma unroll
                for (int p = 0; p < KP; p++) x[p] = ring[(((2 * j + p / 2) & (RING - 1)) * HJ + p % 2) * THREADS];
#endif
                const Pair by = products(q, k, x);
#if RING
                bring(2 * j + RING), bring(2 * j + 1 + RING);
#else
                if (j + 1 < count) load_past(x, key_of(j + 1));
#endif
                if (c == j) q0 = by.q * rq * n0, k0 = by.k * rk * n0;
                if (c + 4 == j) q1 = by.q * rq * n1, k1 = by.k * rk * n1;
            }
#pragma unroll 1
            for (int j = count - 1; j >= 0; j--) {
                if (c == j) q0 *= kept, k0 *= kept;
                if (c + 4 == j) q1 *= kept, k1 *= kept;
                kept *= __shfl_sync(0xffffffffu, j < 4 ? a0 : a1, quad + (j & 3));
            }
            const float decay = expf(log_decay), uq = rq * kept, uk = rk * kept;
#if RING
            __syncwarp();
            *parked = c == 0 ? qk : c == 1 ? gate : decay;  // for the end: registers are short on the way there
            __syncwarp();
#endif
            if (live && into >= 0 && tile_v == 0) {
                const i64 written = into * slots + row;
                if (c == 0) alpha[written * hv + h] = decay;
                if (h % (hv / hk) == 0) {  // one value head of a group writes the key
                    if (c == 0) norm[written * hk + hq] = rk;
                    if (copied)
#pragma unroll
                        for (int p = 0; p < KP; p++) store(key + written * hk * K + at_k + 32 * p, k[p]);
                }
            }

#if !RING
            if (count) load_past(d, delta_of(0, 0));
#endif
            state_wait(barrier, phase);
#pragma unroll 1
            for (int half = 0; half < HALVES; half++) {
                float u[NT][4];
                __syncwarp();
                project(u, q, k, state, half);
#pragma unroll
                for (int j = 0; j < NT; j++) u[j][0] *= uq, u[j][1] *= uq, u[j][2] *= uk, u[j][3] *= uk;

                // The next delta is on its way while one is multiplied: the next ancestor's, or the next half's first.
#pragma unroll 1
                for (int j = 0; j < count; j++) {
                    const float cq = __shfl_sync(0xffffffffu, j < 4 ? q0 : q1, quad + (j & 3));
                    const float ck = __shfl_sync(0xffffffffu, j < 4 ? k0 : k1, quad + (j & 3));
#if RING
                    const int e = (2 + half) * count + j;
                    uint4 d[HJ];
                    staged_wait<RING - 1>();
#pragma unroll
                    for (int J = 0; J < HJ; J++) d[J] = ring[((e & (RING - 1)) * HJ + J) * THREADS];
#else
                    const bool same = j + 1 < count;
                    const u16* next = delta_of(same ? j + 1 : 0, half + !same);
#endif
#pragma unroll
                    for (int J = 0; J < HJ; J++) {
#pragma unroll
                        for (int w = 0; w < 4; w++) {
                            float d0, d1;
                            unpack_half(word(d[J], w), d0, d1);
                            float(&y)[4] = u[4 * J + w];
                            y[0] += d0 * cq, y[1] += d1 * cq, y[2] += d0 * ck, y[3] += d1 * ck;
                        }
#if !RING
                        if (same || half + 1 < HALVES) d[J] = load(next + 32 * J);
#endif
                    }
#if RING
                    bring(e + RING);
#endif
                }

#if STAGED
                if (half == 0 && !(RING && count)) staged_wait<1>();  // v: but for records, the next q and k are newer
#endif
#if RING
                const float4 of = *(const float4*)(parked - c);
#else
                const float4 of = make_float4(qk, gate, decay, 0.f);
#endif
#pragma unroll
                for (int J = 0; J < HJ; J++) {
                    const int column = half * VH + 32 * J;
#if STAGED
                    const uint4 v = mine[(2 * KP + half * HJ + J) * THREADS];
#else
                    const uint4 v = load_once(window + row * channels + 2 * hk * K + at_v + column);
#endif
                    u32 dd[4];
                    float o[8];
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        const float(&y)[4] = u[4 * J + w];
                        float v0, v1;
                        unpack(word(v, w), v0, v1);
                        const float d0 = of.y * (v0 - of.z * y[2]), d1 = of.y * (v1 - of.z * y[3]);
                        o[2 * w] = of.z * y[0] + d0 * of.x, o[2 * w + 1] = of.z * y[1] + d1 * of.x;
                        dd[w] = pack_held(d0, d1);
                    }
                    if (live) {
                        u16* kept = delta + (into * slots + row) * hv * V + at_v + column;
                        if (into >= 0) store(kept, make_uint4(dd[0], dd[1], dd[2], dd[3]));
#if OUT32
                        float4* to = (float4*)((float*)out + (i64)row * hv * V + at_v + column);
                        to[0] = make_float4(o[0], o[1], o[2], o[3]), to[1] = make_float4(o[4], o[5], o[6], o[7]);
#else
                        store((u16*)out + (i64)row * hv * V + at_v + column, pack8(o));
#endif
                    }
                }
            }
#if STAGED
            stage_v(mine, window + next_row * channels + 2 * hk * K + at_v, more);
#endif
            slot0 = next0, slot1 = next1, log_decay = next_decay, gate = next_gate;
            tile += stride, row = next_row;
        }
        state_wait(barrier, phase);  // a block without beams does not leave before its state has come
    }
}
