"""The oracle's definitions of the operators that are functions of a table: `keep` of a row, `prune` of a request.

keep   (logp [m] float32, best first, valid ones only, *arguments) -> who stays, [m] bool
prune  (rank [W, F] float32 of one request, -inf = out, *arguments) -> who stays, [W, F] bool
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


def top_k(logp: Floats, n: float) -> Bools:
    """V08: the n best."""
    return np.arange(len(logp)) < int(n)


def top_p(logp: Floats, p: float) -> Bools:
    """V09: while the mass of better ones is below p; the best always, all where p is 1."""
    stays, mass = np.zeros(len(logp), np.bool_), 0.0
    for at, one in enumerate(logp.tolist()):
        if at and mass >= p and p < 1:
            break
        stays[at], mass = True, mass + math.exp(one)
    return stays


def min_p(logp: Floats, p: float) -> Bools:
    """V10: at least p times the best one's probability."""
    return _reach(logp, np.float32(logp[0] + np.float32(_log(p))))


def epsilon(logp: Floats, p: float) -> Bools:
    """V11: probability p or more; the best always."""
    return _reach(logp, np.float32(_log(p)))


def eta(logp: Floats, p: float) -> Bools:
    """V11: probability min(p, sqrt(p) exp(-H)) or more, H the row's entropy; the best always."""
    shares = np.exp(logp.astype(np.float64) - log_sum_exp(logp.astype(np.float64)))
    entropy = -sum(share * math.log(share) for share in shares.tolist() if share > 0)
    return _reach(logp, np.float32(min(_log(p), 0.5 * _log(p) - entropy)))


def typical(logp: Floats, mass: float) -> Bools:
    """V12: those nearest to the row's entropy until their mass is reached, and who is as near as the last; all where
    the mass is 1."""
    level = logp.astype(np.float64) - log_sum_exp(logp.astype(np.float64))
    share = np.exp(level).tolist()
    entropy = -sum(one * math.log(one) for one in share if one > 0)
    far = np.where(np.array(share) > 0, np.abs(-level - entropy), np.inf).astype(np.float32)
    reached, last = 0.0, np.float32(np.inf)
    for at in np.argsort(far, kind="stable").tolist():
        reached, last = reached + share[at], far[at]
        if reached >= mass:
            break
    stays: Bools = np.less_equal(far, last) | (mass >= 1)
    return stays


def within(rank: Floats, delta: float) -> Bools:
    """V04: at most delta behind the request's best."""
    stays: Bools = rank >= np.float32(rank.max(initial=-np.inf) - np.float32(delta))
    return stays


def above(rank: Floats, score: float) -> Bools:
    """V05: at least this rank; the best always."""
    stays: Bools = (rank >= np.float32(score)) | (rank == rank.max(initial=-np.inf))
    return stays


def within_parent(rank: Floats, delta: float) -> Bools:
    """V06: at most delta behind the row's best."""
    stays = np.zeros(rank.shape, np.bool_)
    for r, row in enumerate(rank):
        stays[r] = row >= np.float32(row.max(initial=-np.inf) - np.float32(delta))
    return stays


def _reach(logp: Floats, floor: np.float32) -> Bools:
    stays: Bools = (logp >= floor) | (np.arange(len(logp)) == 0)
    return stays


def _log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf


def log_sum_exp(row: npt.NDArray[np.float64]) -> float:
    """Of one row, in float64; -inf where everything is."""
    top = row.max(initial=-np.inf)
    return float(top + np.log(np.exp(row - top).sum())) if top > -np.inf else -np.inf
