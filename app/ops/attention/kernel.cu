// Attention of every row over a few positions of its own: the slots of its ancestors, its own key and value, and, where it
// is given, what its request's context gave, which counts as one more key.
//
// build: D=64,128,256 BF16=0,1
// build: D=8,40 BF16=1
//
// -DD head dim, a multiple of 8 up to 256; -DBF16 (0: float16). Entry points <form>_<S>, S positions with the row's own:
//
//   slots_1..slots_8      a lane group takes one (row, head); all its loads are under way before the first use
//   walk_6..walk_8        a block walks WALK rows deep below each of its lane groups, so that L1 serves ancestors to
//                         siblings where rows lie grouped by parent; heads a multiple of TILE
//   compact_2..compact_8  the slots are the rows themselves: everything is read once
//
// Nothing is staged in shared memory: L1 and L2 serve what rows share. Ancestors may stay in L1, what is read once may not;
// compacted slots are quicker with plain loads. The 1 in the launch bounds lets a thread keep registers for all its loads;
// without it some wait for others (both measured on an H200: 3 % and 9 % at S = 8).

// part: prelude/half.cuh

#define THREADS 128
#define VECTORS (D / 8)
#define LANES (VECTORS <= 1 ? 1 : VECTORS <= 2 ? 2 : VECTORS <= 4 ? 4 : VECTORS <= 8 ? 8 : VECTORS <= 16 ? 16 : 32)
#define GROUPS (THREADS / LANES)
#define TILE (GROUPS < 8 ? GROUPS : 8)  // heads of a walking block
#define WALK 8
#define LOG2E 1.4426950408889634f
#define INFINITE __int_as_float(0x7f800000)

enum Form { SLOTS, WALKING, COMPACT };

template <Form FORM>
__device__ __forceinline__ uint4 load_own(const u16* p) {
    return FORM == COMPACT ? load(p) : load_once(p);
}

__device__ __forceinline__ float dot(const float (&q)[8], uint4 key) {
    float k[8], sum = 0.f;
    unpack8(key, k);
#pragma unroll
    for (int e = 0; e < 8; e++) sum += q[e] * k[e];
    return sum;
}

