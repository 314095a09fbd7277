// Around the products of a mixture of experts: which experts a row goes to, rows by expert, and the weighted sum of
// what comes back. The definitions are in reference.py; the arrangement is bit by bit that of a stable sort.
//
// build: BF16=0,1
//
// n rows, E experts (at most EXPERTS), k of them (at most 32) a row; d a multiple of 8, rows of x on 16 bytes.

// part: prelude/half.cuh

#define ALL 0xffffffffu
#define THREADS 256
#define WARPS (THREADS / 32)
#define EXPERTS 512
#define ROWS 128   // of a block that counts or arranges
#define AT_ONCE 4  // rows that a thread of combine loads before it adds them
#define NOT_A_NUMBER 0xffffffffu

__device__ __forceinline__ float number(const u16* p) {
    float a, b;
    unpack(*p, a, b);
    return a;
}

__device__ __forceinline__ float most(float x) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, apart));
    return x;
}

__device__ __forceinline__ float sum(float x) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) x += __shfl_xor_sync(ALL, x, apart);
    return x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// Larger is earlier in the order: numbers descending, NaN before them, equal ones by their number.
__device__ __forceinline__ u64 key(float x, int expert) {
    const u32 bits = __float_as_uint(x + 0.f);
    const u32 rank = x != x ? NOT_A_NUMBER : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)rank << 32 | (0xfffffffeu - expert);
}

// A warp a row; bias may be null; sigmoid_ and normalise are truth values.
extern "C" __global__ void __launch_bounds__(THREADS) choose(
    const u16* logits, i64 stride, const u16* bias, int* expert, float* weight, i64 n, i64 experts, i64 k, i64 sigmoid_,
    i64 normalise, float factor) {
    const i64 row = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, E = (int)experts;
    if (row >= n) return;
    const u16* own = logits + row * stride;
    float top = 0, total = 1;
    if (!sigmoid_) {
        top = __int_as_float(0xff800000);
        for (int e = lane; e < E; e += 32) top = fmaxf(top, number(own + e));
        top = most(top);
        total = 0;
        for (int e = lane; e < E; e += 32) total += expf(number(own + e) - top);
        total = sum(total);
    }
    u64 last = ~0ull;
    int mine = 0;
    float kept = 0;
    for (int j = 0; j < k; j++) {
        u64 best = 0;
        for (int e = lane; e < E; e += 32) {
            const float x = number(own + e);
            const u64 here = key(bias ? sigmoid(x) + number(bias + e) : x, e);
            if (here < last && here > best) best = here;
        }
        const u32 rank = __reduce_max_sync(ALL, (u32)(best >> 32));
        const u32 low = __reduce_max_sync(ALL, (u32)(best >> 32) == rank ? (u32)best : 0u);
        last = (u64)rank << 32 | low;
        if (lane == j) mine = (int)(0xfffffffeu - low);
    }
    if (lane < k) {
        const float x = number(own + mine);
        kept = sigmoid_ ? sigmoid(x) : expf(x - top) / total;
    }
    if (normalise) kept /= fmaxf(sum(kept), 1e-20f);
    if (lane < k) {
        expert[row * k + lane] = mine;
        weight[row * k + lane] = kept * factor;
    }
}

// counts [blocks, E]: how many of a block's rows go to each expert.
extern "C" __global__ void __launch_bounds__(THREADS)
count(const int* expert, int* counts, i64 many, i64 experts, i64 k) {
    __shared__ int cells[EXPERTS];
    const i64 first = blockIdx.x * (ROWS * k), last = first + ROWS * k < many ? first + ROWS * k : many;
    for (int e = threadIdx.x; e < experts; e += THREADS) cells[e] = 0;
    __syncthreads();
    for (i64 i = first + threadIdx.x; i < last; i += THREADS) atomicAdd(cells + expert[i], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) counts[blockIdx.x * experts + e] = cells[e];
}

