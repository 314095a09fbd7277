"""Operators on requests: prune, and the ways to select; `quota` beside it. Prune says who stays; the others turn ranks
into ranks: what is not selected gets -inf, and the best K of what is left, in T0, are the survivors.

Candidates of all requests of a structure are handled at once, laid flat in T0 order, where rows may be cut to their
best K first (precut theorem, policy-language 2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.ops.selection import keys
from app.ops.upload import upload, upload_ints
from app.policies.plan import StepInputs

INF = float("inf")


@dataclass(frozen=True)
class Field:
    """Where candidates stand: request and order of each row, K of each request, C of the step.

    request, order  [n] int64 · code [n, F] int64 · k [R] int64 on the device · widths the same on the host
    rows            of each request, on the host
    """

    request: Tensor
    order: Tensor
    code: Tensor
    k: Tensor
    widths: tuple[int, ...]
    size: int
    rows: tuple[int, ...]

    @classmethod
    def of(cls, inputs: StepInputs) -> Field:
        """From a step's inputs, which must hold what a program with "request" in its `uses` is given."""
        assert inputs.request is not None and inputs.order is not None, "uses: request"
        k = upload_ints(inputs.widths, torch.int64, inputs.code.device)
        return cls(inputs.request, inputs.order, inputs.code, k, inputs.widths, inputs.logits.shape[1], inputs.rows)


class Line(NamedTuple):
    """Candidates of all requests, requests one after the other, each in T0: the valid ones first.

    at [N] int64 flat places r * F + f, each once · row [N] · request [N] · alive [N] bool: valid. On a GPU those that
    are not stay, so that nothing waits for their number
    """

    at: Tensor
    row: Tensor
    request: Tensor
    alive: Tensor


def line(rank: Tensor, field: Field, *, cut: bool) -> Line:
    """Candidates in T0; with `cut`, only the best max(K) of each row."""
    packed = keys(rank, field.code, field.order, field.size)
    per_row, most = rank.shape[1], max(field.widths, default=0)
    place = torch.arange(per_row, device=rank.device).expand_as(packed)
    if cut and per_row > most:
        packed, place = torch.topk(packed, most, dim=1, sorted=False)
    at = (torch.arange(len(rank), device=rank.device)[:, None] * per_row + place).reshape(-1)
    packed = packed.reshape(-1)
    alive = rank.reshape(-1)[at] > -INF
    if waiting_is_free(rank.device):
        at, packed, alive = at[alive], packed[alive], alive[alive]
    row = at.div(per_row, rounding_mode="floor")
    best_first = torch.argsort(packed, descending=True)
    by_request = torch.argsort(field.request[row[best_first]], stable=True)
    order = best_first[by_request]
    return Line(at[order], row[order], field.request[row[order]], alive[order])


def waiting_is_free(device: torch.device) -> bool:
    """Whether shapes may follow what was computed."""
    return device.type == "cpu"


def numbered(counts: Sequence[int], device: torch.device) -> Tensor:
    """[sum of counts] int64: 0 count[0] times, then 1 .."""
    return upload(torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), device)


def place_in(group: Tensor, member: Tensor) -> Tensor:
    """[N] int64: how many earlier members share a member's group; arbitrary for others."""
    outside = torch.iinfo(torch.int64).max
    key = torch.where(member, group, outside)
    ordered, index = torch.sort(key, stable=True)
    first = torch.searchsorted(ordered, ordered)
    place = torch.empty_like(index)
    place[index] = torch.arange(len(index), device=index.device) - first
    return place


def count_in(group: Tensor, member: Tensor) -> Tensor:
    """[N] int64: how many members share each candidate's group."""
    ordered = torch.sort(torch.where(member, group, torch.iinfo(torch.int64).max)).values
    return torch.searchsorted(ordered, group, right=True) - torch.searchsorted(ordered, group)


def only(rank: Tensor, at: Tensor, taken: Tensor | None = None) -> Tensor:
    """Ranks of the candidates at flat places, of those that are taken; -inf elsewhere."""
    out = torch.full_like(rank, -INF, memory_format=torch.contiguous_format)  # a model may give transposed logits
    ranks = rank.reshape(-1)[at]
    out.view(-1)[at] = ranks if taken is None else torch.where(taken, ranks, -INF)
    return out


# ---- prune ---------------------------------------------------------------------------------------------------------


def within(rank: Tensor, field: Field, delta: Tensor) -> Tensor:
    """V04 (1702.01806): at most delta behind the request's best."""
    best = request_best(rank, field)[field.request][:, None]
    return rank >= torch.sub(best, delta)


def above(rank: Tensor, field: Field, floor: Tensor) -> Tensor:
    """V05: at least this rank; the request's best always stays."""
    best = request_best(rank, field)[field.request][:, None]
    return (rank >= floor) | (rank == best)


def within_parent(rank: Tensor, field: Field, delta: Tensor) -> Tensor:
    """V06: at most delta behind the row's best."""
    del field
    best = rank.amax(dim=1, keepdim=True)
    return rank >= torch.sub(best, delta)


