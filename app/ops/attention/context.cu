// Attention of the rows of each request over its context, keys and values read where they lie: flash attention on warpgroup
// products, for sm_90a. Ragged over rows and positions.
//
// build: D=64,128 BF16=0,1 arch=sm_90a
//
// -DD head dim, 64 or 128; -DBF16 (0: float16).
//
// A block: ROWS queries of one request and one key head. Where a key head has a group of query heads, queries are counted
// row by row and head by head inside, so that all of them share the keys in shared memory. Keys and values come in tiles of
// KEYS through STAGES places, rows of 128 bytes swizzled as the products want them (PTX ISA, "Shared memory matrix layout");
// of head dim 128 each half is a plane of its own. A warpgroup has 64 queries: their fragments and its output stay in
// registers, and so do the probabilities, which are laid out as the next product takes them.
//
// The two warpgroups of a block take turns: while one has its products - the probabilities of a tile with its values, and its
// queries with the next keys - the other has its softmax. Left to themselves they would wait for the products at the same
// time. Each fetches its half of a tile three tiles ahead and has its half of the next tile when it gives the turn away: so
// all of a tile is there for who gets the turn, and nobody still reads the place that the tile after it goes to.
//
// The running maximum is only raised where a row's scores exceed it by more than a factor of 2^8: the sums stay far from
// overflow, and most tiles need no rescaling of the output. What a row gets depends on no other row.

// part: prelude/half.cuh
// part: prelude/warpgroup.cuh

#define BLOCKS (D == 64 ? 2 : 1)  // of a processor
#define THREADS 256
#define ROWS 128
#define KEYS 64
#define STAGES 6
#define AHEAD 3
#define PLANES (D / 64)
#define PLANE (KEYS * 128)  // bytes
#define STAGE (2 * PLANES * PLANE)
#define EACH (THREADS / (D / 8))  // keys that all threads fetch at a time
#define ALL 0xffffffffu
#define INFINITE __int_as_float(0x7f800000)
#define LOG2E 1.4426950408889634f
#define SLACK 8.f

#if BF16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif

#define LIST(x)                                                                                                          \
    x(0, 0), x(0, 1), x(0, 2), x(0, 3), x(1, 0), x(1, 1), x(1, 2), x(1, 3), x(2, 0), x(2, 1), x(2, 2), x(2, 3), x(3, 0), \
        x(3, 1), x(3, 2), x(3, 3), x(4, 0), x(4, 1), x(4, 2), x(4, 3), x(5, 0), x(5, 1), x(5, 2), x(5, 3), x(6, 0),      \
        x(6, 1), x(6, 2), x(6, 3), x(7, 0), x(7, 1), x(7, 2), x(7, 3)
#define SUMMED(j, e) "+f"(y[j][e])
#define MADE(j, e) "=f"(y[j][e])

// y is or becomes the sum of itself and a, 64 rows by 16, times 16 rows by 64 columns of shared memory. transposed: the
// numbers of a column lie 128 bytes apart.
#define PRODUCT(name, kept, transposed, add)                                                                             \
    __device__ __forceinline__ void name(float (&y)[8][4], const u32 (&a)[4], u64 b) {                                   \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " add                                                                \
                     ", 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES                                            \
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"  \
                     "%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, " transposed ";}"                       \
                     : LIST(kept)                                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
    }
PRODUCT(first_keys, MADE, "0", "0")
PRODUCT(more_keys, SUMMED, "0", "1")
PRODUCT(values, SUMMED, "1", "1")

// Keeps what is made of y behind this line, and what makes it before.
__device__ __forceinline__ void settled(float (&y)[8][4]) { asm volatile("" : LIST(SUMMED) : : "memory"); }

