// Ranks by an expression: SCORE 3. What it computes stands before this source, as definitions:
//
//     RANK_VALUES   numbers of a row, `value(i)`: parameters, widths, what a request says
//     RANK_COLUMNS  numbers of a candidate, `column(i)`: at most MOST_COLUMNS
//     RANK_NORMED   1: `logp` is the logit less the row's norm, 0: the logit
//     RANK_LOGIT    the logit after the policy's change, of `logit`; undefined: as it is
//     RANK_FLOOR    of the row's largest legal `logp`, `best`: candidates below it are out, but for the first of the best;
//                   undefined: none is
//     RANK_MOST     how many of a row's legal candidates stay, the best by `logp`, the first of equal ones; undefined: all
//     RANK_SCORE    of `logp`, `parent`, values and columns: what a survivor carries
//     RANK          of the same and `score`: what survivors are chosen by; undefined: the score
//     RANK_GUMBEL, RANK_UNIFORM  1: RANK or RANK_DRAWN reads `gumbel`, `uniform`: a candidate's own noise (noise.cuh)
//     RANK_DRAWN    of what RANK is otherwise of: RANK is then of `drawn`, with which it never falls, of the largest of
//                   the row, `top`, and of values
//     RANK_TELLS    1: a NaN or +inf of the score or the changed logit makes a rank of NaN or +inf, a score of -inf a rank
//                   that is no finite number: who looks at ranks need not look at scores
//     RANK_MASKED   1: and a logit of -inf makes a rank that is no finite number, -inf but for NaN among the row's values:
//                   who is masked need not be told from the others. Both are of expressions that draw nothing
//
// One rounding an operation, in the written order, as torch computes them one by one.
#if SCORE == 3

#ifndef RANK_SCORE  // examples, so that everything here is compiled by `make test-kernels`
#if EXAMPLE == 1
#define RANK_VALUES 1
#define RANK_COLUMNS 0
#define RANK_NORMED 1
#define RANK_SCORE add(parent, logp)
#define RANK_GUMBEL 1
#define RANK_DRAWN add(score, gumbel)
#define RANK conditioned(drawn, top, value(0))
#elif EXAMPLE == 2
#define RANK_VALUES 1
#define RANK_COLUMNS 1
#define RANK_NORMED 1
#define RANK_SCORE add(parent, logp)
#define RANK_GUMBEL 1
#define RANK_UNIFORM 1
#define RANK add(sub(score, mul(value(0), uniform)), mul(column(0), gumbel))
#elif EXAMPLE == 3
#define RANK_VALUES 1
#define RANK_COLUMNS 0
#define RANK_NORMED 1
#define RANK_FLOOR log_64(value(0))
#define RANK_MOST 100.f
#define RANK_SCORE add(parent, mul(logp, value(0)))
#elif EXAMPLE == 4
#define RANK_VALUES 1
#define RANK_COLUMNS 0
#define RANK_NORMED 1
#define RANK_SCORE add(parent, logp)
#define RANK sub((logp > -9.f ? score : mul(2.f, score)), mul(value(0), prob_of(logp)))
#define RANK_TELLS 1
#define RANK_MASKED 1
#else
#define RANK_VALUES 2
#define RANK_COLUMNS 1
#define RANK_NORMED 1
#define RANK_LOGIT div(logit, value(0))
#define RANK_FLOOR larger(add(best, log_64(value(1))), -9.f)
#define RANK_SCORE add(parent, mul(logp, value(1)))
#define RANK sub(score, mul(sigmoid(value(0)), larger(log_of(column(0)), exp_of(logp))))
#endif
#endif

#if defined RANK_GUMBEL || defined RANK_UNIFORM
#define NOISY
#endif

#define MOST_COLUMNS 3
#define HELD 4

struct Given {
    const float* values;                  // [n, RANK_VALUES]
    const float* columns[MOST_COLUMNS];  // [n, >= codes] each
    i64 strides[MOST_COLUMNS];
    u64* lasts;                           // [n] of rank_scan: key_of the last that RANK_MOST leaves
    float2* floors;                       // [n] of rank_scan
    const i64* noise;                     // [n, 3]: seed, hash of the prefix, step
    float* largest;                       // [n] of rank_scan: `top`
    float* ranks;                         // [M] out: the survivors' ranks; null where nobody wants them
#if PART == 2
    float held[HELD];                     // the first values of the row, asked for at its beginning
#endif
};

