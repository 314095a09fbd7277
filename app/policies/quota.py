"""Quota: at most and at least so many of a group (V08, V30-V33). Floors in their written order, each with the best of
its groups, then the best of all; nothing is taken that breaks a cap.

Where every group is a union of rows, all candidates that a cut leaves are laid in one line (`choose`). Where groups
cross rows nothing may be cut, and a line would be all candidates: they are looked at from the best on instead, a few K
of a request at a time, and whatever a look has found in a group that is full is left out of the next one. A look after
which places are left has filled a group, so how many looks that takes is known before: nobody waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from app.ops.selection import select_top
from app.ops.selection.geometry import DEEPEST
from app.policies import choose
from app.policies.choose import INF, Field, Line

LOOK = 4
"""How many times K candidates of a request one look takes, DEEPEST at most."""
LINE = 20
"""What it costs to lay a candidate in a line, beside one look at it: a line is sorted several times. Decides which of
the two ways is taken, never what comes out."""
_NO_GROUP = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Quota:
    """A cap or a floor with its group's number at each candidate.

    limit   at most or at least so many
    group   [n, F] or [n, 1] int64, -1 = in no group
    values  how many groups a request can have, where known
    nested  whether each group is a union of rows
    once    whether a row has one candidate of a group at most
    """

    limit: int
    group: Tensor
    values: int | None = None
    nested: bool = False
    once: bool = False

    def looks(self, width: int, rows: int, depth: int) -> int:
        """After how many looks of `depth` candidates places may be left because groups of these are full: each fills
        one, and no more can be full than K places allow. A group with one candidate a row leaves soon."""
        full = width // self.limit if self.values is None else min(width // self.limit, self.values)
        return min(full, -(-full * rows // (depth - width))) if self.once and depth > width else full


def quota(rank: Tensor, field: Field, caps: Sequence[Quota], floors: Sequence[Quota], *, cut: bool) -> Tensor:
    """Ranks [n, F] of what is taken, -inf elsewhere.

    caps  from the innermost to the outermost: each contains the groups of those before it
    cut   whether every group is a union of rows, so that rows may be cut to their best K
    """
    goals = (*(one for one in floors if one.limit > 0), None)
    if not cut:
        basket = _empty(field)
        for number, goal in enumerate(goals):
            basket = _phase(rank, field, caps, goal, basket, first=number == 0)
        places = torch.where(basket.alive, rank.reshape(-1)[basket.at], -INF)
        out = torch.full_like(rank, -INF, memory_format=torch.contiguous_format)
        out.view(-1).scatter_reduce_(0, basket.at, places, "amax")  # empty places lie somewhere, too
        return out
    candidates = choose.line(rank, field, cut=True)
    taken = torch.zeros_like(candidates.alive)
    for goal in goals:
        taken = taken | _take(candidates, taken, caps, goal, field)
    return choose.only(rank, candidates.at, taken)


def depth(width: int) -> int:
    """Candidates of a request of K = width that a look takes."""
    return max(width, min(LOOK * width, DEEPEST))


def head(rank: Tensor, field: Field) -> Line:
    """The best `depth` candidates of each request, in T0. Waits for nothing: where there are fewer, the last are not
    alive and lie anywhere."""
    per_row = rank.shape[1]
    keep = [min(depth(width), rows * per_row) for width, rows in zip(field.widths, field.rows, strict=True)]
    best = select_top(rank, field.code, field.order, field.size, (0, *accumulate(field.rows)), keep)
    row, column = best.parent.clamp(min=0), best.column.clamp(min=0)
    return Line(row * per_row + column, row, choose.numbered(keep, rank.device), best.parent >= 0)


# ---- one floor, or the best of all ---------------------------------------------------------------------------------


def _phase(rank: Tensor, field: Field, caps: Sequence[Quota], goal: Quota | None, basket: Line, *, first: bool) -> Line:
    """What is taken after a floor, or (None) after the best of all; basket: before. first: nothing is in it."""
    left = rank if goal is None else torch.where(goal.group >= 0, rank, -INF)
    left = left.contiguous() if first else _without(left, basket)
    # with one group only, a row's best K are all that a floor can take of it
    cut = all(one.nested for one in caps) and (goal is None or goal.nested or goal.values == 1)
    looks, whole = _looks(left, field, caps, goal, cut=cut)
    for look in range(looks):
        found = head(left, field)
        seen, taken, basket = _add(basket, found, field, caps, goal)
        if choose.waiting_is_free(rank.device) and _settled(basket, found, field):
            return basket
        if whole or look + 1 < looks:
            left = _without(left, found)
            for one in (*caps, *(() if goal is None else (goal,))):
                left = left.masked_fill(_is_full(one, seen, taken, field), -INF)
    return _add(basket, choose.line(left, field, cut=cut), field, caps, goal)[2] if whole else basket


def _looks(rank: Tensor, field: Field, caps: Sequence[Quota], goal: Quota | None, *, cut: bool) -> tuple[int, bool]:
    """How many looks to take, and whether all that is left then comes as a line."""
    groups = caps if goal is None or goal.values == 1 else (*caps, goal)
    per_row, needed, depths = rank.shape[1], 1, 0
    for width, rows in zip(field.widths, field.rows, strict=True):
        own = depth(width)
        full = sum(one.looks(width, rows, own) for one in groups)
        needed, depths = max(needed, min(1 + full, -(-rows * per_row // own))), depths + own
    line = len(rank) * (min(per_row, max(field.widths)) if cut else per_row)
    worth = LINE * line // (rank.numel() + LINE * depths)
    if needed <= max(1, worth):
        return needed, False
    return (worth if choose.waiting_is_free(rank.device) else 0), True


def _add(
    basket: Line, found: Line, field: Field, caps: Sequence[Quota], goal: Quota | None
) -> tuple[Line, Tensor, Line]:
    """Take of what was found, in T0 and behind all that was looked at before: the basket before with what was found,
    who of these is taken, and the basket after."""
    seen = Line(*(torch.cat(both) for both in zip(basket, found, strict=True)))
    taken = torch.cat([basket.alive, torch.zeros_like(found.alive)])
    taken = taken | _take(seen, taken, caps, goal, field)
    order = torch.argsort(seen.request * 2 + (~taken).to(torch.int64), stable=True)
    first = torch.searchsorted(seen.request[order], basket.request)  # each has K places here at least, the basket's own
    own = torch.arange(len(basket.request), device=first.device)
    own = order[first + own - torch.searchsorted(basket.request, basket.request)]
    return seen, taken, Line(seen.at[own], seen.row[own], basket.request, taken[own])


def _empty(field: Field) -> Line:
    """A basket: K places of each request; those that are alive are taken."""
    request = choose.numbered(field.widths, field.request.device)
    nothing = torch.zeros_like(request)
    return Line(nothing, nothing, request, nothing.bool())


def _settled(basket: Line, found: Line, field: Field) -> bool:
    """Whether no look can find more: all places are taken, or there was nothing left. Waits for the device."""
    requests = len(field.widths)
    held = torch.bincount(basket.request[basket.alive], minlength=requests)
    count = torch.bincount(found.request[found.alive], minlength=requests)
    most = torch.tensor([depth(width) for width in field.widths], device=count.device)
    return bool(((held >= field.k) | (count < most)).all())


def _without(rank: Tensor, gone: Line) -> Tensor:
    """Ranks with -inf for those of a line that are alive."""
    values = torch.where(gone.alive, -INF, torch.full((), INF, device=rank.device))
    return rank.reshape(-1).scatter_reduce(0, gone.at, values, "amin").view(rank.shape)


def _is_full(one: Quota, seen: Line, taken: Tensor, field: Field) -> Tensor:
    """[n, F] or [n, 1] bool: candidates of groups that were seen, and are full."""
    group, member = _numbers(one, seen, field)
    is_full = member & (choose.count_in(group, taken & member) >= one.limit)
    full = torch.sort(torch.where(is_full, group, _NO_GROUP)).values
    own = (one.group * len(field.widths) + field.request[:, None]).contiguous()
    place = torch.searchsorted(full, own).clamp_(max=len(full) - 1)
    return (full[place] == own) & (one.group >= 0)


def _numbers(one: Quota, candidates: Line, field: Field) -> tuple[Tensor, Tensor]:
    """Group numbers that no two requests share, and who is in a group."""
    group = one.group.expand(field.code.shape).reshape(-1)[candidates.at]
    return group * len(field.widths) + candidates.request, (group >= 0) & candidates.alive


def _take(candidates: Line, taken: Tensor, caps: Sequence[Quota], goal: Quota | None, field: Field) -> Tensor:
    """The next candidates in T0 that the caps allow, up to the goal of each group and K of each request."""
    chosen = candidates.alive & ~taken
    if goal is not None:
        group, member = _numbers(goal, candidates, field)
        missing = goal.limit - choose.count_in(group, taken & member)
        chosen = chosen & member
    for one in caps:
        cap_group, capped = _numbers(one, candidates, field)
        room = one.limit - choose.count_in(cap_group, taken & capped)
        chosen = chosen & (~capped | (choose.place_in(cap_group, chosen & capped) < room))
    if goal is not None:
        chosen = chosen & (choose.place_in(group, chosen) < missing)
    room = field.k[candidates.request] - choose.count_in(candidates.request, taken)
    return chosen & (choose.place_in(candidates.request, chosen) < room)
