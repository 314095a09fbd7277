// The radix pair of RecoGEM 4.3 on given ranks: an exact cut of each row, then an exact selection of each request.
//
//     precut   each row's best K: its ranks stay in shared memory
//     narrow   one digit of the K-th best key of each request, by several blocks; six launches find all of it
//     collect  the keys at or above it, sorted and written by the last block of each request
//
// A key is the rank, then the smallest order * columns + column (T0); 0 is no candidate.
// Compiled with -DCUT (narrow and collect read 1: what precut wrote, 0: the ranks).
//
// build: CUT=0,1

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define ALL 0xffffffffu
#define NEG __int_as_float(0xff800000)
#define DIGITS 2048
#define THREADS 256  // of a row in precut, and of a block of narrow and collect

// Float order as unsigned order; -0.0 is +0.0, and -inf is 0: nothing to select.
__device__ __forceinline__ u32 rank_key(float x) {
    float sum;
    asm("add.rn.f32 %0, %1, 0f00000000;" : "=f"(sum) : "f"(x));
    u32 i = __float_as_uint(sum);
    return x > NEG ? (i >> 31 ? ~i : i | 0x80000000u) : 0u;
}

// Float order as integer order.
__device__ __forceinline__ int ordered(float x) {
    int i = __float_as_int(x);
    return i ^ ((i >> 31) & 0x7fffffff);
}

__device__ __forceinline__ float unordered(int i) { return __int_as_float(i ^ ((i >> 31) & 0x7fffffff)); }

