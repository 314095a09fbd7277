// What surrounds the selection kernels: candidates as a bit for each code, the survivors' trie nodes, and what was wrong
// with the numbers.
//
// Compiled with -DWIDE (1: `first` is int64, 0: int32).
//
// build: WIDE=0,1

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;

#if WIDE
typedef i64 First;
#else
typedef int First;
#endif

// One row a block. code [n, columns] int64, or null: column f is code f · legal [n, columns] bool · mask [n, stride] bytes
// out, bit c % 8 of byte c / 8; `stride` is a multiple of 4, and 4 * (stride / 4) bytes of shared memory are given.
extern "C" __global__ void __launch_bounds__(256) pack(
    const i64* __restrict__ code, const u8* __restrict__ legal, u32* __restrict__ mask, i64 columns, i64 stride) {
    extern __shared__ u32 bits[];
    const i64 row = blockIdx.x, words = stride / 4;
    for (i64 w = threadIdx.x; w < words; w += 256) bits[w] = 0;
    __syncthreads();
    for (i64 f = threadIdx.x; f < columns; f += 256)
        if (legal[row * columns + f]) {
            i64 c = code ? code[row * columns + f] : f;
            atomicOr(bits + (c >> 5), 1u << (c & 31));
        }
    __syncthreads();
    for (i64 w = threadIdx.x; w < words; w += 256) mask[row * words + w] = bits[w];
}

// The node that `wanted` leads to from its parent's, or -1: code [edges] ascends inside a node, whose edges are
// first[node]:first[node + 1]; edge e leads to node e + 1. node [n] · parent, wanted, child [m]; -1 = none.
extern "C" __global__ void __launch_bounds__(256) child(
    const First* __restrict__ first, const int* __restrict__ code, const i64* __restrict__ node,
    const i64* __restrict__ parent, const i64* __restrict__ wanted, i64* __restrict__ child, i64 m) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= m) return;
    const i64 from = parent[i];
    i64 at = from < 0 ? -1 : node[from], c = wanted[i], found = -1;
    if (at >= 0 && c >= 0) {
        i64 low = first[at], high = first[at + 1], end = high;
        while (low < high) {
            i64 middle = (low + high) / 2;
            if (code[middle] < c) low = middle + 1;
            else high = middle;
        }
        if (low < end && code[low] == c) found = low + 1;
    }
    child[i] = found;
}

// The children of each row's node as bits, but for those whose key request * nodes + child is in `dead`, which ascends:
// one row a block. node [n], -1 = none · request [n] (not read where dead_count is 0) · mask as in `pack`.
extern "C" __global__ void __launch_bounds__(256) children(
    const First* __restrict__ first, const int* __restrict__ code, const i64* __restrict__ node,
    const i64* __restrict__ request, const i64* __restrict__ dead, u32* __restrict__ mask, i64 stride, i64 nodes,
    i64 dead_count) {
    extern __shared__ u32 bits[];
    const i64 row = blockIdx.x, words = stride / 4, at = node[row];
    for (i64 w = threadIdx.x; w < words; w += 256) bits[w] = 0;
    __syncthreads();
    const i64 begin = at < 0 ? 0 : first[at], end = at < 0 ? 0 : first[at + 1];
    for (i64 edge = begin + threadIdx.x; edge < end; edge += 256) {
        bool alive = true;
        if (dead_count) {
            i64 key = request[row] * nodes + edge + 1, low = 0, high = dead_count;
            while (low < high) {
                i64 middle = (low + high) / 2;
                if (dead[middle] < key) low = middle + 1;
                else high = middle;
            }
            alive = low == dead_count || dead[low] != key;
        }
        if (alive) atomicOr(bits + (code[edge] >> 5), 1u << (code[edge] & 31));
    }
    __syncthreads();
    for (i64 w = threadIdx.x; w < words; w += 256) mask[row * words + w] = bits[w];
}

// The sum of each thread's number, in thread 0: of 256 threads.
__device__ __forceinline__ i64 sum_of_block(i64 x, i64* warps) {
    for (int apart = 16; apart; apart /= 2) x += __shfl_down_sync(0xffffffffu, x, apart);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < 8; w++) x += warps[w];
    return x;
}

// One block a request, and one more. bad, score [n], start [requests + 1] of a request's rows, broken [m] · counts out,
// [2 requests + 1]: the bad numbers of its living rows, its living rows; last, the sum of `broken`.
extern "C" __global__ void __launch_bounds__(256) count(
    const float* __restrict__ score, const int* __restrict__ start, i64* __restrict__ counts,
    const int* __restrict__ bad, const int* __restrict__ broken, i64 requests, i64 m) {
    __shared__ i64 warps[2][8];
    const i64 request = blockIdx.x;
    const bool last = request == requests;
    const i64 first = last ? 0 : start[request], end = last ? m : start[request + 1];
    i64 wrong = 0, alive = 0;
    for (i64 row = first + threadIdx.x; row < end; row += 256) {
        const bool lives = last || score[row] > __int_as_float(0xff800000);
        alive += lives;
        if (lives) wrong += last ? broken[row] : bad[row];
    }
    wrong = sum_of_block(wrong, warps[0]), alive = sum_of_block(alive, warps[1]);
    if (threadIdx.x) return;
    counts[last ? 2 * requests : request] = wrong;
    if (!last) counts[requests + request] = alive;
}
