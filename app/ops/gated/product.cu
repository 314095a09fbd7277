// out = silu(x gate^T) * (x up^T) in one launch: the product gates its own sums, for sm_90a. Ragged over rows.
//
// build: BF16=0,1 arch=sm_90a
//
// -DBF16 (0: float16).
//
// A tile is 128 rows by 128 columns of gate and the same 128 of up. Both sums of an output end in one thread's
// registers, so neither product is written and read again: 8 of the 12 bytes an output that product and gate move, and
// two roundings less.
//
// Of a block's three warpgroups the first fetches, by one thread and the tensor memory accelerator, and gives its
// registers to the others; these compute 64 rows by 256 columns each, 128 sums a thread. Operands come in stages of 64
// numbers of the depth: three planes of 128 rows of 128 bytes - x, gate, up - swizzled as products read them (gate and
// up lie together and are one operand of 256 rows). A stage's place has two barriers: `full`, when its bytes are there,
// and `empty`, when they have been read.
//
// Two blocks are a cluster. They have the same columns and other rows, so each fetches one of gate and up for both: half
// of what would be read of the weights. A place is therefore empty when two warpgroups of both blocks have read it.
//
// Blocks stay, and take every so many tiles: columns first, so that a wave reads few rows and all of the weights, which
// L2 holds. The second warpgroup begins LAG stages behind the first and stays behind it: while one gates and writes,
// the other has the tensor cores to itself.

// part: prelude/half.cuh
// part: prelude/silu.cuh
// part: prelude/warpgroup.cuh

#define THREADS 384
#define BLOCKS 2                  // of a cluster
#define STAGES 4
#define LAG 2
#define ROWS 128                  // of a tile; columns of gate, and of up
#define DEEP 64                   // of a stage: rows of 128 bytes
#define PLANE (ROWS * 128)        // bytes
#define STAGE (3 * PLANE)
#define READERS (2 * BLOCKS)      // warpgroups that read a place
#define BEHIND 1                  // the named barrier of the lag

#if BF16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif

struct __align__(64) Map {
    u64 opaque[16];
};  // CUtensorMap: boxes of 128 rows by 128 bytes, swizzled

// "%10,%11,..,%19," for "1".
#define TEN(t) "%" t "0,%" t "1,%" t "2,%" t "3,%" t "4,%" t "5,%" t "6,%" t "7,%" t "8,%" t "9,"
#define EIGHT(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS                                                                                                           \
    EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72), EIGHT(80), \
        EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120)

// d (64 rows by 256 columns) is, or with `more` becomes the sum of itself and, 64 x 16 by 16 x 256 of shared memory.
__device__ __forceinline__ void product(float (&d)[128], u64 a, u64 b, int more) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPES " {"
                 TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5") TEN("6") TEN("7") TEN("8") TEN("9") TEN("10")
                 TEN("11") "%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, p, 1, 1, 0, 0;}"
                 : SUMS
                 : "l"(a), "l"(b), "r"(more));
}

// Keeps what is made of d behind this line, and what makes it before.
__device__ __forceinline__ void settled(float (&d)[128]) { asm volatile("" : SUMS : : "memory"); }

// A barrier for so many arrivals a phase.
__device__ __forceinline__ void set_up(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Until the phase of this parity is over. A new barrier is in phase 0, and the one before it counts as over.
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::
            "r"(barrier),
        "r"(parity)
        : "memory");
}

// An arrival; the phase also waits for so many bytes.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// An arrival at the barrier of block `of` of the cluster.
__device__ __forceinline__ void arrive(u32 barrier, u32 of) {
    asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r];}" ::"r"(
                     barrier),
                 "r"(of)
                 : "memory");
}

// A box, from these coordinates on, into this block. What lies outside the matrix is zeros.
__device__ __forceinline__ void fetch(u32 to, const Map& from, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&from), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// A box into the same place of every block of the cluster, whose own barrier counts its bytes.
__device__ __forceinline__ void fetch_for_all(u32 to, const Map& from, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
        "%3}], [%4], %5;" ::"r"(to),
        "l"(&from), "r"(column), "r"(row), "r"(barrier), "h"((u16)((1 << BLOCKS) - 1))
        : "memory");
}

__device__ __forceinline__ u32 block_of_cluster() {
    u32 x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive;\n\tbarrier.cluster.wait;" ::: "memory");
}

