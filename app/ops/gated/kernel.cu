// out = silu(gate) * up, in float32 inside: a thread takes 8 elements, and everything is read and written once.
//
// build: BF16=0,1
//
// -DBF16 (0: float16). Rows of gate and up may lie apart (strides in elements, multiples of 8); out has none between.

// part: prelude/half.cuh
// part: prelude/silu.cuh

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) gated(
    i64 gate, i64 up, i64 out, i64 pieces, i64 width, i64 gate_row, i64 up_row) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= pieces) return;
    const i64 row = pieces < (1ll << 32) ? (unsigned)at / (unsigned)width : at / width;
    const i64 column = (at - row * width) * 8;
    float g[8], u[8];
    unpack8(load_once((const u16*)gate + row * gate_row + column), g);
    unpack8(load_once((const u16*)up + row * up_row + column), u);
#pragma unroll
    for (int e = 0; e < 8; e++) g[e] = silu(g[e]) * u[e];
    store((uint4*)out + at, pack8(g));
}
