// out = silu(gate) * up, in float32 inside: a thread takes 8 elements, and everything is read and written once.
//
// build: BF16=0,1
//
// -DBF16 (0: float16). Rows of gate and up may lie apart (strides in elements, multiples of 8); out has none between.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define THREADS 256

struct Words {
    u32 w[4];
};

#if BF16
__device__ __forceinline__ void unpack(u32 x, float& a, float& b) {
    a = __uint_as_float(x << 16);
    b = __uint_as_float(x & 0xffff0000u);
}

__device__ __forceinline__ u32 pack(float a, float b) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
    return x;
}
#else
__device__ __forceinline__ void unpack(u32 x, float& a, float& b) {
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
}

__device__ __forceinline__ u32 pack(float a, float b) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
    return x;
}
#endif

__device__ __forceinline__ Words load(const u16* p) {
    Words x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
        : "l"(p));
    return x;
}

__device__ __forceinline__ float silu(float x) {
    return __fdividef(x, 1.f + __expf(-x));  // exp is infinite below -88: -0 then, and NaN for -inf, as torch's
}

extern "C" __global__ void __launch_bounds__(THREADS) gated(
    i64 gate, i64 up, i64 out, i64 pieces, i64 width, i64 gate_row, i64 up_row) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= pieces) return;
    const i64 row = pieces < (1ll << 32) ? (unsigned)at / (unsigned)width : at / width;
    const i64 column = (at - row * width) * 8;
    const Words g = load((const u16*)gate + row * gate_row + column), u = load((const u16*)up + row * up_row + column);
    Words y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float a, b, c, d;
        unpack(g.w[i], a, b);
        unpack(u.w[i], c, d);
        y.w[i] = pack(silu(a) * c, silu(b) * d);
    }
    ((uint4*)out)[at] = make_uint4(y.w[0], y.w[1], y.w[2], y.w[3]);
}
