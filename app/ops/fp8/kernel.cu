// Rows of bfloat16 to 8 bits, each by its own scale, with what makes the rows in the same pass: a row is read once and
// kept in registers as the bfloat16 that it would have been in memory. The definitions are in reference.py; from that
// bfloat16 on they hold bit by bit.
//
// build:
//
// `team` threads take a row, up to PIECES pieces of 8 elements each, `team` apart: a warp, of which a block has
// several, or a whole block.

// part: prelude/half.cuh
// part: prelude/silu.cuh

#define PIECES 4
#define ALL 0xffffffffu

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

__device__ __forceinline__ void unpack8(uint4 x, float (&y)[8]) {
    unpack_bfloat(x.x, y[0], y[1]);
    unpack_bfloat(x.y, y[2], y[3]);
    unpack_bfloat(x.z, y[4], y[5]);
    unpack_bfloat(x.w, y[6], y[7]);
}

__device__ __forceinline__ uint4 pack8(const float (&y)[8]) {
    return make_uint4(
        pack_bfloat(y[0], y[1]), pack_bfloat(y[2], y[3]), pack_bfloat(y[4], y[5]), pack_bfloat(y[6], y[7]));
}

// The largest, or the sum, of all threads of a team, for all of them. `cells` is used once.
template <bool SUM>
__device__ __forceinline__ float together(float x, float* cells, int team) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) {
        const float other = __shfl_xor_sync(ALL, x, apart);
        x = SUM ? x + other : fmaxf(x, other);
    }
    const int warps = team / 32;
    if (warps == 1) return x;
    if (threadIdx.x % 32 == 0) cells[threadIdx.x / 32] = x;
    __syncthreads();
    x = cells[0];
    for (int i = 1; i < warps; i++) x = SUM ? x + cells[i] : fmaxf(x, cells[i]);
    return x;
}

// The kept pieces of a row in 8 bits, and their scale.
__device__ __forceinline__ void put(const uint4 (&kept)[PIECES], i64 pieces, u8* q, float* scale, int me, int team) {
    __shared__ float cells[32];
    float most = 7.888609052210118e-31f;  // 2^-100
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        float x[8];
        unpack8(kept[p], x);
#pragma unroll
        for (int e = 0; e < 8; e++) most = fmaxf(most, fabsf(x[e]));
    }
    most = together<false>(most, cells, team);
    const float factor = __fdiv_rn(448.f, most);
    if (!me) *scale = __fdiv_rn(most, 448.f);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const int at = me + p * team;
        if (at >= pieces) break;
        float x[8];
        unpack8(kept[p], x);
        u32 half[4];
#pragma unroll
        for (int j = 0; j < 4; j++) half[j] = rounded(__fmul_rn(x[2 * j], factor), __fmul_rn(x[2 * j + 1], factor));
        ((uint2*)q)[at] = make_uint2(half[0] | half[1] << 16, half[2] | half[3] << 16);
    }
}

#define ROW                                                                     \
    const int team = (int)team_, me = threadIdx.x % team;                       \
    const i64 row = (i64)blockIdx.x * (blockDim.x / team) + threadIdx.x / team; \
    if (row >= n) return;                                                       \
    uint4 kept[PIECES];                                                         \
    _Pragma("unroll") for (int p = 0; p < PIECES; p++) {                        \
        kept[p] = make_uint4(0, 0, 0, 0);                                       \
    }
#define EACH_PIECE                                     \
    _Pragma("unroll") for (int p = 0; p < PIECES; p++) \
        if (const int at = me + p * team; at < pieces)

// x: rows `stride` elements apart, on 16 bytes; q dense
extern "C" __global__ void __launch_bounds__(1024)
quantise(const u16* x, i64 stride, u8* q, float* scale, i64 n, i64 pieces, i64 team_) {
    ROW
    EACH_PIECE kept[p] = load_once(x + row * stride + at * 8);
    put(kept, pieces, q + row * pieces * 8, scale + row, me, team);
}

// silu(gate) * up
extern "C" __global__ void __launch_bounds__(1024)
gated(const u16* gate, const u16* up, i64 gate_row, i64 up_row, u8* q, float* scale, i64 n, i64 pieces, i64 team_) {
    ROW
    uint4 other[PIECES];
    EACH_PIECE {
        kept[p] = load_once(gate + row * gate_row + at * 8);
        other[p] = load_once(up + row * up_row + at * 8);
    }
    EACH_PIECE {
        float g[8], u[8];
        unpack8(kept[p], g);
        unpack8(other[p], u);
#pragma unroll
        for (int e = 0; e < 8; e++) g[e] = silu(g[e]) * u[e];
        kept[p] = pack8(g);
    }
    put(kept, pieces, q + row * pieces * 8, scale + row, me, team);
}

// As load_once, of what the same thread writes later.
__device__ __forceinline__ uint4 load_own(const void* p) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
    return x;
}

// The kept pieces of x as x / sqrt(mean(x^2) + eps) * weight, in 8 bits.
__device__ __forceinline__ void norm(
    uint4 (&kept)[PIECES], const u16* weight, float eps, i64 pieces, u8* q, float* scale, int me, int team) {
    __shared__ float cells[32];
    float squares = 0;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        float v[8];
        unpack8(kept[p], v);
#pragma unroll
        for (int e = 0; e < 8; e++) squares += v[e] * v[e];
    }
    const float factor = rsqrtf(together<true>(squares, cells, team) / (8.f * pieces) + eps);
    EACH_PIECE {
        float v[8], w[8];
        unpack8(kept[p], v);
        unpack8(load(weight + at * 8), w);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = v[e] * factor * w[e];
        kept[p] = pack8(v);
    }
    put(kept, pieces, q, scale, me, team);
}

extern "C" __global__ void __launch_bounds__(1024) normed(
    const u16* x, i64 stride, const u16* weight, float eps, u8* q, float* scale, i64 n, i64 pieces, i64 team_) {
    ROW
    EACH_PIECE kept[p] = load_once(x + row * stride + at * 8);
    norm(kept, weight, eps, pieces, q + row * pieces * 8, scale + row, me, team);
}

// The same of x += added, in x's memory.
extern "C" __global__ void __launch_bounds__(1024) summed(
    u16* x, i64 stride, const u16* added, i64 added_row, const u16* weight, float eps, u8* q, float* scale, i64 n,
    i64 pieces, i64 team_) {
    ROW
    uint4 other[PIECES];
    EACH_PIECE {
        kept[p] = load_own(x + row * stride + at * 8);
        other[p] = load_once(added + row * added_row + at * 8);
    }
    EACH_PIECE {
        float v[8], w[8];
        unpack8(kept[p], v);
        unpack8(other[p], w);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] += w[e];
        kept[p] = pack8(v);
        store(x + row * stride + at * 8, kept[p]);
    }
    norm(kept, weight, eps, pieces, q + row * pieces * 8, scale + row, me, team);
}
