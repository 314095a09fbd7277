// Rows of bfloat16 to 8 bits, each by its own scale, a warp a row: the row is read for its largest element, and again,
// from the cache, for its elements. The definition is quantise_rows of reference.py, bit by bit.
//
// build:

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define ROWS 8  // a block
#define ALL 0xffffffffu

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two numbers in 8 bits, a in the lower ones; NaN stays NaN, what is too large becomes 448.
__device__ __forceinline__ u32 rounded(float a, float b) {
    u16 out = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(b), "f"(a));
#else
    __trap();
#endif
    return out;
}

// x: n rows of `width` (a multiple of 8), `stride` elements apart, on 16 bytes; q dense
extern "C" __global__ void __launch_bounds__(32 * ROWS)
quantise(const u16* x, i64 stride, u8* q, float* scale, i64 n, i64 width) {
    const i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= n) return;
    const uint4* in = (const uint4*)(x + row * stride);
    const i64 pieces = width / 8;
    float most = 0;
    for (i64 i = lane; i < pieces; i += 32) {
        const uint4 v = in[i];
        const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) most = fmaxf(most, fmaxf(fabsf(low(w[j])), fabsf(high(w[j]))));
    }
#pragma unroll
    for (int apart = 16; apart; apart /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, apart));
    most = fmaxf(most, 7.888609052210118e-31f);  // 2^-100
    const float factor = __fdiv_rn(448.f, most);
    if (!lane) scale[row] = __fdiv_rn(most, 448.f);
    uint2* out = (uint2*)(q + row * width);
    for (i64 i = lane; i < pieces; i += 32) {
        const uint4 v = in[i];
        const u32 w[4] = {v.x, v.y, v.z, v.w};
        u32 half[4];
#pragma unroll
        for (int j = 0; j < 4; j++) half[j] = rounded(__fmul_rn(low(w[j]), factor), __fmul_rn(high(w[j]), factor));
        out[i] = make_uint2(half[0] | half[1] << 16, half[2] | half[3] << 16);
    }
}
