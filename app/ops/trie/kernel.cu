// Walking a prefix tree: the children of each row's node, all codes of a row with the nodes that they lead to, and
// membership in sets of prefixes, each in one pass over its output.
//
// build: WIDE=0,1
//
// -DWIDE: edge numbers are 0: int, 1: long long. Node -1 is no prefix of the catalogue and has no children.

typedef long long i64;

#if WIDE
typedef i64 edge_t;
#else
typedef int edge_t;
#endif

#define THREADS 256

__device__ __forceinline__ void range(const edge_t* first, i64 node, i64& low, i64& high) {
    const i64 at = node < 0 ? 0 : node;
    low = first[at], high = node < 0 ? low : (i64)first[at + 1];
}

// code, child [n, widest], legal [n, widest]: the edges of node[row], then padding that repeats its first code; 0 where it
// has none, since another depth's code may be none of this one.
extern "C" __global__ void __launch_bounds__(THREADS) children(
    i64 first, i64 codes, i64 node, i64 code, i64 child, i64 legal, i64 n, i64 widest) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= n * widest) return;
    const i64 row = n * widest < (1ll << 32) ? (unsigned)at / (unsigned)widest : at / widest;
    i64 low, high;
    range((const edge_t*)first, ((const i64*)node)[row], low, high);
    const i64 edge = low + at - row * widest;
    const bool here = edge < high;
    ((i64*)code)[at] = low < high ? ((const int*)codes)[here ? edge : low] : 0;
    ((i64*)child)[at] = here ? edge + 1 : -1;
    ((bool*)legal)[at] = here;
}

// child [n, size]: where each code of a row leads; -1 = no prefix of the catalogue. One block a row.
extern "C" __global__ void __launch_bounds__(THREADS) dense(i64 first, i64 codes, i64 node, i64 child, i64 n, i64 size) {
    for (i64 row = blockIdx.x; row < n; row += gridDim.x) {
        i64* out = (i64*)child + row * size;
        for (i64 c = threadIdx.x; c < size; c += THREADS) out[c] = -1;
        __syncthreads();
        i64 low, high;
        range((const edge_t*)first, ((const i64*)node)[row], low, high);
        for (i64 edge = low + threadIdx.x; edge < high; edge += THREADS) {
            const int code = ((const int*)codes)[edge];
            if (code >= 0 && code < size) out[code] = edge + 1;
        }
    }
}

// found [n, wide]: whether request[row] * nodes + node is among the ascending keys; node -1 is in no set.
extern "C" __global__ void __launch_bounds__(THREADS) contains(
    i64 keys, i64 node, i64 request, i64 found, i64 n, i64 wide, i64 node_row, i64 node_column, i64 nodes, i64 count) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= n * wide) return;
    const i64 row = n * wide < (1ll << 32) ? (unsigned)at / (unsigned)wide : at / wide;
    const i64 own = ((const i64*)node)[row * node_row + (at - row * wide) * node_column];
    const i64 key = ((const i64*)request)[row] * nodes + own;
    i64 low = 0, high = own < 0 ? 0 : count;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (((const i64*)keys)[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    ((bool*)found)[at] = own >= 0 && low < count && ((const i64*)keys)[low] == key;
}