// 16 bytes to shared memory, or zeros.
__device__ __forceinline__ void fetch(u32 to, const u16* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// A thread's part of the tiles: where its next piece of keys and of values comes from and goes to.
struct Tiles {
    const u16 *keys, *values;
    u32 to;   // in the first place
    int key;  // its position
};

// The next tile, if there is one, into a place; zeros from position `count` on.
__device__ __forceinline__ void fetch_tile(Tiles& x, u32 place, int count, i64 k_position, i64 v_position) {
    if (x.key < (count + KEYS - 1) / KEYS * KEYS) {
        const u32 to = x.to + place * STAGE;
#pragma unroll
        for (int i = 0; i < KEYS / EACH; i++) {
            const bool there = x.key + i * EACH < count;
            fetch(to + i * EACH * 128, x.keys + i * EACH * k_position, there);
            fetch(to + i * EACH * 128 + STAGE / 2, x.values + i * EACH * v_position, there);
        }
        x.key += KEYS, x.keys += KEYS * k_position, x.values += KEYS * v_position;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// All but this thread's newest tiles are in shared memory, where products see them.
template <int NEWEST>
__device__ __forceinline__ void fetched() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The turns of a warpgroup: which of the two it is, how many it still has, and the place of the next one's tile.
struct Turns {
    int self, left;
    u32 place;
};

__device__ __forceinline__ void take(const Turns& x) {
    fetched<AHEAD - 2>();  // with this thread's part of the tile after this one
    asm volatile("bar.sync %0, %1;" ::"r"(1 + x.self), "n"(THREADS) : "memory");
}

__device__ __forceinline__ void give(Turns& x) {
    x.left--, x.place = x.place == STAGES - 1 ? 0 : x.place + 1;
    if (!x.self || x.left) asm volatile("bar.arrive %0, %1;" ::"r"(2 - x.self), "n"(THREADS) : "memory");
}

__device__ __forceinline__ float most_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL, x, 2));
}

__device__ __forceinline__ float sum_of_quad(float x) {
    x += __shfl_xor_sync(ALL, x, 1);
    return x + __shfl_xor_sync(ALL, x, 2);
}

// A warpgroup's share of the softmax over the tiles so far, two rows a thread: lane / 4 and 8 more of its warp's 16.
struct Rows {
    float y[PLANES][8][4];  // the output, times the sum
    float most[2], sum[2];
    u32 p[KEYS / 16][4];  // the last tile's probabilities
};

// The probabilities of a tile from its scores; nothing is under way.
__device__ __forceinline__ void weigh(Rows& x, const float (&s)[8][4], float factor, int left) {
    float w[8][4], by[2];
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) w[j][e] = s[j][e];
    if (left < KEYS) {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (8 * j + 2 * (threadIdx.x % 4) + e % 2 >= left) w[j][e] = -INFINITE;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float here = -INFINITE;
#pragma unroll
        for (int j = 0; j < 8; j++) here = fmaxf(here, fmaxf(w[j][2 * half], w[j][2 * half + 1]));
        here = most_of_quad(here);
        const bool above = (here - x.most[half]) * factor > SLACK;
        by[half] = above ? exp2f((x.most[half] - here) * factor) : 1.f;
        x.most[half] = above ? here : x.most[half];
        x.sum[half] *= by[half];
        const float less = x.most[half] == -INFINITE ? 0.f : x.most[half] * factor;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                w[j][e] = exp2f(w[j][e] * factor - less);
                x.sum[half] += w[j][e];
            }
    }
    if (__any_sync(ALL, by[0] != 1.f || by[1] != 1.f)) {
#pragma unroll
        for (int plane = 0; plane < PLANES; plane++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) x.y[plane][j][e] *= by[e / 2];
    }
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) x.p[i][e] = pack(w[2 * i + e / 2][e % 2 * 2], w[2 * i + e / 2][e % 2 * 2 + 1]);
}

__device__ __forceinline__ void start_scores(float (&s)[8][4], const u32 (&q)[D / 16][4], u32 keys) {
    begin();
    first_keys(s, q[0], descriptor(keys));
#pragma unroll
    for (int i = 1; i < D / 16; i++) more_keys(s, q[i], descriptor(keys + i / 4 * (PLANE >> 4) + i % 4 * 2));
    commit();
}

__device__ __forceinline__ void start_output(Rows& x, u32 at) {
    begin();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
#pragma unroll
        for (int plane = 0; plane < PLANES; plane++)
            values(x.y[plane], x.p[i], descriptor(at + plane * (PLANE >> 4) + i * 128));
    commit();
}

// The fragments of a thread's queries: rows `at` and at + 8 of the request's, which has `queries`.
__device__ __forceinline__ void load_queries(u32 (&x)[D / 16][4], const u16* q, i64 q_row, int at, int queries, int group) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = min(at + 8 * half, queries - 1);
        const u32* from = (const u32*)(q + own / group * q_row + own % group * D) + threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < D / 16; i++) x[i][half] = __ldg(from + 8 * i), x[i][2 + half] = __ldg(from + 8 * i + 4);
    }
}

