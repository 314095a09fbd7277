// A cluster of blocks on a CPU, as much of one as product.cu uses: a fiber a thread, taken up in random order; shared
// memory by offsets; barriers as PTX says them; copies of the tensor memory accelerator, which arrive late, at random;
// products on operands in swizzled shared memory, found by their descriptors. What is wrong ends the process, saying so.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
struct uint4 {
    u32 x, y, z, w;
};
static uint4 make_uint4(u32 a, u32 b, u32 c, u32 d) { return {a, b, c, d}; }
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
using std::min;

static void wrong(const char* what) {
    puts(what);
    exit(1);
}

struct Meeting {  // of so many threads, again and again
    int here = 0;
    u64 round = 0;
};
struct Barrier {  // mbarrier
    int pending, count;
    i64 bytes;
    u32 phase;
};
struct Block {
    std::vector<char> shared = std::vector<char>(200 << 10);
    std::map<u32, Barrier> barriers;
    std::map<int, Meeting> named;
    std::vector<Meeting> warps = std::vector<Meeting>(12);
    std::vector<u32> lanes = std::vector<u32>(12 * 32);
    u32 block, rank;
};
struct Fiber {
    ucontext_t at;
    std::vector<char> stack = std::vector<char>(32 << 10);
    bool over = false;
    Block* block;
    u32 thread;
};
struct Dim {
    u32 x;
};
static std::mt19937 chance;
static std::vector<std::unique_ptr<Fiber>> fibers;
static std::vector<Block*> cluster;
static Meeting everybody;
static std::vector<std::function<void()>> late;
static Fiber* now;
static ucontext_t scheduler;
static std::function<void()> body;
static u64 events;  // whatever brings somebody on
static Dim gridDim;
#define threadIdx (Dim{now->thread})
#define blockIdx (Dim{now->block->block})

static void yield() { swapcontext(&now->at, &scheduler); }

static void attend(Meeting& m, int of) {  // without waiting: bar.arrive
    events++;
    if (++m.here == of) m.here = 0, m.round++;
}
static void meet(Meeting& m, int of) {
    const u64 mine = m.round;
    attend(m, of);
    while (m.round == mine) yield();
}
static void bar_sync(int id, int of) { meet(now->block->named[id], of); }
static void bar_arrive(int id, int of) { attend(now->block->named[id], of); }
static void cluster_sync() { meet(everybody, (int)cluster.size() * THREADS); }
static void __syncwarp() {}
static u32 block_of_cluster() { return now->block->rank; }
static u32 __shfl_xor_sync(u32, u32 x, int with) {
    const u32 warp = now->thread / 32, lane = now->thread % 32;
    now->block->lanes[warp * 32 + lane] = x;
    meet(now->block->warps[warp], 32);
    const u32 got = now->block->lanes[warp * 32 + (lane ^ with)];
    meet(now->block->warps[warp], 32);
    return got;
}
static u32 shared_address(const void* p) { return (u32)((const char*)p - now->block->shared.data()); }

