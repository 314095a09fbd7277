// Attention of every row over a few positions of its own: the slots of its ancestors, its own key and value, and, where it
// is given, what its request's context gave, which counts as one more key.
//
// build: D=64,128,256 BF16=0,1
// build: D=8,40 BF16=1
//
// -DD head dim, a multiple of 8 up to 256; -DBF16 (0: float16). Entry points slots_<S> and compact_<S>, S = 1..8 positions
// with the row's own. LANES lanes of 16 bytes hold one (row, head); all loads of it are under way before the first use, and
// nothing is staged: ancestors that siblings share are found in L1 and L2 when the rows lie grouped by parent.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define THREADS 128
#define VECTORS (D / 8)
#define LANES (VECTORS <= 1 ? 1 : VECTORS <= 2 ? 2 : VECTORS <= 4 ? 4 : VECTORS <= 8 ? 8 : VECTORS <= 16 ? 16 : 32)
#define LOG2E 1.4426950408889634f

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

// Read once: kept out of L1, where ancestors that siblings share should stay.
__device__ __forceinline__ uint4 load_once(const u16* p) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

__device__ __forceinline__ uint4 load_shared(const u16* p) {
    uint4 x;
    asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

__device__ __forceinline__ void unpack8(const uint4& x, float (&y)[8]) {
    unpack(x.x, y[0], y[1]), unpack(x.y, y[2], y[3]), unpack(x.z, y[4], y[5]), unpack(x.w, y[6], y[7]);
}

__device__ __forceinline__ float dot(const float (&q)[8], const uint4& key) {
    float k[8], sum = 0.f;
    unpack8(key, k);
#pragma unroll
    for (int e = 0; e < 8; e++) sum += q[e] * k[e];
    return sum;
}

__device__ __forceinline__ void add(float (&out)[8], float share, const uint4& value) {
    float v[8];
    unpack8(value, v);
#pragma unroll
    for (int e = 0; e < 8; e++) out[e] += share * v[e];
}

// q, k, v      row n at n * *_row elements; [H, D] and [Hkv, D] inside
// k_slots, v_slots  slot (j, n) at j * slot_step + n * slot_row elements, [Hkv, D] inside
// ancestry     row n's column j at n * tree_row + j * tree_column: the slot of step j + 1; columns first..first + S - 2
// bias         [H, S] float32 or null
// shared, shared_lse   the context's output [N, H, D] and log-sum-exp (row n, head h at n * shared_n + h * shared_h), or
//              null; an infinite log-sum-exp: that row has no context
// out          [N, H, D]
// lse          row n, head h at h * N + n, float32, or null
struct Operands {
    const u16 *q, *k, *v, *k_slots, *v_slots;
    const int* ancestry;
    const float* bias;
    const u16* shared;
    const float* shared_lse;
    u16* out;
    float* lse;
    i64 q_row, k_row, v_row, slot_step, slot_row, tree_row, tree_column, shared_n, shared_h;
    int rows, heads, group, slots, first;
    float scale;
};

template <int S, bool COMPACT>
__device__ __forceinline__ void attend(const Operands& x) {
    const u32 pair = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, pairs = (u32)x.rows * x.heads;
    const bool live = pair < pairs && threadIdx.x % LANES < VECTORS;
    const u32 at = pair < pairs ? pair : pairs - 1, row = at / x.heads, head = at - row * x.heads;
    const u32 kv = head / x.group, column = threadIdx.x % LANES < VECTORS ? 8 * (threadIdx.x % LANES) : 0;
    const u32 own = kv * D + column;
    uint4 *result = (uint4*)(x.out + (i64)at * D + column);
    if (S == 1 && !x.shared && !x.lse) {  // a softmax over one key is 1
        if (live) *result = load_once(x.v + row * x.v_row + own);
        return;
    }
    uint4 key[S], value[S];
    i64 place[S];
#pragma unroll
    for (int j = 0; j < S - 1; j++) {
        int slot = row;
        if (!COMPACT) {
            slot = x.ancestry[row * x.tree_row + (x.first + j) * x.tree_column];
            slot = slot < 0 ? 0 : slot >= x.slots ? x.slots - 1 : slot;  // whatever a tombstone holds stays inside
        }
        place[j] = (x.first + j) * x.slot_step + slot * x.slot_row + own;
    }
    const uint4 asked = load_once(x.q + row * x.q_row + head * D + column);
#pragma unroll
    for (int j = 0; j < S - 1; j++) key[j] = (COMPACT ? load_once : load_shared)(x.k_slots + place[j]);
    key[S - 1] = load_once(x.k + row * x.k_row + own);
#pragma unroll
    for (int j = 0; j < S - 1; j++) value[j] = (COMPACT ? load_once : load_shared)(x.v_slots + place[j]);
    value[S - 1] = load_once(x.v + row * x.v_row + own);

    float q[8], score[S];
    unpack8(asked, q);
#pragma unroll
    for (int j = 0; j < S; j++) score[j] = threadIdx.x % LANES < VECTORS ? dot(q, key[j]) : 0.f;
#pragma unroll
    for (int j = 0; j < S; j++)
#pragma unroll
        for (int lane = LANES / 2; lane; lane /= 2) score[j] += __shfl_xor_sync(0xffffffffu, score[j], lane);
    float most = __int_as_float(0xff800000), context = most;
#pragma unroll
    for (int j = 0; j < S; j++) {
        score[j] *= x.scale;
        if (x.bias) score[j] += x.bias[head * S + j];
        most = fmaxf(most, score[j]);
    }
    if (x.shared) {
        context = x.shared_lse[row * x.shared_n + head * x.shared_h];
        if (context == __int_as_float(0x7f800000)) context = -context;
        most = fmaxf(most, context);
    }
    float sum = 0.f, out[8] = {};
#pragma unroll
    for (int j = 0; j < S; j++) {
        score[j] = exp2f((score[j] - most) * LOG2E);
        sum += score[j];
        add(out, score[j], value[j]);
    }
    if (x.shared && context != __int_as_float(0xff800000)) {
        const float share = exp2f((context - most) * LOG2E);
        sum += share;
        add(out, share, load_once(x.shared + (i64)at * D + column));
    }
    const float by = 1.f / sum;
    if (live)
        *result = make_uint4(
            pack(out[0] * by, out[1] * by), pack(out[2] * by, out[3] * by), pack(out[4] * by, out[5] * by),
            pack(out[6] * by, out[7] * by));
    if (x.lse && live && column == 0) x.lse[(i64)head * x.rows + row] = most + logf(sum);
}

#define ENTRY(name, S, COMPACT)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_##S(                                                    \
        i64 q, i64 k, i64 v, i64 k_slots, i64 v_slots, i64 ancestry, i64 bias, i64 shared, i64 shared_lse, i64 out,      \
        i64 lse, i64 q_row, i64 k_row, i64 v_row, i64 slot_step, i64 slot_row, i64 tree_row, i64 tree_column,            \
        i64 shared_n, i64 shared_h, i64 rows, i64 heads, i64 group, i64 slots, i64 first, float scale) {                 \
        attend<S, COMPACT>(Operands{                                                                                     \
            (const u16*)q, (const u16*)k, (const u16*)v, (const u16*)k_slots, (const u16*)v_slots, (const int*)ancestry, \
            (const float*)bias, (const u16*)shared, (const float*)shared_lse, (u16*)out, (float*)lse, q_row, k_row,      \
            v_row, slot_step, slot_row, tree_row, tree_column, shared_n, shared_h, (int)rows, (int)heads, (int)group,    \
            (int)slots, (int)first, scale});                                                                             \
    }

ENTRY(slots, 1, false)
ENTRY(slots, 2, false)
ENTRY(slots, 3, false)
ENTRY(slots, 4, false)
ENTRY(slots, 5, false)
ENTRY(slots, 6, false)
ENTRY(slots, 7, false)
ENTRY(slots, 8, false)
ENTRY(compact, 2, true)
ENTRY(compact, 3, true)
ENTRY(compact, 4, true)
ENTRY(compact, 5, true)
ENTRY(compact, 6, true)
ENTRY(compact, 7, true)
ENTRY(compact, 8, true)
