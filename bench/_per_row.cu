// Attention over S compacted positions, one warp a (row, head), D = 64: a peer of bench/attention.py.
//
// build: S=1,8 BF16=0,1

// part: prelude/half.cuh

extern "C" __global__ void per_row(i64 q, i64 k, i64 v, i64 k_slots, i64 v_slots, i64 out, i64 rows) {
    const i64 row = blockIdx.x * 4 + threadIdx.x / 32, at = row * 32 + threadIdx.x % 32, step = rows * 32;
    if (row >= rows) return;
    float q0, q1, score[S], most = -1e30f, sum = 0.f, a = 0.f, b = 0.f;
    unpack(((const u32*)q)[at], q0, q1);
#pragma unroll
    for (int j = 0; j < S; j++) {
        float k0, k1;
        unpack(j < S - 1 ? ((const u32*)k_slots)[j * step + at] : ((const u32*)k)[at], k0, k1);
        float dot = q0 * k0 + q1 * k1;
        for (int lane = 16; lane; lane /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, lane);
        score[j] = dot * 0.125f, most = fmaxf(most, score[j]);
    }
#pragma unroll
    for (int j = 0; j < S; j++) {
        const float share = __expf(score[j] - most);
        float v0, v1;
        unpack(j < S - 1 ? ((const u32*)v_slots)[j * step + at] : ((const u32*)v)[at], v0, v1);
        a += share * v0, b += share * v1, sum += share;
    }
    ((u32*)out)[at] = pack(a / sum, b / sum);
}
