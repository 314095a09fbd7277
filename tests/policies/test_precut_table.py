"""The table of exact cuts (policy-language 2.3), row by row, on the definitions of the operators alone: what may be cut
from each row of candidates before an operation without changing its result, and the naive cut that does change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pytest

from app.policies.builtin import BUILT_IN
from app.policies.reference import Grid, Ranks, siblings, stays
from app.policies.reference_select import conditioned, select_step

INF = np.float32(np.inf)
TRIALS = 300
Matrix = np.ndarray
Survivors = list[tuple[int, int]]


class Trial(NamedTuple):
    """rank [W, C] with ties and -inf · k · group [W, C] crosses rows · nested, outer [W, 1] are unions of rows."""

    rng: np.random.Generator
    rank: Matrix
    k: int
    group: Matrix
    nested: Matrix
    outer: Matrix
    m: int
    q: int


def trial(rng: np.random.Generator) -> Trial:
    w, c, k = int(rng.integers(1, 7)), int(rng.integers(2, 14)), int(rng.integers(1, 10))
    values = rng.choice(np.array([0, -0.5, -1, -1, -2, -3], np.float32), (w, c))
    if rng.random() < 0.4:
        values = rng.normal(size=(w, c)).astype(np.float32)
    rank = np.where(rng.random((w, c)) < 0.2, -INF, values).astype(np.float32)
    nested = rng.integers(0, 3, (w, 1))
    m, q = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    return Trial(rng, rank, k, rng.integers(0, 3, (w, c)), nested, nested // 2, m, q)


def survivors(rank: Matrix, one: Trial, *, k: int | None = None, **phases: object) -> Survivors:
    """The project's own definition: a sequential scan. Groups are read as attr.g, attr.n and attr.o."""
    w, c = rank.shape
    noise = {"explore": np.zeros((w, c), np.float32)}
    yes = np.ones((w, c), bool)
    extra = {"attr.g": one.group, "attr.n": np.tile(one.nested, c), "attr.o": np.tile(one.outer, c)}
    grid = Grid(
        rank, np.tile(np.arange(c), (w, 1)), yes, yes, ~yes, ~yes, np.zeros(w, np.float32), None, {}, 2,
        one.k if k is None else k, prefix=np.arange(w)[:, None], noise=noise, extra=extra,
    )  # fmt: skip
    given = {"prune": None, "quota": None, "select": "top()", **phases}
    return select_step(given, grid, BUILT_IN, Ranks(rank, rank, np.zeros(w, np.int64))).survivors


def places(rank: Matrix) -> Matrix:
    """Each candidate's place in its row, best first, ties by column."""
    order = np.argsort(-rank, axis=1, kind="stable")
    return np.argsort(order, axis=1, kind="stable")


def cut(rank: Matrix, width: int) -> Matrix:
    return np.where(places(rank) < width, rank, -INF)


def cut_groups(rank: Matrix, group: Matrix, width: int) -> Matrix:
    """The best `width` of each group of each row."""
    out = np.full_like(rank, -INF)
    for one in np.unique(group):
        own = np.where(group == one, rank, -INF)
        out = np.maximum(out, cut(own, width))
    return out


def limits(one: Trial, *lines: str) -> Mapping[str, object]:
    return {"quota": [line.format(m=one.m, q=one.q) for line in lines]}


def same(one: Trial, cutting: Matrix, **phases: object) -> bool:
    return survivors(cutting, one, **phases) == survivors(one.rank, one, **phases)


def with_quota(exact: Callable[[Trial], Matrix], *lines: str) -> Callable[[Trial], bool]:
    return lambda one: same(one, exact(one), **limits(one, *lines))


# ---- operations after the cut: whether the result is that without a cut --------------------------------------------


def row_constant(one: Trial) -> bool:
    shift = one.rng.choice(np.array([0, -1, 2.5], np.float32), (len(one.rank), 1))
    return survivors(cut(one.rank, one.k) + shift, one) == survivors(one.rank + shift, one)


def column_bias(one: Trial) -> bool:
    bias = one.rng.choice(np.array([0, -1, 2.5], np.float32), one.rank.shape)
    return survivors(cut(one.rank, one.k) + bias, one) == survivors(one.rank + bias, one)


