// A row's operands as a warp has them: 8 beams, one a quad; a thread has K / 4 of its beam's q and k and of an ancestor's
// key, 16 bytes at a time, 64 for a quad. They are A (q above, k below) and B of an m16n8k16 as they lie.

#define KP (K / 32)

#if BF16
#define MMA_TYPES "bf16.bf16"
#else
#define MMA_TYPES "f16.f16"
#endif

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPES ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// Of a product's row g (or g + 8), the element of column g, for all of quad g; even, odd: the thread's two columns.
__device__ __forceinline__ float diagonal(float even, float odd) {
    const int lane = threadIdx.x & 31;
    return __shfl_sync(0xffffffffu, lane & 4 ? odd : even, (lane & ~3) + (lane >> 3));
}

struct Pair {
    float q, k;
};

// q . x and k . x of each of the warp's beams with its own x. Of the 8 x 8 products that tensor cores make of each, one
// diagonal is wanted: still a tenth of the instructions that it takes without them.
__device__ __forceinline__ Pair products(const uint4 (&q)[KP], const uint4 (&k)[KP], const uint4 (&x)[KP]) {
    float e[4] = {0.f, 0.f, 0.f, 0.f}, f[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int p = 0; p < KP; p++) {
        mma(e, q[p].x, k[p].x, q[p].y, k[p].y, x[p].x, x[p].y);
        mma(f, q[p].z, k[p].z, q[p].w, k[p].w, x[p].z, x[p].w);
    }
    return {diagonal(e[0] + f[0], e[1] + f[1]), diagonal(e[2] + f[2], e[3] + f[3])};
}

// Asked for here, not where the compiler would use it.
__device__ __forceinline__ float now(const float* p) {
    float x;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(p));
    return x;
}

__device__ __forceinline__ int now(const int* p) {
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}

// A row's ancestor in one column. Whatever a tombstone holds stays inside of the slots.
__device__ __forceinline__ int ancestor(const int* ancestry, i64 row, int columns, int t, int compact, i64 slots) {
    if (t >= columns) return 0;
    const int slot = compact ? (int)row : now(ancestry + row * columns + t);
    return slot < 0 ? 0 : slot >= slots ? (int)slots - 1 : slot;
}

// Records may stay in L1: siblings share them.
template <int pieces>
__device__ __forceinline__ void load_past(uint4 (&x)[pieces], const u16* from) {
#pragma unroll
    for (int p = 0; p < pieces; p++) x[p] = load(from + 32 * p);
}
