// 16-bit numbers in pairs and in eights, and the loads and stores of 16 bytes that carry them.
//
// With -DBF16, unpack, pack and the eights are of that type (1: bfloat16, 0: float16); the names that say their type are
// there for every source. The lower half of a word is its first number.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

__device__ __forceinline__ void unpack_half(u32 x, float& a, float& b) {
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
}

__device__ __forceinline__ u32 pack_half(float a, float b) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
    return x;
}

__device__ __forceinline__ void unpack_bfloat(u32 x, float& a, float& b) {
    a = __uint_as_float(x << 16);
    b = __uint_as_float(x & 0xffff0000u);
}

__device__ __forceinline__ u32 pack_bfloat(float a, float b) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
    return x;
}

// What other threads read as well: may stay in L1.
__device__ __forceinline__ uint4 load(const void* p) {
    uint4 x;
    asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

// What is read once: kept out of L1.
__device__ __forceinline__ uint4 load_once(const void* p) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

__device__ __forceinline__ void store(void* p, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" : : "l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

#ifdef BF16
__device__ __forceinline__ void unpack(u32 x, float& a, float& b) {
#if BF16
    unpack_bfloat(x, a, b);
#else
    unpack_half(x, a, b);
#endif
}

__device__ __forceinline__ u32 pack(float a, float b) {
#if BF16
    return pack_bfloat(a, b);
#else
    return pack_half(a, b);
#endif
}

__device__ __forceinline__ void unpack8(uint4 x, float (&y)[8]) {
    unpack(x.x, y[0], y[1]);
    unpack(x.y, y[2], y[3]);
    unpack(x.z, y[4], y[5]);
    unpack(x.w, y[6], y[7]);
}

__device__ __forceinline__ uint4 pack8(const float (&y)[8]) {
    return make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
}
#endif
