// What surrounds the gated delta rule in a decode step, each in one pass: the convolution over a row's own window, the
// gates, and the gated norm of the output.
//
// build: BF16=0,1 J=2,3,4
//
// Compiled with -DBF16 (0: float16) and -DJ (size of the convolution). Arithmetic is float32.

typedef unsigned int u32;
typedef long long i64;

#if BF16
__device__ __forceinline__ void unpack(u32 x, float& a, float& b) {
    a = __uint_as_float(x << 16);
    b = __uint_as_float(x & 0xffff0000u);
}
__device__ __forceinline__ u32 pack(float a, float b) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
    return x;
}
#else
__device__ __forceinline__ void unpack(u32 x, float& a, float& b) {
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
}
__device__ __forceinline__ u32 pack(float a, float b) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(x) : "f"(a), "f"(b));
    return x;
}
#endif

__device__ __forceinline__ float one(const unsigned short* p) {
    float a, b;
    unpack(*p, a, b);
    return a;
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

__device__ __forceinline__ void eight(const unsigned short* p, float (&x)[8]) {
    const uint4 y = *(const uint4*)p;
    unpack(y.x, x[0], x[1]), unpack(y.y, x[2], x[3]), unpack(y.z, x[4], x[5]), unpack(y.w, x[6], x[7]);
}

// x         [N, D] 16 bit, rows `pitch` apart;  weight [D, J];  tail [R, J - 1, D];  slots [steps, slot_rows, D]
// request   [N], ancestry [N, columns] int32: of columns first.. the newest J - 1 are read; compact: slots are the rows
// y         [N, D], but channels keys..2 keys go to `key` [N, keys] instead (keys 0: none do)
// One thread: 8 channels of a row.
extern "C" __global__ void __launch_bounds__(256) window_convolution(
    const unsigned short* __restrict__ x, i64 pitch, const unsigned short* __restrict__ weight,
    const unsigned short* __restrict__ tail, const unsigned short* __restrict__ slots, const int* __restrict__ request,
    const int* __restrict__ ancestry, i64 columns, i64 first, i64 compact, i64 slot_rows, i64 rows, i64 channels,
    unsigned short* __restrict__ y, unsigned short* __restrict__ key, i64 keys) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");  // the replay behind it may ask for its states
#endif
    const u32 blocks = gridDim.x / (u32)rows;  // of a row
    const i64 row = blockIdx.x / blocks, at = (blockIdx.x % blocks * 256 + threadIdx.x) * 8;
    if (at >= channels) return;
    float kernel[8 * J], sum[8], in[8];
#pragma unroll
    for (int i = 0; i < J; i++) {
        eight(weight + at * J + 8 * i, in);
#pragma unroll
        for (int e = 0; e < 8; e++) kernel[8 * i + e] = in[e];
    }
    eight(x + row * pitch + at, in);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = in[i] * kernel[i * J + J - 1];
#pragma unroll
    for (int back = 1; back < J; back++) {
        const i64 column = columns - back;
        const unsigned short* from;
        if (column >= first) {
            i64 slot = compact ? row : ancestry[row * columns + column];
            slot = slot < 0 ? 0 : slot >= slot_rows ? slot_rows - 1 : slot;
            from = slots + (column * slot_rows + slot) * channels;
        } else {  // the prompt's newest input is the tail's last
            from = tail + (request[row] * (J - 1) + (J - 1) + column - first) * channels;
        }
        eight(from + at, in);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += in[i] * kernel[i * J + J - 1 - back];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = silu(sum[i]);
    *(uint4*)(at >= keys && at < 2 * keys ? key + row * keys + at - keys : y + row * channels + at) =
        make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
}

// ba [N, 2 HV] 16 bit: b, then a;  a_log, dt_bias [HV] 16 bit;  log_alpha, beta [N, HV] float32. One thread: one head.
extern "C" __global__ void __launch_bounds__(256) gates(
    const unsigned short* __restrict__ ba, const unsigned short* __restrict__ a_log,
    const unsigned short* __restrict__ dt_bias, i64 rows, i64 heads, float* __restrict__ log_alpha,
    float* __restrict__ beta) {
    const u32 id = blockIdx.x * 256 + threadIdx.x;
    if (id >= rows * heads) return;
    const i64 row = id / (u32)heads, h = id % (u32)heads;
    const float b = one(ba + row * 2 * heads + h), a = one(ba + row * 2 * heads + heads + h) + one(dt_bias + h);
    log_alpha[id] = -expf(one(a_log + h)) * (a > 20.f ? a : log1pf(expf(a)));
    beta[id] = 1.f / (1.f + expf(-b));
}

// o [N, heads, width] float32;  z [N, heads, width] 16 bit, rows `pitch` apart;  weight [width];  y as z, dense.
// One warp: one head of a row; width is a multiple of 4.
extern "C" __global__ void __launch_bounds__(256) gated_norm(
    const float* __restrict__ o, const unsigned short* __restrict__ z, i64 pitch,
    const unsigned short* __restrict__ weight, float eps, i64 rows, i64 heads, i64 width,
    unsigned short* __restrict__ y) {
    const u32 id = blockIdx.x * 8 + threadIdx.x / 32;
    if (id >= rows * heads) return;
    const i64 row = id / (u32)heads, h = id % (u32)heads;
    const float* own = o + id * width;
    float sum = 0.f;
    for (i64 i = threadIdx.x % 32 * 4; i < width; i += 128) {
        const float4 f = *(const float4*)(own + i);
        sum += f.x * f.x + f.y * f.y + f.z * f.z + f.w * f.w;
    }
#pragma unroll
    for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    const float scale = rsqrtf(sum / width + eps);
    for (i64 i = threadIdx.x % 32 * 4; i < width; i += 128) {
        const float4 f = *(const float4*)(own + i);
        const uint2 gate = *(const uint2*)(z + row * pitch + h * width + i), by = *(const uint2*)(weight + i);
        float g0, g1, g2, g3, w0, w1, w2, w3;
        unpack(gate.x, g0, g1), unpack(gate.y, g2, g3), unpack(by.x, w0, w1), unpack(by.y, w2, w3);
        *(uint2*)(y + id * width + i) =
            make_uint2(pack(f.x * scale * w0 * silu(g0), f.y * scale * w1 * silu(g1)),
                       pack(f.z * scale * w2 * silu(g2), f.w * scale * w3 * silu(g3)));
    }
}
