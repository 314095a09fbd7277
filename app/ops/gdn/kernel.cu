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
// -DSTAGED (1: q, k and v of a warp's next beams are on their way while it has the ones before).
//
// One block: one request, one value head, VT columns of its state, and a share of its beams. One warp: 8 beams at a time.
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

#define GROUPS (K == 128 ? 2 : WGMMA ? 3 : 1)  // warpgroups, of 32 beams each
#define BLOCKS (K == 128 ? 2 : WGMMA ? 1 : 3)  // of a processor
#define THREADS (GROUPS * 128)
#define VH (K == 128 ? 64 : 32)  // columns whose accumulators are in registers at a time
#define HALVES (VT / VH)
#define HJ (VH / 32)
#define KEYS 1    // of ancestors, that are on their way at a time
#define DELTAS 1
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

// All but the newest group: at the start of a tile that is v, at its end the next q and k.
__device__ __forceinline__ void staged_wait() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// Without a copy engine the state is the oldest group of a thread.
__device__ __forceinline__ void staged_wait_state() {
#if STAGED
    asm volatile("cp.async.wait_group 2;" ::: "memory");
#else
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

// window      [N, channels] 16 bit: q [HK, K], k [HK, K], v [HV, V] behind the convolution
// own         [N, pitch] 16 bit: k [HK, K], in the window or, with `copied` 0, in its record already
// log_alpha, beta  [N, HV] float32
// s_ctx       [R, HV, K, V] float32 as two terms
// alpha, delta, key, norm   the records' slots: [steps, slots, HV] float32, [.., HV, V] float16, [.., HK, K] 16 bit,
//             [.., HK] float32
// row_start   [R + 1], ancestry [N, columns] int32: columns first..columns-1 are replayed; compact: slots are the rows
// into        the step whose slots are written, -1 = none
// out         [N, HV, V]
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) replay(
    const u16* __restrict__ window, i64 channels, const u16* __restrict__ own, i64 pitch,
    const float* __restrict__ log_alpha, const float* __restrict__ beta, const u16* __restrict__ s_ctx, float* alpha,
    u16* delta, u16* key, float* norm, const int* __restrict__ row_start, const int* __restrict__ ancestry, int columns,
    int first, int compact, i64 slots, int into, int copied, int hk, int hv, int splits, void* __restrict__ out) {
    extern __shared__ __align__(128) uint4 state[];  // then each thread's staged q, k and v, then the barrier
    uint4* mine = state + STATE / 16 + threadIdx.x;
    const u32 barrier = shared_address(state + STATE / 16 + (STAGED ? THREADS * (2 * KP + VJ) : 0));
    const int split = blockIdx.x % splits, rest = blockIdx.x / splits;
    const int tile_v = rest % (V / VT), h = rest / (V / VT) % hv, r = rest / (V / VT) / hv;
    if (!WGMMA || threadIdx.x == 0)
        state_begin(barrier, state, s_ctx + (((i64)r * hv + h) * (V / VT) + tile_v) * (STATE / 2));
    const int begin = row_start[r], end = row_start[r + 1];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, c = lane & 3, quad = lane & ~3;
    const int hq = h / (hv / hk), stride = splits * GROUPS * 32, count = columns - first;
    const int beam = warp % 4 * 8 + (lane >> 2), at_k = hq * K + 8 * c, at_v = h * V + tile_v * VT + 8 * c;
    int tile = begin + (split * GROUPS + warp / 4) * 32;
    int row = max(min(tile + beam, end - 1), 0);
    int slot0 = ancestor(ancestry, row, columns, first + c, compact, slots);
    int slot1 = ancestor(ancestry, row, columns, first + c + 4, compact, slots);
    float log_decay = now(log_alpha + (i64)row * hv + h), gate = now(beta + (i64)row * hv + h);
#if WGMMA
    asm volatile("griddepcontrol.wait;" ::: "memory");  // what follows may come from the kernel before
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#if STAGED
    stage_qk(mine, window + row * channels + at_k, own + row * pitch + at_k, tile < end);
    stage_v(mine, window + row * channels + 2 * hk * K + at_v, tile < end);
#endif
    if (!WGMMA) staged_wait_state();
    __syncthreads();

    while (tile < end) {
        const bool live = tile + beam < end, more = tile + stride < end;
        const int next_row = min(tile + stride + beam, end - 1);
        const i64 from0 = (first + c) * slots + slot0, from1 = (first + c + 4) * slots + slot1;
        uint4 q[KP], k[KP], x[KEYS][KP], d[DELTAS][HJ];
        // ancestor j of the quad's beam: where its key and its delta begin
        auto slot_of = [&](int j) { return (first + j) * slots + __shfl_sync(0xffffffffu, j < 4 ? slot0 : slot1, quad + (j & 3)); };
        auto key_of = [&](int j) { return key + slot_of(j) * hk * K + at_k; };
        auto delta_of = [&](int j) { return delta + slot_of(j) * hv * V + at_v; };
#pragma unroll
        for (int i = 0; i < KEYS; i++)
            if (i < count) load_past(x[i], key_of(i));
        const float a0 = c < count ? alpha[from0 * hv + h] : 1.f, a1 = c + 4 < count ? alpha[from1 * hv + h] : 1.f;
        const float n0 = c < count ? norm[from0 * hk + hq] : 0.f, n1 = c + 4 < count ? norm[from1 * hk + hq] : 0.f;
        const int next0 = ancestor(ancestry, next_row, columns, first + c, compact, slots);
        const int next1 = ancestor(ancestry, next_row, columns, first + c + 4, compact, slots);
        const float next_decay = now(log_alpha + (i64)next_row * hv + h), next_gate = now(beta + (i64)next_row * hv + h);
#if STAGED
        staged_wait();
#pragma unroll
        for (int p = 0; p < KP; p++) q[p] = mine[p * THREADS], k[p] = mine[(KP + p) * THREADS];
#else
#pragma unroll
        for (int p = 0; p < KP; p++)
            q[p] = load_once(window + row * channels + at_k + 32 * p), k[p] = load_once(own + row * pitch + at_k + 32 * p);
#endif
        const float qq = products(q, k, q).q;
        const Pair with_k = products(q, k, k);
        const float rq = rsqrtf(qq + 1e-6f) * rsqrtf((float)K), rk = rsqrtf(with_k.k + 1e-6f), qk = with_k.q * rq * rk;
#if STAGED
        stage_qk(mine, window + next_row * channels + at_k, own + next_row * pitch + at_k, more);
#endif

        // How much of each ancestor's delta belongs to u_q and to u_k: k_j . q and k_j . k times the decay of all that came
        // later. Thread c of a quad keeps ancestors c and c + 4.
        float q0 = 0.f, q1 = 0.f, k0 = 0.f, k1 = 0.f, kept = 1.f;
#pragma unroll 1
        for (int begun = 0; begun < count; begun += KEYS)
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                const int j = begun + i;
                if (j >= count) break;
                const Pair by = products(q, k, x[i]);
                if (j + KEYS < count) load_past(x[i], key_of(j + KEYS));
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

#pragma unroll
        for (int i = 0; i < DELTAS; i++)
            if (i < count) load_past(d[i], delta_of(i));
        state_wait(barrier);
#pragma unroll 1
        for (int half = 0; half < HALVES; half++) {
            float u[NT][4];
            __syncwarp();
            project(u, q, k, state, half);
#pragma unroll
            for (int j = 0; j < NT; j++) u[j][0] *= uq, u[j][1] *= uq, u[j][2] *= uk, u[j][3] *= uk;

            // the next deltas are on their way while one is multiplied: later ancestors', or the first ones' of the next half
#pragma unroll 1
            for (int begun = 0; begun < count; begun += DELTAS)
#pragma unroll
                for (int i = 0; i < DELTAS; i++) {
                    const int j = begun + i;
                    if (j >= count) break;
                    const float cq = __shfl_sync(0xffffffffu, j < 4 ? q0 : q1, quad + (j & 3));
                    const float ck = __shfl_sync(0xffffffffu, j < 4 ? k0 : k1, quad + (j & 3));
                    const bool same = j + DELTAS < count;
                    const u16* next = delta_of(same ? j + DELTAS : i) + (half + !same) * VH;
#pragma unroll
                    for (int J = 0; J < HJ; J++) {
#pragma unroll
                        for (int w = 0; w < 4; w++) {
                            float d0, d1;
                            unpack_half(word(d[i][J], w), d0, d1);
                            float(&y)[4] = u[4 * J + w];
                            y[0] += d0 * cq, y[1] += d1 * cq, y[2] += d0 * ck, y[3] += d1 * ck;
                        }
                        if (same || half + 1 < HALVES) d[i][J] = load(next + 32 * J);
                    }
                }

#if STAGED
            if (half == 0) staged_wait();
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
                    const float d0 = gate * (v0 - decay * y[2]), d1 = gate * (v1 - decay * y[3]);
                    o[2 * w] = decay * y[0] + d0 * qk, o[2 * w + 1] = decay * y[1] + d1 * qk;
                    dd[w] = pack_held(d0, d1);
                }
                if (live) {
                    if (into >= 0) store(delta + (into * slots + row) * hv * V + at_v + column, make_uint4(dd[0], dd[1], dd[2], dd[3]));
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
    state_wait(barrier);  // a block without beams does not leave before its state has come
}