def mixed_before(one: Trial) -> bool:
    mixed = (one.rank + one.rng.normal(size=one.rank.shape).astype(np.float32)).astype(np.float32)
    return survivors(cut(mixed, one.k), one) == survivors(mixed, one)


def penalised(rank: Matrix) -> Matrix:
    position = siblings(rank, rank > -INF)
    return np.where(rank > -INF, rank - np.float32(0.3) * position, -INF).astype(np.float32)


def sibling(one: Trial) -> bool:
    return survivors(penalised(cut(one.rank, one.k)), one) == survivors(penalised(one.rank), one)


def gumbel(one: Trial) -> bool:
    """The shift is monotone in a row, and its largest is survivor 0: cut the perturbed scores, shift what is left."""
    noise = one.rng.gumbel(size=one.rank.shape).astype(np.float32)
    carry = one.rng.gumbel(size=len(one.rank)).astype(np.float32)
    perturbed = np.where(one.rank > -INF, one.rank + noise, -INF)
    left = np.where(places(perturbed) < one.k, one.rank, -INF)

    def shifted(score: Matrix) -> Matrix:
        yes, c = np.ones(score.shape, bool), score.shape[1]
        grid = Grid(
            score, np.tile(np.arange(c), (len(score), 1)), yes, yes, yes, yes, carry, None, {}, 2, one.k,
            carry=carry, noise={"gumbel": noise},
        )  # fmt: skip
        return conditioned(score, grid)

    whole, after = shifted(one.rank), shifted(left)
    if any(len(np.unique(row[row > -INF])) < (row > -INF).sum() for row in whole):
        return True  # fp32 may round two shifts to one number, and the order in a row is that of the perturbed scores
    return survivors(after, one) == survivors(whole, one)


def kept(name: str, argument: float, logp: Matrix, valid: Matrix) -> Matrix:
    """One `keep` operator on each row by its own reference, which is given the valid candidates best first."""
    out = np.full_like(logp, -INF)
    for r in range(len(logp)):
        order = [at for at in np.argsort(-logp[r], kind="stable") if valid[r, at]]
        if order:
            stay = stays(BUILT_IN[name], (len(order),), logp[r, order], argument)
            out[r, np.array(order)[stay]] = logp[r, np.array(order)[stay]]
    return out


def keep(name: str, argument: float) -> Callable[[Trial], bool]:
    """log-probabilities of the full row; the operator sees the row, or its best K."""

    def run(one: Trial) -> bool:
        with np.errstate(divide="ignore", invalid="ignore"):
            total = np.log(np.exp(one.rank.astype(np.float64)).sum(axis=1, keepdims=True))
            logp = np.where(one.rank > -INF, one.rank - total, -INF).astype(np.float32)
        left = cut(logp, one.k)
        return survivors(kept(name, argument, left, left > -INF), one) == survivors(
            kept(name, argument, logp, logp > -INF), one
        )

    return run


def within_after_top(one: Trial) -> bool:
    whole = survivors(one.rank, one, prune=["within(1.2)"])
    best = one.rank.max()
    return [at for at in survivors(one.rank, one) if one.rank[at] >= np.float32(best - np.float32(1.2))] == whole


def diverse(one: Trial, width: int, groups: int, size: int) -> bool:
    """At step 1 of a search of groups: all share the root, and nobody takes a code again."""
    root = one._replace(rank=one.rank[:1], group=one.group[:1], nested=one.nested[:1], outer=one.outer[:1])
    select = f"diverse({groups}, 0.5)"
    whole = survivors(root.rank, root, k=groups * size, select=select)
    return survivors(cut(root.rank, width), root, k=groups * size, select=select) == whole


def shared_root(exact: bool) -> Callable[[Trial], bool]:
    def run(one: Trial) -> bool:
        groups, size = 2 + one.m % 2, one.q
        return diverse(one, groups * size if exact else size, groups, size)

    return run


