// The best chunks of a request and their candidates.

#define BINS 512    // of chunk scores
#define FINE 2048   // of candidates
#define MOST 1024   // candidates of a bin that are ranked by comparing each with each
#define AHEAD (SCORE == 3 ? 2 : CLUSTER > 6 ? 3 : 4)  // vectors of a lane in flight


#if CLUSTER > 1
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 remote(const void* p, int block) {
    u32 a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"((u32)__cvta_generic_to_shared(p)), "r"(block));
    return a;
}
__device__ __forceinline__ u32 read(const u32* p, int block) {
    u32 x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(remote(p, block)) : "memory");
    return x;
}
__device__ __forceinline__ void write(u64* p, int block, u64 x) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote(p, block)), "l"(x) : "memory");
}
#define CLUSTER_SIZE __cluster_dims__(CLUSTER, 1, 1)
#else
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
__device__ __forceinline__ u32 read(const u32* p, int) { return *(const volatile u32*)p; }
__device__ __forceinline__ void write(u64* p, int, u64 x) { *p = x; }
#define CLUSTER_SIZE
#endif

// A falling step function of x, the same everywhere: bins from `high` down. NaN (no range) is bin 0.
__device__ __forceinline__ u32 bin_of(float x, float high, float scale, u32 bins) {
    u32 b = __float2uint_rz((high - x) * scale);
    return b < bins - 1 ? b : bins - 1;
}

// What the threads before this one have, of 1024; `total` of all.
__device__ __forceinline__ u32 before_of(u32 x, u32* scratch, u32& total) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 sum = x;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        u32 y = __shfl_up_sync(ALL, sum, i);
        if (lane >= i) sum += y;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    u32 w = scratch[lane], all = w;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        u32 y = __shfl_up_sync(ALL, all, i);
        if (lane >= i) all += y;
    }
    total = __shfl_sync(ALL, all, 31);
    u32 earlier = __shfl_sync(ALL, all - w, warp);
    __syncthreads();
    return earlier + sum - x;
}

