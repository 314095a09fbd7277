// x / (1 + exp(-x)).

__device__ __forceinline__ float silu(float x) {
    return __fdividef(x, 1.f + __expf(-x));  // exp is infinite below -88: -0 then, and NaN for -inf, as torch's
}