// The first place of each expert in `start`, for the rows of this block; ends [E] by the first block.
__device__ __forceinline__ void starts(const int* counts, int blocks, int E, int* start, int* ends) {
    __shared__ int total[EXPERTS];
    for (int e = threadIdx.x; e < E; e += THREADS) start[e] = total[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < blocks * E; i += THREADS) {
        const int here = counts[i], e = i % E;
        if (!here) continue;
        atomicAdd(total + e, here);
        if (i / E < (int)blockIdx.x) atomicAdd(start + e, here);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    int before = 0;
    for (int first = 0; first < E; first += 32) {
        const int e = first + threadIdx.x, own = e < E ? total[e] : 0;
        int to = own;
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const int other = __shfl_up_sync(ALL, to, apart);
            if (threadIdx.x >= apart) to += other;
        }
        if (e < E) {
            start[e] += before + to - own;
            if (!blockIdx.x) ends[e] = before + to;
        }
        before += __shfl_sync(ALL, to, 31);
    }
}

// place [n, k] and ends [E] of a stable sort by expert.
extern "C" __global__ void __launch_bounds__(THREADS) arrange(
    const int* expert, const int* counts, int* place, int* ends, i64 n, i64 experts, i64 k) {
    __shared__ int start[EXPERTS], seen[WARPS][EXPERTS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, E = (int)experts;
    const i64 row0 = (i64)blockIdx.x * ROWS, rows = n - row0 < ROWS ? n - row0 : ROWS;
    const int many = (int)(rows * k), share = (many + WARPS * 32 - 1) / (WARPS * 32) * 32;
    const int first = warp * share, last = first + share < many ? first + share : many;
    const int* own = expert + row0 * k;
    starts(counts, gridDim.x, E, start, ends);
    for (int e = lane; e < E; e += 32) seen[warp][e] = 0;
    __syncwarp();
    for (int i = first + lane; i < last; i += 32) atomicAdd(seen[warp] + own[i], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += THREADS) {  // where each warp begins
        int at = start[e];
        for (int w = 0; w < WARPS; w++) {
            const int here = seen[w][e];
            seen[w][e] = at;
            at += here;
        }
    }
    __syncthreads();
    for (int base = first; base < last; base += 32) {  // the order inside a warp is that of its entries
        const int i = base + lane, e = i < last ? own[i] : -1;
        const u32 same = __match_any_sync(ALL, e);
        if (e >= 0) place[row0 * k + i] = seen[warp][e] + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (e >= 0 && lane == __ffs(same) - 1) seen[warp][e] += __popc(same);
        __syncwarp();
    }
}

// The rows x [n, d] at their places in out [n * k, d].
extern "C" __global__ void __launch_bounds__(THREADS)
spread(const u16* x, i64 stride, const int* place, u16* out, i64 n, i64 k, i64 pieces) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= n * pieces) return;
    const i64 row = at / pieces, p = at - row * pieces;
    const uint4 piece = load_once(x + row * stride + p * 8);
    for (int j = 0; j < k; j++) store(out + (place[row * k + j] * pieces + p) * 8, piece);
}

// out[n] = sum over j of weight[n, j] * y[place[n, j]], in float32 and in this order; onto[n] (may be null) comes last.
extern "C" __global__ void __launch_bounds__(THREADS) combine(
    const u16* y, const int* place, const float* weight, const u16* onto, i64 onto_row, u16* out, i64 n, i64 k,
    i64 pieces) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= n * pieces) return;
    const i64 row = at / pieces, p = at - row * pieces;
    float total[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[8];
    const uint4 last = onto ? load_once(onto + row * onto_row + p * 8) : make_uint4(0, 0, 0, 0);
    for (int first = 0; first < k; first += AT_ONCE) {
        uint4 piece[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i < k) piece[i] = load_once(y + (place[row * k + first + i] * pieces + p) * 8);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i >= k) break;
            const float w = weight[row * k + first + i];
            unpack8(piece[i], v);
#pragma unroll
            for (int e = 0; e < 8; e++) total[e] = fmaf(w, v[e], total[e]);
        }
    }
    if (onto) {
        unpack8(last, v);
#pragma unroll
        for (int e = 0; e < 8; e++) total[e] += v[e];
    }
    store(out + at * 8, pack8(total));
}