def dedupe(times: int) -> Callable[[Trial], bool]:
    """At most d = 2 SIDs lead to one item; the best k items of the whole, and of a pool of K times `times`."""

    def run(one: Trial) -> bool:
        size = one.rank.size
        item = one.rng.permutation(np.arange(size) // 2)

        def items(most: int) -> list[int]:
            line = [r * one.rank.shape[1] + c for r, c in survivors(one.rank, one, k=most)]
            return list(dict.fromkeys(item[line].tolist()))[: one.k]

        return items(one.k * times) == items(size)

    return run


def in_turn(first: str, second: str) -> Callable[[Trial], bool]:
    """Two caps, each by one cut to the best m of its groups, against the scan that obeys both."""

    def run(one: Trial) -> bool:
        of = {"g": one.group, "n": np.tile(one.nested, one.rank.shape[1]), "o": np.tile(one.outer, one.rank.shape[1])}
        left, most = one.rank, {first: one.m, second: one.m + 1}
        for name in (first, second):
            left = np.where(within_groups(left, of[name]) < most[name], left, -INF)
        lines = [f"cap(attr.{name}, {most[name]})" for name in (first, second)]
        return survivors(left, one) == survivors(one.rank, one, quota=lines)

    return run


def within_groups(rank: Matrix, group: Matrix) -> Matrix:
    """Each candidate's place in its group over all rows."""
    out, seen = np.zeros(rank.size, np.int64), {}
    for at in np.argsort(-rank.ravel(), kind="stable"):
        own = int(group.ravel()[at])
        out[at] = seen.get(own, 0)
        seen[own] = out[at] + 1
    return out.reshape(rank.shape)


def both(one: Trial) -> Matrix:
    """K, and in each row the best max(cap, floor) of each group."""
    return np.maximum(cut(one.rank, one.k), cut_groups(one.rank, one.group, max(one.m, one.q)))


EXACT: Mapping[str, Callable[[Trial], bool]] = {
    "plain": lambda one: same(one, cut(one.rank, one.k)),
    "row constant after the cut": row_constant,
    "heads mixed before the cut": mixed_before,
    "row-nested cap, min(K, m)": with_quota(lambda one: cut(one.rank, min(one.k, one.m)), "cap(attr.n, {m})"),
    "crossing cap, min(K, m) of each group of a row": with_quota(
        lambda one: cut_groups(one.rank, one.group, min(one.k, one.m)), "cap(attr.g, {m})"
    ),
    "row-nested floor, K": with_quota(lambda one: cut(one.rank, one.k), "floor(attr.n, {q})"),
    "row-nested floor and cap, K": with_quota(
        lambda one: cut(one.rank, one.k), "floor(attr.n, {q})", "cap(attr.o, {m})"
    ),
    "crossing floor, K and q of each group of a row": with_quota(
        lambda one: np.maximum(cut(one.rank, one.k), cut_groups(one.rank, one.group, one.q)), "floor(attr.g, {q})"
    ),
    "crossing floor under a cap of the same groups": with_quota(
        both, "floor(attr.g, {q})", "cap(attr.g, {m})"
    ),
    "groups at a shared root, K once": shared_root(exact=True),
    "sibling penalty, K": sibling,
    "Gumbel shift, K": gumbel,
    "nucleus with the full row's sum, K": keep("top_p", 0.7),
    "min-p, K": keep("min_p", 0.3),
    "relative threshold after the best K": within_after_top,
    "one entry an item, a pool of K d": dedupe(2),
    "nested caps, the inner one first": in_turn("n", "o"),
}  # fmt: skip

NAIVE: Mapping[str, Callable[[Trial], bool]] = {
    "crossing cap, K": with_quota(lambda one: cut(one.rank, one.k), "cap(attr.g, {m})"),
    "crossing floor, K": with_quota(lambda one: cut(one.rank, one.k), "floor(attr.g, {q})"),
    "groups at a shared root, the group's size": shared_root(exact=False),
    "typical, K before it": keep("typical", 0.6),
    "a bias by column after the cut, K": column_bias,
    "one entry an item, a pool of K": dedupe(1),
    "crossing caps in turn": in_turn("n", "g"),
}


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_cut_never_changes_the_result(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    wrong = [at for at in range(TRIALS) if not EXACT[name](trial(rng))]
    assert wrong == []


@pytest.mark.parametrize("name", NAIVE)
def test_the_naive_cut_does(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    assert sum(not NAIVE[name](trial(rng)) for _ in range(TRIALS)) > 3
