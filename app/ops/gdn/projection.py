"""What S_ctx gives: every row times the state of its own request, which lies there once for all its beams.

Letters: R requests, N rows, P projections of a row, HK key heads, HV value heads (G = HV / HK), K and V head dims.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from app.ops.graph import as_node

ROWS: Final = 64
"""Rows of a piece. More rows are fewer copies of states, and more that is computed for nobody."""
COPIED: Final = 1 << 24
"""Elements of states that are copied at a time: 64 MiB."""


def _shapes(x: Tensor, s_ctx: Tensor, row_start: Tensor) -> Tensor:
    del row_start
    n, parts, hk, _ = x.shape
    return x.new_empty((n, parts, hk, s_ctx.shape[1] // hk, s_ctx.shape[3]))


@as_node("(Tensor x, Tensor s_ctx, Tensor row_start) -> Tensor", _shapes)
def shared_projection(x: Tensor, s_ctx: Tensor, row_start: Tensor) -> Tensor:
    """x [N, P, HK, K] float32, s_ctx [R, HV, K, V], row_start [R + 1] int -> [N, P, HK, G, V]. What rows from
    row_start[R] on get is not said. Only a CPU is asked how many rows requests have."""
    return by_width(x, s_ctx, row_start) if x.is_cpu else by_piece(x, s_ctx, row_start)


def by_width(x: Tensor, s_ctx: Tensor, row_start: Tensor) -> Tensor:
    """Neighbouring requests of equal width are one batched product; states are read in place."""
    n, parts, hk, dim = x.shape
    group, width = s_ctx.shape[1] // hk, s_ctx.shape[3]
    out = x.new_empty((n, parts, hk, group, width))
    starts = row_start.tolist()
    first = 0
    for rows, same in groupby(starts[r + 1] - starts[r] for r in range(len(starts) - 1)):
        count = len(list(same))
        if rows:
            own = slice(starts[first], starts[first + count])
            asked = x[own].view(count, rows * parts, hk, 1, dim).permute(0, 2, 3, 1, 4)
            state = s_ctx[first : first + count].view(count, hk, group, dim, width)
            found = asked @ state  # [count, HK, G, rows * P, V]
            out[own].view(count, rows * parts, hk, group, width).copy_(found.permute(0, 3, 1, 2, 4))
        first += count
    out[starts[-1] :] = 0
    return out


def by_piece(x: Tensor, s_ctx: Tensor, row_start: Tensor) -> Tensor:
    """Nothing is asked of the device, and shapes follow from those of the operands, so that it can be captured.

    Requests are cut into pieces of `ROWS` rows, each of which is a product with a copy of its request's state. There
    are as many as R requests with N rows can have, M = min(R, N) of one row and the others' rows in whole pieces: at
    most N + ROWS * M rows are computed, those of pieces that are not full for nobody.
    """
    n, parts, hk, dim = x.shape
    requests, hv, _, width = s_ctx.shape
    group, size = hv // hk, min(ROWS, n)
    if not n:
        return x.new_empty((0, parts, hk, group, width))
    few = min(requests, n)
    number = torch.arange(few + (n - few) // size, device=x.device)
    start = row_start.long()
    pieces = (start.diff() + (size - 1)) // size
    ends = pieces.cumsum(0)
    before = ends - pieces
    owner = torch.searchsorted(ends, number, right=True).clamp_(max=requests - 1)
    first = start[owner] + (number - before[owner]) * size
    rows = (first.unsqueeze(1) + torch.arange(size, device=x.device)).clamp_(max=n - 1)  # and some of who comes next
    asked = x.index_select(0, rows.view(-1)).view(-1, size * parts, hk, 1, dim).permute(0, 2, 3, 1, 4)
    out = x.new_empty((len(number), size * parts, hk, group, width))
    for own in zip(*(torch.split(one, max(1, COPIED // s_ctx[0].numel())) for one in (out, asked, owner)), strict=True):
        into, queries, whose = own
        state = s_ctx.index_select(0, whose).view(-1, hk, group, dim, width)
        into.copy_((queries @ state).permute(0, 3, 1, 2, 4))
    row = torch.arange(n, device=x.device)
    request = torch.searchsorted(start[1:], row, right=True).clamp_(max=requests - 1)
    place = (before[request] * size + row - start[request]).clamp_(max=len(number) * size - 1)  # of pad rows any
    return out.view(-1, parts, hk, group, width).index_select(0, place)
