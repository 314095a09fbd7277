// How far down a row RANK_MOST leaves candidates: by comparing those that can be the last, or by the digits of all.

#ifdef RANK_MOST
#define FEW 512  // candidates that are compared each with each

// Adds one for each lane with `in`; lanes with the same digit as the first, as likely codes have, are added up before.
__device__ __forceinline__ void count(u32* counts, bool in, u32 digit) {
    const u32 lanes = __ballot_sync(ALL, in);
    if (!lanes) return;
    const u32 common = __shfl_sync(ALL, digit, __ffs(lanes) - 1), together = __ballot_sync(ALL, in && digit == common);
    if (in && digit != common) atomicAdd(counts + digit, 1u);
    if ((threadIdx.x & 31) == 0) atomicAdd(counts + common, (u32)__popc(together));
}

// The digit, from the largest of 256, at which the counts reach `need`, and what is above it; ALL where they do not.
__device__ __forceinline__ void find(const u32* counts, u32 need, u32& digit, u32& before) {
    const int lane = threadIdx.x & 31, first = 255 - lane * 8;
    u32 own = 0;
    for (int d = 0; d < 8; d++) own += counts[first - d];
    u32 sum = own;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        const u32 y = __shfl_up_sync(ALL, sum, i);
        if (lane >= i) sum += y;
    }
    if (lane == 31 && sum < need) digit = ALL;
    u32 above = sum - own;
    if (above >= need || sum < need) return;
    for (int d = 0; d < 8; d++) {
        const u32 n = counts[first - d];
        if (above + n >= need) {
            digit = first - d, before = above;
            break;
        }
        above += n;
    }
}

// The key of the `need`-th candidate of a row, 0 where there are fewer; false where too many may be it. All 128 threads,
// which have the row at hand, from code `first` on each; need is at most 128.
//
// The largest logits of the threads bound the wanted one from below: as many candidates reach the `need`-th of those.
__device__ __forceinline__ bool nth_of(const uint4* v, const u32* bits, float less, int first, u32 need, u64& nth) {
    __shared__ uint4 bests[32];
    __shared__ u64 few[FEW], found;
    __shared__ u32 reach;
    __shared__ int bounds[4];
    const auto logp_of = [&](float y) { return RANK_NORMED ? sub(y, less) : y; };
    u32 most = LOW;
#pragma unroll
    for (int u = 0; u < LOADS; u++) most = max_of(most, max_of(legal_of(v[u], bits[u])));
    const int best = ordered(float_of(most));
    ((int*)bests)[threadIdx.x] = best;
    if (threadIdx.x == 0) reach = 0, found = 0;
    __syncthreads();
    u32 as_good = 0;
#pragma unroll 8
    for (int i = 0; i < 32; i++) {
        const uint4 x = bests[i];
        as_good += ((int)x.x >= best) + ((int)x.y >= best) + ((int)x.z >= best) + ((int)x.w >= best);
    }
    const int own = __reduce_max_sync(ALL, as_good >= need ? best : ordered(NEG));
    if ((threadIdx.x & 31) == 0) bounds[threadIdx.x >> 5] = own;
    __syncthreads();
    const float bound = logp_of(unordered(max(max(bounds[0], bounds[1]), max(bounds[2], bounds[3]))));
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
        u32 in = 0;
#pragma unroll
        for (int k = 0; k < V; k++) in |= logp_of(element(v[u], k)) < bound ? 0 : 1u << k;
#pragma unroll 1
        for (u32 left = in & bits[u]; left; left &= left - 1) {
            const int k = __ffs(left) - 1;
            const float y = element_at(v[u], k);
            if (!(y > NEG)) continue;
            const u32 at = atomicAdd(&reach, 1u);
            if (at < FEW) few[at] = key_of(logp_of(y), first + u * UNIT + k);
        }
    }
    __syncthreads();
    const u32 reaching = reach;
    if (reaching > FEW) return false;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < reaching; i += 128) {
        const u64 key = few[i];
        u32 above = 0;
#pragma unroll 4
        for (u32 j = 0; j < reaching; j++) above += few[j] > key;
        if (above == need - 1) found = key;
    }
    __syncthreads();
    nth = found;
    return true;
}
#endif
