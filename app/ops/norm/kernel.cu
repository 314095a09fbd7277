// out = x / sqrt(mean(x^2) + eps) * weight, in float32 inside and rounded once: a warp takes a row, keeps it in
// registers, and everything is read and written once.
//
// build: BF16=0,1 PIECES=1,2,4,8,16
//
// -DBF16 (0: float16), -DPIECES: of 8 elements, that a lane keeps. Rows may lie apart (stride in elements, a multiple of
// 8); out has none between. width: pieces of a row, 32 * PIECES at most.

// part: prelude/half.cuh

#define WARPS 8  // of a block
#define ALL 0xffffffffu

extern "C" __global__ void __launch_bounds__(32 * WARPS)
rms_norm(i64 x, i64 weight, i64 out, i64 rows, i64 width, i64 stride, float eps) {
    const i64 row = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= rows) return;
    const u16* in = (const u16*)x + row * stride;
    uint4 kept[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const int at = lane + 32 * p;
        kept[p] = at < width ? load_once(in + at * 8) : make_uint4(0, 0, 0, 0);
    }
    float sum = 0;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        float a[8];
        unpack8(kept[p], a);
#pragma unroll
        for (int e = 0; e < 8; e++) sum = fmaf(a[e], a[e], sum);
    }
#pragma unroll
    for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(ALL, sum, apart);
    const float scale = rsqrtf(sum / (float)(8 * width) + eps);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const int at = lane + 32 * p;
        if (at >= width) break;
        float a[8], w[8];
        unpack8(kept[p], a);
        unpack8(load((const u16*)weight + at * 8), w);
#pragma unroll
        for (int e = 0; e < 8; e++) a[e] = a[e] * scale * w[e];
        store((uint4*)out + row * width + at, pack8(a));
    }
}
