// The largest rank of each chunk, where ranks do not follow the logits: a row's log-sum-exp first, then its ranks. A row
// of a tile or less is read once.

#ifdef RANK_MOST  // blocks that share a processor's registers
#define RESIDENT (TYPE == 2 ? 3 : RANK_COLUMNS ? 4 : NORM == 2 ? 5 : 6)
#else
#define RESIDENT (TYPE == 2 ? 3 : RANK_COLUMNS ? 4 : 7)
#endif

// The columns of candidates e .. e + V - 1; arbitrary where nothing is legal.
__device__ __forceinline__ void columns_of(const Given& given, i64 row, int e, int codes, u32 bits, float (*out)[V]) {
#pragma unroll
    for (int i = 0; i < RANK_COLUMNS; i++) {
        const float* from = given.columns[i] + row * given.strides[i] + e;
        if (bits && e + V <= codes && ((u64)from & 15) == 0) {
#pragma unroll
            for (int q = 0; q < V / 4; q++) {
                const float4 x = __ldg((const float4*)from + q);
                out[i][4 * q] = x.x, out[i][4 * q + 1] = x.y, out[i][4 * q + 2] = x.z, out[i][4 * q + 3] = x.w;
            }
        } else {
#pragma unroll
            for (int k = 0; k < V; k++) out[i][k] = bits >> k & 1 ? __ldg(from + k) : 0.f;
        }
    }
}

#if defined RANK_FLOOR || defined RANK_MOST
#define LOOKED true  // the row has been looked at before its ranks are computed
#else
#define LOOKED (NORM != 0)
#endif

#ifdef RANK_FLOOR
#define SEEN true  // the same of RANK_MOST
#else
#define SEEN (NORM != 0)
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
    Given given = GIVEN;
    float* mine = chunk + row * chunks;
    const Logit* x = logits + row * codes;
    const int units = SMALL ? chunks / 32 : chunks * UNITS;
    __shared__ float tops[4], sums[4];
    __shared__ int wrongs[4], uppers[4], lowers[4], brokens[4];
    uint4 v[LOADS];
    u32 bits[LOADS];
    int wrong = 0;
    auto take = [&](int first) {
        load_tile(x, mask, row, mask_stride, first, codes, v, bits);
    };
    // Bad logits become -inf, and for NORM 2 those that are not legal; the largest of what is normalised over.
    auto sanitise = [&](int& count) {
        u32 most = LOW;
#pragma unroll
        for (int u = 0; u < LOADS; u++) most = max_of(most, max_of(v[u]));
        if (__any_sync(ALL, !(low_of(most) <= LARGEST && high_of(most) <= LARGEST))) {
            most = LOW;
#pragma unroll
            for (int u = 0; u < LOADS; u++) clean(v[u], count), most = max_of(most, max_of(v[u]));
        }
#if NORM == 2
        most = LOW;
#pragma unroll
        for (int u = 0; u < LOADS; u++) v[u] = keep_bits(v[u], bits[u]), most = max_of(most, max_of(v[u]));
#endif
        return float_of(most);
    };
    // Has the tile from unit `first` at hand, once more if `again`; the largest of what is normalised over.
    auto hold = [&](int first, bool again) {
        if (first >= STRIDE || (again && units > STRIDE)) take(first);
        if (again && units <= STRIDE) return NEG;
        int before = 0;
        return sanitise(again ? before : wrong);
    };
    let_next_begin();
    // A lane has one of the row's numbers, the last its parent's score: one load, which the row's do not wait for.
    const bool of_values = lane < RANK_VALUES && lane < HELD;
    const float number = __ldg(of_values ? given.values + row * RANK_VALUES + lane : parent + row);
    take(warp * LOADS);
    const float own = __shfl_sync(ALL, number, 31);
#pragma unroll
    for (int i = 0; i < HELD; i++) given.held[i] = i < RANK_VALUES ? __shfl_sync(ALL, number, i) : 0.f;
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
        float most = hold(first, false);
#ifdef RANK_LOGIT
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            float y[V], higher = top;
#pragma unroll
            for (int k = 0; k < V; k++) {
                y[k] = changed(given, element(v[u], k), row);
                if (!(y[k] < INF)) y[k] = NEG;
                higher = fmaxf(higher, y[k]);
            }
            float shift = higher > NEG ? -higher * LOG2E : 0.f;
            sum *= exp2_of(fmaf(top, LOG2E, shift));
#pragma unroll
            for (int k = 0; k < V; k++) sum += exp2_of(fmaf(y[k], LOG2E, shift));
            top = higher;
        }
#else
        float higher = fmaxf(top, most), shift = higher > NEG ? -higher * LOG2E : 0.f;
        float part[2] = {sum * exp2_of(fmaf(top, LOG2E, shift)), 0.f};
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            part[0] += exp_sum(v[u].x, shift), part[1] += exp_sum(v[u].y, shift);
            part[0] += exp_sum(v[u].z, shift), part[1] += exp_sum(v[u].w, shift);
        }
        sum = part[0] + part[1], top = higher;
#endif
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

    Floor floor = {NEG, -1, NEG, 0};
