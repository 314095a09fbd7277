// Exact top-K of every request in one read of its logits, by chunk maxima (classes R and L, or given ranks).
//
//     scan    the largest logit of each chunk of a row, and the row's log-sum-exp: the one read
//     tail    one cluster a request: chunks whose best score may be among the K best are read again, and their candidates
//             that may are ranked
//     search  does a request again, by radix search, whose candidates did not fit the tail; exits at once otherwise
//
// Why it is exact: a score falls with its logit inside a row, so a chunk's best score is that of its largest logit. If K
// chunks have a best score of T or more, K candidates have, and those below T are not among the K best. Any lower bound
// of the K-th best chunk serves as T; candidates are ranked by their exact score and place (T0).
//
// Compiled with -DPART (0 scan, 1 tail, 2 search) -DTYPE (0 bfloat16, 1 float16, 2 float32 logits)
// -DSCORE (0: the logit, a given rank; 1: logit + parent; 2: (logit - norm) + parent) -DNORM (scan computes norm over
// 0 nothing, 1 all codes, 2 the codes of the mask) -DMASK (1: a bit a code) -DVEC (1: rows of whole 16-byte vectors)
// -DSMALL (1: a chunk is 16 bytes, for few rows; 0: UNITS times 512 bytes) -DUNITS -DCLUSTER (blocks a request)
//
// What `make test-kernels` compiles is a part of the combinations; search is rarely run, and may spill.
//
// build: PART=0 TYPE=0 SCORE=2 NORM=1,2 MASK=0,1 VEC=1 SMALL=0 UNITS=1 CLUSTER=1
// build: PART=0 TYPE=1 SCORE=1 NORM=1 MASK=1 VEC=0 SMALL=1 UNITS=1 CLUSTER=1
// build: PART=0 TYPE=2 SCORE=0 NORM=0 MASK=0 VEC=1 SMALL=0,1 UNITS=2 CLUSTER=1
// build: PART=0 TYPE=2 SCORE=2 NORM=1 MASK=1 VEC=0 SMALL=0 UNITS=4 CLUSTER=1
// build: PART=1 TYPE=0 SCORE=2 NORM=0 MASK=0,1 VEC=1 SMALL=0 UNITS=1 CLUSTER=1,3,8
// build: PART=1 TYPE=1 SCORE=1 NORM=0 MASK=1 VEC=0 SMALL=1 UNITS=1 CLUSTER=2
// build: PART=1 TYPE=2 SCORE=0 NORM=0 MASK=0 VEC=1 SMALL=0,1 UNITS=2 CLUSTER=4,8
// build: PART=2 TYPE=0 SCORE=2 NORM=0 MASK=0,1 VEC=0 SMALL=0 UNITS=1 CLUSTER=1 spill=1024
// build: PART=2 TYPE=2 SCORE=0 NORM=0 MASK=0 VEC=0 SMALL=1 UNITS=2 CLUSTER=1 spill=1024

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#if TYPE == 2
typedef float Logit;
#define V 4  // logits in 16 bytes
#define LOW 0xff800000u
#define MAXIMUM "max.NaN.f32"
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

// Logits e .. e + V - 1 of a row of `codes`; -inf beyond its end. ONCE: kept out of L1; otherwise e is in the row.
template <bool ONCE>
__device__ __forceinline__ uint4 load(const Logit* row, int e, int codes) {
    uint4 x = low_vector();
#if VEC
    if (!ONCE)
        x = __ldg((const uint4*)(row + e));
    else if (e < codes)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(row + e));
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
    u32 byte = mask[row * stride + (e >> 3)];
    return V == 4 ? (byte >> (e & 4)) & 15u : byte;
#else
    return 255u;
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

#if PART == 0
// ---- scan ----------------------------------------------------------------------------------------------------------

#define LOADS (TYPE == 2 ? 16 : 8)  // vectors of a lane in flight
#define LOG2E 1.4426950408889634f
#define STRIDE (4 * LOADS)

#if TYPE != 2
// Four bits as masks of the halves of two words: SIGNS puts bit i into the sign of byte i, which prmt then spreads.
#define SIGNS 0x10204080u
template <u32 PICK>
__device__ __forceinline__ u32 without(u32 word, u32 signs) {
    u32 m;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(m) : "r"(signs), "n"(PICK));
    return (word & ~m) | (LOW & m);
}
#endif