def request_best(rank: Tensor, field: Field) -> Tensor:
    """[R] float32: the best rank of each request; -inf where nobody is left."""
    rows = rank.amax(dim=1)
    return torch.full((len(field.widths),), -INF, device=rank.device).scatter_reduce_(0, field.request, rows, "amax")


# ---- select --------------------------------------------------------------------------------------------------------


def explore(rank: Tensor, field: Field, noise: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """V39: K - E places by rank, E = floor(share K) from the rest by rank + noise. Returns ranks and who was explored.

    noise [n, F] float32 standard Gumbel
    """
    spare = upload_ints([int(share * width) for width in field.widths], torch.int64, rank.device)
    by_rank = line(rank, field, cut=True)
    firm = by_rank.alive & (place_in(by_rank.request, by_rank.alive) < (field.k - spare)[by_rank.request])
    out, rest = only(rank, by_rank.at, firm), rank.reshape(-1).clone()
    rest[by_rank.at] = torch.where(firm, -INF, rest[by_rank.at])
    rest = rest.view(rank.shape)
    drawn = line(torch.where(rest > -INF, torch.add(rest, noise), -INF), field, cut=True)
    lucky = drawn.alive & (place_in(drawn.request, drawn.alive) < spare[drawn.request])
    out.view(-1)[drawn.at] = torch.where(lucky, rank.reshape(-1)[drawn.at], out.view(-1)[drawn.at])
    explored = torch.zeros(rank.numel(), dtype=torch.bool, device=rank.device)
    explored[drawn.at] = lucky
    return out, explored.view(rank.shape)


def stochastic(score: Tensor, noise: Tensor, parent: Tensor) -> Tensor:
    """V37 (Kool et al. 1903.06059): each child's Gumbel, conditioned on the largest of a row being the parent's.

    score [n, F] log-probability of the prefix, -inf = invalid · noise [n, F] standard Gumbel · parent [n, 1] its G.
    Returns G [n, F] float32, in double precision and rounded once; a row without a valid candidate is all -inf.
    """
    raw = torch.where(score > -INF, torch.add(score, noise), -INF).double()
    top = raw.amax(dim=1, keepdim=True)
    limit = parent.double()
    u = limit - raw + torch.log1p(-torch.exp(raw - top))
    shifted = limit - torch.clamp(u, min=0) - torch.log1p(torch.exp(-torch.abs(u)))
    return torch.where(raw > -INF, shifted, -INF).float()


def diverse(rank: Tensor, field: Field, penalty: Tensor, groups: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """V27 (1610.02424): groups of K / groups survivors, one after the other; a code costs `penalty` for each survivor
    of an earlier group that chose it in this step.

    penalty [n, 1] float32 >= 0 · own [n] int64: each row's group; None at step 1, where groups share the root row: a
    code that an earlier group took is not taken again, and fewer candidates than K are shared out evenly.
    Returns ranks that put the groups one behind the other, and each candidate's group as float32.
    """
    requests, shared = len(field.widths), own is None
    cut = line(rank, field, cut=True)  # one cut of K, unpenalised, serves all groups
    code = field.code.reshape(-1)[cut.at]
    value = rank.reshape(-1)[cut.at]
    cost = penalty.expand(len(rank), 1).reshape(-1)[cut.row]
    size = field.k.div(groups, rounding_mode="floor")
    if shared:
        found = torch.zeros_like(field.k).scatter_add_(0, cut.request, cut.alive.to(torch.int64))
        size = torch.minimum(field.k, found).add(groups - 1).div(groups, rounding_mode="floor")
    used = torch.zeros(requests * field.size, dtype=torch.int64, device=rank.device)
    slot = cut.request * field.size + code
    out = torch.full((rank.numel(),), -INF, device=rank.device)
    group_of = torch.zeros(rank.numel(), device=rank.device)
    for group in range(groups):
        member = cut.alive if own is None else cut.alive & (own[cut.row] == group)
        times = used[slot]
        if shared:
            member = member & (times == 0)
        penalised = torch.sub(value, torch.mul(cost, times.float()))
        place = _place_by(penalised, member, cut, field)
        chosen = member & (place < size[cut.request])
        used.scatter_add_(0, slot, chosen.to(torch.int64))
        behind = -(group * size[cut.request] + place).float()
        out[cut.at] = torch.where(chosen, behind, out[cut.at])
        group_of[cut.at] = torch.where(chosen, float(group), group_of[cut.at])
    return out.view(rank.shape), group_of.view(rank.shape)


def _place_by(value: Tensor, member: Tensor, cut: Line, field: Field) -> Tensor:
    """[N] int64: the place of each member among those of its request by value, ties by T0."""
    order = torch.argsort(field.order[cut.row] * field.size + field.code.reshape(-1)[cut.at])
    worth = torch.where(member, value + 0.0, -INF)
    order = order[torch.argsort(worth[order], descending=True, stable=True)]
    order = order[torch.argsort(cut.request[order], stable=True)]
    place = torch.empty_like(order)
    place[order] = place_in(cut.request[order], torch.ones_like(member))
    return place