static float of_bits(u32 u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
#if BF16
static float of(u16 x) { return of_bits((u32)x << 16); }
static u32 rounded(float x) {
    u32 u;
    memcpy(&u, &x, 4);
    return x == x ? (u + 0x7fff + (u >> 16 & 1)) >> 16 : 0x7fff;
}
#else
static float of(u16 x) {
    const int e = x >> 10 & 31, m = x & 1023;
    const float v = e == 31 ? (m ? NAN : INFINITY) : ldexpf(e ? 1024 + m : m, (e ? e : 1) - 25);
    return x & 0x8000 ? -v : v;
}
static u32 rounded(float x) {
    if (x != x) return 0x7fff;
    const int e = std::max(std::ilogb(x == 0 ? 1e-9f : x), -14);
    const u32 m = (u32)rintf(ldexpf(fabsf(x), 10 - e));  // 2048 carries into the exponent
    return (std::signbit(x) ? 0x8000 : 0) | (e > 15 ? 0x7c00 : min(m + ((u32)(e + 14) << 10), 0x7c00u));
}
#endif
static u32 pack(float a, float b) { return rounded(a) | rounded(b) << 16; }
static float silu(float x) { return x / (1.f + expf(-x)); }
static void store(void* p, uint4 x) {
    if ((u64)p % 16) wrong("a store that is not on 16 bytes");
    memcpy(p, &x, 16);
}

// mbarrier
static Barrier& barrier_at(Block* block, u32 where) {
    const auto found = block->barriers.find(where);
    if (found == block->barriers.end()) wrong("no such barrier");
    return found->second;
}
static void moved(Barrier& b) {
    events++;
    if (b.pending < 0) wrong("more arrivals than were said");
    if (b.pending == 0 && b.bytes == 0) b.phase++, b.pending = b.count;
}
static void set_up(u32 b, u32 count) { now->block->barriers[b] = {(int)count, (int)count, 0, 0}; }
static void wait(u32 b, u32 parity) {
    while ((barrier_at(now->block, b).phase & 1) == parity) yield();
}
static void expect(u32 b, u32 bytes) {
    Barrier& x = barrier_at(now->block, b);
    x.bytes += bytes, x.pending--;
    moved(x);
}
static void arrive(u32 b, u32 of) {
    Barrier& x = barrier_at(cluster[of], b);
    x.pending--;
    moved(x);
}

// The tensor memory accelerator.
struct Map {
    const u16* at;
    i64 rows, columns;
};
static u32 swizzled(u32 a) { return a ^ (a >> 7 & 7) << 4; }
static void bring(Block* into, u32 to, const Map& from, int column, int row, u32 b) {
    for (int r = 0; r < 128; r++)
        for (int i = 0; i < 64; i++) {
            const i64 y = row + r, x = column + i;
            const u16 value = y < from.rows && x < from.columns ? from.at[y * from.columns + x] : 0;
            memcpy(&into->shared[swizzled(to + r * 128 + 2 * i)], &value, 2);
        }
    Barrier& x = barrier_at(into, b);
    x.bytes -= 128 * 128;
    moved(x);
}
static void fetch(u32 to, const Map& from, int column, int row, u32 b) {
    Block* mine = now->block;
    late.push_back([=, &from] { bring(mine, to, from, column, row, b); });
}
static void fetch_for_all(u32 to, const Map& from, int column, int row, u32 b) {
    for (Block* one : cluster) late.push_back([=, &from] { bring(one, to, from, column, row, b); });
}

// Products of a warpgroup, whose four warps begin and end together. One takes place where it is begun.
static void begin() { meet(now->block->named[16 + now->thread / 128], 128); }
static void commit() {}
template <int NEWEST = 0>
static void finish() {
    if (!NEWEST) begin();
}
static u64 descriptor(u32 at) { return (u64)at | 1u << 16 | (u64)(64u | 1u << 30) << 32; }
static float element(u64 d, int row, int k) {
    const u32 start = (u32)(d & 0x3fff) << 4, eights = (u32)(d >> 32 & 0x3fff) << 4;
    if (d >> 62 != 1) wrong("not the swizzle of 128 bytes");
    u16 x;
    memcpy(&x, &now->block->shared[swizzled(start + row / 8 * eights + row % 8 * 128 + 2 * k)], 2);
    return of(x);
}
static void product(float (&d)[128], u64 a, u64 b, int more) {
    const int lane = now->thread % 32, warp = now->thread / 32 % 4;
    float x[2][16];
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < 16; k++) x[h][k] = element(a, warp * 16 + lane / 4 + 8 * h, k);
    for (int j = 0; j < 32; j++)
        for (int e = 0; e < 2; e++) {
            float y[16];
            for (int k = 0; k < 16; k++) y[k] = element(b, 8 * j + lane % 4 * 2 + e, k);
            for (int h = 0; h < 2; h++) {
                float sum = more ? d[4 * j + 2 * h + e] : 0.f;
                for (int k = 0; k < 16; k++) sum += x[h][k] * y[k];
                d[4 * j + 2 * h + e] = sum;
            }
        }
    yield();
}
static void settled(float (&)[128]) {}

// The kernel on the cluster, until it is over.
static void run(const std::function<void()>& kernel) {
    body = kernel, fibers.clear(), late.clear(), everybody = {};
    for (Block* block : cluster)
        for (u32 t = 0; t < THREADS; t++) {
            fibers.emplace_back(new Fiber);
            Fiber* f = fibers.back().get();
            f->block = block, f->thread = t;
            getcontext(&f->at);
            f->at.uc_stack.ss_sp = f->stack.data(), f->at.uc_stack.ss_size = f->stack.size(), f->at.uc_link = &scheduler;
            makecontext(&f->at, (void (*)())(+[] { body(), now->over = true, events++; }), 0);
        }
    std::vector<Fiber*> left;
    for (auto& one : fibers) left.push_back(one.get());
    u64 seen = 0;
    for (int idle = 0; !left.empty(); idle = events == seen ? idle + 1 : 0, seen = events) {
        if (idle > 1000) wrong("nobody can go on");
        if (chance() % 7 == 0) std::shuffle(left.begin(), left.end(), chance);
        for (Fiber* one : left)
            if (chance() % 4) now = one, swapcontext(&scheduler, &one->at);
        left.erase(std::remove_if(left.begin(), left.end(), [](Fiber* f) { return f->over; }), left.end());
        std::shuffle(late.begin(), late.end(), chance);
        for (int count = (int)(chance() % (late.size() + 1)); count; count--) late.back()(), late.pop_back();
    }
    for (Block* block : cluster)
        for (auto& one : block->barriers)
            if (one.second.bytes || one.second.pending != one.second.count) wrong("a barrier in the middle of a phase");
}