// Logits whose bit is 0 become -inf.
__device__ __forceinline__ uint4 keep_bits(const uint4& x, u32 bits) {
    u32 drop = ~bits;
#if TYPE == 2
    return make_uint4(drop & 1 ? LOW : x.x, drop & 2 ? LOW : x.y, drop & 4 ? LOW : x.z, drop & 8 ? LOW : x.w);
#else
    u32 a = (drop & 15) * SIGNS, b = (drop >> 4 & 15) * SIGNS;
    return make_uint4(without<0x9988>(x.x, a), without<0xbbaa>(x.y, a), without<0x9988>(x.z, b), without<0xbbaa>(x.w, b));
#endif
}

__device__ __forceinline__ u32 clean_word(u32 w, int& wrong) {
#if TYPE == 2
    if (__uint_as_float(w) <= LARGEST) return w;
    wrong++;
    return LOW;
#else
    bool a = low_of(w) <= LARGEST, b = high_of(w) <= LARGEST;
    wrong += !a + !b;
    return (a ? w & 0xffffu : LOW & 0xffffu) | (b ? w & 0xffff0000u : LOW & 0xffff0000u);
#endif
}

__device__ __forceinline__ void clean(uint4& x, int& wrong) {
    x.x = clean_word(x.x, wrong), x.y = clean_word(x.y, wrong), x.z = clean_word(x.z, wrong), x.w = clean_word(x.w, wrong);
}

__device__ __forceinline__ float exp_sum(u32 w, float shift) {
    float a = exp2_of(fmaf(low_of(w), LOG2E, shift));
    return TYPE == 2 ? a : a + exp2_of(fmaf(high_of(w), LOG2E, shift));
}

// One row a block of 128 threads.
//
// logits [n, codes] · mask [n, mask_stride bytes] · parent [n], -inf = a dead row, which is not read (SCORE 0: unused)
// chunk  [n, chunks] float32 out: the largest legal logit of each; -inf = none; `chunks` may exceed the row's
// ends   [n] out: the largest and the smallest of a row's chunks that are not -inf; -inf where there is none
// norm   [n] float32 out where NORM · bad [n] int32 out: NaN and +inf among the logits, which count as -inf
extern "C" __global__ void __launch_bounds__(128) scan(
    const Logit* __restrict__ logits, const u8* __restrict__ mask, const float* __restrict__ parent,
    float* __restrict__ chunk, float2* __restrict__ ends, float* __restrict__ norm, int* __restrict__ bad, i64 codes_,
    i64 mask_stride, i64 chunks_) {
    const int codes = (int)codes_, chunks = (int)chunks_, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 row = blockIdx.x;
    float* mine = chunk + row * chunks;
    let_next_begin();
#if SCORE
    if (!(parent[row] > NEG)) {
        for (int i = threadIdx.x; i < chunks; i += 128) mine[i] = NEG;
        if (threadIdx.x == 0) {
            bad[row] = 0, ends[row] = make_float2(NEG, NEG);
#if NORM
            norm[row] = NEG;
#endif
        }
        return;
    }
#endif
    const Logit* x = logits + row * codes;
    const int units = SMALL ? chunks / 32 : chunks * UNITS;
    float top = NEG, sum = 0.f;
    int wrong = 0, upper = ordered(NEG), lower = 0x7fffffff;
    for (int first = warp * LOADS; first < units; first += STRIDE) {
        uint4 v[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) v[u] = load<true>(x, (first + u) * UNIT + lane * V, codes);
#if MASK
        u32 bits[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            int e = (first + u) * UNIT + lane * V;
            bits[u] = e < codes ? load_bits(mask, row, mask_stride, e) : 0;
        }
#endif
        u32 best[LOADS], most = LOW;
#pragma unroll
        for (int u = 0; u < LOADS; u++) best[u] = max_of(v[u]), most = max_of(most, best[u]);
        bool fine = low_of(most) <= LARGEST && high_of(most) <= LARGEST;
        if (__any_sync(ALL, !fine)) {
            most = LOW;
#pragma unroll
            for (int u = 0; u < LOADS; u++) clean(v[u], wrong), best[u] = max_of(v[u]), most = max_of(most, best[u]);
        }
#if MASK
#if NORM == 2
        most = LOW;
#endif
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
#if NORM == 2
            v[u] = keep_bits(v[u], bits[u]);
            best[u] = max_of(v[u]), most = max_of(most, best[u]);
#else
            best[u] = max_of(keep_bits(v[u], bits[u]));
#endif
        }
#endif
#if NORM
        float higher = fmaxf(top, float_of(most)), shift = higher > NEG ? -higher * LOG2E : 0.f;
        float part[2] = {sum * exp2_of(fmaf(top, LOG2E, shift)), 0.f};
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            part[0] += exp_sum(v[u].x, shift), part[1] += exp_sum(v[u].y, shift);
            part[0] += exp_sum(v[u].z, shift), part[1] += exp_sum(v[u].w, shift);
        }
        sum = part[0] + part[1], top = higher;