struct Floor {  // what is out of a row: logp below `least`, but for the code `only`, and keys below `last`; and its `top`
    float least;
    int only;
    float top;
    u64 last;
};

#define GIVEN_PARAMETERS \
    , const float *__restrict__ values, const float *__restrict__ column0, const float *__restrict__ column1, \
    const float *__restrict__ column2, i64 stride0, i64 stride1, i64 stride2, u64 *lasts, float2 *floors, \
    const i64 *__restrict__ noise, float *largest, float *ranks
#define GIVEN {values, {column0, column1, column2}, {stride0, stride1, stride2}, lasts, floors, noise, largest, ranks}

#define NOT_A_NUMBER __int_as_float(0x7fc00000)

__device__ __forceinline__ float mul(float a, float b) {
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float quotient(float a, float b) {
    float c;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float div(float a, float b) { return b == 0.f ? NOT_A_NUMBER : quotient(a, b); }

__device__ __forceinline__ float root(float a) {
    float c;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(c) : "f"(a));
    return c;
}

__device__ __forceinline__ float lesser(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float larger(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float minus(float a) { return __int_as_float(__float_as_int(a) ^ 0x80000000); }
__device__ __forceinline__ float size_of(float a) { return __int_as_float(__float_as_int(a) & 0x7fffffff); }
__device__ __forceinline__ float log_64(float a) { return (float)log((double)a); }
__device__ __forceinline__ float log_of(float a) { return a > 0.f ? logf(a) : NOT_A_NUMBER; }
__device__ __forceinline__ float exp_of(float a) { return expf(a); }

// exp(logp): of a log-probability, which is 0 at most, within 1e-7.
__device__ __forceinline__ float prob_of(float logp) {
    return RANK_NORMED ? exp2_of(mul(logp, 1.4426950408889634f)) : expf(logp);
}
__device__ __forceinline__ float sigmoid(float a) { return quotient(1.f, add(1.f, expf(minus(a)))); }
__device__ __forceinline__ float power(float a, float b) { return powf(a, b); }

// NaN and +inf count as -inf.
__device__ __forceinline__ float sane(float logit) { return logit <= LARGEST ? logit : NEG; }

#if PART == 2
#define value(i) ((i) < HELD ? given.held[(i) < HELD ? (i) : 0] : __ldg(given.values + row * RANK_VALUES + (i)))
#else
#define value(i) __ldg(given.values + row * RANK_VALUES + (i))
#endif
#define column(i) own[i]

// The logit after the policy's change, which may be NaN or +inf.
__device__ __forceinline__ float changed(const Given& given, float logit, i64 row) {
#ifdef RANK_LOGIT
    return logit > NEG ? RANK_LOGIT : NEG;
#else
    return logit;
#endif
}

#ifdef RANK_FLOOR
__device__ __forceinline__ float least_of(const Given& given, float best, i64 row) { return RANK_FLOOR; }
#endif

__device__ __forceinline__ Floor floor_of(const Given& given, i64 row) {
    Floor out = {NEG, -1, NEG, 0};
#ifdef RANK_FLOOR
    const float2 x = given.floors[row];
    out.least = x.x, out.only = __float_as_int(x.y);
#endif
#ifdef RANK_MOST
    out.last = given.lasts[row];
#endif
#ifdef RANK_DRAWN
    out.top = given.largest[row];
#endif
    return out;
}

// Whether a candidate is not out.
__device__ __forceinline__ bool stays(const Floor& floor, float y, float norm, int e) {
    const float logp = RANK_NORMED ? sub(y, norm) : y;
    bool in = true;
#ifdef RANK_FLOOR
    in = logp >= floor.least || e == floor.only;
#endif
#ifdef RANK_MOST
    in = in && key_of(logp, e) >= floor.last;
#endif
    return in;
}

__device__ __forceinline__ Drawing drawing_of(const Given& given, i64 row) {
    const i64 *by = given.noise + 3 * row, seed = __ldg(by), prefix = __ldg(by + 1);
    return {(u32)seed, (u32)(seed >> 32), (u32)prefix, (u32)(prefix >> 32), (u32)__ldg(by + 2)};
}

// Of a changed logit y that is above -inf. rank: RANK_DRAWN, where that is defined.
__device__ __forceinline__ void compute(
    const Given& given, float y, float norm, float parent, i64 row, int e, const float* own, float& score, float& rank) {
    const float logp = RANK_NORMED ? sub(y, norm) : y;
    score = RANK_SCORE;
#ifdef RANK_GUMBEL
    const float gumbel = gumbel_of(drawing_of(given, row), e, GUMBEL_STREAM);
#endif
#ifdef RANK_UNIFORM
    const float uniform = uniform_of(drawing_of(given, row), e, UNIFORM_STREAM);
#endif
#if defined RANK_DRAWN
    rank = RANK_DRAWN;
#elif defined RANK
    rank = RANK;
#else
    rank = score;
#endif
}

// The rank of what `compute` gave.
__device__ __forceinline__ float settled(const Given& given, float drawn, i64 row, float top) {
#ifdef RANK_DRAWN
    return drawn > NEG ? add(RANK, 0.f) : NEG;
#else
    return drawn;
#endif
}

struct Rank {
    float score, rank;  // -inf where it may not be selected
    bool broken;        // it might have been, but for NaN and +inf
};

// What `compute` gives for the candidate `e` of a row, by its sane logit.
__device__ __forceinline__ Rank drawn_of(
    const Given& given, float logit, float norm, float parent, i64 row, int e, bool legal, const Floor& floor) {
    const float y = changed(given, logit, row);
    const bool wrong = !(y < INF), valid = legal && y > NEG && !wrong && stays(floor, y, norm, e);
    float own[MOST_COLUMNS], score, rank;
#pragma unroll
    for (int i = 0; i < RANK_COLUMNS; i++)
        own[i] = valid ? __ldg(given.columns[i] + row * given.strides[i] + e) : 0.f;
    compute(given, y, norm, parent, row, e, own, score, rank);
    const bool fine = score < INF && rank < INF, good = valid && fine && score > NEG && rank > NEG;
    return {good ? add(score, 0.f) : NEG, good ? add(rank, 0.f) : NEG, legal && (wrong || (valid && !fine))};
}

// Of the candidate `e` of a row, by its sane logit.
__device__ __forceinline__ Rank rank_of(
    const Given& given, float logit, float norm, float parent, i64 row, int e, bool legal, const Floor& floor) {
    Rank one = drawn_of(given, logit, norm, parent, row, e, legal, floor);
    one.rank = settled(given, one.rank, row, floor.top);
    return one;
}

#ifdef RANK_MASKED
// The rank of the candidate `e` of a row, by its logit as it is read: NaN, +inf or -inf where it may not be selected, but
// for what is not legal.
__device__ __forceinline__ float seen_of(
    const Given& given, float logit, float norm, float parent, i64 row, int e, bool legal, const Floor& floor) {
#ifdef RANK_LOGIT  // which may make anything of NaN and +inf
    logit = sane(logit);
#endif
    const float y = changed(given, logit, row);
    float own[MOST_COLUMNS], score, rank;
#pragma unroll
    for (int i = 0; i < RANK_COLUMNS; i++)
        own[i] = legal ? __ldg(given.columns[i] + row * given.strides[i] + e) : 0.f;
    compute(given, y, norm, parent, row, e, own, score, rank);
    return stays(floor, y, norm, e) ? rank : NEG;
}
#endif

// `element`, where k is not known to the compiler: no array is indexed by it.
__device__ __forceinline__ float element_at(const uint4& x, int k) {
    const int word = TYPE == 2 ? k : k / 2;
    const u32 w = word == 0 ? x.x : word == 1 ? x.y : word == 2 ? x.z : x.w;
    return TYPE != 2 && k % 2 ? high_of(w) : low_of(w);
}
#undef value
#undef column

#else
#define GIVEN_PARAMETERS
struct Given {};
#define GIVEN {}
#endif
