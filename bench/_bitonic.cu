// Bitonic top-K (Shanbhag, Pirk, Madden, SIGMOD 2018), the peer of RecoGEM's figure 8: slices are sorted into runs of K in
// shared memory; of two runs, one falling and one rising, the larger of each pair of elements are the best K of both.
//
// Compiled with -DFIRST (1: ranks are read, 0: keys of the pass before).
//
// build: FIRST=0,1

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define SLICE 4096
#define THREADS 512

// The larger rank first, then the smaller place; 0 is nothing.
__device__ __forceinline__ u64 key_of(float x, u32 place) {
    u32 i = __float_as_uint(x + 0.f);
    return (u64)(i >> 31 ? ~i : i | 0x80000000u) << 32 | (0xffffffffu - place);
}

// Compare and exchange at distances `gap`, gap / 2 .. 1 of `count` keys, in runs of `size` that fall and rise in turn.
__device__ __forceinline__ void merge(u64* keys, int count, int size, int gap) {
    for (; gap; gap /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < count / 2; i += THREADS) {
            int a = 2 * i - (i & (gap - 1)), b = a + gap;
            u64 x = keys[a], y = keys[b];
            if ((x < y) == ((a & size) == 0)) keys[a] = y, keys[b] = x;
        }
    }
    __syncthreads();
}

// Block b of `blocks` of each request: the best k of its slice, falling. rank [R, count] or keys [R, count] · out
// [R, blocks * k] · k a power of two below SLICE
extern "C" __global__ void __launch_bounds__(THREADS) best_of_slices(
    const float* __restrict__ rank, const u64* __restrict__ before, u64* __restrict__ out, i64 count, i64 blocks, i64 k_) {
    __shared__ u64 keys[SLICE];
    const int k = (int)k_;
    const i64 r = blockIdx.x / blocks, b = blockIdx.x % blocks, first = b * SLICE;
    for (int i = threadIdx.x; i < SLICE; i += THREADS) {
        i64 at = first + i;
#if FIRST
        keys[i] = at < count ? key_of(rank[r * count + at], (u32)at) : 0;
#else
        keys[i] = at < count ? before[r * count + at] : 0;
#endif
    }
    for (int size = 2; size <= k; size *= 2) merge(keys, SLICE, size, size / 2);
    for (int left = SLICE / 2; left >= k; left /= 2) {
        u64 larger[SLICE / 2 / THREADS];
#pragma unroll
        for (int n = 0; n < SLICE / 2 / THREADS; n++) {
            int i = threadIdx.x + n * THREADS, pair = i / k * 2 * k + i % k;
            if (i < left) larger[n] = keys[pair] > keys[pair + k] ? keys[pair] : keys[pair + k];
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < SLICE / 2 / THREADS; n++) {
            int i = threadIdx.x + n * THREADS;
            if (i < left) keys[i] = larger[n];
        }
        merge(keys, left, k, k / 2);
    }
    for (int i = threadIdx.x; i < k; i += THREADS) out[(r * blocks + b) * k + i] = keys[i];
}
