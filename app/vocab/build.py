"""SIDs from item embeddings: residual k-means whose last level is made unique.

Every step is solved in the same way, from the first to the last. Residual k-means proposes the nearest code, and a code
may take no more items of one prefix than there are SIDs below it: room_t = C_(t+1) * ... * C_L, hence exactly one at
the last step. Where a code is asked for by more items than that, the nearest stay and the others go to their next
nearest code of the same prefix that has room (deferred acceptance, Gale and Shapley 1962: with distances on both sides
the result is that of taking all pairs in ascending distance). Since no step lets more items into a prefix than fit
below it, the next step always has a place for each: the build fails only where the catalogue has more items than SIDs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from app.errors import Rejected

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

ROUNDS = 25
"""Lloyd iterations at most; residual codebooks of item embeddings settle earlier."""
POINTS_PER_CODE = 256
"""Codebooks of large catalogues are trained on a sample of this many items a code; all items are assigned."""
BLOCK = 1 << 22
"""Distances computed at a time (16 MiB of float32)."""


def residual_kmeans(embeddings: npt.ArrayLike, sizes: Sequence[int], seed: int = 0) -> npt.NDArray[np.int32]:
    """Give each item an SID of its own.

    embeddings  [N, d] finite numbers, read as float32; the scale of the columns is the caller's affair
    sizes       C_1..C_L
    Returns codes [N, L] int32, pairwise different. Equal inputs and seeds give equal codes on one machine (the order of
    additions in a matrix product is the BLAS library's).
    Raises Rejected for a wrong shape, a NaN or infinity (with its row), and more items than SIDs.
    """
    residual = _checked(embeddings, tuple(sizes))
    items = len(residual)
    random = np.random.default_rng(seed)
    codes = np.empty((items, len(sizes)), np.int32)
    prefix = np.zeros(items, np.int64)
    if items == 0:
        return codes
    residual -= residual.mean(axis=0)
    for step, size in enumerate(sizes):
        room = min(prod(sizes[step + 1 :]), items)
        book = _codebook(residual, size, random)
        code = _assign(residual, prefix, book, room)
        residual -= book[code]
        codes[:, step] = code
        prefix = np.unique(prefix * size + code, return_inverse=True)[1]
    return codes


def _checked(embeddings: npt.ArrayLike, sizes: tuple[int, ...]) -> Floats:
    raw = np.asarray(embeddings)
    if raw.ndim != 2 or raw.dtype.kind not in "fiu":
        raise Rejected("embeddings_shape", f"embeddings must be numbers [items, dim], got {raw.dtype} {raw.shape}")
    with np.errstate(over="ignore"):
        points = np.array(raw, np.float32, order="C")
    finite = np.isfinite(points).all(axis=1)
    if not finite.all():
        row = int(np.argmin(finite))
        raise Rejected("embeddings_not_finite", "the embedding holds a NaN or infinity", location=f"row {row}")
    if not sizes or min(sizes) < 1:
        raise Rejected("sizes", f"sizes must be positive, one a step, got {list(sizes)}")
    if len(points) > prod(sizes):
        raise Rejected(
            "too_many_items", f"{len(points)} items do not fit into the {prod(sizes)} SIDs of sizes {list(sizes)}"
        )
    return points


def _codebook(points: Floats, size: int, random: np.random.Generator) -> Floats:
    """k-means by Lloyd's iteration from `size` random items; returns centroids [size, d].

    A code that loses all its items restarts at an item far from its centroid. With fewer different points than codes,
    some codes stay doubles of others: never nearest, yet free for items that a full code turns away.
    """
    sample = points
    if len(points) > size * POINTS_PER_CODE:
        sample = points[np.sort(random.choice(len(points), size * POINTS_PER_CODE, replace=False))]
    start = random.choice(len(sample), size, replace=len(sample) < size)
    book = sample[start].copy()
    previous: Ints | None = None
    for _ in range(ROUNDS):
        nearest, distance = _nearest(sample, book)
        if previous is not None and np.array_equal(nearest, previous):
            break
        previous = nearest
        book = _means(sample, nearest, distance, book)
    return book


def _means(points: Floats, nearest: Ints, distance: Floats, book: Floats) -> Floats:
    """The mean of each code's points; codes without points restart at the points that are worst served."""
    count = np.bincount(nearest, minlength=len(book))
    order = np.argsort(nearest, kind="stable")
    used = np.flatnonzero(count)
    starts = (np.cumsum(count) - count)[used]
    new = book.copy()
    new[used] = np.add.reduceat(points[order], starts, axis=0) / count[used, None].astype(np.float32)
    empty = np.flatnonzero(count == 0)
    if len(empty):
        worst = np.argsort(-distance, kind="stable")[: len(empty)]
        worst = worst[distance[worst] > 0]
        new[empty[: len(worst)]] = points[worst]
    return new


def _nearest(points: Floats, book: Floats) -> tuple[Ints, Floats]:
    """The nearest code of each point and its squared distance, first code on ties."""
    code = np.empty(len(points), np.int64)
    distance = np.empty(len(points), np.float32)
    rows = max(1, BLOCK // len(book))
    for begin in range(0, len(points), rows):
        block = _distances(points[begin : begin + rows], book)
        best = block.argmin(axis=1)
        code[begin : begin + rows] = best
        distance[begin : begin + rows] = np.take_along_axis(block, best[:, None], axis=1)[:, 0]
    return code, distance


def _distances(points: Floats, book: Floats) -> Floats:
    """Squared Euclidean distances [n, codes], not below 0."""
    squares: Floats = np.einsum("nd,nd->n", points, points)[:, None] + np.einsum("cd,cd->c", book, book)
    squares -= np.float32(2) * (points @ book.T)
    return np.maximum(squares, np.float32(0), out=squares)


def _assign(points: Floats, prefix: Ints, book: Floats, room: int) -> Ints:
    """The code of each item: the nearest, except in prefixes where some code would take more than `room` items."""
    code, _ = _nearest(points, book)
    cells, count = np.unique(prefix * len(book) + code, return_counts=True)
    crowded = np.unique(cells[count > room] // len(book))
    if not len(crowded):
        return code
    order = np.argsort(prefix, kind="stable")
    begin, end = (np.searchsorted(prefix[order], crowded, side) for side in ("left", "right"))
    for low, high in zip(begin.tolist(), end.tolist(), strict=True):
        members = order[low:high]
        code[members] = _match(_distances(points[members], book), room)
    return code


def _match(distance: Floats, room: int) -> Ints:
    """Deferred acceptance: rows ask codes in ascending distance, each code keeps its `room` nearest rows.

    distance [n, codes] with n <= codes * room; overwritten. Ties go to the lower row and the lower code.
    """
    wish: Ints = distance.argmin(axis=1)
    held = distance[np.arange(len(wish)), wish]
    while True:
        order = np.lexsort((held, wish))
        sorted_wish = wish[order]
        place = np.arange(len(order)) - np.searchsorted(sorted_wish, sorted_wish, "left")
        refused = np.sort(order[place >= room])
        if not len(refused):
            return wish
        distance[refused, wish[refused]] = np.inf
        wish[refused] = distance[refused].argmin(axis=1)
        held[refused] = distance[refused, wish[refused]]
