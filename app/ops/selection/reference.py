"""Exact selection in torch, on any device: the definition that kernels are compared with (RecoGEM 4.3).

T0, the order of candidates inside a request: rank descending, then `order * C + code` ascending, where `order` is the
parent's place in its request. Packed into one integer it is unique, so that any top-k of the keys is exact:
there are no ties left to break (policy-language 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from app.ops.upload import upload_ints

CUT = 2
"""A row is cut before the request is where that drops more than half of it; a smaller cut costs more than it saves."""
LOWEST = -0x7F800000 << 32
"""Keys of real ranks are at or above this one, -max included; those of -inf are below."""


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


class Chosen(NamedTuple):
    """What `select_logits` keeps, flat over requests in T0 order; parent, code, order, n_valid as in `Selected`.

    score  [M] float32, -inf = tombstone
    bad    [n] int32: NaN and +inf among the logits of living rows
    slots  [M, t] int32: the survivors' ancestry (OneLA 3.3), row 0's for tombstones; [M, 0] where none was given
    """

    parent: Tensor
    code: Tensor
    order: Tensor
    score: Tensor
    n_valid: Tensor
    bad: Tensor
    slots: Tensor


def keys(rank: Tensor, code: Tensor, order: Tensor, size: int) -> Tensor:
    """T0 as int64 keys, larger is better.

    rank [n, F] float32, never NaN or +inf, -inf = invalid · code [n, F] int64 · order [n] integer · size C with
    W * C < 2**32. Returns [n, F] int64, below LOWEST where invalid; -0.0 and 0.0 are the same rank.
    """
    bits = (rank + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    # two's complement order of the float's bits: negative floats run backwards, so their magnitude bits are flipped
    flipped = bits.bitwise_right_shift(31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    last = 0xFFFFFFFF - order.to(torch.int64).mul(size)
    return flipped.to(torch.int64).bitwise_left_shift_(32).add_(last.unsqueeze(1)).sub_(code)


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
    shapes: dict[tuple[int, int], list[int]] = {}
    for request, kept in enumerate(keep):
        shapes.setdefault((row_start[request + 1] - row_start[request], kept), []).append(request)
    if len(shapes) == 1:  # nothing to put together
        (width, kept), requests = shapes.popitem()
        found = _distinct(rank, row_start[:-1], width, kept) if device.type == "cpu" else None
        if found is not None:
            return found
        packed = keys(rank, code, order, size)
        row, column, valid = _rectangle(packed.view(len(requests), width, rank.shape[1]), row_start[:-1], kept)
        return Selected(row.flatten(), column.flatten(), torch.arange(kept, device=device).repeat(len(requests)), valid)
    packed = keys(rank, code, order, size)
    out_start = [0, *accumulate(keep)]
    parent = torch.full((out_start[-1],), -1, dtype=torch.int64, device=device)
    column = torch.full_like(parent, -1)
    place = torch.zeros_like(parent)
    n_valid = torch.zeros(len(keep), dtype=torch.int64, device=device)
    for (width, kept), requests in shapes.items():
        into = _ranges([out_start[request] for request in requests], kept, device)
        first = [row_start[request] for request in requests]
        own = packed[_ranges(first, width, device)]
        parent[into], column[into], n_valid[upload_ints(requests, torch.int64, device)] = _rectangle(own, first, kept)
        place[into] = torch.arange(kept, device=device)
    return Selected(parent, column, place, n_valid)


def select_logits(
    logits: Tensor, mask: Tensor | None, norm: Tensor | None, parent: Tensor, order: Tensor, ancestry: Tensor | None,
    row_start: Sequence[int], keep: Sequence[int], normalize: str,
) -> Chosen:  # fmt: skip
    """The best keep[r] candidates of each request by parent + (logit - norm), in fp32 and in this order, under T0.

    logits    [n, C] any float; NaN and +inf count as -inf
    mask      [n, >= ceil(C / 8)] uint8, bit c % 8 of byte c // 8: what may be selected; None = everything
    norm      [n] float32, read where `normalize` is "given"; otherwise the log-sum-exp over all codes ("step"), over
              those of the mask ("valid"), or nothing at all ("none")
    parent    [n] float32, -inf = a row from which nothing is selected
    ancestry  [n, t - 1] int32, or None
    """
    values, bad = sanitise(logits)
    alive = (parent > -torch.inf).unsqueeze(1)
    legal = alive.expand(values.shape)
    if mask is not None:
        bits = mask.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=mask.device)
        legal = legal & (bits & 1).view(len(mask), -1)[:, : values.shape[1]].bool()
    if normalize == "none":
        logp = values
    else:
        if normalize != "given":
            over = values if normalize == "step" else values.masked_fill(~legal, -torch.inf)
            norm = torch.logsumexp(over, 1)
        assert norm is not None, "normalize: given"
        logp = torch.sub(values, norm.unsqueeze(1))
    score = torch.add(parent.unsqueeze(1), logp)
    score = torch.where(legal & (values > -torch.inf) & (score < torch.inf), score, -torch.inf).add_(0.0)
    code = torch.arange(values.shape[1], device=logits.device).expand(values.shape)
    best = select_top(score, code, order, values.shape[1], row_start, keep)
    at, dead = best.parent.clamp(min=0), best.parent < 0
    chosen = score[at, best.column.clamp(min=0)].masked_fill_(dead, -torch.inf)
    wrong = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    if bad is not None:
        wrong = (bad * alive.squeeze(1)).to(torch.int32)
    slots = torch.empty(len(at), 0, dtype=torch.int32, device=logits.device)
    if ancestry is not None:
        slots = torch.cat((ancestry.index_select(0, at), at.to(torch.int32).unsqueeze(1)), 1)
    return Chosen(best.parent, best.column, best.order, chosen, best.n_valid, wrong, slots)


def _ranges(first: Sequence[int], length: int, device: torch.device) -> Tensor:
    """[G, length] int64: first[g], first[g] + 1, .."""
    return upload_ints(first, torch.int64, device).unsqueeze(1) + torch.arange(length, device=device)


def _distinct(rank: Tensor, first: Sequence[int], width: int, kept: int) -> Selected | None:
    """The best `kept` of requests of `width` rows each without keys, where no rank is there twice among them and the
    next one: then ranks alone order them. None where it is, or where rows are better cut first.

    rank [n, F] · first: row of each request
    """
    requests, columns = len(first), rank.shape[1]
    if not 0 < kept < width * columns or (width > 1 and columns > CUT * kept):
        return None
    best, index = torch.topk(rank.reshape(requests, width * columns), kept + 1, dim=1, sorted=True)
    if not bool((best[:, :-1] > best[:, 1:]).all()):  # so that only the next one may be -inf
        return None
    index = index[:, :kept]
    row, column = index.div(columns, rounding_mode="floor"), index.remainder(columns)
    if requests > 1:
        row = row + torch.tensor(first).unsqueeze(1)
    place = torch.arange(kept).expand(requests, kept).flatten()
    return Selected(row.flatten(), column.flatten(), place, torch.full((requests,), kept))


def _rectangle(packed: Tensor, first: Sequence[int], kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top `kept` of G requests of W rows each: packed [G, W, F], first row of each request [G].

    Returns row [G, kept], column [G, kept] (-1 = nothing left) and n_valid [G].
    """
    requests, width, columns = packed.shape
    cut: Tensor | None = None
    if columns > CUT * kept > 0:  # the exact precut: what it drops is beaten by `kept` candidates of its own row
        packed, cut = torch.topk(packed, kept, dim=2, sorted=False)
    per_row = packed.shape[2]
    found = min(kept, width * per_row)
    best, index = torch.topk(packed.reshape(requests, width * per_row), found, dim=1, sorted=True)
    row = index.div(max(1, per_row), rounding_mode="floor")
    column = index - row * per_row if cut is None else cut.reshape(requests, width * per_row).gather(1, index)
    dead = best < LOWEST
    row = (row + upload_ints(first, torch.int64, row.device).unsqueeze(1)).masked_fill_(dead, -1)
    column = column.masked_fill_(dead, -1)
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