#ifdef RANK_FLOOR
    __shared__ int peaks[4], first_best;
    float peak = NEG;
    for (int first = warp * LOADS; first < units; first += STRIDE) {
        hold(first, NORM);
        u32 most = LOW;
#pragma unroll
        for (int u = 0; u < LOADS; u++) most = max_of(most, max_of(legal_of(v[u], bits[u])));
        peak = fmaxf(peak, float_of(most));
    }
    peaks[warp] = __reduce_max_sync(ALL, ordered(peak));
    if (threadIdx.x == 0) first_best = 0x7fffffff;
    __syncthreads();
    peak = unordered(max(max(peaks[0], peaks[1]), max(peaks[2], peaks[3])));
    const float most_likely = !(peak > NEG) ? NEG : RANK_NORMED ? sub(peak, less) : peak;
    floor.least = least_of(given, most_likely, row);
    if (!(most_likely >= floor.least)) {  // only the first of the best stays
        for (int first = warp * LOADS; first < units; first += STRIDE) {
            hold(first, true);
#pragma unroll
            for (int u = 0; u < LOADS; u++)
#pragma unroll 1
                for (int k = 0; k < V; k++)
                    if ((bits[u] >> k & 1) && element_at(v[u], k) == peak)
                        atomicMin(&first_best, (first + u) * UNIT + lane * V + k);
        }
        __syncthreads();
        floor.only = first_best;
    }
    if (threadIdx.x == 0) floors[row] = make_float2(floor.least, __int_as_float(floor.only));
#endif

#ifdef RANK_MOST
    u32 need = (u32)RANK_MOST;
    bool looked = SEEN;
    if (need <= 128 && units <= STRIDE) {
        hold(warp * LOADS, looked);
        looked = true;
        if (nth_of(v, bits, less, warp * LOADS * UNIT + lane * V, need, floor.last)) need = 0;
    }
    // The digits of the last that stays, until all stay that share them.
    __shared__ u32 counts[256], digit, before;
    for (int shift = 56; shift >= 0 && need; shift -= 8) {
        counts[threadIdx.x] = counts[threadIdx.x + 128] = 0;
        __syncthreads();
        for (int first = warp * LOADS; first < units; first += STRIDE) {
            hold(first, shift < 56 || looked);
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                const uint4 x = legal_of(v[u], bits[u]);
#pragma unroll 1
                for (int k = 0; k < V; k++) {
                    const float y = element_at(x, k), logp = RANK_NORMED ? sub(y, less) : y;
                    const u64 key = key_of(logp, (first + u) * UNIT + lane * V + k);
                    count(counts, y > NEG && (shift == 56 || (key ^ floor.last) >> (shift + 8) == 0), key >> shift & 255u);
                }
            }
        }
        __syncthreads();
        if (warp == 0) find(counts, need, digit, before);
        __syncthreads();
        if (digit > 255) break;  // fewer than may stay
        floor.last |= (u64)digit << shift, need -= before;
        const bool all = counts[digit] == need;
        __syncthreads();
        if (all) break;
        if (shift == 32 && codes <= 1 << 16) floor.last |= 0xffff0000u, shift = 16;  // two digits that all codes share
    }
    if (threadIdx.x == 0) given.lasts[row] = floor.last;
#endif

    int upper = ordered(NEG), lower = 0x7fffffff, ill = 0;
    for (int first = warp * LOADS; first < units; first += STRIDE) {
        hold(first, LOOKED);
        int best[LOADS];
        bool singly = true;
#ifndef NOISY  // what is drawn costs more than all else: only for who may be selected
        float worst = 0.f;  // of ranks and sizes of scores: NaN or inf where one is bad
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            const uint4 x = legal_of(v[u], bits[u]);
            const int e = (first + u) * UNIT + lane * V;
            float own_[RANK_COLUMNS + 1][V], most = NEG;
            columns_of(given, row, e, codes, bits[u], own_);
#pragma unroll
            for (int k = 0; k < V; k++) {
                float in[MOST_COLUMNS], score, rank;
#pragma unroll
                for (int i = 0; i < RANK_COLUMNS; i++) in[i] = own_[i][k];
                const float logit = element(x, k), y = changed(given, logit, row);
                compute(given, y, less, own, row, e + k, in, score, rank);
#ifdef RANK_MASKED
                const bool stay = stays(floor, y, less, e + k);
#else
                const bool stay = !(y <= NEG) && stays(floor, y, less, e + k);
#endif
                most = k ? larger(most, stay ? rank : NEG) : stay ? rank : NEG;
#if (defined RANK || defined RANK_LOGIT) && !defined RANK_TELLS
                worst = larger(worst, stay ? size_of(score) : 0.f);
#endif
            }
            best[u] = ordered(most);
            worst = larger(worst, most);
        }
        singly = __any_sync(ALL, !(worst <= LARGEST));
#endif
        if (singly) {
#pragma unroll
            for (int u = 0; u < LOADS; u++) {
                float most = NEG;
#pragma unroll 1
                for (u32 left = bits[u]; left; left &= left - 1) {
                    const int k = __ffs(left) - 1, e = (first + u) * UNIT + lane * V + k;
                    Rank one = drawn_of(given, element_at(v[u], k), less, own, row, e, true, floor);
                    most = fmaxf(most, one.rank), ill += one.broken;
                }
                best[u] = ordered(most);
            }
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
#ifdef RANK_DRAWN  // the row's largest is known: ranks in place of what was drawn
    upper = __reduce_max_sync(ALL, upper);
    if (lane == 0) uppers[warp] = upper;
    __syncthreads();
    floor.top = unordered(max(max(uppers[0], uppers[1]), max(uppers[2], uppers[3])));
    if (threadIdx.x == 0) given.largest[row] = floor.top;
    __syncthreads();
    upper = ordered(NEG), lower = 0x7fffffff;
    for (int i = threadIdx.x; i < chunks; i += 128) {
        const float rank = settled(given, mine[i], row, floor.top);
        mine[i] = rank;
        upper = max(upper, ordered(rank));
        if (rank > NEG) lower = min(lower, ordered(rank));
    }
#endif
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
