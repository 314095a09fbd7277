// The one read of the logits.

#if TYPE == 2 || SMALL || !VEC
#define BOUNDS __launch_bounds__(128)
#else
#define BOUNDS __launch_bounds__(128, 8)  // said so, ptxas orders the loads of a mask better: 4 % of the time
#endif

// One row a block of 128 threads.
//
// logits [n, codes] · mask [n, mask_stride bytes] · parent [n], -inf = a dead row (SCORE 0: unused)
// chunk  [n, chunks] float32 out: the largest legal logit of each; -inf = none; `chunks` may exceed the row's
// ends   [n] out: the largest and the smallest of a row's chunks that are not -inf; -inf where there is none
// norm   [n] float32 out where NORM · bad [n] int32 out: NaN and +inf among the logits, which count as -inf
extern "C" __global__ void BOUNDS scan(
    const Logit* __restrict__ logits, const u8* __restrict__ mask, const float* __restrict__ parent,
    float* __restrict__ chunk, float2* __restrict__ ends, float* __restrict__ norm, int* __restrict__ bad, i64 codes_,
    i64 mask_stride, i64 chunks_) {
    const int codes = (int)codes_, chunks = (int)chunks_, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 row = blockIdx.x;
    float* mine = chunk + row * chunks;
    const Logit* x = logits + row * codes;
    uint4 v[LOADS];
    u32 bits[LOADS];
    let_next_begin();
    load_tile(x, mask, row, mask_stride, warp * LOADS, codes, v, bits);  // on its way while the parent's score is
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
    const int units = SMALL ? chunks / 32 : chunks * UNITS;
    float top = NEG, sum = 0.f;
    int wrong = 0, upper = ordered(NEG), lower = 0x7fffffff;
    for (int first = warp * LOADS; first < units; first += STRIDE) {
        if (first >= STRIDE) load_tile(x, mask, row, mask_stride, first, codes, v, bits);
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
