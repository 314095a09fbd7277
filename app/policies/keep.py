"""Operators on rows: cuts of a row's tail (`keep`) and a candidate's place among its siblings.

All work on [n, F] candidates of which `valid` are in play, and keep at least the best of each row. Sums run over the
row in descending order in double precision, so that every device cuts at the same code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

INF = float("inf")


class Row(NamedTuple):
    """A row's candidates, best first.

    sorted  [n, F] float32 values in descending order, ties by column; -inf = invalid
    place   [n, F] int64 0-based place of each candidate
    """

    sorted: Tensor
    place: Tensor


def ordered(values: Tensor, valid: Tensor) -> Row:
    """Sort each row; columns are in code order, so a stable sort breaks ties by code."""
    masked = torch.where(valid, values, -INF)
    best, column = torch.sort(masked, dim=1, descending=True, stable=True)
    place = torch.empty_like(column).scatter_(
        1, column, torch.arange(column.shape[1], device=column.device).expand_as(column)
    )
    return Row(best, place)


def top_k(logp: Tensor, valid: Tensor, n: Tensor) -> Tensor:
    """V08: the n best of each row."""
    return valid & (ordered(logp, valid).place < n)


def top_p(logp: Tensor, valid: Tensor, p: Tensor) -> Tensor:
    """V09 (1904.09751): candidates while the mass of better ones is below p; all of them where p is 1."""
    best, place = ordered(logp, valid)
    mass = torch.cumsum(torch.exp(best.double()), dim=1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))  # not mass - own: that rounds, and cuts elsewhere
    kept = (before < p.double()) | (p >= 1) | (torch.arange(best.shape[1], device=best.device) == 0)
    return valid & kept.gather(1, place)


def min_p(logp: Tensor, valid: Tensor, p: Tensor) -> Tensor:
    """V10 (2407.01082): probability at least p times the row's best."""
    return at_least(logp, valid, torch.add(_best(logp, valid), _log(p)))


def epsilon(logp: Tensor, valid: Tensor, p: Tensor) -> Tensor:
    """V11 (2210.15191): probability at least p."""
    return at_least(logp, valid, _log(p))


def eta(logp: Tensor, valid: Tensor, p: Tensor) -> Tensor:
    """V11: probability at least min(p, sqrt(p) exp(-H)), H the entropy of the row over its valid candidates."""
    weights = torch.where(valid, logp, -INF).double()
    total = torch.logsumexp(weights, dim=1, keepdim=True)
    share = torch.exp(weights - total)
    entropy = -torch.where(share > 0, share * (weights - total), 0.0).sum(dim=1, keepdim=True)
    log_p = torch.log(p.double())
    return at_least(logp, valid, torch.minimum(log_p, 0.5 * log_p - entropy).float())


def typical(logp: Tensor, valid: Tensor, mass: Tensor) -> Tensor:
    """V12 (2202.00666): candidates whose information is nearest to the row's entropy, over its valid ones, until their
    mass is reached, and all that are as near as the last of them; all of them where the mass is 1."""
    weights = torch.where(valid, logp, -INF).double()
    level = weights - torch.logsumexp(weights, dim=1, keepdim=True)
    share = torch.where(valid & (level > -INF), torch.exp(level), 0.0)
    entropy = -torch.where(share > 0, share * level, 0.0).sum(dim=1, keepdim=True)
    far = torch.where(share > 0, torch.abs(-level - entropy), INF).float()
    near, column = torch.sort(far, dim=1, stable=True)
    sums = torch.cumsum(share.gather(1, column), dim=1)
    last = (sums < mass.double()).sum(dim=1, keepdim=True).clamp(max=far.shape[1] - 1)
    return valid & ((far <= near.gather(1, last)) | (mass >= 1))


def at_least(values: Tensor, valid: Tensor, floor: Tensor) -> Tensor:
    """Candidates that reach a floor, and the best of each row (the first of equals)."""
    best = torch.where(valid, values, -INF).argmax(dim=1, keepdim=True)  # the first of equal ones
    first = torch.zeros_like(valid).scatter_(1, best, value=True)
    return valid & ((values >= floor) | first)


def _best(values: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, values, -INF).amax(dim=1, keepdim=True)


def _log(p: Tensor) -> Tensor:
    return torch.log(p.double()).float()