#endif
#if SMALL
#pragma unroll
        for (int u = 0; u < LOADS; u++)
            if (first + u < units) {
                float f = float_of(best[u]);
                mine[(first + u) * 32 + lane] = f;
                upper = max(upper, ordered(f));
                if (f > NEG) lower = min(lower, ordered(f));
            }
#else
        int found = 0;
#pragma unroll
        for (int u = 0; u < LOADS; u += UNITS) {
            u32 of = best[u];
#pragma unroll
            for (int k = 1; k < UNITS; k++) of = max_of(of, best[u + k]);
            int m = __reduce_max_sync(ALL, ordered(float_of(of)));
            found = lane == u / UNITS ? m : found;
        }
        int at = first / UNITS + lane;
        if (lane < LOADS / UNITS && at < chunks) {
            mine[at] = unordered(found);
            upper = max(upper, found);
            if (found > ordered(NEG)) lower = min(lower, found);
        }
#endif
    }
    __shared__ float tops[4], sums[4];
    __shared__ int wrongs[4], uppers[4], lowers[4];
    wrong = __reduce_add_sync(ALL, wrong), upper = __reduce_max_sync(ALL, upper), lower = __reduce_min_sync(ALL, lower);
#if NORM
    float high = unordered(__reduce_max_sync(ALL, ordered(top)));
    sum = high > NEG ? sum * exp2_of((top - high) * LOG2E) : 0.f;
#pragma unroll
    for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(ALL, sum, i);
    if (lane == 0) tops[warp] = high, sums[warp] = sum;
#endif
    if (lane == 0) wrongs[warp] = wrong, uppers[warp] = upper, lowers[warp] = lower;
    __syncthreads();
    if (threadIdx.x == 0) {
        bad[row] = wrongs[0] + wrongs[1] + wrongs[2] + wrongs[3];
        upper = max(max(uppers[0], uppers[1]), max(uppers[2], uppers[3]));
        lower = min(min(lowers[0], lowers[1]), min(lowers[2], lowers[3]));
        ends[row] = make_float2(unordered(upper), upper > ordered(NEG) ? unordered(lower) : NEG);
#if NORM
        float t = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])), s = 0.f;
        for (int w = 0; w < 4; w++) s += t > NEG ? sums[w] * exp2_of((tops[w] - t) * LOG2E) : 0.f;
        norm[row] = t > NEG ? t + logf(s) : NEG;
#endif
    }
}
#else
// ---- what tail and search share ------------------------------------------------------------------------------------

struct Request {  // its rows, what it keeps, and where that goes
    int first, rows, keep;
    i64 out;
};

// Operands of tail and search. Device pointers; a null pointer is an output that nobody wants.
struct Operands {
    const Logit* logits;      // [n, codes]
    const u8* mask;           // [n, mask_stride] bytes
    const float* chunk;       // [n, chunks]
    const float2* ends;       // [n]
    const float* norm;        // [n]
    const float* parent;      // [n]
    const i64* order;         // [n] place among the rows of a request: 0 .. rows - 1
    const int* row_start;     // [R + 1]
    const int* keep;          // [R]
    const int* out_start;     // [R + 1]
    const int* ancestry;      // [n, depth]
    i64* row_out;             // [M]
    i64* code_out;            // [M]
    i64* order_out;           // [M]
    float* score_out;         // [M]
    i64* valid_out;           // [R]
    int* ancestry_out;        // [M, depth + 1]
    int* overflow;            // [R] tail -> search
};

#define PARAMETERS \
    const Logit *__restrict__ logits, const u8 *__restrict__ mask, const float *chunk, const float2 *ends, \
    const float *norm, const float *__restrict__ parent, const i64 *__restrict__ order, \
    const int *__restrict__ row_start, const int *__restrict__ keep, const int *__restrict__ out_start, \
    const int *__restrict__ ancestry, i64 *row_out, i64 *code_out, i64 *order_out, float *score_out, i64 *valid_out, \
    int *ancestry_out, int *overflow, i64 depth_, i64 codes_, i64 mask_stride, i64 chunks_

#define OPERANDS \
    {logits, mask, chunk, ends, norm, parent, order, row_start, keep, out_start, ancestry, row_out, code_out, order_out, \
     score_out, valid_out, ancestry_out, overflow}

