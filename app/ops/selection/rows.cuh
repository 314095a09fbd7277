// What the scans share: a row in vectors, its mask, bad logits, exponentials.

#define LOADS (TYPE == 2 ? 16 : 8)  // vectors of a lane in flight
#define LOG2E 1.4426950408889634f
#define STRIDE (4 * LOADS)

#if TYPE != 2
// Four bits as masks of the halves of two words: SIGNS puts bit i into the sign of byte i, which prmt then spreads.
#define SIGNS 0x10204080u
template <u32 PICK>
__device__ __forceinline__ u32 without(u32 word, u32 signs) {
    u32 m;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(m) : "r"(signs), "n"(PICK));
    return (word & ~m) | (LOW & m);
}
#endif

// Logits whose bit is 0 become -inf.
__device__ __forceinline__ uint4 keep_bits(const uint4& x, u32 bits) {
    u32 drop = ~bits;
#if TYPE == 2
    return make_uint4(drop & 1 ? LOW : x.x, drop & 2 ? LOW : x.y, drop & 4 ? LOW : x.z, drop & 8 ? LOW : x.w);
#else
    u32 a = (drop & 15) * SIGNS, b = (drop >> 4 & 15) * SIGNS;
    return make_uint4(without<0x9988>(x.x, a), without<0xbbaa>(x.y, a), without<0x9988>(x.z, b), without<0xbbaa>(x.w, b));
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
