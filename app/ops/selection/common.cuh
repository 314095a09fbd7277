// Logits, scores and loads: what all parts of chunk.cu share.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#if TYPE == 2
typedef float Logit;
#define V 4  // logits in 16 bytes
#define LOW 0xff800000u
#else
typedef u16 Logit;
#define V 8
#define LOW (TYPE ? 0xfc00fc00u : 0xff80ff80u)
#endif
#define UNIT (32 * V)  // logits that a warp loads at once
#define ALL 0xffffffffu
#define INF __int_as_float(0x7f800000)
#define NEG __int_as_float(0xff800000)
#define LARGEST 3.402823466e38f

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
#undef CLUSTER
#define CLUSTER 1
#endif

// Float order as integer order.
__device__ __forceinline__ int ordered(float x) {
    int i = __float_as_int(x);
    return i ^ ((i >> 31) & 0x7fffffff);
}

__device__ __forceinline__ float unordered(int i) { return __int_as_float(i ^ ((i >> 31) & 0x7fffffff)); }

__device__ __forceinline__ float half_to_float(u32 x) {
    float f;
    asm("{.reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "h"((u16)x));
    return f;
}

// The logits of a word, widened.
__device__ __forceinline__ float low_of(u32 w) {
    return TYPE == 2 ? __uint_as_float(w) : TYPE == 1 ? half_to_float(w & 0xffffu) : __uint_as_float(w << 16);
}

__device__ __forceinline__ float high_of(u32 w) {
    return TYPE == 2 ? __uint_as_float(w) : TYPE == 1 ? half_to_float(w >> 16) : __uint_as_float(w & 0xffff0000u);
}

__device__ __forceinline__ float widened(Logit x) {
#if TYPE == 2
    return x;
#else
    return low_of(x);
#endif
}

// Logit k of a vector, widened.
__device__ __forceinline__ float element(const uint4& x, int k) {
    const u32 word[4] = {x.x, x.y, x.z, x.w};
    return TYPE == 2 ? low_of(word[k % 4]) : k % 2 ? high_of(word[k / 2]) : low_of(word[k / 2]);
}

// One rounding an operation, in the written order; the instructions keep subnormal numbers and are never contracted.
__device__ __forceinline__ float add(float a, float b) {
    float c;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float sub(float a, float b) {
    float c;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// T0 as one number, larger is better: the score, then the smallest order * codes + code. -0.0 is +0.0. Never 0.
__device__ __forceinline__ u64 key_of(float score, u32 place) {
    u32 rank = (u32)ordered(add(score, 0.f)) ^ 0x80000000u;
    return (u64)rank << 32 | (0xffffffffu - place);
}

__device__ __forceinline__ float score_of(float logit, float norm, float parent) {
#if SCORE == 0
    return logit;
#elif SCORE == 1
    return add(parent, logit);
#else
    return add(parent, sub(logit, norm));
#endif
}

// A score that may be selected, or NEG: NaN and +inf are bad.
__device__ __forceinline__ float good_score(float logit, float norm, float parent) {
    float s = score_of(logit, norm, parent);
    return logit > NEG && s < INF ? s : NEG;
}

__device__ __forceinline__ uint4 low_vector() { return make_uint4(LOW, LOW, LOW, LOW); }

// 16 bytes that are not read again soon: kept out of L1.
__device__ __forceinline__ uint4 load_once(const Logit* at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}

// Logits e .. e + V - 1 of a row of `codes`; -inf beyond its end. ONCE: kept out of L1; otherwise e is in the row.
template <bool ONCE>
__device__ __forceinline__ uint4 load(const Logit* row, int e, int codes) {
    uint4 x = low_vector();
#if VEC
    if (!ONCE)
        x = __ldg((const uint4*)(row + e));
    else if (e < codes)
        x = load_once(row + e);
#elif TYPE == 2
    if (e < codes) x.x = __float_as_uint(row[e]);
    if (e + 1 < codes) x.y = __float_as_uint(row[e + 1]);
    if (e + 2 < codes) x.z = __float_as_uint(row[e + 2]);
    if (e + 3 < codes) x.w = __float_as_uint(row[e + 3]);
#else
    u32 w[4] = {LOW, LOW, LOW, LOW};
#pragma unroll
    for (int k = 0; k < 8; k++) {
        u32 half = e + k < codes ? row[e + k] : LOW & 0xffffu;
        w[k / 2] = k % 2 ? (w[k / 2] & 0xffffu) | half << 16 : (w[k / 2] & 0xffff0000u) | half;
    }
    x = make_uint4(w[0], w[1], w[2], w[3]);
#endif
    return x;
}

// Bits of the mask for logits e .. e + V - 1, where e is in the row.
__device__ __forceinline__ u32 load_bits(const u8* mask, i64 row, i64 stride, int e) {
#if MASK
    if (SCORE == 3 && !mask) return (1u << V) - 1;
    u32 byte = mask[row * stride + (e >> 3)];
    return V == 4 ? (byte >> (e & 4)) & 15u : byte;
#else
    return (1u << V) - 1;
#endif
}

__device__ __forceinline__ u32 max_of(u32 a, u32 b) {  // both logits of a word; NaN wins
    u32 c;
#if TYPE == 2
    asm("{.reg .f32 x, y, z; mov.b32 x, %1; mov.b32 y, %2; max.NaN.f32 z, x, y; mov.b32 %0, z;}" : "=r"(c) : "r"(a), "r"(b));
#elif TYPE == 1
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#else
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#endif
    return c;
}

__device__ __forceinline__ u32 max_of(const uint4& x) { return max_of(max_of(x.x, x.y), max_of(x.z, x.w)); }

__device__ __forceinline__ float float_of(u32 w) { return fmaxf(low_of(w), high_of(w)); }

// Kernels of a sequence begin while the one before ends: what it wrote may be read behind `wait_for_previous`.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