__device__ __forceinline__ float norm_of(const float* norm, i64 row) { return SCORE == 2 ? norm[row] : 0.f; }
__device__ __forceinline__ float parent_of(const float* parent, i64 row) { return SCORE ? __ldg(parent + row) : 0.f; }

// T0 as one number, larger is better: the score, then the smallest order * codes + code. -0.0 is +0.0. Never 0.
__device__ __forceinline__ u64 key_of(float score, u32 place) {
    u32 rank = (u32)ordered(add(score, 0.f)) ^ 0x80000000u;
    return (u64)rank << 32 | (0xffffffffu - place);
}

__device__ __forceinline__ float score_in(u64 key) { return unordered((int)((u32)(key >> 32) ^ 0x80000000u)); }

// Survivor number `at` of a request, or a tombstone (key 0).
__device__ __forceinline__ void emit(
    const Operands& o, const Request& q, const u16* inverse, u64 key, int at, int codes, int depth) {
    i64 to = q.out + at, row = -1;
    int code = -1;
    if (key) {
        u32 place = 0xffffffffu - (u32)key;
        code = (int)(place % (u32)codes);
        row = q.first + inverse[place / (u32)codes];
    }
    o.row_out[to] = row;
    o.code_out[to] = code;
    o.order_out[to] = at;
    if (o.score_out) o.score_out[to] = key ? score_in(key) : NEG;
    if (o.ancestry_out) {
        i64 from = row < 0 ? 0 : row;
        int* line = o.ancestry_out + to * (depth + 1);
        for (int d = 0; d < depth; d++) line[d] = o.ancestry[from * depth + d];
        line[depth] = (int)from;
    }
}

__device__ __forceinline__ Request request_of(const Operands& o, int r) {
    int first = o.row_start[r];
    return {first, o.row_start[r + 1] - first, o.keep[r], o.out_start[r]};
}

// place[row] = its order and inverse[order] = row, for the living rows of a request.
__device__ __forceinline__ void invert(const Operands& o, const Request& q, int row, u16* place, u16* inverse) {
    i64 at = o.order[q.first + row];
    if (at >= 0 && at < q.rows && parent_of(o.parent, q.first + row) > NEG) place[row] = (u16)at, inverse[at] = (u16)row;
}
#endif

#if PART == 1
// ---- tail ----------------------------------------------------------------------------------------------------------

#define BINS 512    // of chunk scores
#define FINE 2048   // of candidates
#define MOST 1024   // candidates of a bin that are ranked by comparing each with each
#define AHEAD (CLUSTER > 2 ? 2 : 4)  // vectors of a lane in flight

#if CLUSTER > 1
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 remote(const void* p, int block) {
    u32 a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"((u32)__cvta_generic_to_shared(p)), "r"(block));
    return a;
}
__device__ __forceinline__ u32 read(const u32* p, int block) {
    u32 x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(remote(p, block)) : "memory");
    return x;
}
__device__ __forceinline__ void write(u64* p, int block, u64 x) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote(p, block)), "l"(x) : "memory");
}
#define CLUSTER_SIZE __cluster_dims__(CLUSTER, 1, 1)
#else
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
__device__ __forceinline__ u32 read(const u32* p, int) { return *(const volatile u32*)p; }
__device__ __forceinline__ void write(u64* p, int, u64 x) { *p = x; }
#define CLUSTER_SIZE
#endif

// A falling step function of x, the same everywhere: bins from `high` down. NaN (no range) is bin 0.
__device__ __forceinline__ u32 bin_of(float x, float high, float scale, u32 bins) {
    u32 b = __float2uint_rz((high - x) * scale);
    return b < bins - 1 ? b : bins - 1;
}

// What the threads before this one have, of 1024; `total` of all.
__device__ __forceinline__ u32 before_of(u32 x, u32* scratch, u32& total) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 sum = x;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        u32 y = __shfl_up_sync(ALL, sum, i);
        if (lane >= i) sum += y;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    u32 w = scratch[lane], all = w;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        u32 y = __shfl_up_sync(ALL, all, i);
        if (lane >= i) all += y;
    }
    total = __shfl_sync(ALL, all, 31);
    u32 earlier = __shfl_sync(ALL, all - w, warp);
    __syncthreads();
    return earlier + sum - x;
}

