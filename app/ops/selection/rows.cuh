// What the scans share: a row in vectors, its mask, bad logits, exponentials.

#define LOADS (TYPE == 2 ? 16 : 8)  // vectors of a lane in flight
#define LOG2E 1.4426950408889634f
#define STRIDE (4 * LOADS)

#if TYPE != 2
// Four bits as masks of the halves of two words: SIGNS puts bit i into the sign of byte i, which prmt then spreads.
#define SIGNS 0x10204080u
template <u32 PICK>
__device__ __forceinline__ u32 within(u32 word, u32 signs) {
    u32 m;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(m) : "r"(signs), "n"(PICK));
    return (word & m) | (LOW & ~m);
}
#endif

// Logits whose bit is 0 become -inf.
__device__ __forceinline__ uint4 keep_bits(const uint4& x, u32 bits) {
#if TYPE == 2
    return make_uint4(bits & 1 ? x.x : LOW, bits & 2 ? x.y : LOW, bits & 4 ? x.z : LOW, bits & 8 ? x.w : LOW);
#else
    u32 a = (bits & 15) * SIGNS, b = (bits >> 4) * SIGNS;
    return make_uint4(within<0x9988>(x.x, a), within<0xbbaa>(x.y, a), within<0x9988>(x.z, b), within<0xbbaa>(x.w, b));
#endif
}

// Logits of a tile that rank_scan has looked at, -inf where they are not legal: for NORM 2 all are that already.
__device__ __forceinline__ uint4 legal_of(const uint4& x, u32 bits) { return NORM == 2 ? x : keep_bits(x, bits); }

// Vectors first .. first + LOADS - 1 of a row, by 32 lanes each, and where there is a mask their bits of it.
__device__ __forceinline__ void load_tile(
    const Logit* x, const u8* mask, i64 row, i64 mask_stride, int first, int codes, uint4* v, u32* bits) {
    const int from = first * UNIT + (threadIdx.x & 31) * V;
#if VEC
    if ((first + LOADS) * UNIT <= codes) {  // whole: one address and distances from it, in the place of one a vector
#pragma unroll
        for (int u = 0; u < LOADS; u++) v[u] = load_once(x + from + u * UNIT);
#if MASK
        if (SCORE == 3 && !mask) {
#pragma unroll
            for (int u = 0; u < LOADS; u++) bits[u] = (1u << V) - 1;
            return;
        }
        const u8* byte = mask + row * mask_stride + (from >> 3);
#pragma unroll
        for (int u = 0; u < LOADS; u++) bits[u] = __ldg(byte + u * (UNIT / 8));
#pragma unroll
        for (int u = 0; u < LOADS; u++) bits[u] = V == 4 ? (bits[u] >> (from & 4)) & 15u : bits[u];
#endif
        return;
    }
#endif
#pragma unroll
    for (int u = 0; u < LOADS; u++) v[u] = load<true>(x, from + u * UNIT, codes);
#if MASK
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
        const int e = from + u * UNIT;
        bits[u] = e < codes ? load_bits(mask, row, mask_stride, e) : 0;
    }
#endif
}

__device__ __forceinline__ u32 clean_word(u32 w, int& wrong) {
#if TYPE == 2
    if (__uint_as_float(w) <= LARGEST) return w;
    wrong++;
    return LOW;
#else
    bool a = low_of(w) <= LARGEST, b = high_of(w) <= LARGEST;
    wrong += !a + !b;
    return (a ? w & 0xffffu : LOW & 0xffffu) | (b ? w & 0xffff0000u : LOW & 0xffff0000u);
#endif
}

__device__ __forceinline__ void clean(uint4& x, int& wrong) {
    x.x = clean_word(x.x, wrong), x.y = clean_word(x.y, wrong), x.z = clean_word(x.z, wrong), x.w = clean_word(x.w, wrong);
}

__device__ __forceinline__ float exp_sum(u32 w, float shift) {
    float a = exp2_of(fmaf(low_of(w), LOG2E, shift));
    return TYPE == 2 ? a : a + exp2_of(fmaf(high_of(w), LOG2E, shift));
}
