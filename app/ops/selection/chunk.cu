// Exact top-K of every request in one read of its logits, by chunk maxima (classes R and L, or given ranks).
//
//     scan       the largest logit of each chunk of a row, and the row's log-sum-exp: the one read
//     rank_scan  in its place where ranks do not follow the logits: the largest rank of each chunk
//     tail       one cluster a request: chunks whose best score may be among the K best are read again, and their
//                candidates that may are ranked; where they do not fit, one block searches the request by digits
//
// Why it is exact: a score falls with its logit inside a row, so a chunk's best score is that of its largest logit. If K
// chunks have a best score of T or more, K candidates have, and those below T are not among the K best. Any lower bound
// of the K-th best chunk serves as T; candidates are ranked by their exact score and place (T0).
//
// Compiled with -DPART (0 scan, 1 tail, 2 rank_scan) -DTYPE (0 bfloat16, 1 float16, 2 float32 logits)
// -DSCORE (0: the logit, a given rank; 1: logit + parent; 2: (logit - norm) + parent; 3: as ranked.cuh says)
// -DNORM (the scans compute norm over 0 nothing, 1 all codes, 2 the codes of the mask) -DMASK (1: a bit a code)
// -DVEC (1: rows of whole 16-byte vectors) -DSMALL (1: a chunk is 16 bytes, for few rows; 0: UNITS times 512 bytes)
// -DUNITS -DCLUSTER (blocks a request) -DEXAMPLE (of ranked.cuh, where it is given no expression)
//
// What `make test-kernels` compiles is a part of the combinations; what spills in tail is its search.
//
// build: PART=0 TYPE=0 SCORE=2 NORM=1,2 MASK=0,1 VEC=1 SMALL=0 UNITS=1 CLUSTER=1
// build: PART=0 TYPE=1 SCORE=1 NORM=1 MASK=1 VEC=0 SMALL=1 UNITS=1 CLUSTER=1
// build: PART=0 TYPE=2 SCORE=0 NORM=0 MASK=0 VEC=1 SMALL=0,1 UNITS=2 CLUSTER=1
// build: PART=0 TYPE=2 SCORE=2 NORM=1 MASK=1 VEC=0 SMALL=0 UNITS=4 CLUSTER=1
// build: PART=1 TYPE=0 SCORE=2 NORM=0 MASK=0,1 VEC=1 SMALL=0 UNITS=1 CLUSTER=1,3,8 spill=1024
// build: PART=1 TYPE=1 SCORE=1 NORM=0 MASK=1 VEC=0 SMALL=1 UNITS=1 CLUSTER=2 spill=1024
// build: PART=1 TYPE=2 SCORE=0 NORM=0 MASK=0 VEC=1 SMALL=0,1 UNITS=2 CLUSTER=4,8 spill=1024
// build: PART=2 TYPE=0 SCORE=3 NORM=0,1,2 MASK=1 VEC=1 SMALL=0 UNITS=1 CLUSTER=1 spill=256
// build: PART=2 TYPE=2 SCORE=3 NORM=1 MASK=1 VEC=0 SMALL=1 UNITS=2 CLUSTER=1 spill=512
// build: PART=1 TYPE=0 SCORE=3 NORM=0 MASK=1 VEC=1 SMALL=0 UNITS=1 CLUSTER=1,3,8 spill=1024
// build: PART=2 TYPE=0 SCORE=3 NORM=0,2 MASK=1 VEC=1 SMALL=0,1 UNITS=1 CLUSTER=1 EXAMPLE=1,2,3,4 spill=512
// build: PART=1 TYPE=0 SCORE=3 NORM=0 MASK=1 VEC=1 SMALL=0 UNITS=1 CLUSTER=1,3 EXAMPLE=1,2,3,4 spill=1024

// part: selection/common.cuh
// part: selection/noise.cuh
// part: selection/ranked.cuh
#if PART == 0
// part: selection/rows.cuh
// part: selection/scan.cuh
#elif PART == 2
// part: selection/rows.cuh
// part: selection/heads.cuh
// part: selection/rank_scan.cuh
#else
// part: selection/survivors.cuh
// part: selection/search.cuh
// part: selection/tail.cuh
#endif