// One cluster of CLUSTER blocks of 1024 threads a request. Dynamic shared memory, in this order: `places` u64 of sorted
// candidates, `room` u64 of candidates, `scores_room` floats, `list_room` u32, and twice u16 for each row.
extern "C" __global__ void CLUSTER_SIZE __launch_bounds__(1024, 1)
    tail(PARAMETERS, i64 places, i64 room_, i64 scores_room, i64 list_room_) {
    extern __shared__ __align__(16) u64 memory[];
    __shared__ u32 hist[2][BINS], fine[FINE / 2], start[FINE + 1], next[FINE], scratch[32], base[CLUSTER + 1];
    __shared__ u32 found, listed, cut_bin, cut_before, cut_total;
    const Operands o = OPERANDS;
    const int rank = blockIdx.x % CLUSTER, r = blockIdx.x / CLUSTER, tid = threadIdx.x, lane = tid & 31;
    const int codes = (int)codes_, chunks = (int)chunks_, depth = (int)depth_;
    const Request q = request_of(o, r);
    u64 *sorted = memory, *candidate = sorted + places;
    float* scores = (float*)(candidate + room_);
    u32* list = (u32*)(scores + scores_room);
    u16 *inverse = (u16*)(list + list_room_), *place = inverse + q.rows;
    const u32 room = (u32)room_, list_room = (u32)list_room_;

    let_next_begin();
    if (tid < BINS) hist[0][tid] = hist[1][tid] = 0;
    fine[tid] = 0;
    if (tid == 0) found = listed = 0;
    wait_for_previous();

    // The range of the chunks' scores, and the scores of this block's chunks, by groups of 4 in turn.
    int high_seen = ordered(NEG), low_seen = 0x7fffffff;
    for (int i = tid; i < q.rows; i += 1024) {
        i64 row = q.first + i;
        float a = norm_of(norm, row), b = parent_of(parent, row);
        float2 e = __ldcg(ends + row);
        float best = good_score(e.x, a, b), worst = good_score(e.y, a, b);
        high_seen = max(high_seen, ordered(best));
        if (worst > NEG) low_seen = min(low_seen, ordered(worst));
        invert(o, q, i, place, inverse);
    }
    const int wide = chunks / 4, groups = q.rows * wide;
    const int mine = groups > rank ? (groups - rank + CLUSTER - 1) / CLUSTER : 0;
    for (int j = tid; j < mine; j += 1024) {
        int g = rank + j * CLUSTER;
        i64 row = q.first + g / wide;
        float4 c = __ldcg((const float4*)chunk + (i64)q.first * wide + g);
        float a = norm_of(norm, row), b = parent_of(parent, row);
        ((float4*)scores)[j] =
            make_float4(good_score(c.x, a, b), good_score(c.y, a, b), good_score(c.z, a, b), good_score(c.w, a, b));
    }
    high_seen = __reduce_max_sync(ALL, high_seen), low_seen = __reduce_min_sync(ALL, low_seen);
    if (lane == 0) start[tid >> 5] = (u32)high_seen, start[32 + (tid >> 5)] = (u32)low_seen;
    __syncthreads();
    const float top = unordered(__reduce_max_sync(ALL, (int)start[lane]));
    const float bottom = unordered(__reduce_min_sync(ALL, (int)start[32 + lane]));
    if (q.keep <= 0 || !(top > NEG)) {  // nothing is to be selected, or may be: the whole cluster leaves
        for (int i = rank * 1024 + tid; i < q.keep; i += CLUSTER * 1024) emit(o, q, inverse, 0, i, codes, depth);
        if (rank == 0 && tid == 0) o.valid_out[r] = 0, o.overflow[r] = 0;
        return;
    }

    // The bin of chunk scores in which the K-th best lies; refined while too many chunks share it.
    const float slack = 1e-6f * (fabsf(top) + fabsf(bottom)) + 1e-30f;
    float high = top, scale = BINS / (top - bottom);
    u32 need = q.keep, accepted = 0, last = 0, cut;
    bool everything;
    for (int round = 0;; round++) {
        u32* h = hist[round & 1];
        for (int i = tid; i < 4 * mine; i += 1024) {
            float s = scores[i];
            if (s > NEG && s < INF) atomicAdd(h + bin_of(s, high, scale, BINS), 1u);
        }
        cluster_sync();
        u32 count = 0, total;
        if (tid < BINS) {
#pragma unroll
            for (int c = 0; c < CLUSTER; c++) count += read(h + tid, c);
            hist[(round + 1) & 1][tid] = 0;
        }
        u32 before = before_of(count, scratch, total);
        if (before < need && before + count >= need) cut_bin = tid, cut_before = before, cut_total = count;
        __syncthreads();
        everything = total < need;
        cut = everything ? BINS - 1 : cut_bin;
        accepted += everything ? total : cut_before;
        u32 boundary = everything ? 0 : cut_total;
        if (accepted + boundary <= q.keep + q.keep / 4 + 32 || round == 2 || boundary == last || 1.f / scale < slack) break;
        last = boundary;
        need -= cut_before;
        for (int i = tid; i < 4 * mine; i += 1024) {
            float s = scores[i];
            if (s > NEG && s < INF) {
                u32 b = bin_of(s, high, scale, BINS);
                if (b != cut) scores[i] = b < cut ? INF : NEG;
            }
        }
        high -= cut / scale, scale *= BINS;
        __syncthreads();
    }
    const float least = everything ? NEG : high - (cut + 1) / scale - slack;  // no candidate below is selected
    for (int base = tid - lane; base < 4 * mine; base += 1024) {
        int i = base + lane;
        float s = i < 4 * mine ? scores[i] : NEG;
        bool take = s == INF || (s > NEG && bin_of(s, high, scale, BINS) <= cut);
        u32 votes = __ballot_sync(ALL, take);
        if (!votes) continue;
        u32 at = 0;
        if (lane == 0) at = atomicAdd(&listed, __popc(votes));
        at = __shfl_sync(ALL, at, 0) + __popc(votes & ((1u << lane) - 1));
        if (take && at < list_room) list[at] = (u32)(rank + (i >> 2) * CLUSTER) << 2 | (i & 3);
    }
    __syncthreads();

    // The candidates of those chunks that may be selected, counted by finer bins.
    const float floor_ = everything ? bottom - (top - bottom) : least;
    const float fine_scale = FINE / (top - floor_);
    const u32 lines = min(listed, list_room), work = SMALL ? (lines + 31) / 32 : lines * UNITS;
    for (u32 base = (tid >> 5) * AHEAD; base < work; base += 32 * AHEAD) {
        uint4 x[AHEAD];
        float bound[AHEAD];
        u32 legal[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            u32 w = base + u, line = SMALL ? w * 32 + lane : w / UNITS;
            bool on = line < lines;
            u32 id = list[on ? line : 0], p = id % chunks;
            i64 row = q.first + id / chunks;
            int e = SMALL ? p * V : (p * UNITS + w % UNITS) * UNIT + lane * V;
            on = on && e < codes;
            if (!on) e = 0;  // so that every load is of the row, and none waits for a branch
            x[u] = load<false>(logits + row * codes, e, codes);
            legal[u] = load_bits(mask, row, mask_stride, e);
            if (!on) legal[u] = 0;
            float a = norm_of(norm, row), b = parent_of(parent, row), t = least;
#if SCORE == 2
            t = ((t - b) + a) - (1e-6f * (fabsf(t) + fabsf(b) + fabsf(a)) + 1e-30f);
#elif SCORE == 1
            t = (t - b) - (1e-6f * (fabsf(t) + fabsf(b)) + 1e-30f);
#endif
            bound[u] = fmaxf(t, -LARGEST);  // NaN, of no bound at all, too
        }
        u32 bits = 0;
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            const u32 word[4] = {x[u].x, x[u].y, x[u].z, x[u].w};
#pragma unroll
            for (int k = 0; k < V; k++) {
                float f = TYPE == 2 ? low_of(word[k % 4]) : k % 2 ? high_of(word[k / 2]) : low_of(word[k / 2]);
                if (f >= bound[u] && f <= LARGEST) bits |= (legal[u] >> k & 1u) << (u * V + k);
            }
        }
        u32 own = __popc(bits), upto = own;
        if (!__any_sync(ALL, own)) continue;
#pragma unroll
        for (int i = 1; i < 32; i <<= 1) {
            u32 y = __shfl_up_sync(ALL, upto, i);
            if (lane >= i) upto += y;
        }
        u32 at = 0;
        if (lane == 31) at = atomicAdd(&found, upto);
        at = __shfl_sync(ALL, at, 31) + upto - own;
        while (bits) {
            u32 k = __ffs(bits) - 1, w = base + k / V;
            bits &= bits - 1;
            u32 id = list[SMALL ? w * 32 + lane : w / UNITS], p = id % chunks, in = id / chunks;
            int e = (SMALL ? p * V : (p * UNITS + w % UNITS) * UNIT + lane * V) + k % V;
            i64 row = q.first + in;
            float s = good_score(widened(logits[row * codes + e]), norm_of(norm, row), parent_of(parent, row));
            if (at < room) {
                candidate[at] = key_of(s, place[in] * (u32)codes + e);
                u32 b = bin_of(s, top, fine_scale, FINE);
                atomicAdd(fine + (b >> 1), b & 1 ? 0x10000u : 1u);
            }
            at++;
        }
    }
    cluster_sync();

    // Where each bin begins; each block's candidates of a bin follow those of the blocks before it. Whole bins are shared
    // out: block c has those from `base[c]`, the first that begins at or after keep * c / CLUSTER.
    u32 t0 = 0, t1 = 0, b0 = 0, b1 = 0, total;
    bool over = false;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
        u32 w = read(fine + tid, c);
        if (c < rank) b0 += w & 0xffffu, b1 += w >> 16;
        t0 += w & 0xffffu, t1 += w >> 16;
    }
    if (tid < CLUSTER) over = read(&found, tid) > room || read(&listed, tid) > list_room;
    const u32 keep_ = q.keep, before = before_of(t0 + t1, scratch, total), middle = before + t0, after = middle + t1;
    start[2 * tid] = before, start[2 * tid + 1] = middle;
    next[2 * tid] = before + b0, next[2 * tid + 1] = middle + b1;
    over |= (before < keep_ && t0 > MOST) || (middle < keep_ && t1 > MOST);
    if (tid <= CLUSTER) base[tid] = tid ? total : 0;
    if (tid == 0) start[FINE] = total;
    if (__syncthreads_or(over)) {
        if (rank == 0 && tid == 0) o.overflow[r] = 1;
        cluster_sync();
        return;
    }
