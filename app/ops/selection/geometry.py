"""How a batch is laid out for the selection kernels: requests, chunks, clusters, shared memory. Needs no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from app.ops.upload import upload_ints

MOST = 1024
"""Candidates of one bin that `tail` ranks by comparing each with each (`MOST` of chunk.cu)."""
STATIC = 26 * 1024
"""Bytes of shared memory that the kernels hold beside what the geometry asks for."""
DEEPEST = 4096
"""What may be asked of a request's ranks, whatever its width: more than K, by a quota. Kernels for that are made
beforehand."""
ROOM = 8192
"""Candidates a block of `tail` has room for, where memory allows."""
CLUSTERS = ((8, 8), (6, 16), (3, 44), (2, 66))
"""Blocks that share a request, and up to how many requests: clusters of 1024-thread blocks must all run at once, and do
not fill the processors of an H200 evenly (3 were quicker than 2 and 4 at 32 requests)."""


class Requests(NamedTuple):
    """The requests of a selection.

    row_start  [R + 1] int32, keep [R] int32, out_start [R + 1] int32: on the device
    widest     most rows, most: most survivors, of one request; rows, total: of all; host integers
    """

    row_start: Tensor
    keep: Tensor
    out_start: Tensor
    widest: int
    most: int
    rows: int
    total: int


def requests(row_start: Sequence[int], keep: Sequence[int], device: torch.device) -> Requests:
    """Rows row_start[r]:row_start[r + 1] of request r, of which keep[r] candidates survive. The tensors of one shape
    are made once, so that a launch that was seen before copies nothing to the device."""
    return _requests(tuple(row_start), tuple(keep), device)


@lru_cache(maxsize=1024)
def _requests(row_start: tuple[int, ...], keep: tuple[int, ...], device: torch.device) -> Requests:
    return described(row_start, keep, lambda values: upload_ints(values, torch.int32, device))


def described(row_start: Sequence[int], keep: Sequence[int], tensor: Callable[[Sequence[int]], Tensor]) -> Requests:
    """`requests`, whose tensors are made by `tensor`: int32."""
    out_start = (0, *accumulate(keep))
    start, kept, out = (tensor(one) for one in (row_start, keep, out_start))
    widest = max([0, *(stop - start for start, stop in pairwise(row_start))])  # torch.compile follows no default
    return Requests(start, kept, out, widest, max([0, *keep]), row_start[-1], out_start[-1])


class Geometry(NamedTuple):
    """What `chunk.cu` is compiled and launched with.

    small    a chunk is 16 bytes of a row, otherwise `units` times 512 bytes; `chunks` of them a row, padding included
    cluster  blocks of a request in `tail`
    places, room, scores, lines  what one of those blocks has room for: sorted candidates, candidates, scores of chunks,
                                 and chunks to read again
    memory                       bytes of dynamic shared memory of `tail` · keys: room of its search's sort
    """

    small: bool
    units: int
    chunks: int
    cluster: int
    places: int
    room: int
    scores: int
    lines: int
    memory: int
    keys: int


@lru_cache(maxsize=1024)
def geometry(
    count: int, widest: int, most: int, codes: int, itemsize: int, *, clusters: bool, shared: int
) -> Geometry | None:
    """The quickest layout that fits, or None.

    count     requests; widest, most: largest rows and survivors of one; codes: C; itemsize: bytes of a logit
    clusters  whether blocks can share memory (compute capability 9.0); shared: bytes a block may have
    """
    if not (0 < widest < 1 << 16 and codes > 0 and widest * codes < 1 << 32):
        return None
    small = widest * _parts(codes, 256) < 2 * most  # few rows: chunks of 256 would be fewer than survivors
    first = first_cluster(count, clusters=clusters)
    for shape in candidates(codes, itemsize, first, small=small, clusters=clusters):
        found = fitted(shape, widest, most, shared - STATIC)
        if found is not None:
            return found
    return None


def first_cluster(count: int, *, clusters: bool) -> int:
    """Blocks that share one of `count` requests where memory allows."""
    return next((size for size, most_requests in CLUSTERS if count <= most_requests), 1) if clusters else 1


def candidates(codes: int, itemsize: int, first: int, *, small: bool, clusters: bool) -> Iterator[Geometry]:
    """The layouts in the order in which they are tried, without their shares of memory.

    first  of `first_cluster` · small: whether chunks of 16 bytes come first
    """
    unit, base = 512 // itemsize, 2 if itemsize == 4 else 1
    shapes = [(False, base << times) for times in range(4)]
    for is_small, units in [(True, base)] * small + shapes:
        chunks = _parts(codes, unit) * 32 if is_small else _parts(codes, unit * units * 4) * 4
        for cluster in sorted({first, 8 if clusters else 1}):
            yield Geometry(is_small, units, chunks, cluster, *(0,) * 6)


def fitted(shape: Geometry, widest: int, most: int, shared: int) -> Geometry | None:
    """The shape with its shares of `shared` bytes of memory, or None where they do not fit."""
    cluster = shape.cluster
    scores = _parts(widest * shape.chunks, 4 * cluster) * 4
    places = (most // cluster + MOST + 3) // 2 * 2  # even: what lies behind is read by 16 bytes
    lines = min(scores, 2 * most // cluster + 1024) + 1
    fixed = 8 * places + 4 * scores + 4 * lines + 4 * widest
    room = min(ROOM, (shared - fixed) // 16 * 2)
    keys = 1 << max(1, (most - 1).bit_length())
    search = 8 * keys + 4 * most + 4 * widest
    if shape.chunks >= 1 << 16 or room * cluster < most + MOST // 2 or room < MOST or search > shared:
        return None
    return shape._replace(
        places=places, room=room, scores=scores, lines=lines, memory=max(fixed + 8 * room, search), keys=keys
    )


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)
