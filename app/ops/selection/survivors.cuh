// What tail and search share: operands, the order of candidates, and what is written of a survivor.

struct Request {  // its rows, what it keeps, and where that goes
    int first, rows, keep;
    i64 out;
};

// Operands of tail and search. Device pointers; a null pointer is an output that nobody wants.
struct Operands {
    const Logit* logits;      // [n, codes]
    const u8* mask;           // [n, mask_stride] bytes
    const float* chunk;       // [n, chunks]
    const float2* ends;       // [n]
    const float* norm;        // [n]
    const float* parent;      // [n]
    const i64* order;         // [n] place among the rows of a request: 0 .. rows - 1
    const int* row_start;     // [R + 1]
    const int* keep;          // [R]
    const int* out_start;     // [R + 1]
    const int* ancestry;      // [n, depth]
    i64* row_out;             // [M]
    i64* code_out;            // [M]
    i64* order_out;           // [M]
    float* score_out;         // [M]
    i64* valid_out;           // [R]
    int* ancestry_out;        // [M, depth + 1]
    Given given;
};

#define PARAMETERS \
    const Logit *__restrict__ logits, const u8 *__restrict__ mask, const float *chunk, const float2 *ends, \
    const float *norm, const float *__restrict__ parent, const i64 *__restrict__ order, \
    const int *__restrict__ row_start, const int *__restrict__ keep, const int *__restrict__ out_start, \
    const int *__restrict__ ancestry, i64 *row_out, i64 *code_out, i64 *order_out, float *score_out, i64 *valid_out, \
    int *ancestry_out, i64 depth_, i64 codes_, i64 mask_stride, i64 chunks_ GIVEN_PARAMETERS

#define OPERANDS \
    {logits, mask, chunk, ends, norm, parent, order, row_start, keep, out_start, ancestry, row_out, code_out, order_out, \
     score_out, valid_out, ancestry_out, GIVEN}

__device__ __forceinline__ float norm_of(const float* norm, i64 row) { return SCORE >= 2 ? norm[row] : 0.f; }
__device__ __forceinline__ float parent_of(const float* parent, i64 row) { return SCORE ? __ldg(parent + row) : 0.f; }

// What a chunk's best score is, by what the scan found of it.
__device__ __forceinline__ float chunk_score(float best, float norm, float parent) {
    return SCORE == 3 ? best : good_score(best, norm, parent);
}

// The score of candidate e of a row, which is legal.
__device__ __forceinline__ float candidate_score(const Operands& o, i64 row, int e, int codes) {
    const float logit = widened(o.logits[row * codes + e]), norm = norm_of(o.norm, row), parent = parent_of(o.parent, row);
#if SCORE == 3
    return rank_of(o.given, sane(logit), norm, parent, row, e, true, floor_of(o.given, row)).rank;
#else
    return good_score(logit, norm, parent);
#endif
}

__device__ __forceinline__ float score_in(u64 key) { return unordered((int)((u32)(key >> 32) ^ 0x80000000u)); }

#define FIRST_SLOTS 3

// Survivor number `at` of a request, or a tombstone (key 0).
__device__ __forceinline__ void emit(
    const Operands& o, const Request& q, const u16* inverse, u64 key, int at, int codes, int depth) {
    i64 to = q.out + at, row = -1;
    int code = -1;
    if (key) {
        u32 place = 0xffffffffu - (u32)key;
        code = (int)(place % (u32)codes);
        row = q.first + inverse[place / (u32)codes];
    }
    const i64 from = row < 0 ? 0 : row;
    int slot[FIRST_SLOTS];  // on their way while the rest is written
#pragma unroll
    for (int d = 0; d < FIRST_SLOTS; d++) slot[d] = o.ancestry_out && d < depth ? __ldg(o.ancestry + from * depth + d) : 0;
    o.row_out[to] = row;
    o.code_out[to] = code;
    o.order_out[to] = at;
#if SCORE == 3
    if (o.given.ranks) o.given.ranks[to] = key ? score_in(key) : NEG;
#endif
#if SCORE == 3 && defined RANK
    if (o.score_out && key) {
        float logit = widened(o.logits[row * codes + code]);
        float norm = norm_of(o.norm, row), parent = parent_of(o.parent, row);
        o.score_out[to] = rank_of(o.given, sane(logit), norm, parent, row, code, true, floor_of(o.given, row)).score;
    } else if (o.score_out) {
        o.score_out[to] = NEG;
    }
#else
    if (o.score_out) o.score_out[to] = key ? score_in(key) : NEG;
#endif
    if (o.ancestry_out) {
        int* line = o.ancestry_out + to * (depth + 1);
        for (int d = FIRST_SLOTS; d < depth; d++) line[d] = o.ancestry[from * depth + d];
#pragma unroll
        for (int d = 0; d < FIRST_SLOTS; d++)
            if (d < depth) line[d] = slot[d];
        line[depth] = (int)from;
    }
}

__device__ __forceinline__ Request request_of(const Operands& o, int r) {
    int first = o.row_start[r];
    return {first, o.row_start[r + 1] - first, o.keep[r], o.out_start[r]};
}

// place[row] = its order and inverse[order] = row, for the living rows of a request.
__device__ __forceinline__ void invert(const Operands& o, const Request& q, int row, u16* place, u16* inverse) {
    const i64 at = o.order[q.first + row];
    const float parent = parent_of(o.parent, q.first + row);
    if (at >= 0 && at < q.rows && parent > NEG) place[row] = (u16)at, inverse[at] = (u16)row;
}
