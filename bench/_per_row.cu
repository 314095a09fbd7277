// Attention over S compacted positions, one warp a (row, head), D = 64: a peer of bench/attention.py.
//
// build: S=1,8 BF16=0,1

typedef unsigned int u32;
typedef long long i64;

__device__ __forceinline__ void unpack(u32 x, float& a, float& b) {
#if BF16
    a = __uint_as_float(x << 16), b = __uint_as_float(x & 0xffff0000u);
#else
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
#endif
}

__device__ __forceinline__ u32 pack(float a, float b) {
    u32 x;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
#else
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
#endif
    return x;
}

extern "C" __global__ void per_row(i64 q, i64 k, i64 v, i64 k_slots, i64 v_slots, i64 out, i64 rows) {
    const i64 row = blockIdx.x * 4 + threadIdx.x / 32, at = row * 32 + threadIdx.x % 32, step = rows * 32;
    if (row >= rows) return;
    float q0, q1, score[S], most = -1e30f, sum = 0.f, a = 0.f, b = 0.f;
    unpack(((const u32*)q)[at], q0, q1);
#pragma unroll
    for (int j = 0; j < S; j++) {
        float k0, k1;
        unpack(j < S - 1 ? ((const u32*)k_slots)[j * step + at] : ((const u32*)k)[at], k0, k1);
        float dot = q0 * k0 + q1 * k1;
        for (int lane = 16; lane; lane /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, lane);
        score[j] = dot * 0.125f, most = fmaxf(most, score[j]);
    }
#pragma unroll
    for (int j = 0; j < S; j++) {
        const float share = __expf(score[j] - most);
        float v0, v1;
        unpack(j < S - 1 ? ((const u32*)v_slots)[j * step + at] : ((const u32*)v)[at], v0, v1);
        a += share * v0, b += share * v1, sum += share;
    }
    ((u32*)out)[at] = pack(a / sum, b / sum);
}
