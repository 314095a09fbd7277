// A request again whose candidates did not fit the tail, by radix search.

#define DIGITS 2048
#define TOGETHER 4  // keys of a thread that are read at once: each waits for several loads

// The k-th largest of `count` keys that are not 0; 0 where there are fewer. All 1024 threads.
template <class Key>
__device__ __forceinline__ u64 kth_largest(Key key_at, u32 count, u32 k, u32* hist, u32* state) {
    u64 prefix = 0;
#pragma unroll 1
    for (int shift = 53; shift >= -2; shift -= 11) {
        int low = shift < 0 ? 0 : shift, above = shift + 11;
        for (int i = threadIdx.x; i < DIGITS; i += 1024) hist[i] = 0;
        if (threadIdx.x == 0) state[0] = 0xffffffffu;
        __syncthreads();
#pragma unroll 1
        for (u32 base = 0; base < count; base += 1024 * TOGETHER) {
            u64 keys[TOGETHER];
#pragma unroll
            for (int n = 0; n < TOGETHER; n++) {
                u32 i = base + n * 1024 + threadIdx.x;
                keys[n] = i < count ? key_at(i) : 0;
            }
#pragma unroll
            for (int n = 0; n < TOGETHER; n++) {
                u64 key = keys[n];
                bool in = key && (above > 63 || (key >> above) == (prefix >> above));
                u32 digit = (u32)(key >> low) & ((1u << (above - low)) - 1), lanes = __ballot_sync(ALL, in);
                if (!lanes) continue;
                u32 common = __shfl_sync(ALL, digit, __ffs(lanes) - 1);
                u32 same = __ballot_sync(ALL, in && digit == common);
                if (in && digit != common) atomicAdd(hist + digit, 1u);
                if ((threadIdx.x & 31) == 0) atomicAdd(hist + common, __popc(same));
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) {  // 64 digits a lane, from the largest
            int lane = threadIdx.x, first = DIGITS - 1 - lane * 64;
            u32 own = 0, sum;
            for (int d = 0; d < 64; d++) own += hist[first - d];
            sum = own;
            for (int i = 1; i < 32; i <<= 1) {
                u32 y = __shfl_up_sync(ALL, sum, i);
                if (lane >= i) sum += y;
            }
            u32 before = sum - own;
            if (before < k && sum >= k)
                for (int d = 0; d < 64; d++) {
                    u32 n = hist[first - d];
                    if (before + n >= k) {
                        state[0] = first - d, state[1] = before;
                        break;
                    }
                    before += n;
                }
        }
        __syncthreads();
        if (state[0] == 0xffffffffu) return 0;
        prefix |= (u64)state[0] << low;
        k -= state[1];
        __syncthreads();
    }
    return prefix;
}

// A request by one block of 1024 threads, `cells` 4 numbers of shared memory. memory: `keys_room` u64 (a power of two, at
// least keep), `list_room` u32 (at least keep), and twice u16 for each row.
__device__ __noinline__ void search(
    const Operands& o, const Request& q, int r, int codes, int chunks, int depth, i64 mask_stride, u64* memory, u32* hist,
    u32* cells, int keys_room, int list_room) {
    const int tid = threadIdx.x;
    u32 *state = cells, &listed = cells[2], &found = cells[3];
    u64* keys = memory;
    u32* list = (u32*)(keys + keys_room);
    u16 *inverse = (u16*)(list + list_room), *place = inverse + q.rows;
    for (int i = tid; i < q.rows; i += 1024) invert(o, q, i, place, inverse);
    for (int i = tid; i < keys_room; i += 1024) keys[i] = 0;
    if (tid == 0) listed = found = 0;
    __syncthreads();

    // The K best chunks, by (best score, first place): each other chunk is beaten by K candidates.
    auto chunk_key = [&](u32 i) -> u64 {
        i64 row = q.first + i / chunks;
        float s = chunk_score(o.chunk[(i64)q.first * chunks + i], norm_of(o.norm, row), parent_of(o.parent, row));
        return s > NEG ? key_of(s, place[i / chunks] * (u32)chunks + i % chunks) : 0;
    };
    const u32 all = (u32)q.rows * (u32)chunks;
    const u64 edge = kth_largest(chunk_key, all, q.keep, hist, state);
#pragma unroll 2
    for (u32 i = tid; i < all; i += 1024) {
        u64 key = chunk_key(i);
        if (key && key >= edge) list[atomicAdd(&listed, 1u)] = i / chunks << 16 | i % chunks;
    }
    __syncthreads();
    const u32 size = SMALL ? V : UNITS * UNIT;
    auto element_key = [&](u32 i) -> u64 {
        u32 id = list[i / size], in = id >> 16;
        i64 row = q.first + in;
        int e = (id & 0xffffu) * size + i % size;
        if (e >= codes || !(load_bits(o.mask, row, mask_stride, e & ~(V - 1)) >> (e & (V - 1)) & 1u)) return 0;
        float s = candidate_score(o, row, e, codes);
        return s > NEG ? key_of(s, place[in] * (u32)codes + e) : 0;
    };
    const u32 elements = listed * size;
    const u64 worst = kth_largest(element_key, elements, q.keep, hist, state);
#pragma unroll 4
    for (u32 i = tid; i < elements; i += 1024) {
        u64 key = element_key(i);
        if (key && key >= worst) keys[atomicAdd(&found, 1u)] = key;
    }
    __syncthreads();
    const u32 total = found;
    for (int size2 = 2; size2 <= keys_room; size2 *= 2)  // bitonic, falling
        for (int gap = size2 / 2; gap; gap /= 2) {
            for (int i = tid; i < keys_room / 2; i += 1024) {
                int a = 2 * i - (i & (gap - 1)), b = a + gap;
                u64 x = keys[a], y = keys[b];
                if ((x < y) == ((a & size2) == 0)) keys[a] = y, keys[b] = x;
            }
            __syncthreads();
        }
    for (int i = tid; i < q.keep; i += 1024) emit(o, q, inverse, keys[i], i, codes, depth);
    if (tid == 0) o.valid_out[r] = total;
}