// A place of the ring, and the parity of the phase that its barriers are in.
struct Place {
    u32 at, parity;
    __device__ __forceinline__ void next() {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

// The tiles of a cluster.
struct Tiles {
    int at, last, step, wide;
    __device__ __forceinline__ int row() const { return at / wide * (BLOCKS * ROWS); }
    __device__ __forceinline__ int column() const { return at % wide * ROWS; }
};

// The outputs of a warpgroup's 64 rows from `row` on, at `column`. Sums lie as wgmma has them: a warp has 16 rows, a
// lane the rows lane / 4 and 8 more, and of each 8 columns two; those of up are 64 numbers behind those of gate.
__device__ __forceinline__ void write(const float (&d)[128], u16* out, int row, int rows, int column, i64 width) {
    const int lane = threadIdx.x % 32, own = row + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = own + 8 * half;
        u16* to = out + at * width + column + lane % 4 * 8;
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int from = 4 * (j + i) + 2 * half;
                w[i] = pack(silu(d[from]) * d[from + 64], silu(d[from + 1]) * d[from + 65]);
            }
            const uint4 done = turned(w[0], w[1], w[2], w[3]);
            if (at < rows) store(to + j * 8, done);
        }
    }
}

// x        [rows, depth]
// weights  [2 width, depth], gate first
// out      [rows, width] contiguous; width a multiple of 128, depth of 64
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1) gated_product(
    const __grid_constant__ Map x, const __grid_constant__ Map weights, u16* out, i64 rows, i64 width, i64 depth) {
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 cells[2 * STAGES];
    const u32 places = (shared_address(memory) + 1023) & ~1023u, full = shared_address(cells), empty = full + 8 * STAGES;
    const u32 self = block_of_cluster();
    const int steps = (int)depth / DEEP, wide = (int)width / ROWS;
    Tiles tile = {(int)blockIdx.x / BLOCKS, ((int)rows + BLOCKS * ROWS - 1) / (BLOCKS * ROWS) * wide,
                  (int)gridDim.x / BLOCKS, wide};
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) set_up(full + 8 * i, 1), set_up(empty + 8 * i, READERS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();  // nobody arrives at a barrier before it is set up
    Place place = {0, 0};
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (; tile.at < tile.last; tile.at += tile.step) {
                const int row = tile.row() + self * ROWS, column = tile.column() + self * (int)width;
#pragma unroll 1
                for (int k = 0; k < steps; k++) {
                    const u32 to = places + place.at * STAGE, mark = full + 8 * place.at;
                    wait(empty + 8 * place.at, place.parity ^ 1);
                    expect(mark, STAGE);
                    fetch(to, x, k * DEEP, row, mark);
                    fetch_for_all(to + (1 + self) * PLANE, weights, k * DEEP, column, mark);
                    place.next();
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int mine = threadIdx.x / 128 - 1, told = min(LAG, steps) - 1;
        bool tells = !mine;
        float d[128];
        // One thread speaks for its warpgroup, whose products end together: one for each block.
        auto release = [&](u32 of) {
            if (threadIdx.x % 128 < BLOCKS) arrive(empty + 8 * of, threadIdx.x % 128);
        };
        if (mine) asm volatile("bar.sync %0, 256;" ::"n"(BEHIND) : "memory");
        for (; tile.at < tile.last; tile.at += tile.step) {
            u32 before = 0;
#pragma unroll 1
            for (int k = 0; k < steps; k++) {
                wait(full + 8 * place.at, place.parity);
                const u32 at = (places + place.at * STAGE) >> 4;
                const u64 a = descriptor(at + mine * (PLANE / 2 >> 4)), b = descriptor(at + (PLANE >> 4));
                begin();
                product(d, a, b, k);  // 16 of the depth are 32 bytes
                product(d, a + 2, b + 2, 1);
                product(d, a + 4, b + 4, 1);
                product(d, a + 6, b + 6, 1);
                commit();
                if (k) {
                    finish<1>();  // this stage's products run on while the place before is given back
                    release(before);
                }
                before = place.at;
                place.next();
                if (tells && k == told) {
                    asm volatile("bar.arrive %0, 256;" ::"n"(BEHIND) : "memory");
                    tells = false;
                }
            }
            finish();
            settled(d);
            release(before);
            write(d, out, tile.row() + self * ROWS + mine * 64, (int)rows, tile.column(), width);
        }
        if (tells) asm volatile("bar.arrive %0, 256;" ::"n"(BEHIND) : "memory");  // of a block without a tile
    }
    cluster_sync();  // nobody leaves while the other block fetches for it, or arrives at its barriers
}