#pragma unroll
    for (int c = 1; c <= CLUSTER; c++) {
        u32 edge = (c * keep_ + CLUSTER - 1) / CLUSTER;
        if (before < edge && edge <= middle) base[c] = middle;
        if (middle < edge && edge <= after) base[c] = after;
    }
    __syncthreads();
    const u32 mine_found = found;
    for (u32 i = tid; i < mine_found; i += 1024) {
        u64 key = candidate[i];
        u32 b = bin_of(score_in(key), top, fine_scale, FINE), from = start[b];
        if (from < keep_) {
            u32 owner = from * CLUSTER / keep_;
            write(sorted + (atomicAdd(next + b, 1u) - base[owner]), owner, key);
        }
    }
    cluster_sync();  // the last time that a block touches another

    // The rank inside its bin is a candidate's place.
    const u32 mine_from = base[rank], mine_to = base[rank + 1];
    for (u32 i = tid; i < mine_to - mine_from; i += 1024) {
        u64 key = sorted[i];
        u32 b = bin_of(score_in(key), top, fine_scale, FINE), at = start[b];
        for (u32 k = start[b] - mine_from; k < start[b + 1] - mine_from; k++) at += sorted[k] > key;
        if (at < keep_) emit(o, q, inverse, key, at, codes, depth);
    }
    for (u32 i = total + rank * 1024 + tid; i < keep_; i += CLUSTER * 1024) emit(o, q, inverse, 0, i, codes, depth);
    if (rank == 0 && tid == 0) o.valid_out[r] = min(total, keep_), o.overflow[r] = 0;
}
#endif