__device__ __forceinline__ void add(float (&out)[8], float share, uint4 value) {
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

// One (row, head) of a lane group; all 32 lanes of a warp take part, `live` or not.
template <int S, Form FORM>
__device__ __forceinline__ void attend(const Operands& x, u32 row, u32 head, bool live) {
    const bool used = threadIdx.x % LANES < VECTORS;
    const u32 column = used ? 8 * (threadIdx.x % LANES) : 0, own = head / x.group * D + column;
    const i64 at = (i64)row * x.heads + head;
    u16* result = x.out + at * D + column;
    live = live && used;
    if (S == 1 && !x.shared && !x.lse) {  // a softmax over one key is 1
        if (live) store(result, load_own<SLOTS>(x.v + row * x.v_row + own));
        return;
    }
    uint4 key[S], value[S];
    i64 place[S];
#pragma unroll
    for (int j = 0; j < S - 1; j++) {
        int slot = row;
        if (FORM != COMPACT) {
            slot = x.ancestry[row * x.tree_row + (x.first + j) * x.tree_column];
            slot = slot < 0 ? 0 : slot >= x.slots ? x.slots - 1 : slot;  // whatever a tombstone holds stays inside
        }
        place[j] = (x.first + j) * x.slot_step + slot * x.slot_row + own;
    }
    const uint4 asked = load_own<FORM>(x.q + row * x.q_row + head * D + column);
#pragma unroll
    for (int j = 0; j < S - 1; j++) key[j] = load(x.k_slots + place[j]);
    key[S - 1] = load_own<FORM>(x.k + row * x.k_row + own);
#pragma unroll
    for (int j = 0; j < S - 1; j++) value[j] = load(x.v_slots + place[j]);
    value[S - 1] = load_own<FORM>(x.v + row * x.v_row + own);

    float q[8], score[S];
    unpack8(asked, q);
#pragma unroll
    for (int j = 0; j < S; j++) score[j] = used ? dot(q, key[j]) : 0.f;
#pragma unroll
    for (int j = 0; j < S; j++)
#pragma unroll
        for (int lane = LANES / 2; lane; lane /= 2) score[j] += __shfl_xor_sync(0xffffffffu, score[j], lane);
    float most = -INFINITE, context = -INFINITE;
#pragma unroll
    for (int j = 0; j < S; j++) {
        score[j] *= x.scale;
        if (x.bias) score[j] += x.bias[head * S + j];
        most = fmaxf(most, score[j]);
    }
    if (x.shared) {
        context = x.shared_lse[row * x.shared_n + head * x.shared_h];
        if (context == INFINITE) context = -context;
        most = fmaxf(most, context);
    }
    float sum = 0.f, out[8] = {};
#pragma unroll
    for (int j = 0; j < S; j++) {
        score[j] = exp2f((score[j] - most) * LOG2E);
        sum += score[j];
        add(out, score[j], value[j]);
    }
    if (x.shared && context != -INFINITE) {
        const float share = exp2f((context - most) * LOG2E);
        sum += share;
        add(out, share, load_own<SLOTS>(x.shared + at * D + column));
    }
    const float by = 1.f / sum;
#pragma unroll
    for (int e = 0; e < 8; e++) out[e] *= by;
    if (live) store(result, pack8(out));
    if (x.lse && live && column == 0) x.lse[(i64)head * x.rows + row] = most + logf(sum);
}

template <int S, Form FORM>
__device__ __forceinline__ void run(const Operands& x) {
    const u32 group = threadIdx.x / LANES;
    if (FORM == WALKING) {
        const u32 tiles = x.heads / TILE, head = blockIdx.x % tiles * TILE + group % TILE;
        u32 row = blockIdx.x / tiles * (GROUPS / TILE * WALK) + group / TILE;
#pragma unroll 1
        for (int i = 0; i < WALK; i++, row += GROUPS / TILE)
            attend<S, FORM>(x, row < x.rows ? row : x.rows - 1, head, row < x.rows);
    } else {
        const u32 pairs = (u32)x.rows * x.heads, pair = blockIdx.x * GROUPS + group;
        const u32 at = pair < pairs ? pair : pairs - 1, row = at / x.heads;
        attend<S, FORM>(x, row, at - row * x.heads, pair < pairs);
    }
}

#define ENTRY(name, S, FORM)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name##_##S(                                                 \
        i64 q, i64 k, i64 v, i64 k_slots, i64 v_slots, i64 ancestry, i64 bias, i64 shared, i64 shared_lse, i64 out,      \
        i64 lse, i64 q_row, i64 k_row, i64 v_row, i64 slot_step, i64 slot_row, i64 tree_row, i64 tree_column,            \
        i64 shared_n, i64 shared_h, i64 rows, i64 heads, i64 group, i64 slots, i64 first, float scale) {                 \
        run<S, FORM>(Operands{                                                                                           \
            (const u16*)q, (const u16*)k, (const u16*)v, (const u16*)k_slots, (const u16*)v_slots, (const int*)ancestry, \
            (const float*)bias, (const u16*)shared, (const float*)shared_lse, (u16*)out, (float*)lse, q_row, k_row,      \
            v_row, slot_step, slot_row, tree_row, tree_column, shared_n, shared_h, (int)rows, (int)heads, (int)group,    \
            (int)slots, (int)first, scale});                                                                             \
    }

ENTRY(slots, 1, SLOTS)
ENTRY(slots, 2, SLOTS)
ENTRY(slots, 3, SLOTS)
ENTRY(slots, 4, SLOTS)
ENTRY(slots, 5, SLOTS)
ENTRY(slots, 6, SLOTS)
ENTRY(slots, 7, SLOTS)
ENTRY(slots, 8, SLOTS)
ENTRY(walk, 6, WALKING)
ENTRY(walk, 7, WALKING)
ENTRY(walk, 8, WALKING)
ENTRY(compact, 2, COMPACT)
ENTRY(compact, 3, COMPACT)
ENTRY(compact, 4, COMPACT)
ENTRY(compact, 5, COMPACT)
ENTRY(compact, 6, COMPACT)
ENTRY(compact, 7, COMPACT)
ENTRY(compact, 8, COMPACT)