// One cluster of CLUSTER blocks of 1024 threads a request. Dynamic shared memory, in this order: `places` u64 of sorted
// candidates, `room` u64 of candidates, `scores_room` floats, `list_room` u32, and twice u16 for each row; or what search
// takes, of `keys_room` and `most`.
extern "C" __global__ void CLUSTER_SIZE __launch_bounds__(1024, 1)
    tail(PARAMETERS, i64 places, i64 room_, i64 scores_room, i64 list_room_, i64 keys_room, i64 most) {
    extern __shared__ __align__(16) u64 memory[];
    __shared__ u32 hist[2][BINS], fine[FINE / 2], start[FINE + 1], next[FINE], scratch[32], base[CLUSTER + 1];
    __shared__ u32 found, listed, cut_bin, cut_before, cut_total;
    const Operands o = OPERANDS;
    const int rank = blockIdx.x % CLUSTER, r = blockIdx.x / CLUSTER, tid = threadIdx.x, lane = tid & 31;
    const int codes = (int)codes_, chunks = (int)chunks_, depth = (int)depth_;
    const Request q = request_of(o, r);
    u64 *sorted = memory, *candidate = sorted + places;
    float* scores = (float*)(candidate + room_);
    u32* list = (u32*)(scores + scores_room);
    u16 *inverse = (u16*)(list + list_room_), *place = inverse + q.rows;
    const u32 room = (u32)room_, list_room = (u32)list_room_;

    let_next_begin();
    if (tid < BINS) hist[0][tid] = hist[1][tid] = 0;
    fine[tid] = 0;
    if (tid == 0) found = listed = 0;
    for (int i = tid; i < q.rows; i += 1024) invert(o, q, i, place, inverse);
    wait_for_previous();

    // The range of the chunks' scores, and the scores of this block's chunks, by groups of 4 in turn.
    const int wide = chunks / 4, groups = q.rows * wide;
    const int mine = groups > rank ? (groups - rank + CLUSTER - 1) / CLUSTER : 0;
    int high_seen = ordered(NEG), low_seen = 0x7fffffff;
    for (int i = tid; i < q.rows; i += 1024) {
        i64 row = q.first + i;
        float a = norm_of(norm, row), b = parent_of(parent, row);
        float2 e = __ldcg(ends + row);
        float best = chunk_score(e.x, a, b), worst = chunk_score(e.y, a, b);
        high_seen = max(high_seen, ordered(best));
        if (worst > NEG) low_seen = min(low_seen, ordered(worst));
    }
    for (int j = tid; j < mine; j += 1024) {
        int g = rank + j * CLUSTER;
        i64 row = q.first + g / wide;
        float4 c = __ldcg((const float4*)chunk + (i64)q.first * wide + g);
        float a = norm_of(norm, row), b = parent_of(parent, row);
        ((float4*)scores)[j] =
            make_float4(chunk_score(c.x, a, b), chunk_score(c.y, a, b), chunk_score(c.z, a, b), chunk_score(c.w, a, b));
    }
    high_seen = __reduce_max_sync(ALL, high_seen), low_seen = __reduce_min_sync(ALL, low_seen);
    if (lane == 0) start[tid >> 5] = (u32)high_seen, start[32 + (tid >> 5)] = (u32)low_seen;
    __syncthreads();
    const float top = unordered(__reduce_max_sync(ALL, (int)start[lane]));
    const float bottom = unordered(__reduce_min_sync(ALL, (int)start[32 + lane]));
    if (q.keep <= 0 || !(top > NEG)) {  // nothing is to be selected, or may be: the whole cluster leaves
        for (int i = rank * 1024 + tid; i < q.keep; i += CLUSTER * 1024) emit(o, q, inverse, 0, i, codes, depth);
        if (rank == 0 && tid == 0) o.valid_out[r] = 0;
        return;
    }

    // The bin of chunk scores in which the K-th best lies; refined while too many chunks share it.
    const float slack = 1e-6f * (fabsf(top) + fabsf(bottom)) + 1e-30f;
    float high = top, scale = BINS / (top - bottom);
    u32 need = q.keep, accepted = 0, last = 0, cut;
    bool everything;
    for (int round = 0;; round++) {
        u32* h = hist[round & 1];
        for (int i = tid; i < 4 * mine; i += 1024) {
            float s = scores[i];
            if (s > NEG && s < INF) atomicAdd(h + bin_of(s, high, scale, BINS), 1u);
        }
        cluster_sync();
        u32 count = 0, total;
        if (tid < BINS) {
#pragma unroll
            for (int c = 0; c < CLUSTER; c++) count += read(h + tid, c);
            hist[(round + 1) & 1][tid] = 0;
        }
        u32 before = before_of(count, scratch, total);
        if (before < need && before + count >= need) cut_bin = tid, cut_before = before, cut_total = count;
        __syncthreads();
        everything = total < need;
        cut = everything ? BINS - 1 : cut_bin;
        accepted += everything ? total : cut_before;
        u32 boundary = everything ? 0 : cut_total;
        if (accepted + boundary <= q.keep + q.keep / 4 + 32 || round == 2 || boundary == last || 1.f / scale < slack) break;
        last = boundary;
        need -= cut_before;
        for (int i = tid; i < 4 * mine; i += 1024) {
            float s = scores[i];
            if (s > NEG && s < INF) {
                u32 b = bin_of(s, high, scale, BINS);
                if (b != cut) scores[i] = b < cut ? INF : NEG;
            }
        }
        high -= cut / scale, scale *= BINS;
        __syncthreads();
    }
    const float least = everything ? NEG : high - (cut + 1) / scale - slack;  // no candidate below is selected
    for (int base = tid - lane; base < 4 * mine; base += 1024) {
        int i = base + lane;
        float s = i < 4 * mine ? scores[i] : NEG;
        bool take = s == INF || (s > NEG && bin_of(s, high, scale, BINS) <= cut);
        u32 votes = __ballot_sync(ALL, take);
        if (!votes) continue;
        u32 at = 0;
        if (lane == 0) at = atomicAdd(&listed, __popc(votes));
        at = __shfl_sync(ALL, at, 0) + __popc(votes & ((1u << lane) - 1));
        if (take && at < list_room) {
            const u32 g = rank + (i >> 2) * CLUSTER, row = g / wide;
            list[at] = row << 16 | ((g - row * wide) * 4 + (i & 3));  // a row of the request, and the chunk's place in it
        }
    }
    __syncthreads();

    // The candidates of those chunks that may be selected, counted by finer bins.
    const float floor_ = everything ? bottom - (top - bottom) : least;
    const float fine_scale = FINE / (top - floor_);
    const u32 lines = min(listed, list_room), work = SMALL ? (lines + 31) / 32 : lines * UNITS;
    for (u32 base = (tid >> 5) * AHEAD; base < work; base += 32 * AHEAD) {
        uint4 x[AHEAD];
        float bound[AHEAD];
        u32 legal[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            u32 w = base + u, line = SMALL ? w * 32 + lane : w / UNITS;
            bool on = line < lines;
            u32 id = list[on ? line : 0], p = id & 0xffffu;
            i64 row = q.first + (id >> 16);
            int e = SMALL ? p * V : (p * UNITS + w % UNITS) * UNIT + lane * V;
            on = on && e < codes;
            if (!on) e = 0;  // so that every load is of the row, and none waits for a branch
            x[u] = load<false>(logits + row * codes, e, codes);
            legal[u] = load_bits(mask, row, mask_stride, e);
            if (!on) legal[u] = 0;
            float a = norm_of(norm, row), b = parent_of(parent, row), t = least;
#if SCORE == 2
            t = ((t - b) + a) - (1e-6f * (fabsf(t) + fabsf(b) + fabsf(a)) + 1e-30f);
#elif SCORE == 1
            t = (t - b) - (1e-6f * (fabsf(t) + fabsf(b)) + 1e-30f);
#endif
            bound[u] = fmaxf(t, -LARGEST);  // NaN, of no bound at all, too
        }
        u32 bits = 0;
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
#if SCORE == 3
            u32 w = base + u, line = SMALL ? w * 32 + lane : w / UNITS, id = list[line < lines ? line : 0];
            u32 p = id & 0xffffu;
            i64 row = q.first + (id >> 16);
            int e = SMALL ? p * V : (p * UNITS + w % UNITS) * UNIT + lane * V;
            const float norm_ = norm_of(norm, row), parent_ = parent_of(parent, row);
            const Floor floor = floor_of(o.given, row);
#endif
#if SCORE == 3 && defined NOISY  // only for who may be selected
#pragma unroll 1
            for (u32 left = legal[u]; left; left &= left - 1) {
                const int k = __ffs(left) - 1;
                const float f = sane(element_at(x[u], k));
                const float of = rank_of(o.given, f, norm_, parent_, row, e + k, true, floor).rank;
                if (of >= bound[u] && of <= LARGEST) bits |= 1u << (u * V + k);
            }
#else
#pragma unroll
            for (int k = 0; k < V; k++) {
                float f = element(x[u], k);
#if SCORE == 3 && defined RANK_MASKED
                f = seen_of(o.given, f, norm_, parent_, row, e + k, legal[u] >> k & 1u, floor);
#elif SCORE == 3
                f = rank_of(o.given, sane(f), norm_, parent_, row, e + k, legal[u] >> k & 1u, floor).rank;
#endif
                if (f >= bound[u] && f <= LARGEST) bits |= (legal[u] >> k & 1u) << (u * V + k);
            }
#endif
        }
        u32 own = __popc(bits), upto = own;
        if (!__any_sync(ALL, own)) continue;
#pragma unroll
        for (int i = 1; i < 32; i <<= 1) {
            u32 y = __shfl_up_sync(ALL, upto, i);
            if (lane >= i) upto += y;
        }
        u32 at = 0;
        if (lane == 31) at = atomicAdd(&found, upto);
        at = __shfl_sync(ALL, at, 31) + upto - own;
        while (bits) {
            u32 k = __ffs(bits) - 1, w = base + k / V;
            bits &= bits - 1;
            u32 id = list[SMALL ? w * 32 + lane : w / UNITS], p = id & 0xffffu, in = id >> 16;
            int e = (SMALL ? p * V : (p * UNITS + w % UNITS) * UNIT + lane * V) + k % V;
            i64 row = q.first + in;
            float s = candidate_score(o, row, e, codes);
            if (at < room) {
                candidate[at] = key_of(s, place[in] * (u32)codes + e);
                u32 b = bin_of(s, top, fine_scale, FINE);
                atomicAdd(fine + (b >> 1), b & 1 ? 0x10000u : 1u);
            }
            at++;
        }
    }
    cluster_sync();

    // Where each bin begins; each block's candidates of a bin follow those of the blocks before it. Whole bins are shared
    // out: block c has those from `base[c]`, the first that begins at or after keep * c / CLUSTER.
    u32 t0 = 0, t1 = 0, b0 = 0, b1 = 0, total;
    bool over = false;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
        u32 w = read(fine + tid, c);
        if (c < rank) b0 += w & 0xffffu, b1 += w >> 16;
        t0 += w & 0xffffu, t1 += w >> 16;
    }
    if (tid < CLUSTER) over = read(&found, tid) > room || read(&listed, tid) > list_room;
    const u32 keep_ = q.keep, before = before_of(t0 + t1, scratch, total), middle = before + t0, after = middle + t1;
    start[2 * tid] = before, start[2 * tid + 1] = middle;
    next[2 * tid] = before + b0, next[2 * tid + 1] = middle + b1;
    over |= (before < keep_ && t0 > MOST) || (middle < keep_ && t1 > MOST);
    if (tid <= CLUSTER) base[tid] = tid ? total : 0;
    if (tid == 0) start[FINE] = total;
    if (__syncthreads_or(over)) {
        cluster_sync();  // nobody reads this block's memory any more
        if (rank == 0) {  // on copies: what a call takes by its address lies in local memory
            const Operands operands = OPERANDS;
            const Request request = q;
            search(
                operands, request, r, codes, chunks, depth, mask_stride, memory, start, scratch, (int)keys_room, (int)most);
        }
        return;
    }