#if PART == 2
// ---- search --------------------------------------------------------------------------------------------------------

#define DIGITS 2048

// The k-th largest of `count` keys that are not 0; 0 where there are fewer. All 1024 threads.
template <class Key>
__device__ __forceinline__ u64 kth_largest(Key key_at, u32 count, u32 k, u32* hist, u32* state) {
    u64 prefix = 0;
#pragma unroll 1
    for (int shift = 53; shift >= -2; shift -= 11) {
        int low = shift < 0 ? 0 : shift, above = shift + 11;
        for (int i = threadIdx.x; i < DIGITS; i += 1024) hist[i] = 0;
        if (threadIdx.x == 0) state[0] = 0xffffffffu;
        __syncthreads();
#pragma unroll 1
        for (u32 base = 0; base < count; base += 1024) {
            u32 i = base + threadIdx.x;
            u64 key = i < count ? key_at(i) : 0;
            bool in = key && (above > 63 || (key >> above) == (prefix >> above));
            u32 digit = (u32)(key >> low) & ((1u << (above - low)) - 1), lanes = __ballot_sync(ALL, in);
            if (!lanes) continue;
            u32 common = __shfl_sync(ALL, digit, __ffs(lanes) - 1);
            u32 same = __ballot_sync(ALL, in && digit == common);
            if (in && digit != common) atomicAdd(hist + digit, 1u);
            if ((threadIdx.x & 31) == 0) atomicAdd(hist + common, __popc(same));
        }
        __syncthreads();
        if (threadIdx.x < 32) {  // 64 digits a lane, from the largest
            int lane = threadIdx.x, first = DIGITS - 1 - lane * 64;
            u32 own = 0, sum;
            for (int d = 0; d < 64; d++) own += hist[first - d];
            sum = own;
            for (int i = 1; i < 32; i <<= 1) {
                u32 y = __shfl_up_sync(ALL, sum, i);
                if (lane >= i) sum += y;
            }
            u32 before = sum - own;
            if (before < k && sum >= k)
                for (int d = 0; d < 64; d++) {
                    u32 n = hist[first - d];
                    if (before + n >= k) {
                        state[0] = first - d, state[1] = before;
                        break;
                    }
                    before += n;
                }
        }
        __syncthreads();
        if (state[0] == 0xffffffffu) return 0;
        prefix |= (u64)state[0] << low;
        k -= state[1];
        __syncthreads();
    }
    return prefix;
}