__device__ __forceinline__ int request_of(const int* row_start, int requests, i64 row) {
    int low = 0, high = requests;  // the last one that begins at or before the row
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (row_start[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

// Adds one for each thread with `in`; neighbours with the same digit, as ties have, are added up first.
__device__ __forceinline__ void count_digit(u32* hist, bool in, u32 digit) {
    u32 lanes = __ballot_sync(ALL, in);
    if (!lanes) return;
    u32 common = __shfl_sync(ALL, digit, __ffs(lanes) - 1);
    u32 same = __ballot_sync(ALL, in && digit == common);
    if (in && digit != common) atomicAdd(hist + digit, 1u);
    if ((threadIdx.x & 31) == 0) atomicAdd(hist + common, (u32)__popc(same));
}

// The digit, from the largest, at which the count reaches `need`: found[0], and found[1] what is above it; found[0] = ALL
// where the count does not reach it. THREADS threads behind the barrier `sync`.
template <class Sync>
__device__ __forceinline__ void find_digit(const u32* hist, u32 need, u32* found, u32* warps, int t, Sync sync) {
    const int first = DIGITS - 1 - t * 8, lane = t & 31;
    u32 own = 0;
    for (int d = 0; d < 8; d++) own += hist[first - d];
    u32 sum = own;
    for (int i = 1; i < 32; i <<= 1) {
        u32 y = __shfl_up_sync(ALL, sum, i);
        if (lane >= i) sum += y;
    }
    if (lane == 31) warps[t >> 5] = sum;
    if (t == 0) found[0] = ALL;
    sync();
    u32 before = sum - own;
    for (int w = 0; w < t >> 5; w++) before += warps[w];
    if (before < need && before + own >= need)
        for (int d = 0; d < 8; d++) {
            u32 n = hist[first - d];
            if (before + n >= need) {
                found[0] = first - d, found[1] = before;
                break;
            }
            before += n;
        }
    sync();
}

// A falling step function of x, the same everywhere: bins from `high` down. NaN (no range) is bin 0.
__device__ __forceinline__ u32 bin_of(float x, float high, float scale) {
    u32 b = __float2uint_rz((high - x) * scale);
    return b < DIGITS - 1 ? b : DIGITS - 1;
}

__device__ __forceinline__ u64 key_of(float x, u32 place) { return (u64)rank_key(x) << 32 | (0xffffffffu - place); }

// The best `need` of a row by three radix passes, where too many share the bin of the last of them.
template <class Sync>
__device__ __noinline__ void cut_by_digits(
    const float* ranks, int columns, u32 base, u32 need, u64* out, u32* hist, u32* found, u32* warps, u32* slot, int t,
    Sync sync) {
    const int whole = (columns + THREADS - 1) / THREADS * THREADS;  // so that warps stay together
    u32 prefix = 0, known = 0, ties = 0;
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift == 10 ? 0 : -1) {
        u32 digits = shift ? 2048 : 1024;
        for (int i = t; i < DIGITS; i += THREADS) hist[i] = 0;
        sync();
        for (int c = t; c < whole; c += THREADS) {
            u32 key = c < columns ? rank_key(ranks[c]) : 0;
            count_digit(hist, key && ((key ^ prefix) & known) == 0, (key >> shift) & (digits - 1));
        }
        sync();
        find_digit(hist, need, found, warps, t, sync);
        prefix |= found[0] << shift, known |= (digits - 1) << shift, need -= found[1], ties = hist[found[0]];
        sync();
    }
    const bool all = ties <= need;  // every tie is among the best
    for (int c = t; c < columns; c += THREADS) {
        u32 key = rank_key(ranks[c]);
        if (key > prefix || (all && key == prefix)) out[atomicAdd(slot, 1u)] = key_of(ranks[c], base + c);
    }
    if (all) return;
    for (int from = 0; from < whole && need; from += THREADS) {  // the first of the ties
        int c = from + t, lane = t & 31;
        bool tie = c < columns && rank_key(ranks[c]) == prefix;
        u32 votes = __ballot_sync(ALL, tie), before = __popc(votes & ((1u << lane) - 1)), sum = 0;
        sync();
        if (lane == 0) warps[t >> 5] = __popc(votes);
        sync();
        for (int w = 0; w < THREADS / 32; w++) {
            if (w < t >> 5) before += warps[w];
            sum += warps[w];
        }
        if (tie && before < need) out[atomicAdd(slot, 1u)] = key_of(ranks[c], base + c);
        need -= sum < need ? sum : need;
    }
}

struct Part {  // what a warp has seen of a row
    int high, low, count;
    float sum, squares;
};

// rank [n, columns] float32 · order [n] · cut [n, width] u64 out: the best keep[r] keys of a row in any order, then 0.
// A row stays in shared memory. Its ranks are counted in bins of equal width between the largest and the smallest, so
// that few share the bin of the last that is kept: those are compared with each other.
// One row a block. Dynamic shared memory: `columns` floats, rounded up to 4.
extern "C" __global__ void __launch_bounds__(THREADS) precut(
    const float* __restrict__ rank, const i64* __restrict__ order, const int* __restrict__ row_start,
    const int* __restrict__ keep, u64* __restrict__ cut, i64 columns_, i64 requests, i64 width) {
    extern __shared__ __align__(16) float memory[];
    __shared__ __align__(8) u32 hist[DIGITS];
    __shared__ u32 found[2], warps[THREADS / 32], slot[2];
    __shared__ Part parts[THREADS / 32];
    const int t = threadIdx.x, lane = t & 31, columns = (int)columns_;
    const i64 row = blockIdx.x;
    auto sync = [] { __syncthreads(); };
    float* ranks = memory;
    u64* out = cut + row * width;
    int high = -0x7fffffff, low = 0x7fffffff, count = 0;
    float sum = 0.f, squares = 0.f;
    auto seen = [&](float x) {
        int i = ordered(x);
        if (x > NEG) high = high > i ? high : i, low = low < i ? low : i, count++, sum += x, squares += x * x;
    };
    const float* from = rank + row * columns;
    if (((u64)from & 15) == 0) {
#pragma unroll 4
        for (int c = t; c < columns / 4; c += THREADS) {
            float4 x = __ldcs((const float4*)from + c);
            ((float4*)ranks)[c] = x;
            seen(x.x), seen(x.y), seen(x.z), seen(x.w);
        }
        for (int c = columns / 4 * 4 + t; c < columns; c += THREADS) ranks[c] = from[c], seen(from[c]);
    } else {
        for (int c = t; c < columns; c += THREADS) ranks[c] = from[c], seen(from[c]);
    }
    for (int i = t; i < DIGITS; i += THREADS) hist[i] = 0;
    if (t < 2) slot[t] = 0;
    high = __reduce_max_sync(ALL, high), low = __reduce_min_sync(ALL, low), count = __reduce_add_sync(ALL, count);
    for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(ALL, sum, i), squares += __shfl_xor_sync(ALL, squares, i);
    if (lane == 0) parts[t >> 5] = {high, low, count, sum, squares};
    sync();
    count = 0, sum = squares = 0.f;
    for (int w = 0; w < THREADS / 32; w++) {
        Part one = parts[w];
        high = high > one.high ? high : one.high, low = low < one.low ? low : one.low;
        count += one.count, sum += one.sum, squares += one.squares;
    }
    const float top = unordered(high), least = unordered(low), mean = sum / count;
    const u32 need = keep[request_of(row_start, (int)requests, row)], base = (u32)order[row] * (u32)columns;
    const int quads = (columns + 3) / 4;
    auto four = [&](int q, float* x) {  // ranks 4 q .. 4 q + 3, -inf beyond the end
        float4 v = q < quads ? ((const float4*)ranks)[q] : make_float4(NEG, NEG, NEG, NEG);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (4 * q + k >= columns) x[k] = NEG;
    };
    // Ranks that are surely not kept are not counted: were they normally distributed, 2.5 times as many would be left.
    // Where fewer are left than are kept, all are counted.
    float bottom = least, scale = 0.f;
    const float share = 2.5f * need / count;
    if (share < 0.4f) bottom = fmaxf(least, mean - normcdfinvf(share) * sqrtf(fmaxf(0.f, squares / count - mean * mean)));
    for (;;) {
        scale = DIGITS / (top - bottom);
#pragma unroll 2
        for (int q = t; q < quads; q += THREADS) {
            float x[4];
            four(q, x);
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (x[k] > NEG && x[k] >= bottom) atomicAdd(hist + (DIGITS - 1 - bin_of(x[k], top, scale)), 1u);
        }
        sync();
        find_digit(hist, need ? need : 1u, found, warps, t, sync);
        if (found[0] != ALL || !(bottom > least)) break;
        bottom = least;
        for (int i = t; i < DIGITS; i += THREADS) hist[i] = 0;
        sync();
    }
    const bool everything = found[0] == ALL;  // fewer than `need`
    const u32 digit = found[0], above = found[1], ties = everything ? 0 : hist[digit];
    sync();
    if (need && !everything && ties > DIGITS / 2) {
        cut_by_digits(ranks, columns, base, need, out, hist, found, warps, slot, t, sync);
        sync();
    } else if (need) {
        u64* list = (u64*)hist;  // of those in the bin of the last
        for (int first = 0; first < quads; first += THREADS) {
            float v[4];
            four(first + t, v);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int c = 4 * (first + t) + k;
                float x = v[k];
                const bool in = x > NEG && x >= bottom;
                u32 d = in ? DIGITS - 1 - bin_of(x, top, scale) : 0;
                bool take = in && (everything || d > digit);
                u32 votes = __ballot_sync(ALL, take);
                if (votes) {
                    u32 at = 0;
                    if (lane == 0) at = atomicAdd(slot, (u32)__popc(votes));
                    at = __shfl_sync(ALL, at, 0) + __popc(votes & ((1u << lane) - 1));
                    if (take) out[at] = key_of(x, base + c);
                }
                if (in && !everything && d == digit) list[atomicAdd(slot + 1, 1u)] = key_of(x, base + c);
            }
        }
        sync();
        for (u32 i = t; i < ties; i += THREADS) {
            u64 key = list[i];
            u32 at = above;
            for (u32 k = 0; k < ties; k++) at += list[k] > key;
            if (at < need) out[at] = key;
        }
    }
    const u32 kept = !need ? 0 : everything ? slot[0] : need;
    for (u32 i = kept + t; i < width; i += THREADS) out[i] = 0;
}

struct Source {
    const float* rank;   // [n, columns]
    const i64* order;    // [n]
    const u64* cut;      // [n, width]
    i64 first, count;    // first row of a request; its keys
    int columns, width;
};

__device__ __forceinline__ Source source_of(
    const float* rank, const i64* order, const u64* cut, const int* row_start, int r, int columns, int width) {
    i64 first = row_start[r], rows = row_start[r + 1] - first;
    return {rank, order, cut, first, rows * (CUT ? width : columns), columns, width};
}

__device__ __forceinline__ u64 key_at(const Source& s, i64 i) {
#if CUT
    return s.cut[s.first * s.width + i];
#else
    u32 in = (u32)i / (u32)s.columns, c = (u32)i - in * (u32)s.columns;
    u32 key = rank_key(s.rank[s.first * s.columns + i]);
    return key ? (u64)key << 32 | (0xffffffffu - ((u32)s.order[s.first + in] * (u32)s.columns + c)) : 0;
#endif
}

// One digit of the request's K-th best key; shift 53, 42, .., 9, -2.
//
// prefix [R] u64, need [R] u32: what is known of it, and how many are still to be counted off; need 0: all are taken
// hist [R, DIGITS], ticket [R]: 0 before and after
extern "C" __global__ void __launch_bounds__(THREADS) narrow(
    const float* __restrict__ rank, const i64* __restrict__ order, const u64* __restrict__ cut,
    const int* __restrict__ row_start, const int* __restrict__ keep, u64* prefix, u32* need, u32* hist, u32* ticket,
    i64 columns, i64 width, i64 blocks, i64 shift) {
    __shared__ u32 own[DIGITS], found[2], warps[THREADS / 32], last;
    const int r = (int)(blockIdx.x / blocks), part = (int)(blockIdx.x % blocks), t = threadIdx.x;
    const Source s = source_of(rank, order, cut, row_start, r, (int)columns, (int)width);
    const u64 known = shift == 53 ? 0 : prefix[r];
    const u32 left = shift == 53 ? (u32)keep[r] : need[r];
    const int low = shift < 0 ? 0 : (int)shift, above = (int)shift + 11;
    if (left)
        for (int i = t; i < DIGITS; i += THREADS) own[i] = 0;
    __syncthreads();
    if (left)
#pragma unroll 4
        for (i64 from = (i64)part * THREADS; from < s.count; from += blocks * THREADS) {
            u64 key = from + t < s.count ? key_at(s, from + t) : 0;
            bool in = key && (above > 63 || (key >> above) == (known >> above));
            count_digit(own, in, (u32)(key >> low) & ((1u << (above - low)) - 1));
        }
    __syncthreads();
    if (left)
        for (int i = t; i < DIGITS; i += THREADS)
            if (own[i]) atomicAdd(hist + (i64)r * DIGITS + i, own[i]);
    __threadfence();
    __syncthreads();
    if (t == 0) last = atomicAdd(ticket + r, 1u) == (u32)blocks - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    u32* total = hist + (i64)r * DIGITS;
    for (int i = t; i < DIGITS; i += THREADS) own[i] = left ? __ldcg(total + i) : 0, total[i] = 0;
    __syncthreads();
    find_digit(own, left ? left : 1u, found, warps, t, [] { __syncthreads(); });
    if (t == 0 && left) {
        bool every = found[0] == ALL;  // or all that are at this digit: what is below it need not be known
        prefix[r] = every ? 0 : known | (u64)found[0] << low;
        need[r] = every || own[found[0]] == left - found[1] ? 0 : left - found[1];
    }
    if (t == 0) {
        if (shift == 53 && !left) prefix[r] = 0, need[r] = 0;
        ticket[r] = 0;
    }
}

// The keys at or above the K-th best, in order. chosen [M] u64, taken [R] u32 = 0, ticket [R] = 0 before and after.
// Dynamic shared memory: `keys_room` u64 (a power of two, at least keep), u16 for each row of a request.
extern "C" __global__ void __launch_bounds__(THREADS) collect(
    const float* __restrict__ rank, const i64* __restrict__ order, const u64* __restrict__ cut,
    const int* __restrict__ row_start, const int* __restrict__ keep, const int* __restrict__ out_start,
    const u64* __restrict__ prefix, u64* chosen, u32* taken, u32* ticket, i64* row_out, i64* column_out, i64* order_out,
    i64* valid_out, i64 columns, i64 width, i64 blocks, i64 keys_room) {
    extern __shared__ __align__(16) u64 keys[];
    __shared__ u32 last;
    const int r = (int)(blockIdx.x / blocks), part = (int)(blockIdx.x % blocks), t = threadIdx.x, wanted = keep[r];
    const Source s = source_of(rank, order, cut, row_start, r, (int)columns, (int)width);
    const i64 out = out_start[r];
    const u64 worst = prefix[r];
    if (wanted)
        for (i64 i = (i64)part * THREADS + t; i < s.count; i += blocks * THREADS) {
            u64 key = key_at(s, i);
            if (key && key >= worst) chosen[out + atomicAdd(taken + r, 1u)] = key;
        }
    __threadfence();
    __syncthreads();
    if (t == 0) last = atomicAdd(ticket + r, 1u) == (u32)blocks - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    const int total = (int)__ldcg(taken + r), rows = row_start[r + 1] - (int)s.first;
    u16* inverse = (u16*)(keys + keys_room);
    for (int i = t; i < keys_room; i += THREADS) keys[i] = i < total ? __ldcg(chosen + out + i) : 0;
    for (int i = t; i < rows; i += THREADS) {
        i64 at = order[s.first + i];
        if (at >= 0 && at < rows) inverse[at] = (u16)i;
    }
    __syncthreads();
    for (int size = 2; size <= keys_room; size *= 2)  // bitonic, falling
        for (int gap = size / 2; gap; gap /= 2) {
            for (int i = t; i < keys_room / 2; i += THREADS) {
                int a = 2 * i - (i & (gap - 1)), b = a + gap;
                u64 x = keys[a], y = keys[b];
                if ((x < y) == ((a & size) == 0)) keys[a] = y, keys[b] = x;
            }
            __syncthreads();
        }
    for (int i = t; i < wanted; i += THREADS) {
        u64 key = keys[i];
        u32 place = 0xffffffffu - (u32)key;
        row_out[out + i] = key ? s.first + inverse[place / (u32)columns] : -1;
        column_out[out + i] = key ? (i64)(place % (u32)columns) : -1;
        order_out[out + i] = i;
    }
    if (t == 0) valid_out[r] = total, ticket[r] = 0;
}
