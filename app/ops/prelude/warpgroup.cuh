// What products of a warpgroup (wgmma, sm_90a) need around them, whatever is multiplied.

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Before the first product that is given registers, or shared memory, that were written before.
__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// The products since the last one are a group.
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until no more than the newest so many groups are under way.
template <int NEWEST = 0>
__device__ __forceinline__ void finish() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWEST) : "memory");
}

// An operand in shared memory (PTX ISA, "Shared memory matrix layout"): rows of 128 bytes, their pieces of 16 bytes
// swizzled, eights of rows 1024 bytes apart; at: bytes / 16.
__device__ __forceinline__ u64 descriptor(u32 at) {
    u64 x;
    asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(at | 1u << 16), "r"(64u | 1u << 30));
    return x;
}

// Words j of four lanes become the four words of lane j: sums lie in pairs by fours of lanes, and are stored in eights.
__device__ __forceinline__ uint4 turned(u32 a, u32 b, u32 c, u32 d) {
    const u32 all = 0xffffffffu;
    const bool one = threadIdx.x & 1, two = threadIdx.x & 2;
    const u32 ab = __shfl_xor_sync(all, one ? a : b, 1), cd = __shfl_xor_sync(all, one ? c : d, 1);
    a = one ? ab : a, b = one ? b : ab, c = one ? cd : c, d = one ? d : cd;
    const u32 ac = __shfl_xor_sync(all, two ? a : c, 2), bd = __shfl_xor_sync(all, two ? b : d, 2);
    return two ? make_uint4(ac, bd, c, d) : make_uint4(a, b, ac, bd);
}
