"""Exact selection in torch, on any device: the definition that kernels are compared with (RecoGEM 4.3).

T0, the order of candidates inside a request: rank descending, then `order * C + code` ascending, where `order` is the
parent's place in its request. Packed into one integer it is unique, so that any top-k of the keys is exact:
there are no ties left to break (policy-language 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

INVALID = torch.iinfo(torch.int64).min
"""The key of a candidate that may never be selected: below every key of a real rank, that of -max included."""


class Selected(NamedTuple):
    """What survives, flat over requests in T0 order (M = the sum of `keep`).

    parent   [M] int64  row; -1 = tombstone (the request had fewer valid candidates)
    column   [M] int64  candidate column of that row; -1 = tombstone
    order    [M] int64  0, 1, 2.. inside each request
    n_valid  [R] int64
    """

    parent: Tensor
    column: Tensor
    order: Tensor
    n_valid: Tensor


def keys(rank: Tensor, code: Tensor, order: Tensor, size: int) -> Tensor:
    """T0 as int64 keys, larger is better.

    rank [n, F] float32, never NaN or +inf, -inf = invalid · code [n, F] int64 · order [n] integer · size C with
    W * C < 2**32. Returns [n, F] int64; -0.0 and 0.0 are the same rank.
    """
    bits = (rank + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    # two's complement order of the float's bits: negative floats run backwards, so their magnitude bits are flipped
    ordered = bits.bitwise_xor(bits.bitwise_right_shift(31).bitwise_and_(0x7FFFFFFF)).to(torch.int64)
    place = order.to(torch.int64).mul(size).unsqueeze(1) + code
    packed = ordered.bitwise_left_shift_(32).add_(0xFFFFFFFF).sub_(place)
    return packed.masked_fill_(rank == -torch.inf, INVALID)


def select_top(
    rank: Tensor, code: Tensor, order: Tensor, size: int, row_start: Sequence[int], keep: Sequence[int]
) -> Selected:
    """The best `keep[r]` candidates of each request under T0, in two exact stages: a cut per row, then per request.

    rank, code  [n, F] float32, int64: candidates of each row (see `keys`)
    order       [n] integer, distinct among the live rows of a request
    row_start   [R + 1] rows of request r are row_start[r]:row_start[r + 1]; host integers
    keep        [R] how many to keep; host integers

    Masked candidates are never returned, not even to fill up. Requests of equal (rows, keep) form one rectangle; no
    rectangle is padded.
    """
    device = rank.device
    packed = keys(rank, code, order, size)
    shapes: dict[tuple[int, int], list[int]] = {}
    for request, kept in enumerate(keep):
        shapes.setdefault((row_start[request + 1] - row_start[request], kept), []).append(request)
    out_start = [0]
    for kept in keep:
        out_start.append(out_start[-1] + kept)
    parent = torch.full((out_start[-1],), -1, dtype=torch.int64, device=device)
    column = torch.full_like(parent, -1)
    place = torch.zeros_like(parent)
    n_valid = torch.zeros(len(keep), dtype=torch.int64, device=device)
    for (width, kept), requests in shapes.items():
        if kept == 0:
            continue
        into = _ranges(requests, out_start, kept, device)
        place[into] = torch.arange(kept, device=device)
        if width == 0:
            continue
        rows = _ranges(requests, row_start, width, device)
        best_row, best_column, valid = _rectangle(packed, rows, kept)
        parent[into], column[into] = best_row, best_column
        n_valid[torch.tensor(requests, device=device)] = valid
    return Selected(parent, column, place, n_valid)


def _ranges(requests: list[int], start: Sequence[int], length: int, device: torch.device) -> Tensor:
    """[G, length] int64: start[r], start[r] + 1, .. of each request."""
    first = torch.tensor([start[request] for request in requests], dtype=torch.int64, device=device)
    return first.unsqueeze(1) + torch.arange(length, device=device)


def _rectangle(packed: Tensor, rows: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top `kept` of each request of a rectangle: rows [G, W] -> (row [G, kept], column [G, kept], n_valid [G])."""
    requests, width = rows.shape
    own = packed if rows.numel() == len(packed) and requests == 1 else packed[rows.reshape(-1)]
    cut_column: Tensor | None = None
    if own.shape[1] > kept:  # the exact precut: what it drops is beaten by `kept` candidates of its own row
        own, cut_column = torch.topk(own, kept, dim=1, sorted=False)
    per_row = own.shape[1]
    flat = own.reshape(requests, width * per_row)
    found = min(kept, width * per_row)
    best, index = torch.topk(flat, found, dim=1, sorted=True)
    row_of = index.div(per_row, rounding_mode="floor")
    row = rows.gather(1, row_of)
    if cut_column is None:
        column = index - row_of * per_row
    else:
        column = cut_column.reshape(requests, width * per_row).gather(1, index)
    dead = best == INVALID
    row, column = row.masked_fill(dead, -1), column.masked_fill(dead, -1)
    if found < kept:
        padding = (0, kept - found)
        row = torch.nn.functional.pad(row, padding, value=-1)
        column = torch.nn.functional.pad(column, padding, value=-1)
    return row, column, found - dead.sum(1)


def sanitise(logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits in fp32 with NaN and +inf replaced by -inf, before anything reads them.

    logits [n, C] any float. Returns ([n, C] float32, [n] int64 how many were bad; None where none can be).
    On a CPU one reduction tells the usual case, and nothing is copied.
    """
    values = logits.float()
    if values.device.type == "cpu" and values.numel() and bool(values.amax() < torch.inf):
        return values, None
    bad = values.isnan() | (values == torch.inf)
    return values.masked_fill(bad, -torch.inf), bad.sum(1)
