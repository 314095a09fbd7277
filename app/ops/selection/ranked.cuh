// Ranks by an expression: SCORE 3. What it computes stands before this source, as definitions:
//
//     RANK_VALUES   numbers of a row, `value(i)`: parameters, widths, what a request says
//     RANK_COLUMNS  numbers of a candidate, `column(i)`: at most MOST_COLUMNS
//     RANK_NORMED   1: `logp` is the logit less the row's norm, 0: the logit
//     RANK_LOGIT    the logit after the policy's change, of `logit`; undefined: as it is
//     RANK_FLOOR    of the row's largest legal `logp`, `best`: candidates below it are out, but for the first of the best;
//                   undefined: none is
//     RANK_SCORE    of `logp`, `parent`, values and columns: what a survivor carries
//     RANK          of the same and `score`: what survivors are chosen by; undefined: the score
//
// One rounding an operation, in the written order, as torch computes them one by one.
#if SCORE == 3

#ifndef RANK_SCORE  // an example, so that everything here is compiled by `make test-kernels`
#define RANK_VALUES 2
#define RANK_COLUMNS 1
#define RANK_NORMED 1
#define RANK_LOGIT div(logit, value(0))
#define RANK_FLOOR larger(add(best, log_64(value(1))), -9.f)
#define RANK_SCORE add(parent, mul(logp, value(1)))
#define RANK sub(score, mul(sigmoid(value(0)), larger(log_of(column(0)), exp_of(logp))))
#endif

#define MOST_COLUMNS 3

struct Given {
    const float* values;                  // [n, RANK_VALUES]
    const float* columns[MOST_COLUMNS];  // [n, >= codes] each
    i64 strides[MOST_COLUMNS];
    const float2* floors;                 // [n] of rank_scan
};

struct Floor {  // what is out of a row: logp below `least`, but for the code `only`
    float least;
    int only;
};

#define GIVEN_PARAMETERS \
    , const float *__restrict__ values, const float *__restrict__ column0, const float *__restrict__ column1, \
    const float *__restrict__ column2, i64 stride0, i64 stride1, i64 stride2, float2 *floors
#define GIVEN {values, {column0, column1, column2}, {stride0, stride1, stride2}, floors}

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

#define value(i) __ldg(given.values + row * RANK_VALUES + (i))
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
#ifdef RANK_FLOOR
    const float2 x = given.floors[row];
    return {x.x, __float_as_int(x.y)};
#else
    return {NEG, -1};
#endif
}

// Whether a candidate is not out.
__device__ __forceinline__ bool stays(const Floor& floor, float y, float norm, int e) {
#ifdef RANK_FLOOR
    return (RANK_NORMED ? sub(y, norm) : y) >= floor.least || e == floor.only;
#else
    return true;
#endif
}

// Of a changed logit y that is above -inf.
__device__ __forceinline__ void compute(
    const Given& given, float y, float norm, float parent, i64 row, const float* own, float& score, float& rank) {
    const float logp = RANK_NORMED ? sub(y, norm) : y;
    score = RANK_SCORE;
#ifdef RANK
    rank = RANK;
#else
    rank = score;
#endif
}

struct Rank {
    float score, rank;  // -inf where it may not be selected
    bool broken;        // it might have been, but for NaN and +inf
};

// Of the candidate `e` of a row, by its sane logit.
__device__ __forceinline__ Rank rank_of(
    const Given& given, float logit, float norm, float parent, i64 row, int e, bool legal, const Floor& floor) {
    const float y = changed(given, logit, row);
    const bool wrong = !(y < INF), valid = legal && y > NEG && !wrong && stays(floor, y, norm, e);
    float own[MOST_COLUMNS], score, rank;
#pragma unroll
    for (int i = 0; i < RANK_COLUMNS; i++)
        own[i] = valid ? __ldg(given.columns[i] + row * given.strides[i] + e) : 0.f;
    compute(given, y, norm, parent, row, own, score, rank);
    const bool fine = score < INF && rank < INF, good = valid && fine && score > NEG && rank > NEG;
    return {good ? add(score, 0.f) : NEG, good ? add(rank, 0.f) : NEG, legal && (wrong || (valid && !fine))};
}
#undef value
#undef column

#else
#define GIVEN_PARAMETERS
struct Given {};
#define GIVEN {}
#endif
