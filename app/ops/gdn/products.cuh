// S_ctx in shared memory, as its two terms in core matrices of 8 columns by 16 bytes (8 of K) without swizzle, and the
// product of a warp's queries and keys with VH of its columns at a time: [V / VH, term, K / 8, NT, 8 columns, 8 of K].

#define KS (K / 16)
#define NT (VH / 8)
#define LEAD (NT * 128)     // bytes from 8 of K to the next 8
#define TERM (K / 8 * LEAD) // from one term to the other
#define STATE (K * VT * 4)  // bytes of a block's columns

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes into shared memory behind the thread's back.
__device__ __forceinline__ void stage(uint4* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void staged_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

#if WGMMA

#if VH == 64
#define ACCUMULATORS "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define OPERANDS "{%32,%33,%34,%35}, %36"
#define SHAPE "m64n64k16"
#else
#define ACCUMULATORS "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define OPERANDS "{%16,%17,%18,%19}, %20"
#define SHAPE "m64n32k16"
#endif
#define REGISTERS(j) "+f"(u[j][0]), "+f"(u[j][1]), "+f"(u[j][2]), "+f"(u[j][3])

// A warpgroup's product of one step of K: each warp's A is as in mma.sync, B is shared memory at `b`.
__device__ __forceinline__ void wgmma(float (&u)[NT][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned." SHAPE ".f32." MMA_TYPES
                 " " ACCUMULATORS ", " OPERANDS ", p, 1, 1, 0;}"
                 : REGISTERS(0), REGISTERS(1), REGISTERS(2), REGISTERS(3)
#if VH == 64
                   , REGISTERS(4), REGISTERS(5), REGISTERS(6), REGISTERS(7)
#endif
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// Of all threads, once a block.
__device__ __forceinline__ void barrier_make(u32 barrier) {
    if (threadIdx.x == 0)
        asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(barrier)
                     : "memory");
    __syncthreads();
}

// One thread asks for the state; a phase of the barrier completes when all of it is there.
__device__ __forceinline__ void state_begin(u32 barrier, uint4* to, const u16* from) {
    if (threadIdx.x) return;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"((u32)STATE) : "memory");
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(to) + i * (STATE / 4)),
                     "l"((const char*)from + i * (STATE / 4)), "r"((u32)STATE / 4), "r"(barrier)
                     : "memory");
}

__device__ __forceinline__ void state_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra there; bra again; there:}" ::"r"(
            barrier), "r"(phase)
        : "memory");
}

#else

__device__ __forceinline__ void barrier_make(u32) {}

// All threads of a block ask for the state, as the oldest of their groups; a block has one item.
__device__ __forceinline__ void state_begin(u32, uint4* to, const u16* from) {
#pragma unroll 8
    for (int i = threadIdx.x; i < STATE / 16; i += THREADS) stage(to + i, (const uint4*)from + i);
    staged_group();
}

__device__ __forceinline__ void state_wait(u32, u32) {}

// B of both terms: lanes 0-7 name the rows of the first 8 of K, 8-15 of the second, 16-31 of the other term's.
__device__ __forceinline__ uint4 fragments(u32 at) {
    uint4 b;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w)
                 : "r"(at));
    return b;
}

#endif

// u = columns VH * half .. of S_ctx q and S_ctx k. With warpgroups, all four warps of one must call it together.
__device__ __forceinline__ void project(
    float (&u)[NT][4], const uint4 (&q)[K / 32], const uint4 (&k)[K / 32], const uint4* state, int half) {
#pragma unroll
    for (int j = 0; j < NT; j++) u[j][0] = u[j][1] = u[j][2] = u[j][3] = 0.f;
#if WGMMA
    const u64 high = (u64)(shared_address(state) >> 4) + half * (2 * TERM >> 4) | (u64)(LEAD >> 4) << 16 | (u64)8 << 32;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
    const int lane = threadIdx.x & 31;
    const u32 at = shared_address(state) + (half * 2 + (lane >> 4)) * TERM + (lane >> 3 & 1) * LEAD + (lane & 7) * 16;
#endif
#pragma unroll
    for (int s = 0; s < KS; s++) {
        const u32 a0 = s & 1 ? q[s / 2].z : q[s / 2].x, a2 = s & 1 ? q[s / 2].w : q[s / 2].y;
        const u32 a1 = s & 1 ? k[s / 2].z : k[s / 2].x, a3 = s & 1 ? k[s / 2].w : k[s / 2].y;
#if WGMMA
        wgmma(u, a0, a1, a2, a3, high + s * (2 * LEAD >> 4));
        wgmma(u, a0, a1, a2, a3, high + (TERM >> 4) + s * (2 * LEAD >> 4));
#else
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const uint4 b = fragments(at + s * 2 * LEAD + j * 128);
            mma(u[j], a0, a1, a2, a3, b.x, b.y);
            mma(u[j], a0, a1, a2, a3, b.z, b.w);
        }
#endif
    }
#if WGMMA
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}