// 64 queries over a context of `count` > 0 positions; `next` fetches a tile.
template <typename Next>
__device__ __forceinline__ void attend(
    Rows& x, const u32 (&q)[D / 16][4], Turns& turns, u32 places, int count, float factor, const Next& next) {
    u32 before = places + turns.place * (STAGE >> 4);
    {
        float s[8][4];
        take(turns);
        start_scores(s, q, before);
        give(turns);
        finish();
        settled(s);
        next();
        weigh(x, s, factor, count);
    }
#pragma unroll 1
    for (int left = count - KEYS; left > 0; left -= KEYS) {
        float s[8][4];
        const u32 here = places + turns.place * (STAGE >> 4);
        take(turns);
        start_scores(s, q, here);
        start_output(x, before + (STAGE / 2 >> 4));
        give(turns);
        finish();
        settled(s);
#pragma unroll
        for (int plane = 0; plane < PLANES; plane++) settled(x.y[plane]);
        before = here;
        next();
        weigh(x, s, factor, left);
    }
    start_output(x, before + (STAGE / 2 >> 4));
    finish();
#pragma unroll
    for (int plane = 0; plane < PLANES; plane++) settled(x.y[plane]);
}

// A row's output to `out`, by 16 bytes a thread; by: 1 / its sum.
__device__ __forceinline__ void write(const Rows& x, int half, u16* out, float by, bool live) {
#pragma unroll
    for (int plane = 0; plane < PLANES; plane++)
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) w[i] = pack(x.y[plane][j + i][2 * half] * by, x.y[plane][j + i][2 * half + 1] * by);
            const uint4 done = turned(w[0], w[1], w[2], w[3]);
            if (live) store(out + plane * 64 + j * 8 + 8 * (threadIdx.x % 4), done);
        }
}

// q            row n at n * q_row elements, [H, D] inside
// k, v         request r's position i at r * *_request + i * *_position elements, [Hkv, D] inside
// length       [R] positions of a request; row_start [R + 1]
// out          [N, H, D]; 0 where a request has no position
// lse          [H, N] float32; -inf there
// tiles        blocks of a request and key head
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) context(
    i64 q, i64 k, i64 v, const int* length, const int* row_start, i64 out, float* lse, i64 q_row, i64 k_request,
    i64 k_position, i64 v_request, i64 v_position, i64 rows, i64 heads, i64 key_heads, i64 positions, i64 tiles,
    float scale) {
    extern __shared__ char memory[];
    const u32 places = (shared_address(memory) + 1023) & ~1023u;
    const int rest = blockIdx.x / (u32)tiles, key_head = rest % (u32)key_heads, request = rest / (u32)key_heads;
    const int group = (u32)heads / (u32)key_heads, begins = row_start[request], given = length[request];
    const int queries = (row_start[request + 1] - begins) * group, first = blockIdx.x % (u32)tiles * ROWS;
    if (first >= queries) return;
    const int count = given < 0 ? 0 : given < positions ? given : (int)positions, steps = (count + KEYS - 1) / KEYS;
    const int self = threadIdx.x / 128, at = first + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;

    const int key = threadIdx.x / (D / 8), piece = threadIdx.x % (D / 8);
    Turns turns = {self, steps, 0};
    Tiles from = {(const u16*)k + request * k_request + key_head * D + key * k_position + piece * 8,
                  (const u16*)v + request * v_request + key_head * D + key * v_position + piece * 8,
                  places + piece / 8 * PLANE + key * 128 + (piece % 8 ^ key % 8) * 16, key};
    auto next = [&] {  // behind a turn: the tile AHEAD of it
        const u32 place = turns.place + AHEAD - 1;
        fetch_tile(from, place < STAGES ? place : place - STAGES, count, k_position, v_position);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch_tile(from, i, count, k_position, v_position);
    if (self && steps) {
        fetched<AHEAD - 1>();
        asm volatile("bar.arrive 1, %0;" ::"n"(THREADS) : "memory");
    }
    if (first + self * 64 >= queries) {  // a warpgroup without queries
        while (turns.left) take(turns), give(turns), next();
        return;
    }
    u32 asked[D / 16][4];
    load_queries(asked, (const u16*)q + begins * q_row + key_head * group * D, q_row, at, queries, group);
    Rows x = {};
    x.most[0] = x.most[1] = -INFINITE;
    if (steps) attend(x, asked, turns, places >> 4, count, scale * LOG2E, next);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int own = at + 8 * half;
        const i64 row = begins + own / group, head = key_head * group + own % group;
        const float whole = sum_of_quad(x.sum[half]);
        const bool live = own < queries;
        write(x, half, (u16*)out + (row * heads + head) * D, count ? 1.f / whole : 0.f, live);
        if (threadIdx.x % 4 == 0 && live)
            lse[head * rows + row] = count ? x.most[half] * scale + logf(whole) : -INFINITE;
    }
}