#pragma unroll
    for (int c = 1; c <= CLUSTER; c++) {
        u32 edge = (c * keep_ + CLUSTER - 1) / CLUSTER;
        if (before < edge && edge <= middle) base[c] = middle;
        if (middle < edge && edge <= after) base[c] = after;
    }
    __syncthreads();
    const u32 mine_found = found;
    for (u32 i = tid; i < mine_found; i += 1024) {
        u64 key = candidate[i];
        u32 b = bin_of(score_in(key), top, fine_scale, FINE), from = start[b];
        if (from < keep_) {
            u32 owner = from * CLUSTER / keep_;
            write(sorted + (atomicAdd(next + b, 1u) - base[owner]), owner, key);
        }
    }
    cluster_sync();  // the last time that a block touches another

    // The rank inside its bin is a candidate's place.
    const u32 mine_from = base[rank], mine_to = base[rank + 1];
    for (u32 i = tid; i < mine_to - mine_from; i += 1024) {
        u64 key = sorted[i];
        u32 b = bin_of(score_in(key), top, fine_scale, FINE), at = start[b];
        for (u32 k = start[b] - mine_from; k < start[b + 1] - mine_from; k++) at += sorted[k] > key;
        if (at < keep_) emit(o, q, inverse, key, at, codes, depth);
    }
    for (u32 i = total + rank * 1024 + tid; i < keep_; i += CLUSTER * 1024) emit(o, q, inverse, 0, i, codes, depth);
    if (rank == 0 && tid == 0) o.valid_out[r] = min(total, keep_);
}
