// The largest rank of each chunk, where ranks do not follow the logits: a row's log-sum-exp first, then its ranks. A row
// of a tile or less is read once.

#ifndef RESIDENT
#define RESIDENT 4  // blocks of a processor that registers are shared among
#endif

// One row a block of 128 threads; operands as of `scan`, and
//
// broken [n] int32 out: candidates that may not be selected because of NaN or +inf in their score or rank
extern "C" __global__ void __launch_bounds__(128, RESIDENT) rank_scan(
    const Logit* __restrict__ logits, const u8* __restrict__ mask, const float* __restrict__ parent,
    float* __restrict__ chunk, float2* __restrict__ ends, float* __restrict__ norm, int* __restrict__ bad,
    int* __restrict__ broken, i64 codes_, i64 mask_stride, i64 chunks_ GIVEN_PARAMETERS) {
    const int codes = (int)codes_, chunks = (int)chunks_, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 row = blockIdx.x;
    const Given given = GIVEN;
    float* mine = chunk + row * chunks;
    const Logit* x = logits + row * codes;
    const int units = SMALL ? chunks / 32 : chunks * UNITS;
    const float own = parent[row];
    __shared__ float tops[4], sums[4];
    __shared__ int wrongs[4], uppers[4], lowers[4], brokens[4];
    uint4 v[LOADS];
    u32 bits[LOADS];
    int wrong = 0;
    auto take = [&](int first) {
#pragma unroll
        for (int u = 0; u < LOADS; u++) v[u] = load<true>(x, (first + u) * UNIT + lane * V, codes);
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            int e = (first + u) * UNIT + lane * V;
            bits[u] = e < codes ? load_bits(mask, row, mask_stride, e) : 0;
        }
    };
    let_next_begin();
    take(warp * LOADS);
    if (!(own > NEG)) {
        for (int i = threadIdx.x; i < chunks; i += 128) mine[i] = NEG;
        if (threadIdx.x == 0) {
            bad[row] = broken[row] = 0, ends[row] = make_float2(NEG, NEG);
#if NORM
            norm[row] = NEG;
#endif
        }
        return;
    }

    float less = 0.f;  // what is subtracted from a logit
#if NORM
    float top = NEG, sum = 0.f;
    for (int first = warp * LOADS; first < units; first += STRIDE) {
        if (first >= STRIDE) take(first);
        float most = NEG;
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            clean(v[u], wrong);
#ifndef RANK_LOGIT
            if (NORM == 2) v[u] = keep_bits(v[u], bits[u]);
            most = fmaxf(most, float_of(max_of(v[u])));
#else
#pragma unroll
            for (int k = 0; k < V; k++) {
                bool ill;
                float y = changed(given, element(v[u], k), row, ill);
                if (NORM == 1 || (bits[u] >> k & 1)) most = fmaxf(most, y);
            }
#endif
        }
        float higher = fmaxf(top, most), shift = higher > NEG ? -higher * LOG2E : 0.f;
        sum *= exp2_of(fmaf(top, LOG2E, shift));
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
#ifndef RANK_LOGIT
            sum += exp_sum(v[u].x, shift) + exp_sum(v[u].y, shift) + (exp_sum(v[u].z, shift) + exp_sum(v[u].w, shift));
#else
#pragma unroll
            for (int k = 0; k < V; k++) {
                bool ill;
                float y = changed(given, element(v[u], k), row, ill);
                if (NORM == 1 || (bits[u] >> k & 1)) sum += exp2_of(fmaf(y, LOG2E, shift));
            }
#endif
        }
        top = higher;
    }
    float high = unordered(__reduce_max_sync(ALL, ordered(top)));
    sum = high > NEG ? sum * exp2_of((top - high) * LOG2E) : 0.f;
#pragma unroll
    for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(ALL, sum, i);
    if (lane == 0) tops[warp] = high, sums[warp] = sum;
    __syncthreads();
    float t = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])), s = 0.f;
    for (int w = 0; w < 4; w++) s += t > NEG ? sums[w] * exp2_of((tops[w] - t) * LOG2E) : 0.f;
    less = t > NEG ? t + logf(s) : NEG;
    if (threadIdx.x == 0) norm[row] = less;
#elif RANK_NORMED
    less = norm[row];
#endif

    int upper = ordered(NEG), lower = 0x7fffffff, ill = 0;
    for (int first = warp * LOADS; first < units; first += STRIDE) {
        if (first >= STRIDE || (NORM && units > STRIDE)) take(first);
        int best[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            int e = (first + u) * UNIT + lane * V;
            float most = NEG;
            if (!NORM) clean(v[u], wrong);
#pragma unroll
            for (int k = 0; k < V; k++) {
                Rank one = rank_of(given, sane(element(v[u], k)), less, own, row, e + k, bits[u] >> k & 1);
                most = fmaxf(most, one.rank), ill += one.broken;
            }
            best[u] = ordered(most);
        }
#if SMALL
#pragma unroll
        for (int u = 0; u < LOADS; u++)
            if (first + u < units) {
                mine[(first + u) * 32 + lane] = unordered(best[u]);
                upper = max(upper, best[u]);
                if (best[u] > ordered(NEG)) lower = min(lower, best[u]);
            }
#else
        int found = 0;
#pragma unroll
        for (int u = 0; u < LOADS; u += UNITS) {
            int of = best[u];
#pragma unroll
            for (int k = 1; k < UNITS; k++) of = max(of, best[u + k]);
            int m = __reduce_max_sync(ALL, of);
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
    wrong = __reduce_add_sync(ALL, wrong), ill = __reduce_add_sync(ALL, ill);
    upper = __reduce_max_sync(ALL, upper), lower = __reduce_min_sync(ALL, lower);
    if (lane == 0) wrongs[warp] = wrong, brokens[warp] = ill, uppers[warp] = upper, lowers[warp] = lower;
    __syncthreads();
    if (threadIdx.x == 0) {
        bad[row] = wrongs[0] + wrongs[1] + wrongs[2] + wrongs[3];
        broken[row] = brokens[0] + brokens[1] + brokens[2] + brokens[3];
        upper = max(max(uppers[0], uppers[1]), max(uppers[2], uppers[3]));
        lower = min(min(lowers[0], lowers[1]), min(lowers[2], lowers[3]));
        ends[row] = make_float2(unordered(upper), upper > ordered(NEG) ? unordered(lower) : NEG);
    }
}