// One block of 1024 threads a request. Dynamic shared memory: `keys_room` u64 (a power of two, at least keep),
// `list_room` u32 (at least keep), and twice u16 for each row.
extern "C" __global__ void __launch_bounds__(1024, 1) search(PARAMETERS, i64 keys_room, i64 list_room) {
    extern __shared__ __align__(16) u64 memory[];
    __shared__ u32 hist[DIGITS], state[2], listed, found;
    const Operands o = OPERANDS;
    const int r = blockIdx.x, tid = threadIdx.x;
    wait_for_previous();
    if (!*(volatile int*)(o.overflow + r)) return;
    const int codes = (int)codes_, chunks = (int)chunks_, depth = (int)depth_;
    const Request q = request_of(o, r);
    u64* keys = memory;
    u32* list = (u32*)(keys + keys_room);
    u16 *inverse = (u16*)(list + list_room), *place = inverse + q.rows;
    for (int i = tid; i < q.rows; i += 1024) invert(o, q, i, place, inverse);
    for (int i = tid; i < keys_room; i += 1024) keys[i] = 0;
    if (tid == 0) listed = found = 0;
    __syncthreads();

    // The K best chunks, by (best score, first place): each other chunk is beaten by K candidates.
    auto chunk_key = [&](u32 i) -> u64 {
        i64 row = q.first + i / chunks;
        float s = good_score(chunk[(i64)q.first * chunks + i], norm_of(norm, row), parent_of(parent, row));
        return s > NEG ? key_of(s, place[i / chunks] * (u32)chunks + i % chunks) : 0;
    };
    const u32 all = (u32)q.rows * (u32)chunks;
    const u64 edge = kth_largest(chunk_key, all, q.keep, hist, state);
    #pragma unroll 1
    for (u32 i = tid; i < all; i += 1024) {
        u64 key = chunk_key(i);
        if (key && key >= edge) list[atomicAdd(&listed, 1u)] = i;
    }
    __syncthreads();
    const u32 size = SMALL ? V : UNITS * UNIT;
    auto element_key = [&](u32 i) -> u64 {
        u32 id = list[i / size], p = id % chunks;
        i64 row = q.first + id / chunks;
        int e = p * size + (int)(i % size);
        if (e >= codes || !(load_bits(mask, row, mask_stride, e & ~(V - 1)) >> (e & (V - 1)) & 1u)) return 0;
        float x = widened(logits[row * codes + e]);
        float s = x <= LARGEST ? good_score(x, norm_of(norm, row), parent_of(parent, row)) : NEG;
        return s > NEG ? key_of(s, place[id / chunks] * (u32)codes + e) : 0;
    };
    const u32 elements = listed * size;
    const u64 worst = kth_largest(element_key, elements, q.keep, hist, state);
    #pragma unroll 1
    for (u32 i = tid; i < elements; i += 1024) {
        u64 key = element_key(i);
        if (key && key >= worst) keys[atomicAdd(&found, 1u)] = key;
    }
    __syncthreads();
    const u32 total = found;
    for (int size2 = 2; size2 <= keys_room; size2 *= 2)  // bitonic, falling
        for (int gap = size2 / 2; gap; gap /= 2) {
            for (int i = tid; i < keys_room / 2; i += 1024) {
                int a = 2 * i - (i & (gap - 1)), b = a + gap;
                u64 x = keys[a], y = keys[b];
                if ((x < y) == ((a & size2) == 0)) keys[a] = y, keys[b] = x;
            }
            __syncthreads();
        }
    for (int i = tid; i < q.keep; i += 1024) emit(o, q, inverse, keys[i], i, codes, depth);
    if (tid == 0) o.valid_out[r] = total;
}
#endif
