// Noise that belongs to a candidate, not to its place, as app/policies/noise.py has it: Philox4x32-10 (Salmon et al. 2011)
// of its code, the step, the use and the hash of its prefix, by the key of its request's seed. 64-bit integers and double
// precision, each as torch has it, so that both give the same bits.

struct Drawing {  // what the numbers of a row are drawn by
    u32 key0, key1, prefix0, prefix1, step;
};

#define GUMBEL_STREAM 0u  // two uses of noise in one step are independent
#define UNIFORM_STREAM 1u

// The first of the four words.
__device__ __forceinline__ u32 philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 key0, u32 key1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;
        c0 = (u32)(b >> 32) ^ c1 ^ key0, c1 = (u32)b, c2 = (u32)(a >> 32) ^ c3 ^ key1, c3 = (u32)a;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return c0;
}

// In (0, 1), by steps of 2^-23 and a half, so that nothing is rounded.
__device__ __forceinline__ float uniform_of(const Drawing& by, int code, u32 stream) {
    const u32 word = philox((u32)code, by.step + (stream << 16), by.prefix0, by.prefix1, by.key0, by.key1);
    return ((float)(word >> 9) + 0.5f) * 1.1920928955078125e-7f;
}

// A standard Gumbel number.
__device__ __forceinline__ float gumbel_of(const Drawing& by, int code, u32 stream) {
    return (float)-log(-log((double)uniform_of(by, code, stream)));
}

// The number of a child that drew `drawn`, given that the largest of its row, `top`, is to be the parent's (Kool et al.
// 1903.06059, appendix B): it rises with `drawn`, and is the parent's for the largest.
__device__ __forceinline__ float conditioned(float drawn, float top, float parent) {
    const double limit = parent, x = drawn, behind = fmin(x - (double)top, 0.);
    const double u = (limit - x) + log1p(-exp(behind));
    return (float)((limit - fmax(u, 0.)) - log1p(exp(-fabs(u))));
}
