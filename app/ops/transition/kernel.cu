// What the survivors of a step have written, and the slots of their ancestors, in one pass over both.
//
// build:

typedef long long i64;

#define THREADS 256

// One number of a row a thread. parent, code [n]: below 0 = a tombstone, which is row 0's child by code 0 ·
// sids, ancestry: rows of depth - 1 · sids_out, ancestry_out [n, depth] · codes_out [n]; ancestry_out null: none is kept.
extern "C" __global__ void __launch_bounds__(THREADS) advance(
    const i64* __restrict__ parent, const i64* __restrict__ code, const i64* __restrict__ sids,
    const int* __restrict__ ancestry, i64* __restrict__ sids_out, int* __restrict__ codes_out,
    int* __restrict__ ancestry_out, i64 n, i64 depth) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= n * depth) return;
    const i64 row = n * depth < (1ll << 32) ? (unsigned)at / (unsigned)depth : at / depth, step = at - row * depth;
    const i64 from = parent[row] < 0 ? 0 : parent[row];
    if (step < depth - 1) {
        const i64 before = from * (depth - 1) + step;
        sids_out[at] = sids[before];
        if (ancestry_out) ancestry_out[at] = ancestry[before];
        return;
    }
    const i64 own = code[row] < 0 ? 0 : code[row];
    sids_out[at] = own, codes_out[row] = (int)own;
    if (ancestry_out) ancestry_out[at] = (int)from;
}
